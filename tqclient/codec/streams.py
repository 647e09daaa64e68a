"""Copies rows of a stream to where they belong, each byte once, and verifies what was copied.

A checksum is compared with the *copied* bytes: memory that is recycled under a slow reader then shows as a mismatch,
not as wrong values. Where a checksum unit and the wanted rows agree, that is the destination itself. Where only a part
of a unit is wanted, the unit goes to a scratch buffer, which stays in the cache, and the rows are taken from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.arrays import bounds, spread
from tqclient.codec import parallel
from tqclient.codec.checksum import PARALLEL_UNIT_MIN, PIECE_BYTES, first_mismatch, first_mismatch_at, unit_count
from tqclient.codec.clips import Clip, clip_of, spans
from tqclient.codec.directory import Node, Stream
from tqclient.codec.scattered import Scattered
from tqclient.errors import CorruptBlock
from tqclient.limits import KIB

Fetch = Callable[[int, int], NDArray[np.uint8]]
"""(offset, length) within a block → uint8 [length], a view that is valid for the duration of the read."""
Locate = Callable[[NDArray[np.int64], NDArray[np.int64]], tuple[NDArray[np.uint8], NDArray[np.int64]]]
"""(offsets, lengths) within a block, none empty → what holds these bytes, uint8, and where each begins in it."""
Allocate = Callable[[int], NDArray[np.uint8]]
"""length → uint8 [length], 64-byte aligned and writable; the column that is read keeps it."""

_DIRECT_BYTES_MIN: Final = 128 * KIB
"""From here on a run is worth its own copy; smaller ones share a pass over the scratch buffer."""
_KEPT_MAX: Final = 2
"""Rows that were fetched into the reader's own memory stay there when that is at most so many times as large."""
_GATHER_BYTES_MAX: Final = 128
"""Below this mean size, moving pieces by an index array is faster than one slice assignment each."""


class Group(NamedTuple):
    """The wanted rows of one column that come from one block.

    Attributes:
        node: the column.
        fetch: reads the block.
        rows: int64, within the block; those of a family, see `Scattered`, are numbered as they were picked.
        at: int64 [len(rows)]: the place of each in delivery order.
        owned_bytes: as in `Part`.
        locate: as in `Part`.
        clips: of the column, or of columns within it.
        place: of the first row, where the block's rows are wanted all, in their order, side by side and not clipped, as
            those of many small puts are; -1: they are not.
    """

    node: Node
    fetch: Fetch
    rows: NDArray[np.int64]
    at: NDArray[np.int64]
    owned_bytes: int
    locate: Locate | None = None
    clips: tuple[Clip, ...] = ()
    place: int = -1

    @property
    def clip(self) -> Clip | None:
        """What is wanted of each row; None: all of it."""
        return clip_of(self.node, self.clips)

    def row_in_block(self, index: int) -> int:
        """Returns the number that the row `rows[index]` has within its block, for messages."""
        row, stream = int(self.rows[index]), self.node.streams[0]
        return stream.row_in_block(row) if isinstance(stream, Scattered) else row


