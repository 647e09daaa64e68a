"""What samples have under single tags: as their maps say, after any history, and without unpacking these again."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import msgpack
import numpy as np
import pytest

from tests.model.driver import Driver, claim_request, ids
from tqclient.wire.packing import I64, pack_array, pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import limits, tags
from tqserver.controller.core.samples import SampleTable
from tqserver.controller.core.tags import TagFilter

VALUES: tuple[Any, ...] = (1, 1.0, True, 0, False, -0.0, "1", b"1", "", 2**64 - 1, math.nan, math.inf, [1], {"a": 1})


def _wheres() -> list[TagFilter]:
    single = [{tag: value} for tag in ("t", "u", b"t") for value in (*VALUES, "unheard of")]
    wheres = [*single, {"t": 1, "u": True}, {"t": 1, "u": [1]}, {"t": None}, {}]
    return [TagFilter(msgpack.packb(where), unaborted) for where in wheres for unaborted in (False, True)]


def _agree(samples: SampleTable, passes: TagFilter, slots: Any) -> None:
    said, alive = samples.matching(passes, slots), samples.alive[slots]
    own = samples.tags[slots] if isinstance(slots, slice) else [samples.tags[slot] for slot in slots]
    assert said[alive].tolist() == [passes(each) for each, lives in zip(own, alive, strict=True) if lives]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("values_max", [limits.TAG_VALUES_MAX, 5])
def test_a_filter_says_the_same_of_samples_as_of_their_maps(
    seed: int, values_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "TAG_VALUES_MAX", values_max)
    monkeypatch.setattr(limits, "COMPACT_ROWS_MIN", 32)
    monkeypatch.setattr(tags, "CHUNK_ROWS", 16)
    drawn, samples, wheres, last = random.Random(seed), SampleTable(), _wheres(), 0

    def some_tags(count: int) -> list[bytes]:
        names = ("t", "u", "other", b"t", "aborted")
        maps = [{name: drawn.choice(VALUES) for name in names if drawn.random() < 0.6} for _ in range(count)]
        return [msgpack.packb(each) if each else b"" for each in maps]

    for _ in range(40):
        count = drawn.randint(1, 60)
        samples.reserve(count)
        new = np.array(samples.append(np.arange(last + 1, last + 1 + count), None))
        last += count
        if drawn.random() < 0.8:
            samples.set_tags(new, some_tags(count))
        live = samples.slots()
        again = live[sorted(drawn.sample(range(len(live)), min(len(live), 5)))]
        samples.set_tags(again, some_tags(len(again)))
        gone = live[sorted(drawn.sample(range(len(live)), len(live) // 2))]
        samples.remove(gone)
        if samples.wants_compaction():
            samples.compact()
        for _ in range(drawn.randint(0, 9)):  # some first looks are half taken when the samples change
            samples.prepare(drawn.sample(("t", "u", b"t"), 2), drawn.choice(("t", None)))
        for passes in drawn.sample(wheres, 12) if drawn.random() < 0.5 else ():
            _agree(samples, passes, slice(0, samples.size))
            _agree(samples, passes, samples.slots()[::3])
        if drawn.random() < 0.5:
            continue
        numbers = [tags.number(msgpack.unpackb(own).get("t") if own else None) for own in samples.tags]
        assert samples.numbers("t")[samples.slots()].tolist() == [numbers[slot] for slot in samples.slots()]


def _unpacked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets how many maps were unpacked."""
    counts, unpack = list[int](), tags.unpacked

    def counted(values: Sequence[bytes]) -> list[dict[Any, Any]]:
        counts.append(len(values))
        return unpack(values)

    monkeypatch.setattr(tags, "unpacked", counted)
    return counts


def test_many_values_of_one_tag_have_the_maps_unpacked_once(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session, keep=True)
    driver.put(session, p, 500, tags=[{"prompt": row % 100, "uid": row} for row in range(500)])
    counts = _unpacked(monkeypatch)
    for prompt in range(100):
        assert len(np.frombuffer(driver.claim(session, p, 2, where={"prompt": prompt}).rows.ids, I64)) == 2
    assert sum(counts) == 500
    counts.clear()
    driver.put(session, p, 50, tags=[{"prompt": row, "uid": 500 + row} for row in range(50)])
    driver.ok("set_tags", pb.SetTagsRequest(partition_id=p, ids=ids(1), tags=pack_blobs([b""])), session=session)
    assert sum(counts) == 51  # of the put and of set_tags, once each, however many choices there are
    driver.core.check_invariants()


def test_a_clear_by_tags_takes_no_sample_that_is_gone_already(driver: Driver, session: int) -> None:
    p = driver.partition(session, keep=True)
    given = driver.put(session, p, 10, tags=[{"prompt": row % 2} for row in range(10)])
    request = pb.ClearRequest(partition_id=p, tags=msgpack.packb({"prompt": 1}))
    assert driver.ok("clear", request, session=session).ids == pack_array(given[1::2], I64)
    assert not driver.ok("clear", request, session=session).ids
    assert driver.describe(p).samples == 5


@pytest.mark.parametrize(
    "request_",
    [
        claim_request(0, 2, where={"prompt": 7}),
        claim_request(0, 2, sampler="prioritized", params={"tag": "prompt"}),
        pb.ClearRequest(tags=msgpack.packb({"prompt": 7})),
    ],
)
def test_a_first_look_is_taken_in_steps_beforehand(
    driver: Driver, session: int, request_: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tags, "CHUNK_ROWS", 50)
    p = driver.partition(session, keep=True)
    given = driver.put(session, p, 500, tags=[{"prompt": row % 100, "uid": row} for row in range(500)])
    counts, request_.partition_id = _unpacked(monkeypatch), p
    steps = driver.core.first_look(request_)
    for _ in range(4):
        next(steps)
    assert counts == [50] * 4
    driver.put(session, p, 1, tags=[{"prompt": 7, "uid": 500}])
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=pack_array(given[:10], I64)), session=session)
    counts.clear()
    assert len(list(steps)) == 6
    assert sum(counts) == 300
    assert not list(driver.core.first_look(request_))  # of what came meanwhile, at once
    assert sum(counts) == 301
    counts.clear()
    outcome = driver.send(request_.DESCRIPTOR.name.removesuffix("Request").lower(), request_, session=session)
    assert outcome.error is None
    assert not counts
    driver.core.check_invariants()


def test_a_first_look_ends_with_its_partition(driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tags, "CHUNK_ROWS", 50)
    p = driver.partition(session, keep=True)
    driver.put(session, p, 500, tags=[{"prompt": row} for row in range(500)])
    steps = driver.core.first_look(claim_request(p, 2, where={"prompt": 7}))
    next(steps)
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    assert not list(steps)
    assert not list(driver.core.first_look(claim_request(p, 2, where={"prompt": 7})))
