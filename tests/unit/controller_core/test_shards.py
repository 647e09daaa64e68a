"""How many samples each shard has: as their tags say, after any history, and without unpacking these again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.model.driver import Driver
from tqclient.wire.packing import I64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, limits, tags
from tqserver.controller.core.samples import SampleTable

SHARDS: tuple[Any, ...] = (0, 1, 7, limits.SHARDS_MAX - 1, limits.SHARDS_MAX, -1, True, 1.0, "1", None, [1])


@pytest.mark.parametrize("seed", range(4))
def test_samples_are_counted_by_the_shard_that_their_tags_name(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "COMPACT_ROWS_MIN", 32)
    drawn, samples, last = random.Random(seed), SampleTable(), 0

    def some_tags(count: int) -> list[bytes]:
        maps = [{"shard": drawn.choice(SHARDS), "uid": drawn.randint(0, 9)} for _ in range(count)]
        return [b"" if drawn.random() < 0.2 else msgpack.packb(each) for each in maps]

    for turn in range(40):
        count = drawn.randint(1, 60)
        samples.reserve(count)
        new = np.array(samples.append(np.arange(last + 1, last + 1 + count), None))
        last += count
        if turn > 3:  # the first ones have none
            samples.set_tags(new, some_tags(count))
        live = samples.slots()
        again = live[sorted(drawn.sample(range(len(live)), min(len(live), 5)))]
        samples.set_tags(again, some_tags(len(again)))
        samples.remove(live[sorted(drawn.sample(range(len(live)), len(live) // 2))])
        if samples.wants_compaction():
            samples.compact()
        named = [msgpack.unpackb(own).get("shard") for own in samples.tags if own]
        plain = [shard for shard in named if type(shard) is int and 0 <= shard < limits.SHARDS_MAX]
        assert samples.shards.sizes == Counter(plain)


def test_nobody_looks_at_the_tags_of_samples_that_go(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session, keep=True)
    given = driver.put(session, p, 500, tags=[{"shard": row % 4, "uid": row} for row in range(500)])
    together = list[int]()
    unpacked = tags.unpacked

    def counted(values: Sequence[bytes]) -> list[dict[Any, Any]]:
        together.append(len(values))
        return unpacked(values)

    monkeypatch.setattr(tags, "unpacked", counted)
    restored = Core.restore(driver.core.snapshot(), driver.now)
    assert together == [500]  # all at once
    monkeypatch.setattr("tqserver.controller.core.tags.msgpack.unpackb", None)  # none by itself, either
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=pack_array(given[1:], I64)), session=session)
    assert together == [500]
    monkeypatch.undo()
    assert [shard.samples for shard in driver.describe(p).shards.values()] == [1]
    assert [shard.samples for shard in restored.describe_partition(p).shards.values()] == [125] * 4
    driver.core.check_invariants()
    restored.check_invariants()
