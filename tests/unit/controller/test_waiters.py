"""The lines: who is granted what, when, and that nobody is left behind. Time and core are the test's own."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.controller.lines_bench import Bench
from tqclient.errors import (
    BackpressureTimeout,
    ClaimTimeout,
    LeaseExpired,
    PartitionNotFound,
    Sealed,
    Unavailable,
)
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.lines import GRANTS_MAX, Waiter


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_claims_are_granted_in_order_and_no_more_than_there_are_rows(bench: Bench) -> None:
    first, second = bench.claim("first", 2), bench.claim("second", 2)
    bench.claim("third", 2)
    bench.ready(1)
    assert bench.granted == []
    bench.ready(4)
    assert bench.granted == ["first", "second"]  # 5 rows are ready, 4 promised
    bench.applied(first, 2)
    bench.applied(second, 2)
    bench.waiters.serve()
    assert bench.granted == ["first", "second"]
    bench.ready(1)
    assert bench.granted == ["first", "second", "third"]
    assert bench.waiters.claims == 0


def test_small_claims_do_not_overtake_a_large_one(bench: Bench) -> None:
    first = bench.claim("early", 1)
    large = bench.claim("large", 5)
    for number in range(10):
        bench.ready(1)
        if number == 0:
            bench.applied(first, 1)
        bench.claim(f"small {number}", 1)
    # Of 10 samples, the first went to who came first, 5 were gathered for the large claim, and 4 are left.
    assert bench.granted == ["early", "large", *(f"small {number}" for number in range(4))]
    assert large.promised == 5
    assert bench.waiters.claims == 6


@pytest.mark.parametrize("how", ["expires", "is withdrawn", "loses its session"])
def test_a_large_claim_holds_up_others_for_as_long_as_it_waits_itself(bench: Bench, how: str) -> None:
    large = bench.claim("large", 5, seconds=1, session=7)
    bench.claim("small", 1)
    bench.ready(4)
    bench.clock.advance(0.5)
    assert bench.granted == []
    if how == "expires":
        bench.clock.advance(0.6)
    elif how == "is withdrawn":
        bench.waiters.withdraw(large)
    else:
        bench.core.dead_sessions = {7}
        bench.waiters.session_ended()
        bench.waiters.serve()
        assert isinstance(bench.refused["large"], LeaseExpired)
    assert bench.granted == ["small"]


def test_a_claim_behind_another_one_is_told_so(bench: Bench) -> None:
    bench.claim("large", 5)
    bench.ready(2)
    bench.claim("impatient", 1, seconds=0)
    assert "2 samples are ready" in str(bench.refused["impatient"])
    assert "a claim for 5 came first" in str(bench.refused["impatient"])
    bench.clock.advance(20)
    assert "came first" not in str(bench.refused["large"])


def test_claims_for_other_fields_do_not_wait_for_each_other(bench: Bench) -> None:
    bench.claim("large", 5, fields=["a", "b"])
    bench.claim("small", 1, fields=["a"])
    bench.claim("behind", 1, fields=["b", "a"])  # the same set
    bench.ready(2)
    assert bench.granted == ["small"]


def test_a_claim_that_only_a_seal_can_meet_holds_up_nobody(bench: Bench) -> None:
    bench.core.capacity = 4
    outsized = bench.claim("outsized", 5)
    small = bench.claim("small", 1)
    bench.ready(2)
    assert bench.granted == ["small"]
    bench.applied(small, 1)
    bench.core.sealed = True
    bench.ready(0)
    assert bench.granted == ["small", "outsized"]
    assert outsized.promised == 1


def test_a_claim_that_comes_back_keeps_its_place(bench: Bench) -> None:
    first = bench.claim("first", 1)
    bench.ready(1)
    bench.claim("second", 1)
    assert bench.granted == ["first"]
    bench.core.ready = 0  # cleared between the look and the record
    bench.waiters.settled(first)
    bench.waiters.wait(first, 5)
    bench.ready(1)
    assert bench.granted == ["first", "first"]


def test_claims_are_granted_for_a_put_that_is_on_its_way(bench: Bench) -> None:
    first = bench.claim("first", 2)
    bench.claim("second", 2)
    bench.claim("third", 2)
    bench.ready(1)
    bench.coming(3)
    assert bench.granted == ["first", "second"]  # 1 row is ready, 3 will be, 4 are promised
    bench.ready(3)
    bench.applied(first, 2)
    bench.waiters.serve()
    assert bench.granted == ["first", "second"]
    bench.ready(2)
    assert bench.granted == ["first", "second", "third"]


def test_a_put_on_its_way_meets_a_claim_once_and_not_again_if_it_did_not_bring_enough(bench: Bench) -> None:
    claim = bench.claim("claim", 2)
    bench.claim("behind", 2)
    bench.coming(2)
    assert bench.granted == ["claim"]
    bench.ready(1)  # one of its rows existed already
    bench.waiters.settled(claim)
    bench.waiters.wait(claim, 5)
    bench.coming(2)
    assert bench.granted == ["claim"]  # nor does anybody overtake it
    bench.ready(1)
    assert bench.granted == ["claim", "claim"]


def test_a_claim_that_a_put_on_its_way_meets_alone_is_given_a_preview(bench: Bench) -> None:
    first = bench.claim("first", 2)
    bench.claim("second", 2)
    bench.coming(2)
    assert (bench.granted, bench.previewed) == (["first"], ["first of 2"])
    bench.coming(2)  # perhaps the second gets these, perhaps the first gets some: its promise is not kept yet
    assert bench.granted == ["first"]
    bench.ready(2)
    bench.applied(first, 2)
    bench.ready(1)
    bench.coming(1)  # half of them are there already
    assert (bench.granted, bench.previewed) == (["first", "second"], ["first of 2"])


def test_a_put_of_more_rows_than_a_claim_waits_for_is_no_preview_of_it(bench: Bench) -> None:
    bench.claim("half", 2)
    bench.coming(4)
    assert (bench.granted, bench.previewed) == (["half"], [])


def test_a_claim_that_is_met_at_once_alone_is_given_a_preview_of_what_is_there(bench: Bench) -> None:
    bench.ready(3)
    bench.claim("first", 2)
    bench.claim("second", 1)  # which one it gets is not known before the first has its own
    assert (bench.granted, bench.previewed) == (["first", "second"], ["first of what is there"])


@pytest.mark.parametrize(
    ("claim", "put", "granted"),
    [
        ({}, {"fields": ("a",)}, True),
        ({"fields": ["a"]}, {"fields": ("a", "b")}, True),
        ({"fields": ["a", "b"]}, {"fields": ("a",)}, False),  # b follows later
        ({"fields": ["a", "b"]}, {"fields": ("b",), "ids": bytes(16)}, True),  # a may be there
        ({"fields": ["a"]}, {"fields": ("b",), "ids": bytes(16)}, False),
        ({"where": b"\x81\xa1k\x01"}, {"fields": ("a",)}, False),
        ({"sampler": pb.Sampler(name="group")}, {"fields": ("a",)}, False),  # not any 2 rows will do
        ({"batch_size": 3}, {"fields": ("a",)}, False),
    ],
)
def test_which_claims_a_put_on_its_way_seems_to_meet(
    bench: Bench, claim: dict[str, Any], put: dict[str, Any], granted: bool
) -> None:
    bench.claim("claim", **{"batch_size": 2, **claim})
    bench.coming(2, *put["fields"], ids=put.get("ids", b""))
    assert bench.granted == (["claim"] if granted else [])


def test_a_claim_that_does_not_wait_is_answered_at_once(bench: Bench) -> None:
    bench.claim("now", 1, seconds=0)
    assert isinstance(bench.refused["now"], ClaimTimeout)
    assert (bench.waiters.claims, bench.clock.scheduled) == (0, 0)


def test_deadlines_end_waiting_and_grants_end_deadlines(bench: Bench) -> None:
    bench.claim("short", 1, seconds=1)
    bench.claim("long", 1, seconds=9)
    bench.clock.advance(1.5)
    assert list(bench.refused) == ["short"]
    assert "of partition 'p1': 0 samples are ready" in str(bench.refused["short"])
    assert "1 were asked for" in str(bench.refused["short"])
    bench.ready(1)
    bench.clock.advance(20)
    assert bench.granted == ["long"]
    assert list(bench.refused) == ["short"]
    assert bench.clock.scheduled == 0


def test_a_claim_that_was_withdrawn_is_not_granted(bench: Bench) -> None:
    gone = bench.claim("gone", 1)
    bench.claim("next", 1)
    assert bench.waiters.withdraw(gone)
    assert not bench.waiters.withdraw(gone)
    bench.ready(1)
    assert bench.granted == ["next"]


def test_the_rest_of_a_sealed_partition_goes_to_one_claim_and_the_others_end(bench: Bench) -> None:
    first = bench.claim("first", 8)
    bench.claim("second", 8)
    bench.core.sealed = True
    bench.ready(3)
    assert bench.granted == ["first"]
    bench.applied(first, 3)
    bench.waiters.serve()
    assert bench.refused == {}  # its samples may be released yet
    bench.core.leased = 0
    bench.ready(0)
    assert isinstance(bench.refused["second"], Sealed)


def test_an_ended_session_refuses_its_own_claims_alone(bench: Bench) -> None:
    bench.claim("dead", 1, session=7)
    bench.claim("alive", 1, session=8)
    bench.core.dead_sessions = {7}
    bench.ready(1)
    assert isinstance(bench.refused["dead"], LeaseExpired)
    assert bench.granted == ["alive"]


def test_a_change_costs_as_much_as_there_are_queues_not_calls(bench: Bench) -> None:
    for number in range(5_000):
        bench.claim(f"{number}", 2 + number % 7)
    bench.core.looks = 0
    bench.ready(1)
    assert bench.core.looks <= 3


def test_a_burst_is_granted_in_portions_that_follow_each_other(bench: Bench) -> None:
    claims = [bench.claim(f"{number}", 1) for number in range(GRANTS_MAX * 2 + 5)]
    bench.ready(len(claims))
    assert len(bench.granted) == GRANTS_MAX
    for waiter in claims:
        bench.applied(waiter, 1)
        bench.waiters.serve()
    assert bench.granted == [f"{number}" for number in range(len(claims))]


def test_a_deleted_partition_and_a_shutdown_refuse_everybody(bench: Bench) -> None:
    bench.claim("a", 1)
    bench.commit("b", 1)
    bench.waiters.gone(1, "p1")
    assert {type(error) for error in bench.refused.values()} == {PartitionNotFound}
    assert {str(error) for error in bench.refused.values()} == {"partition 'p1' was deleted meanwhile"}
    bench.claim("c", 1)
    bench.waiters.close(Unavailable("shutting down"))
    assert isinstance(bench.refused["c"], Unavailable)
    assert bench.clock.scheduled == 0


def test_commits_wait_in_line_and_are_let_in_one_at_a_time(bench: Bench) -> None:
    large = bench.commit("large", 5)
    bench.commit("small", 1)
    bench.core.room = 1
    bench.waiters.room_changed(1)
    bench.waiters.serve()
    assert bench.granted == []  # nobody overtakes
    bench.core.room = 6
    bench.waiters.room_changed(1)
    bench.waiters.serve()
    assert bench.granted == ["large"]
    bench.core.room = 1
    bench.waiters.settled(large)
    bench.waiters.serve()
    assert bench.granted == ["large", "small"]


def test_commits_that_find_room_do_not_wait_for_each_other(bench: Bench) -> None:
    bench.core.room = 10
    for name in ("a", "b", "c"):
        bench.commit(name, 1)
    assert bench.granted == ["a", "b", "c"]


def test_fields_for_samples_that_exist_pass_those_who_wait_for_room(bench: Bench) -> None:
    bench.commit("new samples", 1)
    fields = bench.waiter("fields", pb.CommitRequest(partition_id=1, rows=1, ids=bytes(8)))
    bench.waiters.wait(fields, 10.0)
    assert bench.granted == ["fields"]
    bench.waiters.settled(fields)
    bench.core.room = 1
    bench.waiters.room_changed(1)
    bench.waiters.serve()
    assert bench.granted == ["fields", "new samples"]


@pytest.mark.parametrize("how", ["expires", "is withdrawn"])
def test_who_stands_behind_a_commit_that_goes_is_looked_at(bench: Bench, how: str) -> None:
    bench.core.room = 4
    large = bench.commit("large", 5, seconds=1)
    bench.commit("small", 2, seconds=30)
    assert bench.granted == []
    if how == "expires":
        bench.clock.advance(1)
    else:
        bench.waiters.withdraw(large)
    assert bench.granted == ["small"]


def test_a_commit_gives_up_in_time(bench: Bench) -> None:
    bench.commit("full", 1, seconds=2)
    bench.clock.advance(2)
    assert isinstance(bench.refused["full"], BackpressureTimeout)
    assert "partition 'p1' had no room for" in str(bench.refused["full"])


@given(
    st.lists(
        st.tuples(st.sampled_from(["claim", "put", "apply", "expire", "withdraw"]), st.integers(1, 4)), max_size=60
    )
)
def test_rows_are_never_promised_twice_and_claims_are_met_in_their_order_as_soon_as_they_can_be(
    steps: list[tuple[str, int]],
) -> None:
    bench = Bench()
    waiting: dict[str, Waiter] = {}
    under_way: dict[str, Waiter] = {}
    for number, (step, size) in enumerate(steps):
        if step == "claim":
            name = f"{number}"
            waiting[name] = bench.claim(name, size, seconds=5)
        elif step == "put":
            bench.ready(size)
        elif step == "apply" and under_way:
            waiter = under_way.pop(next(iter(under_way)))
            bench.applied(waiter, waiter.request.batch_size)
            bench.waiters.serve()
        elif step == "expire":
            bench.clock.advance(size)
        elif step == "withdraw" and waiting:
            bench.waiters.withdraw(waiting.pop(next(iter(waiting))))
            bench.waiters.serve()
        for name in bench.refused:
            waiting.pop(name, None)
        for name in bench.granted:
            under_way[name] = waiting.pop(name)
            assert all(under_way[name].ticket < waiter.ticket for waiter in waiting.values())
        bench.granted.clear()
        promised = sum(waiter.request.batch_size for waiter in under_way.values())
        assert promised <= bench.core.ready
        if waiting:
            first = min(waiting.values(), key=lambda waiter: waiter.ticket)
            assert first.request.batch_size > bench.core.ready - promised
        assert bench.waiters.claims == len(waiting)


def test_claims_for_groups_are_granted_one_at_a_time(bench: Bench) -> None:
    sampler = pb.Sampler(name="group")
    first = bench.claim("first", 2, sampler=sampler)
    bench.claim("second", 2, sampler=sampler)
    plain = bench.claim("plain", 1)
    bench.ready(6)
    assert bench.granted == ["first"]  # what it takes is known once it took effect: whatever was ready is promised
    bench.applied(first, 2)
    bench.waiters.serve()
    assert bench.granted == ["first", "second"]
    assert bench.waiters.claims == 1
    assert plain.promised == 0
