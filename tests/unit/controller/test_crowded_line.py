"""Claims that wait for many choices of samples."""

from __future__ import annotations

import pytest

from tests.unit.controller.test_waiters import Bench
from tqclient.errors import ClaimTimeout, InvalidArgument
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import limits


def test_no_more_choices_are_waited_for_than_can_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "VIEWS_PER_CONSUMER_MAX", 3)
    bench = Bench()
    for shard in range(3):
        bench.claim(f"of {shard}", 1, where=b"%d" % shard)
    bench.claim("too many", 1, where=b"3")
    bench.claim("by another sampler", 1, where=b"2", sampler=pb.Sampler(name="lifo"))
    bench.claim("no wait", 1, 0.0, where=b"3")
    refused = {name: type(error) for name, error in bench.refused.items()}
    assert refused == {"too many": InvalidArgument, "no wait": ClaimTimeout}
    assert "consumer 'c' of partition 'p1'" in str(bench.refused["too many"])
    bench.clock.advance(11)
    assert sorted(bench.refused) == ["by another sampler", "no wait", "of 0", "of 1", "of 2", "too many"]
    bench.claim("there is room", 1, where=b"3")
    assert "there is room" not in bench.refused
