"""Topology: all members of a DP rank get the same rows, settle together, and start over together."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.driver import Driver, ids, unpack
from tqclient.errors import ClaimTimeout, InvalidArgument, LeaseExpired, Sealed, TopologyMismatch
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, Readiness, limits


def place(dp_rank: int = 0, member: int = 0, *, dp: int = 1, tp: int = 2, **options: Any) -> pb.Topology:
    sizes = {"dp": dp, "tp": tp, "pp": 1, "cp": 1, "ep": 1, "members": tp, "world_rank": dp_rank * tp + member}
    return pb.Topology(dp_rank=dp_rank, member=member, **{**sizes, **options})


class Job:
    """Ranks, each a session of its own."""

    def __init__(self, driver: Driver, p: int, **sizes: Any) -> None:
        self.driver, self.p, self.sizes = driver, p, sizes
        self.sessions: dict[tuple[int, int], int] = {}

    def claim(self, dp_rank: int, member: int, batch: int = 2, **options: Any) -> Any:
        session = self.sessions.get((dp_rank, member))
        if session is None:
            session = self.sessions[dp_rank, member] = self.driver.open()
        topology = place(dp_rank, member, **self.sizes)
        return self.driver.claim(session, self.p, batch, topology=topology, **options)

    def settle(self, dp_rank: int, member: int, claim: Any, *, ack: bool = True) -> None:
        self.driver.settle(self.sessions[dp_rank, member], claim.claim_id, ack=ack)
        self.driver.core.check_invariants()

    def die(self, dp_rank: int, member: int) -> None:
        session = self.sessions.pop((dp_rank, member))
        self.driver.send("end_session", journal_pb2.EndSession(session=session))
        self.driver.core.check_invariants()


def _ids(reply: Any) -> list[int]:
    return unpack(reply.rows.ids)


@pytest.fixture
def p(driver: Driver, session: int) -> int:
    p = driver.partition(session, max_attempts=2)
    driver.put(session, p, 12)
    return p


def test_members_get_the_same_rows_step_by_step_and_settle_together(driver: Driver, p: int) -> None:
    job = Job(driver, p, dp=2)
    a, ahead = job.claim(0, 0), job.claim(0, 0)
    other = job.claim(1, 1)
    b, behind = job.claim(0, 1), job.claim(0, 1)
    assert (_ids(a), a.step) == (_ids(b), b.step) == ([1, 2], 0)
    assert (_ids(ahead), ahead.step) == (_ids(behind), behind.step) == ([3, 4], 1)
    assert (_ids(other), other.step) == ([5, 6], 0)
    assert b.rows == a.rows
    assert driver.counts(p) == (0, 6, 6, 0, 0)
    job.settle(0, 0, a)
    assert driver.counts(p) == (0, 6, 6, 0, 0)
    job.settle(0, 1, b)
    assert driver.counts(p) == (0, 6, 4, 2, 0)
    job.settle(0, 1, behind)
    job.settle(0, 0, ahead)
    assert driver.counts(p) == (0, 6, 2, 4, 0)


def test_a_release_starts_all_over_that_is_not_consumed(driver: Driver, p: int) -> None:
    job = Job(driver, p)
    a0, b0 = job.claim(0, 0), job.claim(0, 1)
    a1 = job.claim(0, 0)
    job.settle(0, 0, a0)
    job.settle(0, 1, b0, ack=False)
    with pytest.raises(LeaseExpired):
        job.settle(0, 0, a1)
    again = [job.claim(0, member) for member in (0, 0, 1, 1)]
    assert [_ids(claim) for claim in again] == [[1, 2], [3, 4], [1, 2], [3, 4]]
    assert [claim.step for claim in again] == [0, 1, 0, 1]
    assert all(claim.rows.attempts == b"\x02\0\0\0\x02\0\0\0" for claim in again)
    job.settle(0, 1, again[2], ack=False)  # the second of two attempts: all of it is given up
    assert driver.counts(p) == (0, 8, 0, 0, 4)
    assert unpack(driver.core.list_dead(p, "x").ids) == [1, 2, 3, 4]
    nxt = [job.claim(0, 0), job.claim(0, 1)]
    assert [(claim.step, _ids(claim)) for claim in nxt] == [(2, [5, 6])] * 2


def test_a_dead_member_has_its_share_redelivered_whole_and_others_flow(driver: Driver, p: int) -> None:
    job = Job(driver, p, dp=2)
    a, _ = job.claim(0, 0), job.claim(0, 1)
    c, d = job.claim(1, 0), job.claim(1, 1)
    job.die(0, 1)
    with pytest.raises(LeaseExpired):
        job.settle(0, 0, a)
    job.settle(1, 0, c)
    job.settle(1, 1, d)
    assert _ids(job.claim(1, 0)) == [5, 6]  # what DP rank 0 was given stays its own
    assert [(_ids(claim), claim.rows.attempts[0]) for claim in (job.claim(0, 0), job.claim(0, 1))] == [([1, 2], 2)] * 2


def test_a_member_that_comes_anew_acks_for_itself(driver: Driver, p: int) -> None:
    job = Job(driver, p)
    a, b = job.claim(0, 0), job.claim(0, 1)
    job.settle(0, 0, a)
    job.die(0, 0)
    a = job.claim(0, 0)
    assert (_ids(a), a.step, a.rows.attempts[0]) == ([1, 2], 0, 1)
    job.settle(0, 1, b)
    assert driver.counts(p) == (0, 10, 2, 0, 0)
    job.settle(0, 0, a)
    assert driver.counts(p) == (0, 10, 0, 2, 0)


def test_the_leaders_ack_is_enough_if_so_configured(driver: Driver, p: int) -> None:
    job = Job(driver, p, leader_acks=True)
    leader, other = job.claim(0, 0), job.claim(0, 1)
    job.settle(0, 0, leader)
    assert driver.counts(p) == (0, 10, 0, 2, 0)
    leader = job.claim(0, 0)
    job.settle(0, 0, leader)
    job.settle(0, 1, other, ack=False)  # it is consumed: nothing comes again
    late = job.claim(0, 1)
    assert (_ids(late), late.step) == ([3, 4], 1)  # consumed, but this member has not seen it
    job.settle(0, 1, late)
    assert driver.counts(p) == (0, 8, 0, 4, 0)
    assert [_ids(job.claim(0, member)) for member in (1, 0)] == [[5, 6]] * 2


def test_a_leader_does_not_leave_the_others_behind_for_ever(
    driver: Driver, p: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "SHARES_PER_DP_RANK_MAX", 3)
    job = Job(driver, p, leader_acks=True)
    for _ in range(3):
        job.settle(0, 0, job.claim(0, 0))
    with pytest.raises(InvalidArgument, match=r"DP rank 0 is 3 steps, .* ahead of its members \[1\]"):
        job.claim(0, 0)
    job.settle(0, 1, job.claim(0, 1))
    assert job.claim(0, 0).step == 3


def test_what_the_leader_acked_out_of_order_does_not_start_over(driver: Driver, p: int) -> None:
    job = Job(driver, p, leader_acks=True)
    first, second = job.claim(0, 0), job.claim(0, 0)
    other, held = job.claim(0, 1), job.claim(0, 1)
    job.settle(0, 0, second)
    job.settle(0, 1, other, ack=False)  # step 0 starts over; the member still holds step 1, which is consumed
    assert [job.claim(0, 1).step for _ in range(2)] == [0, 2]
    job.settle(0, 1, held)
    with pytest.raises(LeaseExpired):
        job.settle(0, 0, first)


def test_a_member_that_comes_late_misses_nothing(driver: Driver, p: int) -> None:
    job = Job(driver, p, leader_acks=True)
    for _ in range(2):
        job.settle(0, 0, job.claim(0, 0))
    late = [job.claim(0, 1) for _ in range(3)]
    assert [(claim.step, _ids(claim)) for claim in late] == [(0, [1, 2]), (1, [3, 4]), (2, [5, 6])]
    job.die(0, 1)
    assert _ids(job.claim(0, 1)) == [5, 6]  # in place of the dead one: what was consumed does not come again
    assert driver.counts(p) == (0, 6, 2, 4, 0)


def test_cleared_rows_stay_in_the_delivery_and_leave_the_next_one(driver: Driver, session: int, p: int) -> None:
    job = Job(driver, p)
    a = job.claim(0, 0)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    b = job.claim(0, 1)
    assert _ids(a) == _ids(b) == [1, 2]
    job.settle(0, 1, b, ack=False)
    assert _ids(job.claim(0, 0)) == [2]
    job.die(0, 0)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(2)), session=session)
    driver.core.check_invariants()
    assert _ids(job.claim(0, 1)) == [3, 4]


def test_a_rank_without_members_gives_its_shares_back_after_ten_leases(driver: Driver, p: int) -> None:
    job = Job(driver, p, dp=2)
    job.claim(0, 0)
    job.die(0, 0)
    assert driver.core.next_deadline() is not None
    driver.now += 99.0
    keeper = driver.open()
    assert [c.WhichOneof("body") for c in driver.core.due(driver.now)] == ["end_session"]  # the first one's lease
    driver.now += 2.0
    driver.core.heartbeat(keeper, (), driver.now)
    due = [c for c in driver.core.due(driver.now) if c.WhichOneof("body") == "dissolve_replica"]
    assert len(due) == 1
    assert driver.journal(due[0]).error is None
    driver.core.check_invariants()
    assert driver.counts(p) == (0, 12, 0, 0, 0)
    job = Job(driver, p, dp=2)
    again = job.claim(1, 0)
    assert (_ids(again), again.rows.attempts[0]) == ([1, 2], 2)


def _lost(driver: Driver, p: int, dp_rank: int) -> None:
    command = journal_pb2.DissolveReplica(partition_id=p, consumer="x", dp_rank=dp_rank)
    assert driver.send("dissolve_replica", command).error is None
    driver.core.check_invariants()


def test_rows_that_kill_a_whole_dp_rank_are_given_up(driver: Driver, p: int) -> None:
    job = Job(driver, p, dp=2)
    for attempt in (1, 2):
        claim = job.claim(0, 0)
        assert (_ids(claim), claim.rows.attempts[0]) == ([1, 2], attempt)
        job.die(0, 0)
        _lost(driver, p, 0)
    assert driver.counts(p) == (0, 10, 0, 0, 2)
    assert unpack(driver.core.list_dead(p, "x").ids) == [1, 2]
    assert _ids(job.claim(1, 0)) == [3, 4]


def test_deliveries_to_a_dp_rank_that_was_lost_count(driver: Driver, p: int) -> None:
    job = Job(driver, p, dp=2, tp=1)
    job.claim(0, 0)
    job.die(0, 0)
    _lost(driver, p, 0)
    claim = job.claim(1, 0, 3)
    assert (_ids(claim), list(claim.rows.attempts[::4])) == ([1, 2, 3], [2, 2, 1])
    job.settle(1, 0, claim, ack=False)
    assert unpack(driver.core.list_dead(p, "x").ids) == [1, 2]
    again = job.claim(1, 0, 3)
    assert (_ids(again), again.step) == ([3], claim.step)


def test_a_group_that_was_delivered_too_often_is_given_up_whole(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_attempts=1)
    driver.put(session, p, 4, groups=["a", "b"] * 2)
    job = Job(driver, p, tp=1)
    group = {"sampler": "group", "params": {"size": 2}}
    job.claim(0, 0, **group)
    job.die(0, 0)
    _lost(driver, p, 0)
    assert unpack(driver.core.list_dead(p, "x").ids) == [1, 3]
    assert _ids(job.claim(0, 0, **group)) == [2, 4]


def test_a_restart_keeps_places_positions_and_shares(driver: Driver, p: int) -> None:
    job = Job(driver, p, dp=2, leader_acks=True)
    a = job.claim(0, 0)
    job.claim(0, 0)
    job.settle(0, 0, a)
    job.claim(1, 1)
    data = driver.core.snapshot()
    driver.core = Core.restore(data, driver.now)
    assert driver.core.snapshot() == data
    driver.core.check_invariants()
    assert [(_ids(claim), claim.step) for claim in (job.claim(0, 1), job.claim(0, 1))] == [([1, 2], 0), ([3, 4], 1)]
    job.die(0, 1)
    replayed = Core()
    for command, sequence in driver.log:
        replayed.apply(command, 0.0, sequence)
    assert replayed.snapshot() == driver.core.snapshot()


def test_reset_and_deletion_end_shares(driver: Driver, session: int, p: int) -> None:
    job = Job(driver, p)
    a, _ = job.claim(0, 0), job.claim(0, 1)
    driver.ok("reset_consumer", pb.ResetConsumerRequest(partition_id=p, consumer="x"), session=session)
    driver.core.check_invariants()
    assert driver.counts(p) == (0, 12, 0, 0, 0)
    with pytest.raises(LeaseExpired):
        job.settle(0, 0, a)
    assert _ids(job.claim(0, 0)) == _ids(job.claim(0, 1)) == [1, 2]
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    driver.core.check_invariants()
    assert driver.sealed == set()
    job.die(0, 0)


def test_a_session_forgets_its_places_in_deleted_partitions(driver: Driver, session: int, p: int) -> None:
    """A trainer outlives thousands of them."""
    other = driver.partition(session, "other")
    for member in (0, 1):
        driver.claim(session, p, 1, topology=place(member=member))
        _register(driver, session, other, place(member=member))
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    places = driver.core._state.leases.sessions[session].consumers
    assert list(places) == [(other, "x")]
    driver.core.check_invariants()
    driver.send("end_session", journal_pb2.EndSession(session=session))
    driver.core.check_invariants()


def test_sealed_ends_ranks_once_all_is_settled(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    job = Job(driver, p, tp=1)
    first, last = job.claim(0, 0), job.claim(0, 0)
    assert _ids(last) == [3]
    job.settle(0, 0, first)
    with pytest.raises(ClaimTimeout):
        job.claim(0, 0)
    job.settle(0, 0, last)
    with pytest.raises(Sealed):
        job.claim(0, 0)


def test_members_must_ask_alike(driver: Driver, p: int) -> None:
    job = Job(driver, p)
    job.claim(0, 0)
    with pytest.raises(InvalidArgument, match="ask alike"):
        job.claim(0, 1, batch=3)


def test_whole_groups_go_to_one_rank(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 8, groups=["a", "b", "c", "d"] * 2)
    job = Job(driver, p, dp=2, tp=1)
    group = {"sampler": "group", "params": {"size": 2}}
    assert [_ids(job.claim(rank, 0, **group)) for rank in (1, 0)] == [[1, 5], [2, 6]]


# Registration.


def _register(driver: Driver, session: int, p: int, topology: pb.Topology) -> int:
    request = pb.RegisterRankRequest(partition_id=p, consumer="x", topology=topology)
    return int(driver.ok("register_rank", request, session=session).registered)


def test_ranks_register_once_and_are_counted(driver: Driver, session: int, p: int) -> None:
    other = driver.open()
    assert _register(driver, session, p, place(0, 0)) == 1
    assert _register(driver, other, p, place(0, 1)) == 2
    assert _register(driver, session, p, place(0, 0)) == 2
    with pytest.raises(TopologyMismatch, match=r"rank 1 claims member 1 of DP rank 0, which live rank 1 \(session"):
        _register(driver, session, p, place(0, 1))
    with pytest.raises(TopologyMismatch, match=r"dp=2, tp=2.* live ranks \(0, 1\) are registered with dp=1, tp=2"):
        _register(driver, driver.open(), p, place(1, 1, dp=2))
    driver.send("end_session", journal_pb2.EndSession(session=other))
    assert _register(driver, driver.open(), p, place(0, 1)) == 2


def test_another_topology_takes_over_once_no_rank_lives(driver: Driver, p: int) -> None:
    job = Job(driver, p)
    job.claim(0, 0)
    job.die(0, 0)
    later = driver.open()
    with pytest.raises(TopologyMismatch, match="RegisterRank"):
        driver.claim(later, p, 2, topology=place(1, 0, dp=2))
    assert _register(driver, later, p, place(1, 0, dp=2)) == 1
    driver.core.check_invariants()
    assert driver.counts(p) == (0, 12, 0, 0, 0)
    claim = driver.claim(later, p, 2, topology=place(1, 0, dp=2))
    assert (_ids(claim), claim.step) == ([1, 2], 0)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dp": 0}, InvalidArgument, "sizes from 1"),
        (
            {"dp": 65_536},
            InvalidArgument,
            "sizes from 1 to 65536, and no more ranks in all, not .*'dp': 65536.*'tp': 2",
        ),
        ({"members": 3}, TopologyMismatch, "tp × pp × cp is 2, .* 3 members"),
        ({"dp_rank": 1}, TopologyMismatch, "outside dp=1"),
        ({"member": 2}, TopologyMismatch, "outside"),
        ({"world_rank": 2}, TopologyMismatch, "outside"),
        ({"ep": 3}, TopologyMismatch, "ep=3 was asked for, but a pipeline stage has 2 ranks.* at most ep=1"),
        # The launcher that asked for dp=8, ep=2 and started eight engines of one rank each.
        (
            {"dp": 8, "tp": 1, "members": 1, "ep": 2, "world_size": 1},
            TopologyMismatch,
            "is 8 ranks, but its process belongs to a world of 1; ep=2 was asked for, and at most ep=1 is in effect",
        ),
    ],
)
def test_sizes_must_multiply_to_the_world(
    driver: Driver, session: int, p: int, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    topology = place()
    for name, value in options.items():
        setattr(topology, name, value)
    with pytest.raises(error, match=says):
        _register(driver, session, p, topology)
    with pytest.raises(error, match=says):
        driver.claim(session, p, 2, topology=topology)


def test_a_waiting_rank_is_ready_once_its_share_is_made(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2)
    job = Job(driver, p)
    job.claim(0, 0)
    request = pb.ClaimRequest(partition_id=p, consumer="x", batch_size=2, topology=place(0, 1))
    request.mutation.client_id, request.mutation.session = (1).to_bytes(16, "big"), session
    assert driver.core.readiness(request) is Readiness.READY  # nothing else is ready
    request.topology.CopyFrom(place(0, 0))
    with pytest.raises(TopologyMismatch):
        driver.core.readiness(request)
