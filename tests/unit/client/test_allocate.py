"""Writers: one effect and one booking of their room, however their commits end and whoever calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.client.fakes import FakeService, gone
from tests.unit.client.test_put import _extents, do_put, read_back
from tqclient.arguments import RowArguments
from tqclient.errors import BackpressureTimeout, InternalError, InvalidArgument, LeaseExpired, Sealed, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.allocate import Allocation, abort, allocate, forget, publish
from tqclient.operations.effects import Call, Sleep, Work
from tqclient.operations.put import settle_lost_puts
from tqclient.windows import Window
from tqclient.wire.v1 import controller_pb2 as pb

SPEC = {"x": ("int64", [64])}
OTHERS = {"x": torch.full((2, 64), -1)}
INTERRUPTS = [KeyboardInterrupt(), GeneratorExit(), gone(), InternalError("the reply could not be read")]


@pytest.fixture(params=["shm", "grpc"])
def anywhere(request: pytest.FixtureRequest) -> FakeService:
    """In the arena, and elsewhere."""
    return FakeService(request.param)


def open_rows(service: FakeService, ref: PartitionRef, value: int = 1, **arguments: Any) -> Allocation:
    allocation = service.run(allocate(service.state, ref, 2, SPEC, RowArguments(**arguments), 5.0))
    allocation.values["x"].fill_(value)
    return allocation


def commits(service: FakeService) -> list[pb.CommitRequest]:
    return [request for _, request in service.calls if isinstance(request, pb.CommitRequest)]


def pending(service: FakeService) -> list[int]:
    return [window.pending for windows in service.state.windows._open.values() for window in windows]


def late(service: FakeService) -> Any:
    """The time of the call is over, so that it is not tried again."""
    return lambda: setattr(service.clock, "now", service.clock.now + 60)


@pytest.mark.parametrize("lost", INTERRUPTS, ids=lambda error: type(error).__name__)
def test_the_place_of_a_commit_that_was_interrupted_is_never_cut_again(
    service: FakeService, ref: PartitionRef, lost: BaseException
) -> None:
    allocation = open_rows(service, ref)
    service.fault("Commit", lost, reply_lost=True, before=late(service))
    with pytest.raises(type(lost)):
        service.run(publish(service.state, allocation, 5.0))
    abort(service.state, allocation)
    abort(service.state, allocation)
    do_put(service, ref, OTHERS)
    extents = [(each.offset, each.length) for request in commits(service) for each in _extents(request)]
    assert len(set(extents)) == len(extents) == 2
    assert torch.equal(torch.stack(read_back(service, ref, [1, 2])["x"]), torch.ones(2, 64, dtype=torch.int64))
    assert pending(service) == [1]
    service.run(settle_lost_puts(service.state))
    assert pending(service) == [0]
    do_put(service, ref, OTHERS)
    assert len({each.offset for request in commits(service) for each in _extents(request)}) == 3
    assert [lent.ended for lent in service.first.transport.lent] == [1]


def refused(service: FakeService, ref: PartitionRef, refusal: Exception) -> Window:
    allocation = open_rows(service, ref)
    service.fault("Commit", refusal)
    with pytest.raises(type(refusal)):
        service.run(publish(service.state, allocation, 5.0))
    abort(service.state, allocation)
    (window,) = next(iter(service.state.windows._open.values()))
    return window


@pytest.mark.parametrize("refusal", [Sealed("the partition is sealed"), BackpressureTimeout("no room")])
def test_the_place_of_a_commit_that_was_refused_is_cut_again(
    service: FakeService, ref: PartitionRef, refusal: Exception
) -> None:
    window = refused(service, ref, refusal)
    assert (window.used, window.pending) == (0, 0)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    "refusal",
    [LeaseExpired("the session has ended"), InvalidArgument("request 3 was applied, but its reply was forgotten")],
)
def test_the_place_of_a_commit_that_may_have_been_applied_is_cut_again_once_it_is_known_that_it_was_not(
    service: FakeService, ref: PartitionRef, refusal: Exception, known: bool
) -> None:
    window = refused(service, ref, refusal)
    assert (window.used > 0, window.pending) == (True, 1)
    if not known:
        service.fault("Commit", refusal)
    service.run(settle_lost_puts(service.state))
    assert (window.used > 0, window.pending) == (not known, 0)


def test_a_refusal_says_nothing_of_an_earlier_commit_that_had_no_answer(
    service: FakeService, ref: PartitionRef
) -> None:
    allocation = open_rows(service, ref)
    for fault in (gone(), BackpressureTimeout("no room")):
        service.fault("Commit", fault, before=late(service))
        with pytest.raises(type(fault)):
            service.run(publish(service.state, allocation, 5.0))
    abort(service.state, allocation)
    (window,) = next(iter(service.state.windows._open.values()))
    assert (window.used > 0, window.pending) == (True, 1)
    service.fault("Commit", gone())  # the controller is away still
    for used in (True, False):
        service.run(settle_lost_puts(service.state))
        assert (window.used > 0, window.pending) == (used, int(used))


@pytest.mark.parametrize("lost", INTERRUPTS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("applied", [False, True])
def test_a_commit_without_an_answer_is_sent_again_as_it_was(
    anywhere: FakeService, ref: PartitionRef, lost: BaseException, applied: bool
) -> None:
    service = anywhere
    allocation = open_rows(service, ref)
    do_put(service, ref, OTHERS)  # other requests are numbered and answered meanwhile
    for _ in range(2):
        service.fault("Commit", lost, reply_lost=applied, before=late(service))
        with pytest.raises(type(lost)):
            service.run(publish(service.state, allocation, 5.0))
        do_put(service, ref, OTHERS)
    ids = service.run(publish(service.state, allocation, 5.0))
    assert service.run(publish(service.state, allocation, 5.0)) is ids
    assert len(service.samples) == 8
    mine = [request for request in commits(service) if request.mutation.request == allocation.number]
    assert (
        len({(each.mutation.request, each.mutation.session, each.blocks[0].SerializeToString()) for each in mine}) == 1
    )
    assert len(mine) == 3
    assert torch.equal(torch.stack(read_back(service, ref, ids)["x"]), torch.ones(2, 64, dtype=torch.int64))
    assert service.state.requests.settled_below() == service.state.requests.take()


def test_elsewhere_what_was_filled_in_outlives_the_session(ref: PartitionRef) -> None:
    service = FakeService("grpc")
    allocation = open_rows(service, ref)
    service.fault("Commit", gone(), before=late(service))
    with pytest.raises(Unavailable):
        service.run(publish(service.state, allocation, 5.0))
    service.end_sessions()
    ids = service.run(publish(service.state, allocation, 5.0))
    assert len({each.mutation.request for each in commits(service)}) == 1
    assert commits(service)[-1].mutation.session == 2
    assert torch.equal(torch.stack(read_back(service, ref, ids)["x"]), torch.ones(2, 64, dtype=torch.int64))


def test_a_commit_that_was_refused_elsewhere_is_put_anew(ref: PartitionRef) -> None:
    service = FakeService("grpc")
    allocation = open_rows(service, ref)
    service.fault("Commit", BackpressureTimeout("no room"))
    with pytest.raises(BackpressureTimeout):
        service.run(publish(service.state, allocation, 5.0))
    ids = service.run(publish(service.state, allocation, 5.0))
    assert ids.tolist() == [1, 2]
    extents = [(each.offset, each.length) for request in commits(service) for each in _extents(request)]
    assert len(set(extents)) == 1  # the room was given back in between


def test_an_open_writer_does_not_keep_replies_of_others_at_the_controller(
    anywhere: FakeService, ref: PartitionRef
) -> None:
    open_rows(anywhere, ref)
    do_put(anywhere, ref)
    assert anywhere.state.requests.settled_below() == anywhere.state.requests.take()


def test_of_two_commits_the_second_waits_for_the_first(anywhere: FakeService, ref: PartitionRef) -> None:
    service = anywhere
    allocation = open_rows(service, ref)
    first = publish(service.state, allocation, 5.0)
    effect = next(first)
    while not isinstance(effect, Call) or effect.method != "Commit":
        effect = first.send(service.perform(effect))
    second = publish(service.state, allocation, 5.0)
    assert isinstance(next(second), Sleep)
    assert isinstance(second.send(None), Sleep)
    with pytest.raises(StopIteration) as end:
        first.send(service.perform(effect))
    with pytest.raises(StopIteration) as again:
        second.send(None)
    assert again.value.value is end.value.value
    assert len(commits(service)) == 1
    assert pending(service) == [0]


def test_a_commit_that_waits_for_another_in_vain_says_so(service: FakeService, ref: PartitionRef) -> None:
    allocation = open_rows(service, ref)
    first = publish(service.state, allocation, 5.0)
    assert isinstance(next(first), Work)
    with pytest.raises(Unavailable, match=r"another commit of this writer did not end within 2.0 s"):
        service.run(publish(service.state, allocation, 2.0))
    first.close()
    assert service.run(publish(service.state, allocation, 2.0)).tolist() == [1, 2]


def test_after_a_commit_that_failed_the_one_that_waits_tries(service: FakeService, ref: PartitionRef) -> None:
    allocation = open_rows(service, ref)
    first, second = (publish(service.state, allocation, 5.0) for _ in range(2))
    next(first)
    next(second)
    with pytest.raises(KeyboardInterrupt):
        first.throw(KeyboardInterrupt())
    effect, ids = second.send(None), None
    while ids is None:
        try:
            effect = second.send(service.perform(effect))
        except StopIteration as end:
            ids = end.value
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize("stored", [True, False])
def test_an_abort_during_a_commit_waits_for_what_comes_of_it(
    service: FakeService, ref: PartitionRef, stored: bool
) -> None:
    allocation = open_rows(service, ref)
    running = publish(service.state, allocation, 5.0)
    effect = running.send(service.perform(next(running)))
    abort(service.state, allocation)
    assert allocation.stage == "open"
    assert service.first.transport.lent[0].ended == 0
    if stored:
        with pytest.raises(StopIteration):
            running.send(service.perform(effect))
        abort(service.state, allocation)
        assert allocation.stage == "committed"
    else:
        with pytest.raises(BackpressureTimeout):
            running.throw(BackpressureTimeout("no room"))
        assert allocation.stage == "aborted"
        with pytest.raises(InvalidArgument, match="aborted"):
            service.run(publish(service.state, allocation, 5.0))
    assert service.first.transport.lent[0].ended == 1
    assert pending(service) == [0]
    do_put(service, ref, OTHERS)
    extents = [(each.offset, each.length) for request in commits(service) for each in _extents(request)]
    assert len(set(extents)) == len(extents)


def test_whoever_forgets_a_writer_leaves_it_to_the_heartbeat(service: FakeService, ref: PartitionRef) -> None:
    allocation = open_rows(service, ref)
    forget(service.state, allocation)
    assert allocation.stage == "open"
    service.state.run_forgotten()
    assert allocation.stage == "aborted"
    assert pending(service) == [0]
    forget(service.state, allocation)
    assert not service.state.forgotten


def test_tensors_that_cannot_be_taken_back_keep_their_room(
    service: FakeService, ref: PartitionRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = open_rows(service, ref)
    with monkeypatch.context() as patch:
        patch.setattr(service.first.transport.lent[0], "end", lambda: service.take_fault("end"))
        for _ in range(2):
            service.fault("end", Unavailable("no address space"))
        with pytest.raises(Unavailable):
            abort(service.state, allocation)
        forget(service.state, allocation)
        service.state.run_forgotten()
        assert pending(service) == [1]
    abort(service.state, allocation)
    assert pending(service) == [0]


def test_in_a_forked_child_nothing_of_a_writer_is_touched(
    service: FakeService, ref: PartitionRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocation = open_rows(service, ref)
    with monkeypatch.context() as child:
        child.setattr(service.state, "_pid", -1)
        assert service.state.forked
        abort(service.state, allocation)
        forget(service.state, allocation)
        with pytest.raises(InvalidArgument, match="after a fork"):
            service.run(publish(service.state, allocation, 5.0))
    assert (allocation.stage, pending(service), service.state.forgotten) == (
        "open",
        [1],
        type(service.state.forgotten)(),
    )
    assert service.first.transport.lent[0].ended == 0
    assert service.run(publish(service.state, allocation, 5.0)).tolist() == [1, 2]