@dataclass(frozen=True, slots=True)
class Reading:
    """How a column is to be read; see `tqclient.codec.read_column`."""

    path: str
    copy: bool
    allocate: Allocate
    verify: bool
    allow_pickle: bool
    verify_views: bool = True
    later: parallel.Later | None = None

    def child(self, key: str) -> Reading:
        """The same for a child of a struct."""
        return replace(self, path=f"{self.path}.{key}")

    def verifies_view(self, group: Group) -> bool:
        """Whether a view of these rows is compared with its checksums now."""
        return self.verify and (self.verify_views or group.owned_bytes > 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows back to back, in delivery order.

    Attributes:
        data: uint8; of a view, bytes of the block itself.
        bounds: int64 [rows + 1], bytes.
        is_view: whether `data` belongs to the block: not when it was fetched into memory of the reader's own.
    """

    data: NDArray[np.uint8]
    bounds: NDArray[np.int64]
    is_view: bool


def read_rows(
    groups: Sequence[Group], index: int, reading: Reading, *, view: bool, later: parallel.Later | None = None
) -> Rows:
    """Reads stream `index` of a column, from however many blocks.

    Args:
        groups: together they fill the places 0 to rows - 1 once each.
        index: of the stream within its node.
        reading: how.
        view: give a view where the rows lie side by side in one block.
        later: takes the large copies; the rows are not there before it was run. None: all are made now.

    Raises:
        CorruptBlock: a checksum differs; names the field and the row.
    """
    group = groups[0]
    if len(groups) > 1 or isinstance(group.node.streams[index], Scattered):
        return _read_many(groups, index, reading, later)
    starts, stops = spans(group.node, index, group.rows, group.clips)
    row_bounds = bounds(stops - starts)
    whole = bool(row_bounds[-1]) and np.array_equal(starts[1:], stops[:-1])
    keeps_little = int(row_bounds[-1]) * _KEPT_MAX >= group.owned_bytes > 0
    if (view or keeps_little) and whole:
        data = _view(group, index, int(starts[0]), int(stops[-1]), reading)
        return Rows(data, row_bounds, is_view=not group.owned_bytes)
    target = reading.allocate(int(row_bounds[-1]))
    copy = _Copy(group, index, reading, target, later)
    if whole:
        copy.run_one(int(starts[0]), int(stops[-1]))
    else:
        copy.run(starts, stops, row_bounds[group.at])
    return Rows(target, row_bounds, is_view=False)


def _read_many(groups: Sequence[Group], index: int, reading: Reading, later: parallel.Later | None) -> Rows:
    """Reads a stream of several blocks. Of those that are wanted whole, and may have one row each, none is worth an
    array of its own; those of a family are one.
    """
    sizes = np.empty(sum(len(group.rows) for group in groups), np.int64)
    whole: list[Group] = []
    families: list[tuple[Group, Scattered]] = []
    cut: list[tuple[Group, NDArray[np.int64], NDArray[np.int64]]] = []
    for group in groups:
        stream = group.node.streams[index]
        if isinstance(stream, Scattered):
            families.append((group, stream))
            sizes[group.at] = stream.sizes
            continue
        if group.place < 0:
            starts, stops = spans(group.node, index, group.rows, group.clips)
            cut.append((group, starts, stops))
            sizes[group.at] = stops - starts
            continue
        whole.append(group)
        if stream.rows == 1:
            sizes[group.place] = stream.length
        else:
            sizes[group.place : group.place + stream.rows] = np.diff(stream.bounds())
    row_bounds = bounds(sizes)
    target = reading.allocate(int(row_bounds[-1]))
    for group, scattered in families:
        bad = scattered.copy(target, row_bounds[group.at], verify=reading.verify)
        if bad is not None:
            raise CorruptBlock(
                f"field {reading.path!r}, row {group.row_in_block(bad)} of its block: its bytes fail their checksum",
                rows=[int(group.at[bad])],
            )
    for group, at in zip(whole, row_bounds[[group.place for group in whole]].tolist(), strict=True):
        _Copy(group, index, reading, target, later).run_whole(at)
    for group, starts, stops in cut:
        _Copy(group, index, reading, target, later).run(starts, stops, row_bounds[group.at])
    return Rows(target, row_bounds, is_view=False)


def _view(group: Group, index: int, start: int, stop: int, reading: Reading) -> NDArray[np.uint8]:
    stream = group.node.streams[index]
    first = start // stream.unit
    last = -(-stop // stream.unit)
    base = first * stream.unit
    units = group.fetch(stream.offset + base, min(last * stream.unit, stream.length) - base)
    if reading.verifies_view(group):
        step = parallel.TASK_BYTES // stream.unit if stream.unit >= PARALLEL_UNIT_MIN else last - first

        def check(unit: int) -> None:
            piece = units[(unit - first) * stream.unit : (unit - first + step) * stream.unit]
            _check(group, stream, reading, piece, unit, min(unit + step, last))

        parallel.run([partial(check, unit) for unit in range(first, last, step)], units.size)
    return units[start - base : stop - base]


def _check(group: Group, stream: Stream, reading: Reading, units: NDArray[np.uint8], first: int, last: int) -> None:
    bad = first_mismatch(units, stream.unit, stream.checksums[first:last])
    if bad is not None:
        raise _damage(group, stream, reading, first + bad)


def _damage(group: Group, stream: Stream, reading: Reading, unit: int) -> CorruptBlock:
    """Names the first wanted row that a damaged unit holds bytes of."""
    start = unit * stream.unit
    starts, stops = stream.extents(group.rows)
    touched = np.flatnonzero((starts < start + stream.unit) & (stops > start))
    row = int(group.rows[touched[0]]) if touched.size else -1
    return CorruptBlock(
        f"field {reading.path!r}, row {row} of its block: bytes from {start} on fail their checksum",
        rows=[int(place) for place in group.at[touched[:1]]],
    )


class _Copy:
    """One group's rows on their way into one target."""

    def __init__(
        self, group: Group, index: int, reading: Reading, target: NDArray[np.uint8], later: parallel.Later | None
    ) -> None:
        self._group = group
        self._stream = group.node.streams[index]
        self._reading = reading
        self._target = target
        self._later = later

    def run_one(self, start: int, stop: int) -> None:
        """Copies the byte span [start, stop) of the stream to the target's beginning."""
        unit = self._stream.unit
        if start % unit == 0 and (stop % unit == 0 or stop == self._stream.length):
            self._copy_units(start, stop, 0)
        else:
            self.run(np.array([start]), np.array([stop]), np.zeros(1, np.int64))

    def run_whole(self, at: int) -> None:
        """Copies the whole stream to `at` in the target."""
        stream, length = self._stream, self._stream.length
        if length >= _DIRECT_BYTES_MIN:
            self._copy_units(0, length, at)
        elif length:
            copied = self._target[at : at + length]
            copied[:] = self._group.fetch(stream.offset, length)
            if self._reading.verify:
                _check(self._group, stream, self._reading, copied, 0, len(stream.checksums))

    def run(self, starts: NDArray[np.int64], stops: NDArray[np.int64], at: NDArray[np.int64]) -> None:
        """Copies the byte spans [starts, stops) of the stream to `at` in the target."""
        kept = starts < stops
        if not kept.all():
            starts, stops, at = starts[kept], stops[kept], at[kept]
        if not starts.size:
            return
        # Spans that are neighbours on both sides become one run.
        new = (starts[1:] != stops[:-1]) | (at[1:] != at[:-1] + (stops - starts)[:-1])
        first = np.concatenate(([0], np.flatnonzero(new) + 1))
        last = np.append(first[1:] - 1, len(starts) - 1)
        starts, stops, at = starts[first], stops[last], at[first]

        unit, length = self._stream.unit, self._stream.length
        whole = -(-starts // unit) * unit
        whole_stop = np.where(stops == length, stops, stops // unit * unit)
        direct = whole_stop - whole >= _DIRECT_BYTES_MIN
        for run in np.flatnonzero(direct).tolist():
            start = int(whole[run])
            self._copy_units(start, int(whole_stop[run]), int(at[run]) + start - int(starts[run]))
        exact = ~direct & (whole == starts) & (whole_stop == stops)
        if exact.any():
            self._copy_exact(starts[exact], stops[exact], at[exact])
        # What is left: the other small runs, and heads and tails of the large ones.
        small = ~direct & ~exact
        begin = np.concatenate((starts[small], starts[direct], whole_stop[direct]))
        end = np.concatenate((stops[small], whole[direct], stops[direct]))
        place = np.concatenate((at[small], at[direct], (at + whole_stop - starts)[direct]))
        left = begin < end
        if left.any():
            self._copy_parts(*_split(begin[left], end[left], place[left], unit))

    def _copy_units(self, start: int, stop: int, at: int) -> None:
        """Whole units go straight to the target and are hashed there."""
        stream = self._stream
        source = self._group.fetch(stream.offset + start, stop - start)

        def copy(first: int) -> None:
            for position in range(first, min(first + parallel.TASK_BYTES, stop - start), PIECE_BYTES):
                piece = source[position : position + PIECE_BYTES]
                copied = self._target[at + position : at + position + piece.size]
                np.copyto(copied, piece)
                if self._reading.verify:
                    unit = (start + position) // stream.unit
                    _check(self._group, stream, self._reading, copied, unit, unit + unit_count(piece.size, stream.unit))

        tasks = [partial(copy, first) for first in range(0, stop - start, parallel.TASK_BYTES)]
        if self._later is None:
            parallel.run(tasks, stop - start)
        else:
            self._later.add(tasks, stop - start)

    def _copy_exact(self, begin: NDArray[np.int64], end: NDArray[np.int64], at: NDArray[np.int64]) -> None:
        """Runs of whole units, each too small for a copy of its own: straight to the target, and hashed there."""
        stream, target, sizes = self._stream, self._target, end - begin
        locate = self._group.locate
        located = None if locate is None else locate(stream.offset + begin, sizes)
        batches = (np.cumsum(sizes) - 1) // PIECE_BYTES  # hashed while they are in the cache
        first = np.concatenate(([0], np.flatnonzero(np.diff(batches)) + 1))
        for low, high in zip(first.tolist(), [*first[1:].tolist(), len(begin)], strict=True):
            runs = slice(low, high)
            if located is not None:
                source, places = located
                move(source, places[runs], target, at[runs], sizes[runs])
            else:
                for start, size, place in zip(
                    begin[runs].tolist(), sizes[runs].tolist(), at[runs].tolist(), strict=True
                ):
                    target[place : place + size] = self._group.fetch(stream.offset + start, size)
            if self._reading.verify:
                starts, stops, copied = _split(begin[runs], end[runs], at[runs], stream.unit)
                units = starts // stream.unit
                bad = first_mismatch_at(target, copied, stops - starts, stream.checksums[units])
                if bad is not None:
                    raise _damage(self._group, stream, self._reading, int(units[bad]))

    def _copy_parts(self, begin: NDArray[np.int64], end: NDArray[np.int64], at: NDArray[np.int64]) -> None:
        """Spans within one unit each: their units go through a scratch buffer, every unit once."""
        stream = self._stream
        units, slot = np.unique(begin // stream.unit, return_inverse=True)
        order = np.argsort(slot, kind="stable")
        begin, end, at, slot = begin[order], end[order], at[order], slot[order]
        slots = max(1, PIECE_BYTES // stream.unit)
        scratch = np.empty(min(slots, len(units)) * stream.unit, np.uint8)
        for base in range(0, len(units), slots):
            self._load(units[base : base + slots], scratch)
            low, high = np.searchsorted(slot, (base, base + slots))
            inside = (slot[low:high] - base) * stream.unit + begin[low:high] % stream.unit
            move(scratch, inside, self._target, at[low:high], (end - begin)[low:high])

    def _load(self, units: NDArray[np.int64], scratch: NDArray[np.uint8]) -> None:
        stream = self._stream
        first = np.concatenate(([0], np.flatnonzero(units[1:] != units[:-1] + 1) + 1))
        last = np.append(first[1:], len(units))
        for low, high in zip(first.tolist(), last.tolist(), strict=True):
            start = int(units[low]) * stream.unit
            size = min((high - low) * stream.unit, stream.length - start)
            copied = scratch[low * stream.unit : low * stream.unit + size]
            np.copyto(copied, self._group.fetch(stream.offset + start, size))
            if self._reading.verify:
                unit = int(units[low])
                _check(self._group, stream, self._reading, copied, unit, unit + high - low)


def _split(
    begin: NDArray[np.int64], end: NDArray[np.int64], at: NDArray[np.int64], unit: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Cuts spans at the unit boundaries."""
    first = begin // unit
    counts = (end - 1) // unit - first + 1
    starts = spread(first, counts) * unit
    spans = np.repeat(begin, counts)
    cut = np.maximum(starts, spans)
    return cut, np.minimum(starts + unit, np.repeat(end, counts)), np.repeat(at, counts) + cut - spans


def move(
    source: NDArray[np.uint8],
    begin: NDArray[np.int64],
    target: NDArray[np.uint8],
    at: NDArray[np.int64],
    sizes: NDArray[np.int64],
) -> None:
    """target[at[i] : at[i] + sizes[i]] = source[begin[i] : begin[i] + sizes[i]] for each i; there is at least one."""
    size = int(sizes[0])
    low, high = int(begin.min()), int(begin.max()) + size
    if (sizes == size).all() and (np.diff(at) == size).all() and not ((begin - low) % size).any():
        # Rows of one table, side by side in the target: one call moves them all.
        rows = target[at[0] : at[0] + size * len(sizes)].reshape(-1, size)
        np.take(source[low:high].reshape(-1, size), (begin - low) // size, axis=0, out=rows, mode="clip")
        return
    if int(sizes.sum()) > _GATHER_BYTES_MAX * len(sizes):
        for start, place, size in zip(begin.tolist(), at.tolist(), sizes.tolist(), strict=True):
            target[place : place + size] = source[start : start + size]
        return
    # The index arrays take 16 bytes per byte: a bounded number of pieces at a time.
    step = PIECE_BYTES // _GATHER_BYTES_MAX
    for low in range(0, len(sizes), step):
        counts = sizes[low : low + step]
        target[spread(at[low : low + step], counts)] = source[spread(begin[low : low + step], counts)]
