"""Reading rows: locate → fetch → verify and decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import names_of, pack_lookup_keys, row_ids
from tqclient.codec import Column, Layout, Part, read_column, share_offsets
from tqclient.codec.clips import Clip, join_clips
from tqclient.codec.parallel import Later
from tqclient.errors import CorruptBlock, InvalidArgument, LeaseExpired, SampleNotFound, TQError, Unavailable
from tqclient.info import PartitionRef
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
        if not fields:
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
    missing = []
    for block_id, block in rows.blocks.items():
        known = state.directories.get(block_id)
        if known is not None:
            layouts[block_id] = known
        elif block.directory:
            layouts[block_id] = _remember(state, ref, rows, block_id, block.directory)
        else:
            missing.append(block_id)
    if missing:
        request = pb.GetDirectoriesRequest(session=session.session, block_ids=pack_array(missing, U64))
        reply = yield from call(CONTROLLER, "GetDirectories", request, deadline, state.rng)
        directories = unpack_blobs(reply.directories, what="directories", rows=len(missing))
        for block_id, directory in zip(missing, directories, strict=True):
            layouts[block_id] = _remember(state, ref, rows, block_id, directory)
    return layouts


def _remember(state: ClientState, ref: PartitionRef, rows: RowSet, block_id: int, directory: bytes) -> Layout:
    try:
        layout = Layout.parse(directory)
    except CorruptBlock as error:
        raise _unreadable(ref, rows, block_id, error) from None
    state.directories.put(block_id, layout, len(directory))
    return layout


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
    fetched: dict[int, Fetched] = {}
    try:
        for block_id, ranges in _wanted(ref, rows, layouts, clips).items():
            fetched[block_id] = _read(ref, rows, block_id, paths[block_id], ranges, deadline)
            state.counters.read(paths[block_id].transport.name, int(ranges[:, 1].sum()))
        columns = {}
        copies = Later()
        for name, runs in rows.runs.items():
            sources = [fetched[run.block_id] for run in runs]
            parts = [
                Part(layouts[run.block_id], run.rows, source.view, source.owned_bytes, source.locate, clipped)
                for run, source, clipped in zip(runs, sources, clips.get(name, [()] * len(runs)), strict=True)
            ]
            read = partial(read_column, name, parts, copy=copy, allocate=state.allocate, form=ref.form(name))
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


def _checked(ref: PartitionRef, name: str, rows: RowSet, read: Callable[[], T]) -> T:
    """Reads something of a field; damage is the replica's that it was read from."""
    try:
        return read()
    except CorruptBlock as error:
        raise ReplicaFailed(_damaged(rows.runs[name], error), _locate_damage(ref, name, rows, error)) from None


def _check_views(read: Callable[[], Column], ref: PartitionRef, name: str, rows: RowSet) -> None:
    try:
        read()
    except CorruptBlock as error:
        raise _locate_damage(ref, name, rows, error) from None


def _read(
    ref: PartitionRef, rows: RowSet, block_id: int, path: Path, ranges: NDArray[np.uint64], deadline: Deadline
) -> Fetched:
    error: TQError
    try:
        seconds = path.seconds(deadline, int(ranges[:, 1].sum()))
        return path.transport.read(path.extent, ranges, timeout=seconds)
    except SampleNotFound as refusal:
        error = ExtentGone(f"partition {ref.name!r}: {refusal.message}")
    except InvalidArgument as refusal:  # the extent leaves the arena, or the directory the extent
        error = _unreadable(ref, rows, block_id, refusal)
    except Unavailable as refusal:
        error = refusal
    raise ReplicaFailed([block_id], error)


def _damaged(runs: list[Run], error: CorruptBlock) -> list[int]:
    """Returns the block that holds the first damaged row; all of the field's when the row is not known."""
    end = 0
    for run in runs:
        end += len(run.rows)
        if error.rows and error.rows[0] < end:
            return [run.block_id]
    return list({run.block_id for run in runs})


def _wanted(ref: PartitionRef, rows: RowSet, layouts: dict[int, Layout], clips: Clips) -> dict[int, NDArray[np.uint64]]:
    """Returns, for each block, the byte ranges that the fields' rows need: one read per block."""
    of_runs: dict[int, dict[int, _InBlock]] = {}  # the fields of one put have the same runs, one object for them all
    wanted: dict[int, dict[str, _InBlock]] = {}
    for name, runs in rows.runs.items():
        found = of_runs.get(id(runs))
        if found is None:
            found = of_runs[id(runs)] = _by_block(runs, layouts)
        for block_id, each in found.items():
            clipped = join_clips([clips[name][index] for index in each.indices]) if name in clips else ()
            wanted.setdefault(block_id, {})[name] = replace(each, clips=clipped) if clipped else each
    needed = {}
    for block_id, fields in wanted.items():
        try:
            needed[block_id] = _ranges(layouts[block_id], fields)
        except InvalidArgument as error:  # the directory lacks a field, or a row
            raise _unreadable(ref, rows, block_id, error) from None
    return needed


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
        everything = len(rows) == count and bool(np.array_equal(rows, np.arange(count)))
        found[block_id] = _InBlock(indices, rows, everything)
    return found


def _ranges(layout: Layout, fields: dict[str, _InBlock]) -> NDArray[np.uint64]:
    if fields.keys() == set(layout.fields) and all(each.whole for each in fields.values()):
        return layout.payload
    return np.concatenate(
        [layout.ranges(name, None if each.whole else each.rows, each.clips) for name, each in fields.items()]
    )


def _unreadable(ref: PartitionRef, rows: RowSet, block_id: int, error: TQError) -> CorruptBlock:
    """Says of a block that is not what the controller was told which row and field it would have given first."""
    for name, runs in rows.runs.items():
        row = 0
        for run in runs:
            if run.block_id == block_id:
                return _locate_damage(ref, name, rows, CorruptBlock(error.message, rows=[row]))
            row += len(run.rows)
    return CorruptBlock(f"partition {ref.name!r}, block {block_id}: {error.message}")


def _locate_damage(ref: PartitionRef, name: str, rows: RowSet, error: CorruptBlock) -> CorruptBlock:
    row = int(error.rows[0]) if error.rows else None
    where = f"partition {ref.name!r}, field {name!r}"
    if row is None or row >= len(rows.ids):
        return CorruptBlock(f"{where}: {error.message}")
    sample = int(rows.ids[row])
    return CorruptBlock(f"{where}, row {row}, sample {sample}: {error.message}", ids=[sample], rows=[row])
