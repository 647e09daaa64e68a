"""Reading rows: locate → fetch → verify and decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import flag, names_of, pack_lookup_keys, row_ids
from tqclient.codec import Column, Gathered, Layout, Part, gather, read_column, share_offsets
from tqclient.codec.clips import Clip, join_clips
from tqclient.codec.layout import is_everything
from tqclient.codec.parallel import Later
from tqclient.errors import CorruptBlock, InternalError, InvalidArgument, LeaseExpired, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations import damage
from tqclient.operations.bring import bring
from tqclient.operations.effects import CONTROLLER, Deadline, Operation, Work, call
from tqclient.operations.ranges import Clips, Wanted, check_ranges, resolve_clips, wanted_ranges
from tqclient.operations.replicas import ExtentGone, Path, ReplicaFailed, Replicas
from tqclient.operations.sessions import in_session, pause_and_refresh, refresh_nodes
from tqclient.rows import RowSet, Run
from tqclient.state import ClientState, Session
from tqclient.transport.base import Fetched
from tqclient.wire.packing import I64, U64, pack_array, unpack_blobs
from tqclient.wire.v1 import controller_pb2 as pb

T = TypeVar("T")


@dataclass(slots=True)
class Holdings:
    """What a batch of views holds until it is closed.

    Attributes:
        fetched: what the views show.
        release_pin: lets go of what keeps the bytes in place; None: a claim does, or there is nothing to be let go.
        checks: by field, what compares its views with their checksums.
    """

    fetched: list[Fetched] = field(default_factory=list)
    release_pin: Callable[[], None] | None = None
    checks: dict[str, Callable[[], None]] = field(default_factory=dict)

    def close(self) -> None:
        """Lets go. Repeatable; may run in a finalizer."""
        self.checks = {}
        fetched, self.fetched = self.fetched, []
        for each in fetched:
            each.close()
        release, self.release_pin = self.release_pin, None
        if release is not None:
            release()


@dataclass(frozen=True, slots=True)
class Delivery:
    """Rows and their decoded columns.

    Attributes:
        rows: what is known of each row.
        columns: by field.
        holdings: what views need; empty when everything was copied.
    """

    rows: RowSet
    columns: dict[str, Column]
    holdings: Holdings


def get(
    state: ClientState,
    ref: PartitionRef,
    ids: Any,
    keys: Sequence[str] | None,
    fields: Sequence[str] | None,
    copy: bool,
    timeout: float | None,
    ranges: Any = None,
) -> Operation[Delivery]:
    """Reads samples by id or key. See `Partition.get`."""
    deadline = state.deadline(timeout)
    wanted = wanted_ranges(ranges)
    copy = flag(copy, what="copy")
    if (ids is None) == (keys is None):
        raise InvalidArgument("get: give ids or keys, one of the two")
    request = pb.LocateRequest(partition_id=ref.partition_id, runs=True)
    if ids is not None:
        request.ids = pack_array(row_ids(ids), I64)
    elif keys is not None:
        request.keys.CopyFrom(pack_lookup_keys(keys))
    if not request.ids and not request.keys.ends:
        raise InvalidArgument("get: no id or key was given")
    if fields is not None:
        request.fields.extend(names_of(fields, what="fields"))
        if not request.fields:
            raise InvalidArgument("get: fields=[] asks for nothing; None means every field")
    check_ranges(wanted, ref, request.fields)

    def attempt(session: Session) -> Operation[Delivery]:
        return (yield from _locate_and_fetch(state, ref, request, session, copy, deadline, wanted))

    try:
        return (yield from in_session(state, deadline, attempt))
    except (CorruptBlock, ExtentGone):
        # Freed under a slow reader, or damaged, or lost with its node: the controller knows which, so ask it once more.
        yield from refresh_nodes(state, deadline)
    try:
        return (yield from in_session(state, deadline, attempt))
    except ExtentGone as error:
        raise CorruptBlock(error.message) from None


def _locate_and_fetch(
    state: ClientState,
    ref: PartitionRef,
    request: pb.LocateRequest,
    session: Session,
    copy: bool,
    deadline: Deadline,
    wanted: Sequence[Wanted],
) -> Operation[Delivery]:
    pins = state.take_dropped_pins()
    request.session = session.session
    request.dropped_pins = pack_array(pins, U64)
    request.pin = pin = state.new_pin()
    epoch = state.epoch
    try:
        reply = yield from call(CONTROLLER, "Locate", request, deadline, state.rng)
    except BaseException:
        # It may have been taken all the same.
        state.return_dropped_pins(session, [*pins, pin])
        raise
    ref.fields_changed(reply.fields)
    holdings = Holdings(release_pin=lambda: state.drop_pin(session.session, pin))
    try:
        rows = RowSet.from_wire(reply.rows, [each.name for each in reply.fields])
        state.hold_pin(session, pin, rows.blocks, epoch=epoch)
        columns = yield from fetch(state, ref, rows, session, copy, holdings, deadline, wanted)
    except BaseException:
        holdings.close()
        raise
    if copy:
        holdings.close()
    return Delivery(rows, columns, holdings)


def fetch(
    state: ClientState,
    ref: PartitionRef,
    rows: RowSet,
    session: Session,
    copy: bool,
    holdings: Holdings,
    deadline: Deadline,
    wanted: Sequence[Wanted] = (),
) -> Operation[dict[str, Column]]:
    """Brings the rows' bytes and decodes them.

    Args:
        state: of the client.
        ref: partition that the rows belong to, for messages.
        rows: located ones, whose blocks are pinned or claimed.
        session: that holds the pin or claim.
        copy: False gives views.
        holdings: collects what views need.
        deadline: of the call.
        wanted: ranges of fields of which less than whole rows are wanted.

    Raises:
        InvalidArgument: a range does not fit its row.
        CorruptBlock: names partition, field, row and sample.
        ExtentGone: a node does not have the bytes.
        Unavailable: a node is away until the deadline.
    """
    layouts = yield from _layouts(state, ref, rows, session, deadline)
    clips = resolve_clips(wanted, ref, rows, layouts)
    replicas = Replicas(state, rows.blocks)
    backoff = state.backoff()
    while True:
        try:
            paths = yield from replicas.choose(deadline)
            columns: dict[str, Column] = yield Work(
                lambda paths=paths: fetch_and_decode(state, ref, rows, layouts, clips, paths, copy, holdings, deadline)  # type: ignore[misc]
            )
        except ReplicaFailed as failure:
            replicas.failed(failure)  # there may be another one
        except Unavailable as error:
            yield from pause_and_refresh(state, backoff, deadline, error)
            replicas.forgive()
        else:
            _check_still_held(state, ref, session, paths)
            return columns


def _check_still_held(state: ClientState, ref: PartitionRef, session: Session, paths: dict[int, Path]) -> None:
    """A one-sided read is refused by nobody: it counts only when what held the blocks still did at its end."""
    if any(path.transport.segment for path in paths.values()) and not state.is_live(session):
        raise LeaseExpired(f"partition {ref.name!r}: session {session.session} ended while samples were read")


def _layouts(
    state: ClientState, ref: PartitionRef, rows: RowSet, session: Session, deadline: Deadline
) -> Operation[dict[int, Layout]]:
    """Returns the layout of each block: just sent, remembered, or asked for."""
    layouts: dict[int, Layout] = {}
    sent: dict[int, bytes] = {}
    missing = []
    for block_id, block in rows.blocks.items():
        known = state.directories.get(block_id)
        if known is not None:
            layouts[block_id] = known
        elif block.directory:
            sent[block_id] = block.directory
        else:
            missing.append(block_id)
    while missing:  # a reply has as many as it has room for
        request = pb.GetDirectoriesRequest(session=session.session, block_ids=pack_array(missing, U64))
        reply = yield from call(CONTROLLER, "GetDirectories", request, deadline, state.rng)
        directories = unpack_blobs(reply.directories, what="directories")
        if not 0 < len(directories) <= len(missing):
            raise InternalError(f"the controller sent {len(directories)} directories of {len(missing)} blocks")
        sent.update(zip(missing, directories, strict=False))
        missing = missing[len(directories) :]
    for (block_id, directory), layout in zip(sent.items(), Layout.parse_many(list(sent.values())), strict=True):
        layouts[block_id] = _parsed(ref, rows, block_id, directory) if layout is None else layout
        state.directories.put(block_id, layouts[block_id], len(directory))
    for block_id, joined in zip(list(layouts), Layout.join(list(layouts.values())), strict=True):
        if joined is not layouts[block_id]:
            layouts[block_id] = joined
            state.directories.replace(block_id, joined)
    return layouts


def _parsed(ref: PartitionRef, rows: RowSet, block_id: int, directory: bytes) -> Layout:
    try:
        return Layout.parse(directory)
    except CorruptBlock as error:
        raise damage.unreadable(ref, rows, block_id, error) from None


def fetch_and_decode(
    state: ClientState,
    ref: PartitionRef,
    rows: RowSet,
    layouts: dict[int, Layout],
    clips: Clips,
    paths: dict[int, Path],
    copy: bool,
    holdings: Holdings,
    deadline: Deadline,
) -> dict[str, Column]:
    """Brings the rows' bytes by the paths that were chosen, and decodes them; the other arguments are as in `fetch`.

    Raises:
        ReplicaFailed: a block could not be read by its path.
        CorruptBlock: a directory lacks what it should have.
    """
    fetched = bring(ref, rows, _wanted(ref, rows, layouts, clips), paths, deadline, state.counters)
    try:
        columns = {}
        copies = Later()
        parts: dict[str, Sequence[Gathered]] = {}
        for names, runs in _by_runs(rows, clips):
            parts.update(dict.fromkeys(names, _gathered(runs, layouts, fetched, clips.get(names[0]))))
        for name in rows.runs:
            read = partial(read_column, name, parts[name], copy=copy, allocate=state.allocate, form=ref.form(name))
            mine = Later()
            columns[name] = _checked(ref, name, rows, partial(read, verify_views=False, later=mine))
            copies.add([partial(_checked, ref, name, rows, copy) for copy in mine.take()], mine.size_bytes)
            if columns[name].is_view:
                holdings.checks[name] = partial(_check_views, read, ref, name, rows)
        copies.run()
        share_offsets(columns.values())
    except BaseException:
        for each in fetched.values():
            each.close()
        raise
    if copy:
        for each in fetched.values():
            each.close()
    else:
        holdings.fetched.extend(fetched.values())
    return columns


def _gathered(
    runs: Sequence[Run],
    layouts: dict[int, Layout],
    fetched: dict[int, Fetched],
    clips: Sequence[tuple[Clip, ...]] | None,
) -> Sequence[Gathered]:
    parts = []
    for index, run in enumerate(runs):
        source, clipped = fetched[run.block_id], () if clips is None else clips[index]
        memory = source.memory or (None, 0)
        parts.append(
            Part(layouts[run.block_id], run.rows, source.view, source.owned_bytes, source.locate, clipped, *memory)
        )
    return gather(parts)


def _checked(ref: PartitionRef, name: str, rows: RowSet, read: Callable[[], T]) -> T:
    """Reads something of a field; damage is the replica's that it was read from."""
    try:
        return read()
    except CorruptBlock as error:
        raise ReplicaFailed(damage.blocks_of(rows.runs[name], error), damage.locate(ref, name, rows, error)) from None


