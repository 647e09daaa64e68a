"""Putting samples: measure → reserve → write in place → commit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arguments import RowArguments, name_of
from tqclient.codec import Plan, measure, normalise
from tqclient.errors import DuplicateKey, InvalidArgument, LeaseExpired, TQError, Unavailable
from tqclient.info import PartitionRef
from tqclient.limits import MIB
from tqclient.operations.compare import equal_rows
from tqclient.operations.effects import CONTROLLER, UNKNOWN_OUTCOME, Deadline, Operation, Work, call, pause
from tqclient.operations.nodes import Placed, reserve
from tqclient.operations.sessions import in_session, refresh_nodes, session_is_live
from tqclient.schema import Form, join
from tqclient.state import ClientState, Session
from tqclient.windows import Fate
from tqclient.wire.packing import I64, U8, pack_array, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb

BLOCK_BYTES: Final = 1024 * MIB
"""A larger put becomes several blocks. One put in one block can be read as views."""
BLOCK_BYTES_APART: Final = 64 * MIB
"""The same where no node has room for the whole put in one piece: a segment of an arena each."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A put that was checked, and not yet placed.

    Attributes:
        plan: of all rows.
        ways: the same rows cut into blocks, in few large ones and in small ones.
        request: the commit, without mutation and blocks.
    """

    plan: Plan
    ways: Sequence[Sequence[Plan]]
    request: pb.CommitRequest


def put(
    state: ClientState, ref: PartitionRef, values: Any, arguments: RowArguments, timeout: float | None
) -> Operation[NDArray[np.int64]]:
    """Puts rows and returns their ids. See `Partition.put`."""
    deadline = state.deadline(timeout, waits=True)
    prepared: Prepared | None = yield Work(lambda: prepare(ref, values, arguments))
    if prepared is None:
        return np.empty(0, np.int64)
    number = state.requests.take()
    backoff = state.backoff()

    def attempt(session: Session) -> Operation[pb.CommitReply]:
        while True:
            try:
                return (yield from _put_once(state, ref, prepared, session, number, deadline))
            except _Displaced as displaced:  # written in vain: the node restarted, or gave the window up
                yield from pause(backoff, deadline, displaced.cause)
                yield from refresh_nodes(state, deadline)

    try:
        reply = yield from in_session(state, deadline, attempt)
    finally:
        state.requests.settle(number)
    ref.fields_changed(reply.fields)
    return unpack_array(reply.ids, I64, what="ids", rows=prepared.plan.rows).astype(np.int64)


class _Displaced(Exception):
    """The bytes could not be brought in place; the session is alive, so another place will do."""

    def __init__(self, cause: TQError) -> None:
        super().__init__(str(cause))
        self.cause = cause


def prepare(ref: PartitionRef, values: Any, arguments: RowArguments) -> Prepared | None:
    """Checks everything that can be checked before anything is reserved.

    Returns:
        None when there is no row.

    Raises:
        InvalidArgument, UnsupportedValue, SchemaMismatch: nothing was done.
    """
    plan = measure(normalise(values))
    _check_fields(ref, plan.forms)
    request = pb.CommitRequest(partition_id=ref.partition_id, **arguments.to_wire(plan.rows))
    request.fields.extend(pb.Field(name=name, form=form.to_bytes()) for name, form in plan.forms.items())
    if plan.rows == 0:
        return None
    ways = [plan.split(BLOCK_BYTES), plan.split(BLOCK_BYTES_APART)]
    if (count := len(ways[-1])) > limits.BLOCKS_PER_PUT_MAX:
        raise InvalidArgument(f"{count} blocks in one put, at most {limits.BLOCKS_PER_PUT_MAX}; put less at once")
    return Prepared(plan, ways, request)


def _check_fields(ref: PartitionRef, forms: Mapping[str, Form]) -> None:
    for name, form in forms.items():
        name_of(name, what="field")
        known = ref.form(name)
        if known is not None:
            join(name, known, form)


def _put_once(
    state: ClientState, ref: PartitionRef, prepared: Prepared, session: Session, number: int, deadline: Deadline
) -> Operation[pb.CommitReply]:
    """Places, writes and commits under one session."""
    ways = [[block.size_bytes for block in blocks] for blocks in prepared.ways]
    placed = yield from reserve(state, session, ref.partition_id, ways, deadline)
    blocks = prepared.ways[placed.way]
    fate: Fate = "unknown"
    try:
        try:
            directories = yield from _write(state, blocks, placed, session, deadline)
            reply = yield from _commit(state, ref, prepared, placed, directories, session, number, deadline)
            fate = "committed"
            return reply
        except (*UNKNOWN_OUTCOME, _Displaced):
            raise  # nobody knows what became of the bytes
        except TQError:
            fate = "refused"
            raise
    finally:
        state.windows.settle(placed.cuts, fate)
        state.placed(placed.cuts[0].window.spot.node, sum(ways[placed.way]))
        if placed.cuts[0].window.whole:
            state.wake.set()  # the heartbeat closes it; a put that is done need not wait for that


def _write(
    state: ClientState, blocks: Sequence[Plan], placed: Placed, session: Session, deadline: Deadline
) -> Operation[list[bytes]]:
    def write_all() -> list[bytes]:
        directories = []
        for block, cut in zip(blocks, placed.cuts, strict=True):
            with placed.transport.write(cut.place(), session=session.session, timeout=deadline.remaining()) as target:
                directories.append(block.write(target))
        return directories

    try:
        written: list[bytes] = yield Work(write_all)
        return written
    except LeaseExpired as error:
        if not (yield from session_is_live(state, session.session, deadline)):
            raise
        state.windows.retire()  # the session lives, so it is the node that has lost its windows
        raise _Displaced(error) from None
    except Unavailable as error:
        state.windows.retire()
        raise _Displaced(error) from None


def _commit(
    state: ClientState,
    ref: PartitionRef,
    prepared: Prepared,
    placed: Placed,
    directories: Sequence[bytes],
    session: Session,
    number: int,
    deadline: Deadline,
) -> Operation[pb.CommitReply]:
    """Commits; keys that exist already with the same bytes are passed over, a batch of error rows at a time."""
    request = pb.CommitRequest()
    request.CopyFrom(prepared.request)
    request.mutation.CopyFrom(state.mutation(number, session))
    request.blocks.extend(
        pb.BlockWrite(extents=[cut.extent()], directory=directory, rows=block.rows)
        for block, cut, directory in zip(prepared.ways[placed.way], placed.cuts, directories, strict=True)
    )

    def renew_wait() -> None:
        request.wait_ms = deadline.wait_ms()

    skip = np.zeros(prepared.plan.rows, np.uint8)
    while True:
        try:
            reply: pb.CommitReply = yield from call(
                CONTROLLER, "Commit", request, deadline, state.rng, before=renew_wait
            )
            return reply
        except DuplicateKey as error:
            if not error.existing_ids or not request.HasField("keys"):  # a field is written already
                raise
            yield from equal_rows(state, ref, prepared.plan, error, deadline)
            skip[np.asarray(error.rows, np.int64)] = 1
            request.skip = pack_array(skip, U8)
