"""Small blocks that differ in numbers alone, as puts of a row or of a group leave them by the thousand.

Their directories are parsed side by side, and their rows are read as if they were those of one block that is scattered
over the memory. What is not like the others is parsed and read by itself: nothing is taken for granted here that
`directory.parse` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arrays import bounds, spread
from tqclient.codec.checksum import UNIT_MAX, UNIT_MIN, Numbers, unit_count, whole_units
from tqclient.codec.clips import Clip, clip_of
from tqclient.codec.directory import COUNT_WIDTHS, COUNTS_AT, SHARED, SIZE_AT, Node, Stream, parse
from tqclient.codec.header import HEADER_BYTES, aligned
from tqclient.codec.scattered import Picks, Scattered, Streams
from tqclient.errors import CorruptBlock, UnsupportedVersion
from tqclient.limits import MIB

FAMILY_MIN: Final = 8
"""So few blocks are as well parsed one by one."""
KINDS_MAX: Final = 4
"""Of families among directories that begin alike; the rest is parsed one by one."""
ROWS_MAX: Final = 64
"""A block of more rows is worth being parsed by itself: while one block of a family is remembered, so are the rows of
all."""
STREAM_BYTES_MAX: Final = 8 * MIB
"""A block with a longer stream is worth it, too."""
_RESERVED_AT: Final = 18  # within the entry of a stream, behind offset, length, width and unit


class _Spans(NamedTuple):
    """Where rows of some fields lie in all blocks.

    Attributes:
        entries: of their streams.
        numbers: offsets, lengths, units of the streams, int64 [blocks, streams, 1]; starts and stops of rows within
            them, int32 [blocks, streams, rows].
    """

    entries: list[int]
    numbers: list[Numbers]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Directories that differ in numbers alone. Blocks are known by their place among them.

    Attributes:
        fields: columns by name, as the first block has them.
        rows: of each block.
        sizes: int64 [blocks], bytes of each.
        starts: int64 [blocks]: where the bytes of each block's streams begin, within the block.
        stops: int64 [blocks]: where they end; 0: a block has none.
        streams: by the place of the entry of the first block's, in the directory's order.
        shares: whether rows of some column share values.
    """

    fields: dict[str, Node]
    rows: int
    sizes: Numbers
    starts: Numbers
    stops: Numbers
    streams: dict[int, Streams]
    shares: bool
    _ranges: dict[frozenset[str], NDArray[np.uint64]] = field(default_factory=dict)
    _rows: dict[frozenset[str], _Spans] = field(default_factory=dict)

    def ranges(self, block: int, fields: Iterable[str]) -> NDArray[np.uint64]:
        """Returns the bytes of a block that fields lie in: uint64 [n, 2] (offset, length), ascending."""
        wanted = frozenset(fields)
        known = self._ranges.get(wanted)
        if known is None:
            known = self._ranges[wanted] = self._ranges_of(wanted)
        found: NDArray[np.uint64] = known[block]
        return found

    def _ranges_of(self, wanted: frozenset[str]) -> NDArray[np.uint64]:
        """The same for all blocks: uint64 [blocks, n, 2]. Neighbours, with the padding between them, are one range."""
        named = [
            (name in wanted, self.streams[stream.entry])
            for name, node in self.fields.items()
            for column in node.preorder()
            for stream in column.streams
        ]
        ranges = []
        for is_wanted, run in groupby(named, key=itemgetter(0)):
            own = [stream for _, stream in run]
            if is_wanted:
                start = own[0].offsets
                stop = np.max([np.where(each.lengths > 0, each.offsets + each.lengths, start) for each in own], axis=0)
                ranges.append((start, stop - start))
        return np.array(ranges, np.uint64).reshape(-1, 2, len(self.sizes)).transpose(2, 0, 1)

    def row_ranges(
        self, block: int, fields: Iterable[str], rows: Numbers, clips: Sequence[Clip] = ()
    ) -> tuple[Numbers, Numbers]:
        """Returns where in a block rows of fields lie, with the whole units around: (starts, stops), int64 [n]."""
        wanted = frozenset(fields)
        known = self._rows.get(wanted)
        if known is None:
            known = self._rows[wanted] = self._rows_of(wanted)
        offsets, lengths, units, lows, highs = (numbers[block] for numbers in known.numbers)
        low, high = lows[:, rows], highs[:, rows]
        for clip in clips:
            index = known.entries.index(clip.node.streams[0].entry)
            high[index] = low[index] + clip.stops * clip.item_bytes
            low[index] += clip.starts * clip.item_bytes
        starts, stops = whole_units(low, high, units, lengths)
        return (starts + offsets)[low < high], (stops + offsets)[low < high]

    def _rows_of(self, wanted: frozenset[str]) -> _Spans:
        every = np.broadcast_to(np.arange(self.rows), (len(self.sizes), self.rows))
        found = [each for name in self.fields if name in wanted for each in self._spans(self.fields[name], every)]
        entries, plain = [entry for entry, _, _ in found], [self.streams[entry][:3] for entry, _, _ in found]
        ends = [(starts.astype(np.int32), stops.astype(np.int32)) for _, starts, stops in found]
        of_streams = [np.stack(each, axis=1)[:, :, None] for each in zip(*plain, strict=True)]
        return _Spans(entries, [*of_streams, *(np.stack(each, axis=1) for each in zip(*ends, strict=True))])

    def _spans(self, column: Node, rows: Numbers) -> Iterator[tuple[int, Numbers, Numbers]]:
        """For the entry of each stream of a column: where in it rows [blocks, n] start and stop, [blocks, n] each."""
        for stream in column.streams:
            ends = self.streams[stream.entry].bounds(np.arange(len(self.sizes)), stream)
            yield stream.entry, np.take_along_axis(ends, rows, axis=1), np.take_along_axis(ends, rows + 1, axis=1)
        if column.kind == SHARED:
            rows = np.take_along_axis(self._counts(column.streams[0]), rows, axis=1).astype(np.int64)
        for child in column.children:
            yield from self._spans(child, rows)

    def _counts(self, stream: Stream) -> NDArray[Any]:
        """The counts of a stream whose rows have some, unsigned [blocks, rows]: of a shared column, its index."""
        counts = self.streams[stream.entry].counts
        assert counts is not None
        return counts

    def row_counts(self, block: int, stream: Stream, rows: Numbers) -> Numbers:
        """Returns how many items rows of a block have in a stream, int64 [rows].

        Args:
            block: which.
            stream: the first block's; its rows have counts.
            rows: int64.
        """
        counts: Numbers = self._counts(stream)[block, rows].astype(np.int64)
        return counts

    def scattered(self, column: Node, picks: Picks, memory: NDArray[np.uint8], clips: Sequence[Clip] = ()) -> Node:
        """Returns some rows of some blocks of a column as if they were those of one block.

        Args:
            column: one of `fields`, or of what is below them.
            picks: which rows.
            memory: uint8, that holds what is wanted of all of the blocks.
            clips: of the column, or of columns within it, of which less than whole rows are wanted.
        """
        if column.kind == SHARED:
            picks, first, which = picks.shared(self._counts(column.streams[0]), clips)
            clips = [clip.take(first) for clip in clips]
            own: list[Stream] = [replace(column.streams[0], rows=len(which), counts=which, _bounds=None)]
        else:
            clip = clip_of(column, clips)
            own = [Scattered(stream, self.streams[stream.entry], picks, memory, clip) for stream in column.streams]
        children = [self.scattered(child, picks, memory, clips) for child in column.children]
        return replace(column, streams=tuple(own), children=tuple(children))


