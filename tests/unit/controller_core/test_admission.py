"""Limits on puts: staleness that waits, permits, the rate limit, and versions that are live."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from tests.model.driver import LEASE, Driver, ids, unpack
from tqclient.errors import BackpressureTimeout, ClaimTimeout, InvalidArgument, LeaseExpired, Sealed
from tqclient.wire.packing import I64, pack_array, pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, Demand, Limit, ReadinessChanged, RoomChanged

WAIT: dict[str, Any] = {"staleness": "wait", "max_staleness": 1, "samples_per_version": 4}


def _permit(driver: Driver, session: int, p: int, samples: int, *, client: int = 1) -> pb.AcquirePermitReply:
    request = pb.AcquirePermitRequest(partition_id=p, samples=samples)
    reply: pb.AcquirePermitReply = driver.ok("acquire_permit", request, session=session, client=client)
    return reply


def _put(driver: Driver, session: int, p: int, rows: int, permit: int = 0, **options: Any) -> list[int]:
    request = driver.commit(p, rows, **options)
    request.permit = permit
    return unpack(driver.ok("commit", request, session=session).ids)


def _set_version(driver: Driver, session: int, p: int, version: int) -> None:
    outcome = driver.send("set_version", pb.SetVersionRequest(partition_id=p, version=version), session=session)
    assert RoomChanged(p) in outcome.effects


def _counts(driver: Driver, p: int) -> tuple[int, int]:
    described = driver.core.describe_partition(p)
    return described.accepted, described.running


# Policies.


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ({"staleness": "wait"}, "max_staleness"),
        ({"staleness": "wait", "max_staleness": 1}, "samples_per_version"),
        ({"staleness": "wait", "max_staleness": 1, "samples_per_version": 0}, "samples_per_version=0"),
        ({"samples_per_version": 4}, "only with staleness='wait'"),
        ({"staleness": "hope"}, "expected 'drop' or 'wait'"),
        ({"capacity_versions": 0}, "capacity_versions=0"),
        ({"rate_limit": pb.RateLimit(samples_per_insert=0, min_samples=1, error_buffer=2)}, "above 0"),
        ({"rate_limit": pb.RateLimit(samples_per_insert=float("nan"), min_samples=1, error_buffer=2)}, "above 0"),
        ({"rate_limit": pb.RateLimit(samples_per_insert=2, min_samples=0, error_buffer=2)}, "min_samples=0"),
        ({"rate_limit": pb.RateLimit(samples_per_insert=2, min_samples=1, error_buffer=1.5)}, "at least 2.0"),
        ({"rate_limit": pb.RateLimit(samples_per_insert=0.5, min_samples=1)}, "at least 1.0"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(
    driver: Driver, session: int, policy: dict[str, Any], says: str
) -> None:
    with pytest.raises(InvalidArgument, match=says):
        driver.partition(session, **policy)


# Staleness that waits.


def test_puts_wait_for_the_version_that_they_may_be_consumed_at(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    driver.put(session, p, 8)  # (1 + 0 + 1) × 4
    with pytest.raises(BackpressureTimeout, match=r"max_staleness=1: at version 0, 8 samples are admitted; 8 were acc"):
        driver.put(session, p, 1)
    _set_version(driver, session, p, 0)
    assert Limit.STALENESS in driver.demand(driver.commit(p, 1)).lacks
    _set_version(driver, session, p, 1)
    driver.put(session, p, 4)
    assert driver.demand(driver.commit(p, 1)).lacks.keys() == {Limit.STALENESS}
    assert not driver.demand(driver.commit(p, 1, ids=[1])).draws  # a column is no new sample
    assert driver.put(session, p, 1, ["b"], ids=[1]) == [1]
    driver.core.check_invariants()


def test_what_waits_is_never_dropped(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    driver.put(session, p, 2, versions=[0, 0])
    _set_version(driver, session, p, 9)
    assert driver.counts(p) == (0, 2, 0, 0, 0)


def test_samples_that_nobody_consumes_do_not_count_once_they_are_cleared(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    driver.put(session, p, 8)
    driver.settle(session, driver.claim(session, p, 2).claim_id)
    driver.claim(session, p, 2)
    driver.ok(
        "clear", pb.ClearRequest(partition_id=p, ids=ids(1, 3, 5, 6)), session=session
    )  # consumed, leased, 2 open
    assert _counts(driver, p) == (6, 0)
    driver.put(session, p, 2)
    with pytest.raises(BackpressureTimeout):
        driver.put(session, p, 1)


# Permits.


def test_a_permit_counts_as_running_and_stamps_the_version_of_its_grant(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    first = _permit(driver, session, p, 6)
    assert first.version == -1
    assert _counts(driver, p) == (0, 6)
    with pytest.raises(BackpressureTimeout, match="0 were accepted, 6 are running"):
        _permit(driver, session, p, 3)
    with pytest.raises(BackpressureTimeout):
        driver.put(session, p, 3)
    _put(driver, session, p, 4, first.permit)
    assert _counts(driver, p) == (4, 2)
    _set_version(driver, session, p, 5)
    assert _permit(driver, session, p, 3).version == 5
    driver.core.check_invariants()


def test_a_permit_is_put_under_by_its_holder_for_as_many_as_it_has(driver: Driver, session: int) -> None:
    p, other = driver.partition(session, **WAIT), driver.open(client=2)
    permit = _permit(driver, session, p, 2).permit
    with pytest.raises(InvalidArgument, match="has 2 samples left, and the put has 3"):
        _put(driver, session, p, 3, permit)
    request = driver.commit(p, 1)
    request.permit = permit
    assert isinstance(driver.send("commit", request, client=2, session=other).error, InvalidArgument)
    _put(driver, session, p, 2, permit)
    with pytest.raises(InvalidArgument, match="used up or returned"):
        _put(driver, session, p, 1, permit)
    assert _put(driver, session, p, 1, permit, fields=["b"], ids=[1]) == [1]  # a column needs none


@pytest.mark.parametrize("end", ["return", "close", "die"])
def test_what_is_left_of_a_permit_comes_back(driver: Driver, session: int, end: str) -> None:
    p, holder = driver.partition(session, **WAIT), driver.open(client=2)
    permit = _permit(driver, holder, p, 8, client=2).permit
    if end == "return":
        request = pb.ReturnPermitRequest(partition_id=p, permit=permit)
        outcome = driver.send("return_permit", request, client=2, session=holder)
        again = driver.send("return_permit", pb.ReturnPermitRequest(partition_id=p, permit=permit), session=session)
        assert (again.error, again.effects) == (None, ())
    elif end == "close":
        outcome = driver.send("close_session", pb.CloseSessionRequest(), client=2, session=holder)
    else:
        outcome = driver.send("end_session", journal_pb2.EndSession(session=holder))
    assert RoomChanged(p) in outcome.effects
    assert _counts(driver, p) == (0, 0)
    driver.put(session, p, 8)
    driver.core.check_invariants()


def test_another_session_returns_nothing(driver: Driver, session: int) -> None:
    p, other = driver.partition(session, **WAIT), driver.open(client=2)
    permit = _permit(driver, session, p, 3).permit
    request = pb.ReturnPermitRequest(partition_id=p, permit=permit)
    driver.ok("return_permit", request, client=2, session=other)
    assert _counts(driver, p) == (0, 3)


def test_permits_of_sealed_deleted_and_unlimited_partitions(driver: Driver, session: int) -> None:
    free, p = driver.partition(session, "free"), driver.partition(session, "held", **WAIT)
    assert _permit(driver, session, free, 1_000_000).version == -1
    _permit(driver, session, p, 4)
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    assert not driver.demand(pb.AcquirePermitRequest(partition_id=p, samples=100)).draws  # it need not wait
    with pytest.raises(Sealed):
        _permit(driver, session, p, 1)
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    driver.core.check_invariants()
    driver.send("end_session", journal_pb2.EndSession(session=session))
    driver.core.check_invariants()


@pytest.mark.parametrize("samples", [0, 1 << 25])
def test_a_permit_for_no_sample_or_too_many_is_refused(driver: Driver, session: int, samples: int) -> None:
    with pytest.raises(InvalidArgument, match="samples of a permit"):
        _permit(driver, session, driver.partition(session), samples)


def test_a_repeated_request_is_one_permit(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    reply = _permit(driver, session, p, 3)
    outcome = driver.journal(driver.log[-1][0])
    assert outcome.repeated
    assert outcome.reply == reply
    assert _counts(driver, p) == (0, 3)


def test_a_permit_needs_a_live_session(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    driver.send("end_session", journal_pb2.EndSession(session=session))
    request = pb.AcquirePermitRequest(partition_id=p, samples=1)
    assert isinstance(driver.send("acquire_permit", request, session=session).error, LeaseExpired)


def test_permits_outlive_a_restart_of_the_controller(driver: Driver, session: int) -> None:
    p = driver.partition(session, **WAIT)
    permit = _permit(driver, session, p, 3).permit
    driver.core = Core.restore(driver.core.snapshot(), driver.now, session_lease=LEASE)
    driver.core.check_invariants()
    _put(driver, session, p, 3, permit)
    assert _counts(driver, p) == (3, 0)
    assert _permit(driver, session, p, 1).permit > permit


def test_a_snapshot_of_an_earlier_release_is_read(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    tree = msgpack.unpackb(driver.core.snapshot(), strict_map_key=False)
    tree["counters"] = tree["counters"][:8]
    for partition in tree["partitions"]:
        del partition["admitted"]
    driver.core = Core.restore(msgpack.packb(tree), driver.now, session_lease=LEASE)
    assert _counts(driver, p) == (3, 0)
    assert _permit(driver, session, p, 1).permit == 1


# Live versions.


def test_a_put_waits_to_bring_another_version(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_versions=2)
    driver.put(session, p, 3, versions=[1, 2, -1])
    driver.put(session, p, 2, versions=[2, -1])
    with pytest.raises(BackpressureTimeout, match=r"capacity_versions=2: samples of versions \[1, 2\] are live"):
        driver.put(session, p, 2, versions=[2, 3])
    outcome = driver.send("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert RoomChanged(p) in outcome.effects
    driver.put(session, p, 2, versions=[2, 3])
    driver.core.check_invariants()


def test_a_put_of_more_versions_than_may_be_live_is_refused_at_once(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_versions=2)
    with pytest.raises(InvalidArgument, match="a put of 3 weight versions, but capacity_versions is 2"):
        driver.put(session, p, 3, versions=[1, 2, 3])


def test_an_upsert_may_take_the_last_sample_of_a_version_along(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_versions=1)
    driver.put(session, p, 2, versions=[1, 1])
    with pytest.raises(BackpressureTimeout):
        driver.put(session, p, 1, ids=[1], versions=[2], upsert=True)
    outcome = driver.send("commit", driver.commit(p, 2, ids=[1, 2], versions=[2, 2], upsert=True), session=session)
    assert outcome.error is None
    assert RoomChanged(p) in outcome.effects
    driver.put(session, p, 1, versions=[2])
    driver.core.check_invariants()


def test_a_column_widens_the_span_and_may_bring_a_version(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_versions=1)
    driver.put(session, p, 2, versions=[3, 3])
    driver.put(session, p, 1, ["b"], ids=[1], versions=[2])  # (2, 3): the newest stays
    with pytest.raises(BackpressureTimeout):
        driver.put(session, p, 1, ["b"], ids=[2], versions=[4])
    driver.core.check_invariants()


def test_the_samples_of_a_sealed_partition_are_given_no_version_too_many(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_versions=1, max_staleness=1, staleness="wait", samples_per_version=4)
    driver.put(session, p, 2, versions=[1, 1])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    upsert = driver.commit(p, 1, ids=[1], versions=[2], upsert=True)
    assert driver.demand(upsert, session).lacks.keys() == {Limit.VERSIONS}
    with pytest.raises(BackpressureTimeout, match=r"capacity_versions=1: samples of versions \[1\] are live"):
        driver.put(session, p, 1, ids=[1], versions=[2], upsert=True)
    driver.put(session, p, 2, ids=[1, 2], versions=[2, 2], upsert=True)
    for never in (driver.commit(p, 1, versions=[3]), pb.AcquirePermitRequest(partition_id=p, samples=9)):
        assert driver.demand(never, session) == Demand()  # refused because it is sealed: it need not wait for room
    driver.core.check_invariants()


# The rate limit: 2 deliveries for each put, from 2 samples on, off by 4 at the most. offset = 4.


def _paced(driver: Driver, session: int, **policy: Any) -> int:
    limit = pb.RateLimit(samples_per_insert=2, min_samples=2, error_buffer=4)
    return driver.partition(session, consumers=["x", "y"], rate_limit=limit, **policy)


def test_puts_and_claims_keep_pace(driver: Driver, session: int) -> None:
    p = _paced(driver, session)
    driver.put(session, p, 1)
    with pytest.raises(ClaimTimeout, match="1 samples were put, min_samples=2"):
        driver.claim(session, p, 1)
    driver.put(session, p, 3)  # 4 × 2 - 0 = 8 = 4 + 4
    with pytest.raises(BackpressureTimeout, match=r"4 samples were put and only 0 delivered; 1 more wait for claims"):
        driver.put(session, p, 1)
    outcome = driver.send("claim", pb.ClaimRequest(partition_id=p, consumer="x", batch_size=2), session=session)
    assert RoomChanged(p) in outcome.effects  # 8 - 2 = 6
    driver.put(session, p, 1)  # 10 - 2 = 8
    driver.claim(session, p, 3)  # 10 - 5 = 5
    driver.claim(session, p, 5, consumer="y")  # 10 - 10 = 0 = 4 - 4
    driver.put(session, p, 1)  # 12 - 10 = 2
    driver.claim(session, p, 1)  # 12 - 11 = 1
    driver.claim(session, p, 1, consumer="y")  # 12 - 12 = 0
    assert driver.core.describe_partition(p).delivered == 12


def test_a_claim_waits_for_puts_though_samples_are_ready(driver: Driver, session: int) -> None:
    limit = pb.RateLimit(samples_per_insert=1, min_samples=1, error_buffer=1)  # 0 <= inserted - delivered <= 2
    p = driver.partition(session, consumers=["x", "y"], rate_limit=limit)
    driver.put(session, p, 2)
    driver.claim(session, p, 2)
    with pytest.raises(ClaimTimeout, match="2 samples were delivered of 2 that were put; 1 more wait for puts"):
        driver.claim(session, p, 1, consumer="y")
    outcome = driver.send("commit", driver.commit(p, 1), session=session)
    assert ReadinessChanged(p, by_count=True) in outcome.effects
    driver.claim(session, p, 1, consumer="y")


def test_redeliveries_do_not_count(driver: Driver, session: int) -> None:
    p = _paced(driver, session)
    driver.put(session, p, 2)
    for _ in range(3):
        driver.settle(session, driver.claim(session, p, 2).claim_id, ack=False)
    assert driver.core.describe_partition(p).delivered == 2


def test_what_the_rate_can_never_allow_is_refused_at_once(driver: Driver, session: int) -> None:
    p = _paced(driver, session)
    with pytest.raises(InvalidArgument, match="a put of 5 samples moves the balance of samples_per_insert by 10"):
        driver.put(session, p, 5)
    with pytest.raises(InvalidArgument, match="a claim of 9 samples moves"):
        driver.claim(session, p, 9)


def test_a_sealed_partition_hands_out_the_rest_whatever_the_rate(driver: Driver, session: int) -> None:
    limit = pb.RateLimit(samples_per_insert=1, min_samples=1, error_buffer=1)
    p = driver.partition(session, consumers=["x", "y"], rate_limit=limit)
    driver.put(session, p, 2)
    driver.claim(session, p, 2)
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    assert unpack(driver.claim(session, p, 9, consumer="y").rows.ids) == [1, 2]


def _ranked(driver: Driver, session: int, p: int, dp_rank: int, member: int, **options: Any) -> list[int]:
    topology = pb.Topology(dp=2, tp=2, pp=1, cp=1, ep=1, members=2, dp_rank=dp_rank, member=member)
    client = options.pop("client")
    return unpack(driver.claim(session, p, 1, topology=topology, client=client, **options).rows.ids)


def test_a_share_is_delivered_once_however_many_members_take_it(driver: Driver, session: int) -> None:
    limit = pb.RateLimit(samples_per_insert=1, min_samples=1, error_buffer=1)  # 0 <= inserted - delivered <= 2
    p = driver.partition(session, rate_limit=limit)
    driver.put(session, p, 2)
    members = [driver.open(client=2), driver.open(client=3)]
    assert _ranked(driver, members[0], p, 0, 0, client=2) == [1]
    assert _ranked(driver, members[1], p, 0, 1, client=3) == [1]
    assert driver.core.describe_partition(p).delivered == 1


def test_shares_that_were_never_delivered_and_dissolve_do_not_count(driver: Driver, session: int) -> None:
    limit = pb.RateLimit(samples_per_insert=1, min_samples=1, error_buffer=2)  # -1 <= inserted - delivered <= 3
    p = driver.partition(session, rate_limit=limit)
    driver.put(session, p, 2)
    member = driver.open(client=2)
    params = {"field": "a"}
    assert len(_ranked(driver, member, p, 0, 0, client=2, sampler="seqlen_balanced", params=params)) == 1
    assert driver.core.describe_partition(p).delivered == 2  # the other DP rank's is set aside
    request = journal_pb2.DissolveReplica(partition_id=p, consumer="x", dp_rank=1)
    driver.send("dissolve_replica", request)
    assert driver.core.describe_partition(p).delivered == 1
    driver.core.check_invariants()


# Groups that are stale in part.


def _grouped(driver: Driver, session: int) -> int:
    p = driver.partition(session, max_staleness=1)
    driver.put(session, p, 2, groups=["z", "z"], versions=[2, 2])
    params = {"size": 2}
    driver.settle(session, driver.claim(session, p, 2, sampler="group", params=params).claim_id)
    return p


def _stale(driver: Driver, p: int) -> list[int]:
    driver.core.check_invariants()
    return unpack(driver.core.list_dead(p, "x").stale)


def test_a_stale_member_takes_its_group_with_it(driver: Driver, session: int) -> None:
    p = _grouped(driver, session)
    driver.put(session, p, 5, groups=["a", "a", "a", "b", "b"], versions=[0, 2, 2, 1, 2])
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=2), session=session)
    assert _stale(driver, p) == [3, 4, 5]  # two fresh members of a are left, and are not handed out as a pair
    assert driver.counts(p) == (0, 2, 0, 2, 3)
    driver.put(session, p, 1, groups=["a"], versions=[2])  # a late one goes the same way
    assert _stale(driver, p) == [3, 4, 5, 8]
    claim = driver.claim(session, p, 2, sampler="group", params={"size": 2})
    assert unpack(claim.rows.ids) == [6, 7]


def test_a_group_is_as_it_was_once_its_stale_member_is_fresh_or_gone(driver: Driver, session: int) -> None:
    p = _grouped(driver, session)
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=2), session=session)
    driver.put(session, p, 4, groups=["a", "a", "b", "b"], versions=[0, 2, 0, 2])
    assert _stale(driver, p) == [3, 4, 5, 6]
    driver.put(session, p, 1, ids=[3], versions=[2], upsert=True)
    assert _stale(driver, p) == [5, 6]
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(5)), session=session)
    assert _stale(driver, p) == []


def test_an_aborted_member_takes_nobody_with_it(driver: Driver, session: int) -> None:
    p = _grouped(driver, session)
    tags: list[dict[str, Any]] = [{"aborted": True}, {}, {}]
    driver.put(session, p, 3, groups=["a"] * 3, versions=[0, 2, 2], tags=tags)
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=2), session=session)
    assert _stale(driver, p) == [3]
    packed = pack_blobs([msgpack.packb({"aborted": None})])
    request = pb.SetTagsRequest(partition_id=p, ids=pack_array([3], I64), tags=packed)
    driver.ok("set_tags", request, session=session)
    assert _stale(driver, p) == [3, 4, 5]


def test_a_consumer_of_single_samples_loses_only_what_is_stale(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_staleness=1)
    driver.put(session, p, 3, groups=["a"] * 3, versions=[0, 2, 2])
    driver.settle(session, driver.claim(session, p, 1).claim_id)
    driver.put(session, p, 1, groups=["a"], versions=[0])
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=2), session=session)
    assert _stale(driver, p) == [4]
    assert driver.counts(p) == (0, 2, 0, 1, 1)
