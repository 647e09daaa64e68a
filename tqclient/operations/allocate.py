"""Putting without a copy: room first, filled in by its owner, published last.

On the host of the arena the tensors lie in the arena itself. Elsewhere, and where the block is kept more than once,
they lie in memory of the process, and publishing them is a put.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import RowArguments
from tqclient.codec.buffers import allocate as new_buffer
from tqclient.errors import InvalidArgument, LeaseExpired
from tqclient.info import PartitionRef
from tqclient.operations.effects import UNKNOWN_OUTCOME, Deadline, Operation, Work
from tqclient.operations.nodes import Placed, reserve
from tqclient.operations.put import Blocks, Prepared, commit, commit_request, prepare, put, settle_room
from tqclient.operations.sessions import in_session, notice_end
from tqclient.rows import ids_of
from tqclient.spec import Spec, placeholders
from tqclient.state import ClientState, Session
from tqclient.transport.base import Lent


@dataclass(slots=True)
class _Place:
    """Where the tensors lie in an arena.

    Attributes:
        session: that reserved it.
        placed: the room.
        lent: its bytes.
        number: of the commit, however often it is sent.
        filled: the put, once the bytes were taken back: its plan lies over them, its request is the whole commit.
        maybe_committed: a commit was sent whose outcome is not known.
    """

    session: Session
    placed: Placed
    lent: Lent
    number: int
    filled: Prepared | None = None
    maybe_committed: bool = False


@dataclass(slots=True)
class Allocation:
    """Rows that are being filled in.

    Attributes:
        ref: of the partition.
        arguments: of the rows.
        prepared: of the fields' shapes.
        values: by field: a tensor `[rows, *shape]`, a list of one per row, or a dict of those.
        place: in an arena; None: the values lie in memory of this process.
        stage: where it stands.
        ids: of the samples, once it is committed.
    """

    ref: PartitionRef
    arguments: RowArguments
    prepared: Prepared
    values: dict[str, Any]
    place: _Place | None
    stage: Literal["open", "committed", "aborted"] = "open"
    ids: NDArray[np.int64] | None = None


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
    return None if lent is None else _Place(session, placed, lent, state.requests.take())


def publish(state: ClientState, allocation: Allocation, timeout: float | None) -> Operation[NDArray[np.int64]]:
    """Commits what was filled in. See `Writer.commit`."""
    if allocation.ids is not None:
        return allocation.ids
    if allocation.stage == "aborted":
        raise InvalidArgument("this writer was aborted: nothing was stored; allocate again")
    if allocation.place is None:
        ids = yield from put(state, allocation.ref, allocation.values, allocation.arguments, timeout)
    else:
        deadline = state.deadline(timeout, waits=True)
        ids = yield from _publish_in_place(state, allocation, allocation.place, deadline)
    allocation.ids, allocation.stage = ids, "committed"
    return ids


def _publish_in_place(
    state: ClientState, allocation: Allocation, place: _Place, deadline: Deadline
) -> Operation[NDArray[np.int64]]:
    ref = allocation.ref
    filled = place.filled
    if filled is None:
        filled = place.filled = yield Work(lambda: _take_back(state, allocation.prepared, place))
    try:
        reply = yield from commit(state, ref, filled, filled.request, deadline)
    except UNKNOWN_OUTCOME:
        place.maybe_committed = True  # the same request may be sent again
        raise
    except LeaseExpired as error:
        abort(state, allocation)
        yield from notice_end(state, place.session, deadline)
        raise LeaseExpired(
            f"partition {ref.name!r}: what was filled in is lost with the place that it lay in ({error.message}); "
            "nothing was stored. Allocate again"
        ) from None
    _end(state, place, "committed")
    ref.fields_changed(reply.fields)
    return ids_of(reply, filled.plan.rows)


def _take_back(state: ClientState, prepared: Prepared, place: _Place) -> Prepared:
    """Takes the bytes from whoever fills them in, and writes what is missing around them."""
    target = place.lent.take_back()
    plan = prepared.plan.over(target)
    directory = plan.write(target)
    request = commit_request(state, prepared, place.placed, [directory], place.session, place.number)
    return Prepared(plan, prepared.blocks, request)


def _end(state: ClientState, place: _Place, fate: Literal["committed", "refused", "unknown"]) -> None:
    place.lent.end()
    state.requests.settle(place.number)
    settle_room(state, place.placed, fate, ())
    if fate == "committed":
        for target in place.placed.all():
            state.counters.wrote(target.transport.name, target.cut.length)


def forget(state: ClientState, allocation: Allocation) -> None:
    """Has the next heartbeat abort it. For finalizers: it takes no lock that its thread may hold."""
    if allocation.place is not None and allocation.stage == "open" and not state.closed:
        state.forgotten.append(lambda: abort(state, allocation))
    else:
        abort(state, allocation)


def abort(state: ClientState, allocation: Allocation) -> None:
    """Gives the room back, if it was not committed; repeatable. Calls nobody."""
    if allocation.stage != "open":
        return
    allocation.stage = "aborted"
    place = allocation.place
    if place is not None:
        _end(state, place, "unknown" if place.maybe_committed else "refused")