def _check_views(read: Callable[[], Column], ref: PartitionRef, name: str, rows: RowSet) -> None:
    try:
        read()
    except CorruptBlock as error:
        raise damage.locate(ref, name, rows, error) from None


def _wanted(ref: PartitionRef, rows: RowSet, layouts: dict[int, Layout], clips: Clips) -> dict[int, NDArray[np.uint64]]:
    """Returns, for each block, the byte ranges that the fields' rows need: one read per block."""
    wanted: dict[int, list[tuple[list[str], _InBlock]]] = {}
    for names, runs in _by_runs(rows, clips):
        clipped = clips.get(names[0])
        for block_id, whole in _by_block(runs, layouts).items():
            each = whole if clipped is None else whole.clipped([clipped[index] for index in whole.indices])
            wanted.setdefault(block_id, []).append((names, each))
    needed = {}
    for block_id, fields in wanted.items():
        try:
            needed[block_id] = _ranges(layouts[block_id], fields)
        except InvalidArgument as error:  # the directory lacks a field, or a row
            raise damage.unreadable(ref, rows, block_id, error) from None
    return needed


def _by_runs(rows: RowSet, clips: Clips) -> list[tuple[list[str], list[Run]]]:
    """Brings fields together that have the same runs, as those of one put do, and are wanted whole."""
    together: dict[int, tuple[list[str], list[Run]]] = {}
    for place, (name, runs) in enumerate(rows.runs.items()):
        together.setdefault(-place if name in clips else id(runs), ([], runs))[0].append(name)
    return list(together.values())


