"""Putting samples: measure → reserve → write in place → commit."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arguments import RowArguments, name_of
from tqclient.codec import Plan, measure, normalise
from tqclient.errors import DuplicateKey, InternalError, InvalidArgument, LeaseExpired, TQError, Unavailable
from tqclient.info import PartitionRef
from tqclient.limits import MIB
from tqclient.operations.compare import equal_rows
from tqclient.operations.effects import CONTROLLER, UNKNOWN_OUTCOME, Call, Deadline, Operation, Work, call
from tqclient.operations.nodes import Placed, Target, give_up, patience, reserve
from tqclient.operations.permits import PermitHandle
from tqclient.operations.sessions import CLOSE_TIMEOUT, in_session, pause_and_refresh, session_is_live, settle_each
from tqclient.rows import ids_of
from tqclient.schema import Form, join
from tqclient.state import ClientState, LostPut, Session
from tqclient.windows import Fate
from tqclient.wire.packing import U8, U32, pack_array, pack_narrow
from tqclient.wire.v1 import controller_pb2 as pb

_log = logging.getLogger(__name__)

BLOCK_BYTES: Final = 1024 * MIB
"""A larger put becomes several blocks. One put in one block can be read as views."""
BLOCK_BYTES_APART: Final = 64 * MIB
BLOCK_BYTES_SMALL: Final = 8 * MIB
"""The same where no node has room for the whole put in one piece: a segment of an arena each, or less."""


class Blocks:
    """The rows of a put cut into blocks: into few large ones, or into small ones that find room more easily.

    Args:
        plan: of all rows.
    """

    def __init__(self, plan: Plan) -> None:
        """Cuts nothing yet.

        Raises:
            InvalidArgument: there would be too many blocks.
        """
        self._plan = plan
        # Blocks are not filled to the brim: as a bound, they may all be half full.
        blocks_max = limits.BLOCKS_PER_PUT_MAX // 2
        self._sizes = [
            size
            for size in (BLOCK_BYTES, BLOCK_BYTES_APART, BLOCK_BYTES_SMALL)
            if plan.size_bytes // size <= blocks_max
        ]
        if not self._sizes:
            raise InvalidArgument(
                f"a put of {plan.size_bytes} bytes is more than {limits.BLOCKS_PER_PUT_MAX} blocks; put less at once"
            )
        self._ways: dict[int, list[Plan]] = {}

    def way(self, way: int) -> list[Plan]:
        """Returns the blocks by one of the ways to cut them."""
        if way not in self._ways:
            self._ways[way] = self._plan.split(self._sizes[way])
        return self._ways[way]

    @property
    def lengths(self) -> list[Callable[[], list[int]]]:
        """For each way, what returns the lengths of its blocks."""
        return [partial(self._lengths, way) for way in range(len(self._sizes))]

    def _lengths(self, way: int) -> list[int]:
        return [block.size_bytes for block in self.way(way)]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A put that was checked, and not yet placed.

    Attributes:
        plan: of all rows.
        blocks: the same rows cut into blocks.
        request: the commit, without mutation, blocks and lengths.
    """

    plan: Plan
    blocks: Blocks
    request: pb.CommitRequest


def put(
    state: ClientState,
    ref: PartitionRef,
    values: Any,
    arguments: RowArguments,
    timeout: float | None,
    permit: PermitHandle | None = None,
) -> Operation[NDArray[np.int64]]:
    """Puts rows and returns their ids. See `Partition.put`."""
    deadline = state.deadline(timeout, waits=True)
    if permit is not None:
        permit.check(ref.partition_id)
        if arguments.weight_version is None and permit.version is not None:
            arguments = replace(arguments, weight_version=permit.version)
    prepared: Prepared | None = yield Work(lambda: prepare(ref, values, arguments))
    if prepared is None:
        return np.empty(0, np.int64)
    if permit is not None and not prepared.request.ids:
        prepared.request.permit = permit.permit
    number = state.requests.take()
    lost: list[LostPut] = []
    try:
        reply = yield from put_prepared(state, ref, prepared, number, lost, deadline, permit)
    finally:
        if lost:
            state.put_lost(*lost)
        else:
            state.requests.settle(number)
    ref.fields_changed(reply.fields)
    return ids_of(reply, prepared.plan.rows)


