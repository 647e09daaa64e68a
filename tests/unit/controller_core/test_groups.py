"""Groups are delivered whole: counted by group, in any order of arrival, with members too many, aborted or late."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.driver import Driver, ids, unpack
from tqclient.errors import ClaimTimeout, InvalidArgument, SampleNotFound, Sealed
from tqclient.wire.packing import pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, limits
from tqserver.controller.core.groups import Members

Joined = st.lists(st.tuples(st.integers(-1, 5), st.integers(1, 12)), max_size=20)


@given(first=st.lists(st.integers(-1, 5), max_size=12), later=Joined, asked=st.lists(st.integers(0, 8), unique=True))
def test_members_of_many_groups_are_those_of_each(
    first: list[int], later: list[tuple[int, int]], asked: list[int]
) -> None:
    """Whether they were there from the beginning, joined later, once or again, or never were."""
    members = Members(np.array(first, np.int64), np.arange(1, len(first) + 1))
    by_hand: dict[int, set[int]] = {}
    for group, ident in [*zip(first, range(1, len(first) + 1), strict=True), *later]:
        by_hand.setdefault(group, set()).add(ident)
    for half in (later[: len(later) // 2], later[len(later) // 2 :]):
        members.add(*(np.array([each[side] for each in half], np.int64) for side in (0, 1)))
    found, places = members.of(np.array(asked, np.int64))
    assert list(zip(places.tolist(), found.tolist(), strict=True)) == [
        (place, ident) for place, group in enumerate(asked) for ident in sorted(by_hand.get(group, ()))
    ]


def _claim(driver: Driver, session: int, p: int, batch: int, size: int | None = 2, **options: Any) -> Any:
    return driver.claim(session, p, batch, sampler="group", params={"size": size}, **options)


def _ids(reply: Any) -> list[int]:
    return unpack(reply.rows.ids)


def _tag(driver: Driver, session: int, p: int, sample: int, tags: dict[str, Any]) -> None:
    request = pb.SetTagsRequest(partition_id=p, ids=ids(sample), tags=pack_blobs([msgpack.packb(tags)]))
    driver.ok("set_tags", request, session=session)


def test_only_complete_groups_whatever_the_order_of_arrival(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 5, groups=["a", "b", "c", "c", "b"])  # a lacks one
    claim = _claim(driver, session, p, 4)
    assert _ids(claim) == [2, 5, 3, 4]  # b is older than c: its first member came first
    driver.put(session, p, 2, groups=["", "a"])  # one without a group
    assert _ids(_claim(driver, session, p, 2)) == [1, 7]
    driver.settle(session, claim.claim_id, ack=False)
    assert _ids(_claim(driver, session, p, 2)) == [2, 5]
    assert driver.counts(p) == (0, 3, 4, 0, 0)
    driver.core.check_invariants()


def test_a_member_counts_once_its_fields_are_written(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4, groups=["a", "a", "b", "b"])
    driver.put(session, p, 3, ["r"], ids=[1, 3, 4])
    assert _ids(_claim(driver, session, p, 2, fields=["r"])) == [3, 4]
    driver.put(session, p, 1, ["r"], ids=[2])
    assert _ids(_claim(driver, session, p, 2, fields=["r"])) == [1, 2]
    driver.core.check_invariants()


def test_surplus_and_late_members_are_dropped_and_listed(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4, groups=["a", "a", "a", "b"])
    assert _ids(_claim(driver, session, p, 2)) == [1, 2]
    assert driver.counts(p) == (0, 1, 2, 0, 1)
    driver.put(session, p, 2, groups=["a", "b"])  # late for a, in time for b
    assert driver.counts(p) == (0, 2, 2, 0, 2)
    assert unpack(driver.core.list_dead(p, "x").surplus) == [3, 5]
    assert driver.core.list_dead(p, "x").ids == b""
    with pytest.raises(SampleNotFound):
        driver.ok("requeue", pb.RequeueRequest(partition_id=p, consumer="x", ids=ids(3)), session=session)
    driver.core = Core.restore(driver.core.snapshot(), driver.now)
    driver.put(session, p, 1, groups=["a"])
    assert driver.counts(p) == (0, 2, 2, 0, 3)
    driver.core.check_invariants()
    driver.ok("reset_consumer", pb.ResetConsumerRequest(partition_id=p, consumer="x"), session=session)
    assert driver.counts(p) == (0, 7, 0, 0, 0)


def test_samples_that_an_upsert_takes_to_a_granted_group_are_late(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_staleness=1)
    keys = ["a", "b", "c", "d", "e"]
    driver.put(session, p, 5, keys=keys, groups=["g", "g", "h", "h", "h"], versions=[2, 2, 2, 2, 0])
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=2), session=session)
    claim = _claim(driver, session, p, 2)
    assert _ids(claim) == [1, 2]
    driver.put(session, p, 3, keys=["c", "d", "e"], groups=["g"] * 3, upsert=True)
    assert driver.counts(p) == (0, 0, 2, 0, 3)
    assert unpack(driver.core.list_dead(p, "x").surplus) == [3, 4, 5]
    driver.put(session, p, 1, keys=["e"], versions=[2], upsert=True)  # a stale one, made fresh, does not come back
    driver.settle(session, claim.claim_id, ack=False)
    driver.put(session, p, 5, keys=keys, groups=["g"] * 5, upsert=True)  # where they are already
    assert driver.counts(p) == (0, 2, 0, 0, 3)
    assert _ids(_claim(driver, session, p, 2)) == [1, 2]
    driver.core.check_invariants()


def test_what_a_consumer_was_given_is_not_late_wherever_an_upsert_takes_it(driver: Driver, session: int) -> None:
    """Leased, consumed, and dead."""
    p = driver.partition(session, max_attempts=1)
    driver.put(session, p, 8, keys=list("abcdefgh"), groups=["g", "g", "h", "h", "i", "i", "j", "j"])
    claims = [_claim(driver, session, p, 2) for _ in range(4)]
    driver.settle(session, claims[0].claim_id)
    driver.settle(session, claims[1].claim_id)
    driver.settle(session, claims[2].claim_id, ack=False)
    before = driver.counts(p)
    assert before == (0, 0, 2, 4, 2)
    driver.put(session, p, 3, keys=["c", "e", "g"], groups=["g"] * 3, upsert=True)
    assert driver.counts(p) == before
    assert driver.core.list_dead(p, "x").surplus == b""
    driver.settle(session, claims[3].claim_id)
    assert driver.counts(p) == (0, 0, 0, 6, 2)
    driver.core.check_invariants()


def test_aborted_and_cleared_members_do_not_count(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, groups=["a"] * 3)
    _tag(driver, session, p, 1, {"aborted": True})
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(2)), session=session)
    with pytest.raises(ClaimTimeout):
        _claim(driver, session, p, 2)
    driver.put(session, p, 1, groups=["a"])
    assert _ids(_claim(driver, session, p, 2)) == [3, 4]
    assert driver.counts(p) == (0, 0, 2, 0, 1)  # the aborted one went with the grant
    driver.core.check_invariants()


def test_groups_say_their_own_sizes(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    tags: list[dict[str, Any]] = [{"group_size": 3}, {}, {}, {"group_size": 1}, {"group_size": 2}, {"group_size": 3}]
    driver.put(session, p, 6, groups=["a", "a", "b", "c", "d", "d"], tags=tags)
    with pytest.raises(ClaimTimeout):
        _claim(driver, session, p, 4, None)  # c alone is complete: a lacks one, b says nothing, d disagrees
    driver.put(session, p, 1, groups=["a"])
    assert _ids(_claim(driver, session, p, 4, None)) == [1, 2, 7, 4]
    _tag(driver, session, p, 6, {"group_size": 2})
    assert _ids(_claim(driver, session, p, 2, None)) == [5, 6]
    _tag(driver, session, p, 3, {"group_size": 1})
    driver.core.check_invariants()
    assert _ids(_claim(driver, session, p, 1, None)) == [3]


@pytest.mark.parametrize("size", [(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_group_that_says_it_is_larger_than_can_be_is_never_complete(driver: Driver, session: int, size: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, groups=["a", "a", "b"], tags=[{"group_size": size}, {}, {"group_size": 1}])
    assert _ids(_claim(driver, session, p, 1, None)) == [3]
    driver.put(session, p, 1, groups=["a"], tags=[{"group_size": size}])
    with pytest.raises(ClaimTimeout):
        _claim(driver, session, p, 3, None)
    _tag(driver, session, p, 1, {"group_size": 3})
    driver.core.check_invariants()
    Core.restore(driver.core.snapshot(), driver.now).check_invariants()
    _tag(driver, session, p, 4, {"group_size": 3})
    assert _ids(_claim(driver, session, p, 3, None)) == [1, 2, 4]


def test_a_group_larger_than_the_batch_is_an_error(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, groups=["a"] * 3, tags=[{"group_size": 3}] * 3)
    with pytest.raises(InvalidArgument, match="batch_size=2, but the oldest complete group has 3"):
        _claim(driver, session, p, 2, None)


def test_sealed_partition_hands_out_complete_groups_and_ends(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 5, groups=["a", "a", "b", "c", "c"])
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    claim = _claim(driver, session, p, 6)
    assert _ids(claim) == [1, 2, 4, 5]
    with pytest.raises(ClaimTimeout):
        _claim(driver, session, p, 2)  # what is leased may come back
    driver.settle(session, claim.claim_id)
    with pytest.raises(Sealed):
        _claim(driver, session, p, 2)
    assert driver.counts(p) == (0, 1, 0, 4, 0)


def test_an_upsert_that_moves_a_sample_to_another_group(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, keys=["1", "2", "3"], groups=["a", "b", "b"])
    with pytest.raises(ClaimTimeout):
        _claim(driver, session, p, 4)
    driver.put(session, p, 1, keys=["2"], groups=["a"], upsert=True)
    assert _ids(_claim(driver, session, p, 2)) == [1, 2]
    driver.core.check_invariants()


def test_groups_survive_a_compaction(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3000, groups=[i // 2 for i in range(3000)])
    assert _ids(_claim(driver, session, p, 2)) == [1, 2]
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(*range(3, 2990))), session=session)
    assert _ids(_claim(driver, session, p, 4)) == [2991, 2992, 2993, 2994]  # 2990 lost its other half
    driver.core.check_invariants()


@pytest.mark.parametrize("among", [1, 2, 1_000], ids=["the same", "there and back", "ever new ones"])
@pytest.mark.parametrize("size", [2, None])
def test_upserts_with_groups_leave_nothing_behind(
    driver: Driver, session: int, among: int, size: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what there is of groups holds after each compaction: who is complete, who was granted, what tags say."""
    monkeypatch.setattr(limits, "COMPACT_ROWS_MIN", 16)
    p = driver.partition(session, consumers=["x", "y"])
    groups = ["granted", "moved", "moved", "last", "last", "granted"]
    driver.put(session, p, 6, keys=list("abcdef"), groups=groups, tags=[{"group_size": 2}] * 6)
    driver.settle(session, _claim(driver, session, p, 2, size).claim_id)
    for turn in range(200):
        driver.put(session, p, 2, keys=["b", "c"], groups=[turn % among] * 2, upsert=True)
        if turn % 10 == 5:
            claim = _claim(driver, session, p, 6, size, consumer="y")
            assert _ids(claim) == [1, 6, 4, 5, 2, 3]
            driver.settle(session, claim.claim_id, ack=False)
            driver.ok("reset_consumer", pb.ResetConsumerRequest(partition_id=p, consumer="y"), session=session)
            driver.core.check_invariants()
        samples = driver.core._state.partition(p).samples
        assert len(samples.groups.values) <= 16 + 2 * samples.live
        assert samples._members is None or samples._members.joined <= 16
    driver.put(session, p, 1, groups=["granted"])
    assert driver.counts(p) == (0, 4, 0, 2, 1)
    assert _ids(_claim(driver, session, p, 4, size)) == [4, 5, 2, 3]
    driver.core.check_invariants()
    replayed = Core()
    for command, sequence in driver.log:
        replayed.apply(command, 0.0, sequence)
        if sequence % 50 == 0:
            replayed = Core.restore(replayed.snapshot(), 0.0)
    assert replayed.snapshot() == driver.core.snapshot()