def families(directories: Sequence[bytes]) -> list[tuple[Family, int] | None]:
    """Finds the directories that differ in numbers alone.

    Returns:
        For each the family and its place in it; None: parse it, whatever comes of that.
    """
    by_prefix: dict[bytes, list[int]] = {}
    for index, directory in enumerate(directories):
        by_prefix.setdefault(directory[:SIZE_AT], []).append(index)
    found: list[tuple[Family, int] | None] = [None] * len(directories)
    for alike in by_prefix.values():
        left = alike
        for _ in range(KINDS_MAX):
            if len(left) < FAMILY_MIN:
                break
            family, members = _family([directories[index] for index in left])
            if family is not None:
                for block in np.flatnonzero(members).tolist():
                    found[left[block]] = family, block
            left = [index for index, member in zip(left[1:], members[1:].tolist(), strict=True) if not member]
    return found


def _family(directories: Sequence[bytes]) -> tuple[Family | None, NDArray[np.bool_]]:
    """Returns the family of the first of directories that begin alike, and which of them belong to it."""
    first, none = directories[0], np.zeros(len(directories), np.bool_)
    try:
        rows, _, nodes, _ = parse(first)
    except (CorruptBlock, UnsupportedVersion):
        return None, none
    if not 1 <= rows <= ROWS_MAX:
        return None, none
    cursors = _Cursors(directories)
    cursors.take(SIZE_AT)  # they begin alike
    sizes = cursors.numbers(8)
    starts = ends = aligned(cursors.sizes + HEADER_BYTES)
    stops = np.zeros_like(starts)
    position = SIZE_AT + 8
    streams: dict[int, Streams] = {}
    columns = [column for node in nodes for column in node.preorder()]
    for column, stream in [(each, stream) for each in columns for stream in each.streams]:
        cursors.same(first[position : stream.entry])  # the heads of columns
        own = streams[stream.entry] = _of_stream(cursors, stream, ends)
        if column.kind == SHARED and own.counts is not None:
            cursors.keep(own.counts.max(axis=1) < column.values)
        stops = np.where(own.lengths > 0, ends + own.lengths, stops)
        ends = aligned(ends + own.lengths)
        position = stream.entry_end
    members = cursors.finish() & (sizes == ends.astype(np.uint64)) & (ends <= limits.BLOCK_BYTES_MAX)
    if members.sum() < FAMILY_MIN:
        return None, members
    shares = any(column.kind == SHARED for column in columns)
    return Family({node.name: node for node in nodes}, rows, ends, starts, stops, streams, shares), members


