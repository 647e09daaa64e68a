"""Global batches divided over DP ranks: equal counts, balanced sums, nothing twice and nobody starved."""

from __future__ import annotations

import tracemalloc
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.driver import LEASE, Driver, claim_request, client_id, unpack
from tests.unit.controller_core.test_shares import Job, place
from tqclient import limits
from tqclient.errors import ClaimTimeout, InvalidArgument, Sealed
from tqclient.schema import Form
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, Readiness
from tqserver.controller.core.samplers.balance import balanced
from tqserver.controller.core.shares import ORPHAN_LEASES

RAGGED = Form("ragged", "torch", "int64", ()).to_bytes()
SAMPLER: dict[str, Any] = {"sampler": "seqlen_balanced", "params": {"field": "a"}}


def _put(driver: Driver, session: int, p: int, lengths: list[int], **options: Any) -> list[int]:
    return driver.put(session, p, len(lengths), form=RAGGED, lengths={"a": lengths}, **options)


def _ids(reply: Any) -> list[int]:
    return unpack(reply.rows.ids)


def test_counts_are_equal_and_sums_balanced(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [9, 1, 5, 5, 8, 2, 7, 3])
    job = Job(driver, p, dp=2, tp=1)
    first, second = _ids(job.claim(1, 0, 2, **SAMPLER)), _ids(job.claim(0, 0, 2, **SAMPLER))
    # Of 9, 1, 5, 5 the only halves of two rows with sums of 10 are {9, 1} and {5, 5}.
    assert sorted([first, second]) == [[1, 2], [3, 4]]
    assert driver.counts(p) == (0, 4, 4, 0, 0)
    assert sorted([_ids(job.claim(rank, 0, 2, **SAMPLER)) for rank in (0, 1)]) == [[5, 6], [7, 8]]
    driver.core.check_invariants()


def test_a_rank_that_runs_ahead_starves_nobody(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 12)
    job = Job(driver, p, dp=3, tp=1)
    ahead = [job.claim(2, 0, 2, **SAMPLER) for _ in range(2)]
    assert [claim.step for claim in ahead] == [0, 1]
    with pytest.raises(ClaimTimeout):
        job.claim(2, 0, 2, **SAMPLER)
    assert driver.counts(p) == (0, 0, 12, 0, 0)  # the others' rows are reserved for them
    others = [job.claim(rank, 0, 2, **SAMPLER) for rank in (0, 1, 1, 0)]
    assert [claim.step for claim in others] == [0, 0, 1, 1]
    assert sorted(i for claim in ahead + others for i in _ids(claim)) == list(range(1, 13))


def test_a_global_batch_waits_until_all_of_it_is_ready(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 3)
    job = Job(driver, p, dp=2, tp=1)
    with pytest.raises(ClaimTimeout):
        job.claim(0, 0, 2, **SAMPLER)
    _put(driver, session, p, [1])
    assert len(_ids(job.claim(0, 0, 2, **SAMPLER))) == 2


def test_the_last_rows_go_to_the_lowest_ranks(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [4, 4, 4, 4, 4, 4, 4, 7])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    job = Job(driver, p, dp=3, tp=1)
    claims = [job.claim(rank, 0, 2, **SAMPLER) for rank in (0, 1, 2)]
    assert [len(_ids(claim)) for claim in claims] == [2, 2, 2]
    with pytest.raises(ClaimTimeout):
        job.claim(2, 0, 2, **SAMPLER)  # two rows are left, and they are not its own
    last = [job.claim(rank, 0, 2, **SAMPLER) for rank in (0, 1)]
    assert sorted(_ids(claim) for claim in last) == [[7], [8]]
    for rank, claim in ((0, claims[0]), (1, claims[1]), (2, claims[2]), (0, last[0]), (1, last[1])):
        job.settle(rank, 0, claim)
    for rank in range(3):
        with pytest.raises(Sealed):
            job.claim(rank, 0, 2, **SAMPLER)
    assert driver.counts(p) == (0, 0, 0, 8, 0)


def _one_row_is_left(driver: Driver, session: int, p: int, job: Job) -> None:
    """Both ranks had a row; the last one is rank 0's."""
    _put(driver, session, p, [1, 1])
    for rank in (0, 1):
        job.settle(rank, 0, job.claim(rank, 0, 1, **SAMPLER))
    _put(driver, session, p, [1])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)