def put_prepared(
    state: ClientState,
    ref: PartitionRef,
    prepared: Prepared,
    number: int,
    lost: list[LostPut],
    deadline: Deadline,
    permit: PermitHandle | None = None,
) -> Operation[pb.CommitReply]:
    """Puts what was checked, wherever there is room, and elsewhere when it is lost there before it is committed.

    Args:
        state: of the client.
        ref: of the partition.
        prepared: the put.
        number: of the commit, however often it is sent.
        lost: takes a commit that ends without an answer. It may be sent again, as it is.
        deadline: of the call.
        permit: that `prepared` is put under.
    """
    backoff = state.backoff()

    def attempt(session: Session) -> Operation[pb.CommitReply]:
        if prepared.request.permit and permit is not None and permit.session != session.session:
            raise _PermitGone
        while True:
            try:
                return (yield from _put_once(state, ref, prepared, session, number, lost, deadline))
            except _Displaced as displaced:  # written in vain: the node restarted, or gave the window up
                yield from pause_and_refresh(state, backoff, deadline, displaced.cause)

    try:
        return (yield from in_session(state, deadline, attempt))
    except _PermitGone:
        raise LeaseExpired(
            f"partition {ref.name!r}: the permit ended with its session (this process was not heard of for a lease); "
            "put without it, and the samples are admitted as they come"
        ) from None


class _PermitGone(Exception):
    """The session that the permit belongs to has ended; another one will not bring it back."""


class _Displaced(Exception):
    """The bytes could not be brought or left in place; the session is alive, so another place will do."""

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
    request = pb.CommitRequest(partition_id=ref.partition_id, runs=True, **arguments.to_wire(plan.rows))
    request.fields.extend(pb.Field(name=name, form=form.to_bytes()) for name, form in plan.forms.items())
    if plan.rows == 0:
        return None
    return Prepared(plan, Blocks(plan), request)


def _check_fields(ref: PartitionRef, forms: Mapping[str, Form]) -> None:
    for name, form in forms.items():
        name_of(name, what="field")
        known = ref.form(name)
        if known is not None:
            join(name, known, form)


def _put_once(
    state: ClientState,
    ref: PartitionRef,
    prepared: Prepared,
    session: Session,
    number: int,
    lost: list[LostPut],
    deadline: Deadline,
) -> Operation[pb.CommitReply]:
    """Places, writes and commits under one session. A commit that ends without an answer is added to `lost`."""
    lengths = prepared.blocks.lengths
    placed = yield from reserve(state, session, ref.partition_id, ref.replicas, lengths, deadline)
    blocks = prepared.blocks.way(placed.way)
    underway: list[Target] = []
    fate: Fate | Literal["lost"] = "refused"  # what was not committed is not
    try:
        directories = yield from _write(state, blocks, placed, session, underway, deadline)
        request = commit_request(state, prepared, placed, directories, session, number)
        fate = "lost"
        try:
            reply = yield from commit(state, ref, prepared, request, deadline)
        except LeaseExpired as error:
            if not (yield from session_is_live(state, session.session, deadline)):
                raise
            # A node is away, or has lost its arena. An earlier try may be under way still: its bytes stay as they are.
            fate = "unknown"
            raise _Displaced(Unavailable(error.message)) from None
        fate = "committed"
        return reply
    except (*UNKNOWN_OUTCOME, InvalidArgument):  # which also says that a reply was forgotten
        raise
    except TQError:
        fate = "refused" if fate == "lost" else fate
        raise
    finally:
        if fate == "lost":
            lost.append(LostPut(request, placed.cuts()))
        else:
            settle_room(state, placed, fate, underway)


def settle_lost_puts(state: ClientState) -> Operation[None]:
    """Learns what became of puts whose outcome nobody waited for, and books their room."""

    def settle(lost: LostPut) -> Operation[None]:
        fate = yield from _fate(state, lost)
        state.windows.settle(lost.cuts, fate)
        state.requests.settle(lost.commit.mutation.request)

    yield from settle_each(state.lost_puts, settle)


def _fate(state: ClientState, lost: LostPut) -> Operation[Fate]:
    """Asks the controller; what was not applied up to then never is."""
    session = state.session
    sent = lost.commit.mutation
    if session is None or session.session != sent.session:
        return "unknown"  # it ended; the nodes take back what was not committed
    request = pb.CommitRequest(
        mutation=state.mutation(sent.request, session), partition_id=lost.commit.partition_id, abandoned=True
    )
    try:
        yield Call(CONTROLLER, "Commit", request, CLOSE_TIMEOUT)
    except Unavailable:
        raise
    except (LeaseExpired, InternalError, InvalidArgument):
        return "unknown"
    except TQError as error:
        _log.debug("request %d was not applied, and is not any more: %s", sent.request, error)
        return "refused"
    return "committed"