def test_many_groups_of_several_sizes_come_each_with_its_oldest_members(driver: Driver, session: int) -> None:
    """Some with a member that is claimed already, dropped, or one too many."""
    p = driver.partition(session)
    sizes = [1, 3, 2, 4, 1, 3]
    groups = [group for member in range(4) for group, size in enumerate(sizes) if member < size]
    driver.put(session, p, len(groups), groups=groups, tags=[{"group_size": sizes[group]} for group in groups])
    driver.put(session, p, 2, groups=[1, 4])  # too many of these
    members = {group: [i + 1 for i, each in enumerate(groups) if each == group] for group in range(len(sizes))}
    claim = _claim(driver, session, p, sum(sizes[:4]), size=None)
    assert _ids(claim) == [ident for group in range(4) for ident in members[group]]
    assert _ids(_claim(driver, session, p, 4, size=None)) == [*members[4], *members[5]]
    assert unpack(driver.core.list_dead(p, "x").surplus) == [15, 16]
    driver.settle(session, claim.claim_id, ack=False)
    assert _ids(_claim(driver, session, p, 6, size=None)) == [*members[0], *members[1], *members[2]]
    driver.core.check_invariants()


def test_groups_within_a_budget_of_tokens(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 6, groups=["a", "b", "a", "b", "c", "c"])  # each row has 2, the length of a dense row
    assert _ids(_claim(driver, session, p, 0, max_tokens=11, token_field="a")) == [1, 3, 2, 4]
    with pytest.raises(InvalidArgument, match="alone"):
        _claim(driver, session, p, 0, max_tokens=3, token_field="a")


