"""Putting without a copy: room first, filled in by its owner, published last.

On the host of the arena the tensors lie in the arena itself. Elsewhere, and where the block is kept more than once,
they lie in memory of the process, and publishing them is a put.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import RowArguments
from tqclient.codec.buffers import allocate as new_buffer
from tqclient.errors import InvalidArgument, LeaseExpired, TQError, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.effects import UNKNOWN_OUTCOME, Deadline, Operation, Sleep, Work
from tqclient.operations.nodes import Placed, reserve
from tqclient.operations.put import Blocks, Prepared, commit, commit_request, prepare, put_prepared, settle_room
from tqclient.operations.sessions import in_session, notice_end
from tqclient.rows import ids_of
from tqclient.spec import Spec, placeholders
from tqclient.state import ClientState, LostPut, Session
from tqclient.transport.base import Lent
from tqclient.wire.v1 import controller_pb2 as pb

TURN_POLL: Final = 0.005
"""Seconds between looks at a commit of the same rows that another caller runs."""
_MAYBE_APPLIED: Final = (*UNKNOWN_OUTCOME, LeaseExpired, InvalidArgument)
"""Errors of a commit after which an earlier try may have been applied: its reply was lost, or forgotten meanwhile."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the tensors lie in an arena.

    Attributes:
        session: that reserved it.
        placed: the room.
        lent: its bytes.
    """

    session: Session
    placed: Placed
    lent: Lent


@dataclass(slots=True, eq=False)
class Allocation:
    """Rows that are being filled in.

    Attributes:
        ref: of the partition.
        arguments: of the rows.
        prepared: of the fields' shapes.
        values: by field: a tensor `[rows, *shape]`, a list of one per row, or a dict of those.
        place: in an arena; None: the values lie in memory of this process.
        ids: of the samples, once it is committed.
        aborted: it is not committed any more.
        number: of the commit, however often it is sent; None: it was not sent yet.
        filled: the put, from the first commit on. In the arena its plan lies over the bytes that were taken back, and
            its request is the whole commit.
        unknown: elsewhere, commits whose outcome is not known: the last one is sent again before anything is put anew.
        maybe_committed: in the arena, a commit was sent whose outcome is not known.
        lock: of what follows.
        committing: whoever runs a commit.
        abort_after: the rows are aborted when that has ended without storing them.
        ended: its room was booked, and its number settled.
    """

    ref: PartitionRef
    arguments: RowArguments
    prepared: Prepared
    values: dict[str, Any]
    place: _Place | None
    ids: NDArray[np.int64] | None = None
    aborted: bool = False
    number: int | None = None
    filled: Prepared | None = None
    unknown: list[LostPut] = field(default_factory=list)
    maybe_committed: bool = False
    lock: threading.RLock = field(default_factory=threading.RLock)  # a finalizer may run inside any holder
    committing: object | None = None
    abort_after: bool = False
    ended: bool = False

    @property
    def stage(self) -> Literal["open", "committed", "aborted"]:
        """Where it stands."""
        if self.ids is not None:
            return "committed"
        return "aborted" if self.aborted else "open"

    def lost(self) -> list[LostPut]:
        """Returns the commits whose outcome is not known."""
        if self.place is None or self.filled is None:
            return self.unknown
        return [LostPut(self.filled.request, self.place.placed.cuts())] if self.maybe_committed else []

    def begin_commit(self, caller: object) -> bool:
        """Makes a caller the one who runs a commit; False while another one is."""
        with self.lock:
            if self.committing is None:
                self.committing = caller
            return self.committing is caller

    def end_commit(self, caller: object) -> bool:
        """Lets others have a turn. Returns whether the rows are to be aborted now; repeatable."""
        with self.lock:
            if self.committing is not caller:
                return False
            self.committing = None
            return self.abort_after


def allocate(
    state: ClientState, ref: PartitionRef, rows: int, spec: Spec, arguments: RowArguments, timeout: float | None
) -> Operation[Allocation]:
    """Makes room for rows. See `Partition.allocate`."""
    deadline = state.deadline(timeout, waits=True)
    prepared = prepare(ref, placeholders(spec, rows), arguments)
    if prepared is None:
        raise AssertionError("placeholders have at least one row")
    _check_size(prepared)
    place = None
    if ref.replicas == 1:

        def attempt(session: Session) -> Operation[_Place | None]:
            return (yield from _lend(state, ref, prepared.blocks, session, deadline))

        place = yield from in_session(state, deadline, attempt)
    target = new_buffer(prepared.plan.size_bytes) if place is None else place.lent.array
    return Allocation(ref, arguments, prepared, prepared.plan.over(target).tensors(), place)


def _check_size(prepared: Prepared) -> None:
    if len(prepared.blocks.way(0)) > 1:
        raise InvalidArgument(
            f"{prepared.plan.size_bytes} bytes in one allocation are more than one block may have: allocate fewer rows "
            "at once, several times"
        )


def _lend(
    state: ClientState, ref: PartitionRef, blocks: Blocks, session: Session, deadline: Deadline
) -> Operation[_Place | None]:
    """Reserves room, and borrows it where it is memory of this host."""
    placed = yield from reserve(state, session, ref.partition_id, 1, blocks.lengths[:1], deadline)
    target = placed.targets[0][0]
    lent = None
    try:
        lent = yield Work(lambda: target.transport.lend(target.cut.place(), session=session.session))
    finally:
        if lent is None:
            settle_room(state, placed, "refused", ())
    return None if lent is None else _Place(session, placed, lent)


def publish(state: ClientState, allocation: Allocation, timeout: float | None) -> Operation[NDArray[np.int64]]:
    """Commits what was filled in. See `Writer.commit`."""
    deadline = state.deadline(timeout, waits=True)
    caller = object()
    try:
        while not allocation.begin_commit(caller):
            if deadline.remaining() <= TURN_POLL:
                raise Unavailable(
                    f"partition {allocation.ref.name!r}: another commit of this writer did not end within "
                    f"{deadline.timeout} s; this one did nothing"
                )
            yield Sleep(TURN_POLL)
        if allocation.aborted:
            raise InvalidArgument("this writer was aborted: nothing was stored; allocate again")
        if allocation.ids is None:
            yield from _publish(state, allocation, deadline)
        if allocation.ids is None:
            raise AssertionError("what was committed has ids")
        return allocation.ids
    finally:
        if allocation.end_commit(caller):
            abort(state, allocation)


def _publish(state: ClientState, allocation: Allocation, deadline: Deadline) -> Operation[None]:
    ref, place = allocation.ref, allocation.place
    number = allocation.number
    if number is None:  # not before: until it is settled, the controller keeps every later reply of this client
        number = allocation.number = state.requests.take()
    if place is None:
        reply = yield from _commit_elsewhere(state, allocation, number, deadline)
    else:
        reply = yield from _commit_in_place(state, allocation, place, number, deadline)
    allocation.ids = ids_of(reply, allocation.prepared.plan.rows)
    _end(state, allocation)
    ref.fields_changed(reply.fields)


def _commit_in_place(
    state: ClientState, allocation: Allocation, place: _Place, number: int, deadline: Deadline
) -> Operation[pb.CommitReply]:
    ref, filled = allocation.ref, allocation.filled
    if filled is None:
        filled = allocation.filled = yield Work(lambda: _take_back(state, allocation.prepared, place, number))
    try:
        with _maybe_committed(allocation):
            return (yield from commit(state, ref, filled, filled.request, deadline))
    except LeaseExpired as error:
        allocation.aborted = True
        _end(state, allocation)
        yield from notice_end(state, place.session, deadline)
        raise LeaseExpired(
            f"partition {ref.name!r}: what was filled in is lost with the place that it lay in ({error.message}); "
            "nothing was stored. Allocate again"
        ) from None


@contextmanager
def _maybe_committed(allocation: Allocation) -> Iterator[None]:
    """Surrounds a commit. However it ends, only a definite refusal says that it was not carried out."""
    before, allocation.maybe_committed = allocation.maybe_committed, True
    try:
        yield
    except _MAYBE_APPLIED:
        raise
    except TQError:
        allocation.maybe_committed = before
        raise


def _commit_elsewhere(
    state: ClientState, allocation: Allocation, number: int, deadline: Deadline
) -> Operation[pb.CommitReply]:
    """Puts what was filled in; what may have been committed by an earlier call is committed once more instead."""
    ref, filled = allocation.ref, allocation.filled
    if filled is None:
        filled = allocation.filled = yield Work(lambda: prepare(ref, allocation.values, allocation.arguments))
        if filled is None:
            raise AssertionError("there is at least one row")
    if allocation.unknown:
        try:
            return (yield from commit(state, ref, filled, allocation.unknown[-1].commit, deadline))
        except LeaseExpired:
            pass  # it was not applied, and its place is gone; what was filled in is still here
    return (yield from put_prepared(state, ref, filled, number, allocation.unknown, deadline))


def _take_back(state: ClientState, prepared: Prepared, place: _Place, number: int) -> Prepared:
    """Takes the bytes from whoever fills them in, and writes what is missing around them."""
    target = place.lent.take_back()
    plan = prepared.plan.over(target)
    directory = plan.write(target)
    request = commit_request(state, prepared, place.placed, [directory], place.session, number)
    return Prepared(plan, prepared.blocks, request)


def _end(state: ClientState, allocation: Allocation) -> None:
    """Books what became of the rows, once. An interrupt may cost room, which is then free with the session."""
    with allocation.lock:
        if allocation.ended:
            return
        place = allocation.place
        if place is not None:
            place.lent.end()  # first of all: from here on the room may be another's
        allocation.ended = True
        lost = allocation.lost()
        if allocation.ids is None and lost:
            state.put_lost(*lost)
            return
        if allocation.number is not None:
            state.requests.settle(allocation.number)
        for each in allocation.unknown:  # one of them may be what was committed
            state.windows.settle(each.cuts, "unknown")
        if place is None:
            return
        settle_room(state, place.placed, "refused" if allocation.ids is None else "committed", ())
        if allocation.ids is not None:
            for target in place.placed.all():
                state.counters.wrote(target.transport.name, target.cut.length)


def forget(state: ClientState, allocation: Allocation) -> None:
    """Has the chores abort it. For finalizers: it takes no lock that its thread may hold."""
    if allocation.ended or state.forked:
        return
    if allocation.place is not None and not state.closed:
        state.forgotten.append(lambda: _abandon(state, allocation))
    else:
        _abandon(state, allocation)


def _abandon(state: ClientState, allocation: Allocation) -> None:
    allocation.committing = None  # nobody is left who could commit it
    with suppress(Unavailable):  # then its room is not given to others, and is free with the session
        abort(state, allocation)


def abort(state: ClientState, allocation: Allocation) -> None:
    """Gives the room back, if it was not committed; repeatable. Calls nobody. While a commit runs, once it has failed.

    Raises:
        Unavailable: the tensors cannot be taken back now, and nothing has changed.
    """
    if state.forked:
        return  # the rows are the parent's
    with allocation.lock:
        if allocation.committing is not None:
            allocation.abort_after = True
            return
        allocation.aborted = allocation.ids is None
    _end(state, allocation)
