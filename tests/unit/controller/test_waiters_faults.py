"""The lines when looking at a request fails: it is refused alone, and nobody is left behind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.unit.controller.lines_bench import Bench
from tqclient.errors import BackpressureTimeout, ClaimTimeout, InternalError
from tqclient.wire.v1 import controller_pb2 as pb


@pytest.fixture
def bench() -> Bench:
    return Bench()


def _refused(bench: Bench, name: str) -> str:
    assert isinstance(bench.refused[name], InternalError)
    return str(bench.refused[name])


@pytest.mark.parametrize("first", ["broken", "whole"])
def test_a_claim_that_cannot_be_looked_at_is_refused_alone(
    bench: Bench, caplog: pytest.LogCaptureFixture, first: str
) -> None:
    bench.claim(first, 7 if first == "broken" else 2)
    bench.claim("whole" if first == "broken" else "broken", 2 if first == "broken" else 7)
    bench.core.broken = {7}
    bench.ready(2)
    assert bench.granted == ["whole"]
    bench.ready(0)
    assert bench.granted == ["whole"]
    bench.clock.advance(20)
    assert _refused(bench, "broken") == (
        "ClaimRequest to partition 1: OverflowError: a fault of the daemon's own; its log has the trace"
    )
    assert caplog.text.count("OverflowError: a bug") == 1
    assert (bench.waiters.claims, bench.clock.scheduled) == (0, 0)


def test_a_claim_that_cannot_be_looked_at_when_it_comes_is_refused_and_is_in_nobody_s_way(bench: Bench) -> None:
    bench.core.broken, bench.core.unplaced = {7}, {8}
    bench.claim("broken", 7)
    bench.claim("unplaced", 8)
    assert "OverflowError" in _refused(bench, "broken")
    assert "OverflowError" in _refused(bench, "unplaced")
    assert (bench.waiters.claims, bench.clock.scheduled, bench.waiters._claims) == (0, 0, {})
    bench.claim("whole", 2)
    bench.coming(2)
    assert bench.granted == ["whole"]


def test_a_put_on_its_way_is_none_to_a_claim_that_cannot_be_looked_at(bench: Bench) -> None:
    bench.claim("broken", 7)
    bench.claim("whole", 2)
    bench.core.broken = {7}
    bench.coming(2)
    assert bench.granted == ["whole"]
    assert "OverflowError" in _refused(bench, "broken")


@pytest.mark.parametrize("line", [True, False], ids=["behind others", "alone"])
def test_a_put_that_cannot_be_looked_at_when_it_comes_is_refused_and_not_let_in(bench: Bench, line: bool) -> None:
    bench.core.broken, bench.core.unplaced = {7}, {8}
    if line:
        bench.commit("waits", 1)
    bench.commit("broken", 7)
    bench.commit("unplaced", 8)
    assert bench.granted == []
    assert "CommitRequest to partition 1: OverflowError" in _refused(bench, "broken")
    assert "CommitRequest to partition 1: OverflowError" in _refused(bench, "unplaced")
    assert bench.clock.scheduled == int(line)
    assert bool(bench.waiters._room) == line


def test_a_put_that_cannot_be_looked_at_any_more_holds_up_nobody(bench: Bench) -> None:
    bench.commit("broken", 7)
    bench.commit("whole", 2, seconds=1)
    bench.core.broken = {7}
    bench.clock.advance(1)
    assert isinstance(bench.refused["whole"], BackpressureTimeout)  # whose own line was not looked at meanwhile
    bench.commit("next", 2)
    bench.core.room = 2
    bench.waiters.room_changed(1)
    bench.waiters.serve()
    assert bench.granted == ["next"]
    assert "OverflowError" in _refused(bench, "broken")


@pytest.mark.parametrize("kind", ["claim", "commit"])
def test_a_deadline_is_kept_by_who_cannot_be_looked_at(bench: Bench, kind: str) -> None:
    wait: Callable[..., object] = bench.claim if kind == "claim" else bench.commit
    wait("broken", 7, seconds=1)
    bench.core.broken = {7}
    bench.clock.advance(1)
    assert "OverflowError" in _refused(bench, "broken")
    assert (bench.waiters._claims, bench.waiters._room) == ({}, {})


@pytest.mark.parametrize("how", ["expires", "is withdrawn"])
def test_who_stands_behind_one_that_goes_is_granted_though_the_grants_before_it_fail(bench: Bench, how: str) -> None:
    sampler = pb.Sampler(name="group")  # one at a time
    large = bench.claim("large", 5, seconds=1, sampler=sampler)
    for name in ("fails", "fails, too", "whole"):
        waiter = bench.claim(name, 1, sampler=sampler)
        if name != "whole":
            waiter.grant = lambda waiter=waiter: bench.waiters.settled(waiter)  # type: ignore[misc]
    bench.ready(1)
    assert bench.granted == []
    if how == "expires":
        bench.clock.advance(1)
        assert isinstance(bench.refused["large"], ClaimTimeout)
    else:
        bench.waiters.withdraw(large)
    assert bench.granted == ["whole"]