@dataclass(frozen=True, slots=True)
class _InBlock:
    """Rows that are wanted of one block.

    Attributes:
        indices: of the runs that lie in it.
        rows: int64, within the block.
        everything: whether they are all of its rows, in order.
        clips: of a field of which less than whole rows are wanted.
    """

    indices: list[int]
    rows: NDArray[np.int64]
    everything: bool
    clips: tuple[Clip, ...] = ()

    def clipped(self, clips: Sequence[Sequence[Clip]]) -> _InBlock:
        """Returns the same with the clips of each of the runs."""
        return replace(self, clips=join_clips(clips))

    @property
    def whole(self) -> bool:
        """Whether nothing of the field is left out."""
        return self.everything and not self.clips


def _by_block(runs: Sequence[Run], layouts: dict[int, Layout]) -> dict[int, _InBlock]:
    by_block: dict[int, list[int]] = {}
    for index, run in enumerate(runs):
        by_block.setdefault(run.block_id, []).append(index)
    found = {}
    for block_id, indices in by_block.items():
        rows = runs[indices[0]].rows if len(indices) == 1 else np.concatenate([runs[index].rows for index in indices])
        count = layouts[block_id].rows
        found[block_id] = _InBlock(indices, rows, is_everything(rows, count))
    return found


def _ranges(layout: Layout, fields: list[tuple[list[str], _InBlock]]) -> NDArray[np.uint64]:
    if all(each.whole for _, each in fields):
        return layout.whole(fields[0][0] if len(fields) == 1 else [name for names, _ in fields for name in names])
    return np.concatenate(
        [layout.whole(names) if each.whole else layout.needed(names, each.rows, each.clips) for names, each in fields]
    )
