"""Which samples a claim gets: by tag, by order, at random, by priority."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest

from tests.model.driver import Driver, claim_request, client_id, ids, unpack
from tqclient.errors import ClaimTimeout, InvalidArgument, Sealed
from tqclient.wire.packing import pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core


def _tag(driver: Driver, session: int, p: int, sample: int, tags: dict[str, Any]) -> None:
    request = pb.SetTagsRequest(partition_id=p, ids=ids(sample), tags=pack_blobs([msgpack.packb(tags)]))
    driver.ok("set_tags", request, session=session)


def _ids(reply: Any) -> list[int]:
    return unpack(reply.rows.ids)


def test_where_takes_samples_that_have_all_of_the_tags(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    tags = [{"s": "done", "n": 1}, {"s": "done"}, {}, {"s": "done", "n": True}, {"s": "done", "n": 1}]
    driver.put(session, p, 5, tags=tags)
    assert _ids(driver.claim(session, p, 2, where={"s": "done", "n": 1})) == [1, 5]  # 1 and True differ
    assert _ids(driver.claim(session, p, 1, where={"s": "done"})) == [2]
    with pytest.raises(ClaimTimeout):
        driver.claim(session, p, 2, where={"s": "done"})
    assert _ids(driver.claim(session, p, 2)) == [3, 4]
    driver.core.check_invariants()


def test_a_tag_that_is_set_later_makes_a_sample_match_and_wakes_claims(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    with pytest.raises(ClaimTimeout):
        driver.claim(session, p, 1, where={"s": "done"})
    _tag(driver, session, p, 2, {"s": "done"})
    driver.core.check_invariants()
    assert _ids(driver.claim(session, p, 1, where={"s": "done"})) == [2]
    _tag(driver, session, p, 3, {"s": "done"})
    _tag(driver, session, p, 3, {"s": None})
    with pytest.raises(ClaimTimeout):
        driver.claim(session, p, 1, where={"s": "done"})


def test_a_sealed_partition_ends_where_nothing_else_matches(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, tags=[{"s": 1}, {}, {}])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    claim = driver.claim(session, p, 5, where={"s": 1})
    assert _ids(claim) == [1]
    driver.settle(session, claim.claim_id)
    with pytest.raises(Sealed):
        driver.claim(session, p, 1, where={"s": 1})
    assert _ids(driver.claim(session, p, 5)) == [2, 3]


@pytest.mark.parametrize("where", [b"\xc1", b"\x01", msgpack.packb([1])])
def test_where_must_be_a_map(driver: Driver, session: int, where: bytes) -> None:
    p = driver.partition(session)
    request = claim_request(p, 1)
    request.where = where
    with pytest.raises(InvalidArgument, match="tags"):
        driver.ok("claim", request, session=session)


def test_lifo_takes_the_freshest_first(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    assert _ids(driver.claim(session, p, 2, sampler="lifo")) == [3, 2]
    driver.put(session, p, 1)
    assert _ids(driver.claim(session, p, 2, sampler="lifo")) == [4, 1]
    driver.settle(session, 1, ack=False)
    assert _ids(driver.claim(session, p, 1, sampler="lifo")) == [3]
    driver.core.check_invariants()


def test_lifo_looks_through_many_chunks(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 5000)
    assert _ids(driver.claim(session, p, 4999, sampler="lifo")) == list(range(5000, 1, -1))
    assert _ids(driver.claim(session, p, 1, sampler="lifo")) == [1]


def test_random_draws_each_sample_once_and_by_its_seed(driver: Driver, session: int) -> None:
    drawn: dict[tuple[str, int], list[int]] = {}
    for name, seed in (("p", 7), ("q", 7), ("r", 8)):
        p = driver.partition(session, name)
        first = driver.put(session, p, 100)[0]
        batches = [_ids(driver.claim(session, p, 10, sampler="random", params={"seed": seed})) for _ in range(10)]
        drawn[name, seed] = [i - first for batch in batches for i in batch]
        assert sorted(drawn[name, seed]) == list(range(100))
    assert drawn["p", 7] == drawn["q", 7] != drawn["r", 8]
    assert drawn["p", 7] != sorted(drawn["p", 7])


@pytest.mark.parametrize("rows", [40, 400])  # listed, or tried blindly
def test_random_draws_every_sample_as_often(driver: Driver, session: int, rows: int) -> None:
    p = driver.partition(session, max_attempts=60_000)
    driver.put(session, p, rows)
    turns, seen = 2000, dict.fromkeys(range(1, rows + 1), 0)
    for seed in range(turns):
        claim = driver.claim(session, p, 8, sampler="random", params={"seed": seed})
        for i in _ids(claim):
            seen[i] += 1
        driver.settle(session, claim.claim_id, ack=False)
    share = 8 / rows
    deviation = (turns * share * (1 - share)) ** 0.5
    assert all(abs(count - turns * share) < 6 * deviation for count in seen.values())


def test_random_answers_alike_after_a_restart_that_forgot_its_scans(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 900)
    driver.settle(session, driver.claim(session, p, 300).claim_id)
    driver.claim(session, p, 3, sampler="random", params={"seed": 1})
    restored = Core.restore(driver.core.snapshot(), driver.now)
    claim = driver.claim(session, p, 5, sampler="random", params={"seed": 1})
    again = restored.apply(driver.log[-1][0], driver.now, len(driver.log))
    assert again.reply == claim
    assert restored.snapshot() == driver.core.snapshot()


def test_prioritized_takes_the_highest_then_the_oldest_then_those_without(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    tags = [{"w": 1}, {}, {"w": 2.5}, {"w": 1}, {"w": "high"}, {"w": True}, {"w": -3}]
    driver.put(session, p, 7, tags=tags)
    sampler = {"sampler": "prioritized", "params": {"tag": "w"}}
    assert _ids(driver.claim(session, p, 2, **sampler)) == [3, 1]  # 2.5, then the older of the ones
    _tag(driver, session, p, 7, {"w": 9})
    driver.put(session, p, 1, tags=[{"w": 8}])
    assert _ids(driver.claim(session, p, 3, **sampler)) == [7, 8, 4]
    assert _ids(driver.claim(session, p, 3, **sampler)) == [2, 5, 6]  # no number at all: by age
    driver.core.check_invariants()


def test_prioritized_agrees_with_sorting_everything(driver: Driver, session: int) -> None:
    p, rng = driver.partition(session, max_attempts=1000), random.Random(5)
    weights: dict[int, int] = {}
    for _ in range(40):
        if rng.random() < 0.5 or len(weights) < 64:
            new = [rng.randrange(20) for _ in range(rng.randrange(1, 700))]
            added = driver.put(session, p, len(new), tags=[{"w": weight} for weight in new])
            weights.update(zip(added, new, strict=True))
        else:
            changed = rng.choice(sorted(weights))
            weights[changed] = 30
            _tag(driver, session, p, changed, {"w": 30})
        claim = driver.claim(session, p, 1, sampler="prioritized", params={"tag": "w"})
        rows = min(len(weights), 50)
        driver.settle(session, claim.claim_id, ack=False)
        claim = driver.claim(session, p, rows, sampler="prioritized", params={"tag": "w"})
        assert _ids(claim) == sorted(weights, key=lambda i: (-weights[i], i))[:rows]
        driver.settle(session, claim.claim_id, ack=rng.random() < 0.5)
        if driver.counts(p)[3]:
            done = _ids(claim)
            driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(*done)), session=session)
            for i in done:
                del weights[i]
    assert len(weights) > 4096  # several runs of slots


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("lifo", {"n": 1}, "no parameters, not n"),
        ("random", {"seed": "x"}, "seed: an int"),
        ("random", {"seeds": 1}, "parameters seed, not seeds"),
        ("prioritized", {}, "needs tag"),
        ("group", {"size": 0}, "group size from 1 to 131072, not 0"),
        ("group", {"size": 1 << 63}, "group size from 1 to 131072, not 9223372036854775808"),
        ("seqlen_balanced", {"field": "a", "groups": 131_073}, "group size from 1 to 131072, not 131073"),
        ("group", {"size": 4}, "batch_size=6 is no multiple of the group size, 4"),
        ("seqlen_balanced", {}, "needs field"),
        ("seqlen_balanced", {"field": "a", "groups": 5}, "no multiple"),
        ("best", {}, "there are: fifo, group, lifo, prioritized, random, seqlen_balanced"),
    ],
)
def test_parameters_are_checked(driver: Driver, name: str, params: dict[str, Any], says: str) -> None:
    request = claim_request(1, 6, sampler=name, params=params)
    request.mutation.client_id, request.mutation.request = client_id(1), 1
    with pytest.raises(InvalidArgument, match=says):
        driver.core.check(journal_pb2.Command(claim=request))