def settle_room(state: ClientState, placed: Placed, fate: Fate, underway: Sequence[Target]) -> None:
    """Books what became of the room; `underway` are replicas that were not seen to be written to the end."""
    settled = [target for target in placed.all() if target not in underway]
    for target in underway:
        if target.cut.window.one_sided:
            state.windows.drift(target.cut, target.transport)
        else:
            state.windows.settle([target.cut], "unknown")
    if fate == "refused":
        give_up(state, settled)
    else:
        state.windows.settle([target.cut for target in settled], fate)
    if state.windows.wants_closing:
        state.wake.set()  # the chores close them; a put that is done need not wait for that


class _WriteFailed(Exception):
    """One replica could not be written."""

    def __init__(self, target: Target, error: TQError) -> None:
        super().__init__(str(error))
        self.target = target
        self.error = error


def _write(
    state: ClientState,
    blocks: Sequence[Plan],
    placed: Placed,
    session: Session,
    underway: list[Target],
    deadline: Deadline,
) -> Operation[list[bytes]]:
    def write_all() -> list[bytes]:
        return [
            _write_block(state, block, targets, session, underway, deadline)
            for block, targets in zip(blocks, placed.targets, strict=True)
        ]

    try:
        written: list[bytes] = yield Work(write_all)
        return written
    except _WriteFailed as failed:
        error, node = failed.error, failed.target.cut.window.spot.node
    if isinstance(error, Unavailable):
        state.placement.failed(node)
    elif not isinstance(error, LeaseExpired) or not (yield from session_is_live(state, session.session, deadline)):
        raise error
    state.windows.retire(node=node)  # the session lives: it is the node that is away, or has lost its windows
    raise _Displaced(error)


def _write_block(
    state: ClientState,
    block: Plan,
    targets: Sequence[Target],
    session: Session,
    underway: list[Target],
    deadline: Deadline,
) -> bytes:
    """Encodes a block into one replica's place, and copies it to the others' from there."""
    if len(targets) == 1:
        with _writing(state, targets[0], session, underway, deadline) as place:
            return block.write(place)
    with ExitStack() as stack:
        # In one order in all threads: a path may have little memory to write from, and two puts that each hold some
        # of it must not wait for each other.
        places = [
            stack.enter_context(_writing(state, target, session, underway, deadline))
            for target in sorted(targets, key=lambda target: target.transport.arena)
        ]
        directory = block.write(places[0])
        for place in places[1:]:
            np.copyto(place, places[0])
    return directory


@contextmanager
def _writing(
    state: ClientState, target: Target, session: Session, underway: list[Target], deadline: Deadline
) -> Iterator[NDArray[np.uint8]]:
    cut = target.cut
    timeout = patience(state, cut.window.spot.node, deadline, cut.length)
    underway.append(target)
    try:
        with target.transport.write(cut.place(), session=session.session, timeout=timeout) as place:
            yield place
        state.counters.wrote(target.transport.name, cut.length)
    except TQError as error:
        raise _WriteFailed(target, error) from None
    except _WriteFailed:  # another replica's; this one was not sent
        if not cut.window.one_sided:
            underway.remove(target)
        raise
    underway.remove(target)


def commit_request(
    state: ClientState,
    prepared: Prepared,
    placed: Placed,
    directories: Sequence[bytes],
    session: Session,
    number: int,
) -> pb.CommitRequest:
    request = pb.CommitRequest()
    request.CopyFrom(prepared.request)
    request.mutation.CopyFrom(state.mutation(number, session))
    request.lengths.extend(_lengths(prepared.plan, narrow=session.narrow_lengths))
    request.blocks.extend(
        pb.BlockWrite(extents=[target.cut.extent() for target in targets], directory=directory, rows=block.rows)
        for block, targets, directory in zip(prepared.blocks.way(placed.way), placed.targets, directories, strict=True)
    )
    return request


def _lengths(plan: Plan, *, narrow: bool) -> Iterator[pb.FieldLengths]:
    for path, lengths in plan.lengths().items():
        if lengths.max() <= limits.ROW_LENGTH_MAX:
            packed, width = pack_narrow(lengths) if narrow else (pack_array(lengths, U32), 0)
            yield pb.FieldLengths(field=path, lengths=packed, width=width)


def commit(
    state: ClientState, ref: PartitionRef, prepared: Prepared, request: pb.CommitRequest, deadline: Deadline
) -> Operation[pb.CommitReply]:
    """Commits; keys that exist already with the same bytes are passed over, a batch of error rows at a time."""

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