def test_a_granted_group_that_is_stale_in_part_is_dropped_whole(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_staleness=1)
    driver.put(session, p, 4, groups=["a", "a", "b", "b"], versions=[0, 2, 2, 2])
    claim = _claim(driver, session, p, 4)
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=2), session=session)
    driver.settle(session, claim.claim_id, ack=False)
    assert driver.counts(p) == (0, 2, 0, 0, 2)
    assert _ids(_claim(driver, session, p, 2)) == [3, 4]
    assert unpack(driver.core.list_dead(p, "x").stale) == [1, 2]
    driver.core.check_invariants()


@pytest.mark.parametrize(
    ("versions", "stale", "opened"), [(None, [3], 1), ([5], [], 2)], ids=["still stale", "made fresh"]
)
def test_a_stale_member_that_goes_to_another_group_leaves_its_mates_to_be_had(
    driver: Driver, session: int, versions: list[int] | None, stale: list[int], opened: int
) -> None:
    p = driver.partition(session, max_staleness=1)
    driver.put(session, p, 2, groups=["g", "g"], versions=[5, 5])
    driver.settle(session, _claim(driver, session, p, 2).claim_id)
    driver.put(session, p, 2, keys=["a0", "a1"], groups=["a", "a"], versions=[4, 5])
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=6), session=session)
    assert driver.counts(p) == (0, 0, 0, 2, 2)
    driver.put(session, p, 1, keys=["a0"], groups=["b"], versions=versions, upsert=True)
    assert driver.counts(p) == (0, opened, 0, 2, 2 - opened)
    assert unpack(driver.core.list_dead(p, "x").stale) == stale
    driver.core.check_invariants()
    driver.put(session, p, 1, groups=["a"], versions=[6])
    assert _ids(_claim(driver, session, p, 2)) == [4, 5]