def _of_stream(cursors: _Cursors, stream: Stream, ends: Numbers) -> Streams:
    """Reads one stream's entry in each directory; one that is wrong falls behind. `ends`: of what lies before, aligned.

    What it returns of those that fell behind is 0.
    """
    offsets, lengths, widths, log2 = (cursors.numbers(width) for width in (8, 8, 1, 1))
    cursors.take(COUNTS_AT - _RESERVED_AT)
    cursors.keep((offsets == ends.astype(np.uint64)) & (lengths < STREAM_BYTES_MAX))
    cursors.keep((log2 >= UNIT_MIN.bit_length() - 1) & (log2 <= UNIT_MAX.bit_length() - 1))
    counts = None
    if stream.counts is None:
        cursors.keep((widths == 0) & (lengths == stream.rows * stream.item_bytes))
    else:
        counts = cursors.counts(widths, stream.rows)
        # Each bounded first, so that no sum wraps; and no product is made that might.
        cursors.keep(counts.max(axis=1, initial=0) < limits.BLOCK_BYTES_MAX)
        items = np.where(cursors.alike[:, None], counts, 0).sum(axis=1, dtype=np.uint64)
        if stream.item_bytes:
            whole, rest = np.divmod(lengths, np.uint64(stream.item_bytes))
            cursors.keep((items == whole) & (rest == 0))
        else:
            cursors.keep(lengths == 0)
    units = np.int64(1) << cursors.of_alike(log2)
    at = cursors.take(8 * unit_count(cursors.of_alike(lengths), units))
    plain = cursors.of_alike(offsets), cursors.of_alike(lengths)
    each = unit_count(plain[1], units)
    checksums = cursors.read(spread(at, each, 8), "<u8")
    kept = None
    if counts is not None:
        kept = cursors.of_alike(counts)
        kept = kept.astype(np.min_scalar_type(int(kept.max(initial=0))))
    return Streams(*plain, units, kept, checksums, bounds(each))


class _Cursors:
    """Reads directories of any sizes side by side, front to back.

    Attributes:
        sizes: int64 [directories], bytes.
        alike: bool [directories]: which of them had all that was asked for, and as it should be. The others fell
            behind: they read what lies at their beginning.
    """

    def __init__(self, directories: Sequence[bytes]) -> None:
        self.sizes = np.fromiter(map(len, directories), np.int64, len(directories))
        stops = np.cumsum(self.sizes)
        self._starts, self._ends = stops - self.sizes, stops - 8
        self._at: Numbers = self._starts
        self.alike = np.ones(len(directories), np.bool_)
        # The last one may read as much behind its beginning as the first one has.
        self._raw = np.frombuffer(b"".join([*directories, directories[0]]), np.uint8)
        bodies = (memoryview(directory)[:-8] for directory in directories)
        self._digests = np.fromiter(map(xxhash.xxh3_64_intdigest, bodies), np.uint64, len(directories))

    def read(self, at: Numbers, dtype: str) -> NDArray[Any]:
        """Returns what lies at places of them all, of whatever alignment."""
        places = self._raw.size - np.dtype(dtype).itemsize + 1
        found: NDArray[Any] = np.ndarray((places,), dtype, self._raw, strides=(1,))[at]
        return found

    def keep(self, right: NDArray[np.bool_]) -> None:
        """Lets those fall behind that are not right."""
        self.alike &= right

    def of_alike(self, numbers: NDArray[Any]) -> Numbers:
        """Returns numbers [directories, ...] as int64; those of directories that fell behind are 0."""
        alike = self.alike.reshape(-1, *[1] * (numbers.ndim - 1))
        return np.where(alike, numbers, 0).astype(np.int64)

    def take(self, size: int | Numbers) -> Numbers:
        """Goes past a part; returns where it begins."""
        self.keep(self._at + size <= self._ends)
        at: Numbers = np.where(self.alike, self._at, self._starts)
        self._at = at + size
        return at

    def same(self, part: bytes) -> None:
        """Goes past a part that is the same in all of them."""
        if part:
            self.keep(self.read(self.take(len(part)), f"S{len(part)}") == part)

    def numbers(self, width: int) -> NDArray[np.uint64]:
        """Goes past a number of `width` bytes; returns it, uint64 [directories]."""
        return self.read(self.take(width), f"<u{width}").astype(np.uint64)

    def counts(self, widths: NDArray[np.uint64], rows: int) -> NDArray[np.uint64]:
        """Goes past the counts of rows, each of `widths` bytes; returns them, uint64 [directories, rows]."""
        self.keep(np.isin(widths, COUNT_WIDTHS))
        at = self.take(rows * self.of_alike(widths))
        found = np.zeros((len(at), rows), np.uint64)
        for width in COUNT_WIDTHS:
            mine = np.flatnonzero(self.alike & (widths == width))
            if mine.size:
                found[mine] = self.read(at[mine, None] + width * np.arange(rows), f"<u{width}")
        return found

    def finish(self) -> NDArray[np.bool_]:
        """Says which of them are alike to their ends, and pass their checksums."""
        self.keep((self._at == self._ends) & (self._digests == self.read(self._ends, "<u8")))
        return self.alike