def _asks(job: Job, dp_rank: int, batch: int = 1) -> pb.ClaimRequest:
    """A rank's claim, as it waits."""
    request = claim_request(job.p, batch, topology=place(dp_rank, **job.sizes), **SAMPLER)
    request.mutation.session, request.mutation.client_id = job.sessions[dp_rank, 0], client_id(1)
    return request


def _leases_pass(driver: Driver, leases: float) -> list[str | None]:
    """Time goes by while all that live renew; returns what was done then."""
    driver.now += leases * LEASE
    for session in list(driver.core._state.leases.sessions):
        driver.core.heartbeat(session, (), driver.now)
    due = driver.core.due(driver.now)
    assert all(driver.journal(command).error is None for command in due)
    driver.core.check_invariants()
    return [command.WhichOneof("body") for command in due]


def test_a_rank_with_nothing_waits_for_those_that_have_yet_to_claim(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    job = Job(driver, p, dp=2, tp=1)
    _one_row_is_left(driver, session, p, job)
    with pytest.raises(ClaimTimeout):
        job.claim(1, 0, 1, **SAMPLER)
    assert driver.core.readiness(_asks(job, 1)) is Readiness.WAIT
    assert "DP ranks [0] have yet to claim and ack them" in driver.core.rate_note(_asks(job, 1))
    last = job.claim(0, 0, 1, **SAMPLER)
    assert driver.core.readiness(_asks(job, 1)) is Readiness.WAIT
    job.settle(0, 0, last)
    assert driver.core.readiness(_asks(job, 1)) is Readiness.DRAINED


def test_the_last_rows_of_a_dp_rank_that_died_with_nothing_go_to_the_others(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    job = Job(driver, p, dp=2, tp=1)
    _one_row_is_left(driver, session, p, job)
    assert _leases_pass(driver, 11) == ["complete_ranks"]
    job.die(0, 0)
    assert _leases_pass(driver, 9) == []
    assert driver.core.readiness(_asks(job, 1)) is Readiness.WAIT
    assert _leases_pass(driver, 2) == ["complete_ranks"]
    last = job.claim(1, 0, 1, **SAMPLER)
    assert (_ids(last), last.step) == ([3], 1)
    driver.core = Core.restore(driver.core.snapshot(), driver.now)
    with pytest.raises(ClaimTimeout):
        job.claim(0, 0, 1, **SAMPLER)  # it is back, and waits for the other's ack
    job.settle(1, 0, last, ack=False)
    assert _ids(job.claim(1, 0, 1, **SAMPLER)) == [3]


def test_nobody_waits_for_ever_for_a_dp_rank_that_never_comes(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    job = Job(driver, p, dp=3, tp=1)
    _put(driver, session, p, [1] * 2)
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    for rank in (2, 1):
        job.sessions[rank, 0] = driver.open()
        register = pb.RegisterRankRequest(partition_id=p, consumer="x", topology=place(rank, 0, **job.sizes))
        driver.ok("register_rank", register, session=job.sessions[rank, 0])
        assert _leases_pass(driver, 9) == []  # as long again for each that comes
    driver.core = Core.restore(driver.core.snapshot(), driver.now)
    driver.send("start", journal_pb2.Start())
    assert _leases_pass(driver, 9) == []  # and after a start
    assert driver.core.readiness(_asks(job, 2)) is Readiness.WAIT
    assert _leases_pass(driver, 2) == ["complete_ranks"]
    driver.core = Core.restore(driver.core.snapshot(), driver.now)
    assert [_ids(job.claim(rank, 0, 1, **SAMPLER)) for rank in (2, 1)] == [[2], [1]]
    assert _leases_pass(driver, 11) == []


def test_nobody_is_watched_whom_nobody_waits_for(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    job = Job(driver, p, dp=2, tp=1)
    _put(driver, session, p, [1] * 2)
    orphans = driver.core._state.orphans
    job.claim(0, 0, 1, sampler="fifo")
    job.settle(1, 0, job.claim(1, 0, 1, sampler="fifo"))
    assert orphans.keys() == {(p, "x", None)}
    job.die(0, 0)
    assert orphans.keys() == {(p, "x", None), (p, "x", 0)}
    job.die(1, 0)
    assert orphans.keys() == {(p, "x", 0)}  # it has something to give back
    job.claim(0, 0, 1, sampler="fifo")
    assert orphans.keys() == {(p, "x", None)}
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    assert not orphans


def test_a_snapshot_of_before_says_nothing_of_complete_ranks(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 2)
    Job(driver, p, dp=2, tp=1).claim(0, 0, 1, **SAMPLER)
    data = driver.core.snapshot()
    tree = msgpack.unpackb(data, strict_map_key=False)
    *_, ranks = tree["partitions"][0]["consumers"][0]
    assert ranks.pop() is False
    assert Core.restore(msgpack.packb(tree), driver.now).snapshot() == data


def test_ranks_that_get_nothing_cost_nothing(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1, 1, 2])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    job = Job(driver, p, dp=limits.RANKS_MAX, tp=1)
    tracemalloc.start()
    try:
        first = job.claim(0, 0, 1, **SAMPLER)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    ranks = driver.core._state.partition(p).consumers["x"].ranks
    assert ranks is not None
    assert ranks.replicas.keys() == {0, 1, 2}
    job.sessions[9, 0] = driver.open()
    assert driver.core.readiness(_asks(job, 9)) is Readiness.WAIT
    assert [_ids(each) for each in (first, job.claim(1, 0, 1, **SAMPLER), job.claim(2, 0, 1, **SAMPLER))] == [
        [3],
        [1],
        [2],
    ]


def test_whole_groups_are_divided(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [9, 5, 1, 1, 5, 9, 4, 4], groups=["a", "b", "c", "d", "b", "a", "c", "d"])
    job = Job(driver, p, dp=2, tp=1)
    grouped = {"sampler": "seqlen_balanced", "params": {"field": "a", "groups": 2}}
    # Groups of 18 (rows 1, 6), 10 (2, 5), 5 (3, 7) and 5 (4, 8): 18 + 5 against 10 + 5.
    shares = [_ids(job.claim(rank, 0, 4, **grouped)) for rank in (0, 1)]
    assert sorted(map(sorted, shares)) in ([[1, 3, 6, 7], [2, 4, 5, 8]], [[1, 4, 6, 8], [2, 3, 5, 7]])
    driver.core.check_invariants()


def test_a_lost_dp_rank_is_left_out_until_it_is_back(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 12)
    job = Job(driver, p, dp=2, tp=1)
    job.claim(0, 0, 2, **SAMPLER)
    lost = journal_pb2.DissolveReplica(partition_id=p, consumer="x", dp_rank=1)
    assert driver.send("dissolve_replica", lost).error is None
    assert driver.counts(p) == (0, 10, 2, 0, 0)
    assert len(_ids(job.claim(0, 0, 2, **SAMPLER))) == 2
    assert driver.counts(p) == (0, 8, 4, 0, 0)
    back = job.claim(1, 0, 2, **SAMPLER)
    assert (back.step, driver.counts(p)) == (2, (0, 4, 8, 0, 0))
    assert job.claim(0, 0, 2, **SAMPLER).step == 2
    driver.core.check_invariants()


@pytest.mark.parametrize("restart", [False, True])
def test_a_job_that_comes_back_as_a_whole_has_global_batches_from_the_first_on(
    driver: Driver, session: int, *, restart: bool
) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 12)
    job = Job(driver, p, dp=3, tp=1)
    for rank in range(3):
        job.claim(rank, 0, 2, **SAMPLER)
    for rank in range(3):
        job.die(rank, 0)
    assert _leases_pass(driver, ORPHAN_LEASES + 1) == ["dissolve_replica"] * 3
    if restart:
        driver.core = Core.restore(driver.core.snapshot(), driver.now, session_lease=LEASE)
    claims = [job.claim(rank, 0, 2, **SAMPLER) for rank in (1, 0, 2)]
    assert [(claim.step, len(_ids(claim))) for claim in claims] == [(1, 2)] * 3
    assert driver.counts(p) == (0, 6, 6, 0, 0)
    # Whoever does not come back is not waited for for ever: its share is the others' after as long a time as ever.
    job.die(2, 0)
    assert sorted(map(str, _leases_pass(driver, ORPHAN_LEASES + 1))) == ["complete_ranks", "dissolve_replica"]
    assert driver.counts(p) == (0, 8, 4, 0, 0)


def test_the_first_of_a_job_that_comes_back_gives_the_others_their_whole_time_again(
    driver: Driver, session: int
) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [1] * 8)
    job = Job(driver, p, dp=2, tp=1)
    lost = [job.claim(rank, 0, 2, **SAMPLER) for rank in (0, 1)]
    for rank in (0, 1):
        job.die(rank, 0)
    _leases_pass(driver, ORPHAN_LEASES - 1)
    again = [job.claim(0, 0, 2, **SAMPLER)]
    assert _leases_pass(driver, 2) == []  # rank 1 is still on its way
    again.append(job.claim(1, 0, 2, **SAMPLER))
    assert [(claim.step, _ids(claim)) for claim in again] == [(claim.step, _ids(claim)) for claim in lost]


def test_without_topology_it_is_one_rank(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    _put(driver, session, p, [5, 1, 3])
    assert _ids(driver.claim(session, p, 2, **SAMPLER)) == [1, 2]


def test_a_field_without_lengths_is_refused(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4)
    job = Job(driver, p, dp=2, tp=1)
    with pytest.raises(InvalidArgument, match="no length; fields that have them: a"):
        job.claim(0, 0, 2, sampler="seqlen_balanced", params={"field": "b"})
    assert driver.counts(p) == (0, 4, 0, 0, 0)


@pytest.mark.parametrize(("rows", "parts"), [(16, 4), (17, 4), (3, 5), (64, 8), (1, 1), (0, 3), (256, 16)])
def test_balance_over_many_draws(rows: int, parts: int) -> None:
    rng = np.random.default_rng(rows * 100 + parts)
    for _ in range(20):
        weights = np.exp(rng.uniform(np.log(512), np.log(8192), rows)).astype(np.int64)
        part_of = balanced(weights, parts)
        counts = np.bincount(part_of, minlength=parts)
        assert counts.tolist() == [rows // parts + (part < rows % parts) for part in range(parts)]
        sums = np.bincount(part_of, weights=weights, minlength=parts)
        if rows >= 8 * parts and rows % parts == 0:
            assert sums.max() / sums.min() <= 1.15


def test_balance_finds_what_the_greedy_rule_misses() -> None:
    # Greedily: 8 | 7, 7+6 | 8, ... leaves sums that one swap evens out: 8+5+4 = 17 and 7+6+4 = 17.
    part_of = balanced(np.array([8, 7, 6, 5, 4, 4]), 2)
    assert np.bincount(part_of, weights=[8, 7, 6, 5, 4, 4]).tolist() == [17, 17]


def _exhaustively_balanced(weights: list[int], parts: int) -> list[int]:
    """The same rules in loops: every pair is looked at."""
    room = [len(weights) // parts + (part < len(weights) % parts) for part in range(parts)]
    filled = [part for part in range(parts) if room[part]]
    sums, part_of = [0] * parts, [0] * len(weights)
    for at in sorted(range(len(weights)), key=lambda at: -weights[at]):
        part_of[at] = min((part for part in filled if room[part]), key=lambda part: sums[part])
        sums[part_of[at]] += weights[at]
        room[part_of[at]] -= 1
    while len(filled) > 1:
        high, low = max(filled, key=lambda part: sums[part]), min(filled, key=lambda part: sums[part])
        ours = [at for at in range(len(weights)) if part_of[at] == high]
        theirs = [at for at in range(len(weights)) if part_of[at] == low]
        gap = sums[high] - sums[low]
        pairs = [(abs(gap - 2 * (weights[mine] - weights[yours])), mine, yours) for mine in ours for yours in theirs]
        left, mine, yours = min(pairs)
        if left >= gap:
            return part_of
        part_of[mine], part_of[yours] = low, high
        sums[high] -= weights[mine] - weights[yours]
        sums[low] += weights[mine] - weights[yours]
    return part_of


@given(st.lists(st.integers(0, 40) | st.integers(512, 8192), max_size=24), st.integers(1, 6))
def test_balance_is_what_a_look_at_every_pair_gives(weights: list[int], parts: int) -> None:
    assert balanced(np.array(weights, dtype=np.int64), parts).tolist() == _exhaustively_balanced(weights, parts)


def test_balance_takes_memory_in_proportion_to_the_rows() -> None:
    weights = np.random.default_rng(0).integers(1, 9_000, 2 * 8_192)
    tracemalloc.start()
    try:
        part_of = balanced(weights, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20  # each with each: 512 MB
    sums = np.bincount(part_of, weights=weights)
    assert sums.max() - sums.min() <= 1