def test_a_stale_sample_that_comes_into_a_group_takes_it_along(driver: Driver, session: int) -> None:
    """And gives back the one that it leaves, in the same put."""
    p = driver.partition(session, max_staleness=1)
    driver.put(session, p, 2, groups=["g", "g"], versions=[5, 5])
    driver.settle(session, _claim(driver, session, p, 2).claim_id)
    driver.put(session, p, 4, keys=["a0", "a1", "b0", "b1"], groups=["a", "a", "b", "b"], versions=[4, 5, 5, 5])
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=6), session=session)
    assert unpack(driver.core.list_dead(p, "x").stale) == [3, 4]
    driver.put(session, p, 2, keys=["a0", "b1"], groups=["b", "a"], upsert=True)
    assert unpack(driver.core.list_dead(p, "x").stale) == [3, 5]
    assert _ids(_claim(driver, session, p, 2)) == [4, 6]
    driver.core.check_invariants()


def test_only_so_many_granted_groups_are_remembered(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "GRANTED_GROUPS_MAX", 2)
    p = driver.partition(session)
    driver.put(session, p, 6, groups=["a", "a", "b", "b", "c", "c"])
    _claim(driver, session, p, 6)
    driver.put(session, p, 2, groups=["a", "c"])
    assert driver.counts(p) == (0, 1, 6, 0, 1)  # a is forgotten, c is not
