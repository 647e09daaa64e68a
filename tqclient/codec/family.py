"""Blocks of one row that differ in numbers alone, as one-row puts leave them by the thousand.

Their directories are parsed as one matrix, and their rows are read as if they were those of one block that is scattered
over the memory. What is not like the others is parsed and read by itself: nothing is taken for granted here that
`directory.parse` checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient import limits
from tqclient.codec.checksum import UNIT_MAX, UNIT_MIN, first_mismatch
from tqclient.codec.directory import COUNTS_AT, SHARED, SIZE_AT, Node, Stream, parse
from tqclient.codec.header import ALIGN, HEADER_BYTES, aligned
from tqclient.errors import CorruptBlock, UnsupportedVersion
from tqclient.limits import KIB

FAMILY_MIN: Final = 8
"""So few blocks are as well parsed one by one."""
KINDS_MAX: Final = 4
"""Of families among directories of one size; the rest is parsed one by one."""
STREAM_BYTES_MAX: Final = 128 * KIB
"""A longer stream is worth a copy of its own: all that comes with one is little beside its bytes."""
_LENGTH_AT, _WIDTH_AT, _UNIT_AT = 8, 16, 17  # within the entry of a stream, whose offset comes first

Numbers = NDArray[np.int64]


class Streams(NamedTuple):
    """One stream of each block: what is not the same in all of them.

    Attributes:
        offsets: int64 [blocks], bytes within the block.
        lengths: int64 [blocks], bytes.
        units: int64 [blocks], bytes per checksum.
        counts: int64 [blocks], items of the row; None: rows have none.
        checksums: uint64 [blocks, units].
    """

    offsets: Numbers
    lengths: Numbers
    units: Numbers
    counts: Numbers | None
    checksums: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """Directories that differ in numbers alone. Blocks are known by their place among them.

    Attributes:
        fields: columns by name, as the first block has them.
        sizes: int64 [blocks], bytes of each.
        start: where the bytes of each block's streams begin, within the block.
        stops: int64 [blocks]: where they end; 0: a block has none.
        streams: in the directory's order.
    """

    fields: dict[str, Node]
    sizes: Numbers
    start: int
    stops: Numbers
    streams: tuple[Streams, ...]
    _ranges: dict[frozenset[str], NDArray[np.uint64]] = field(default_factory=dict)

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
        streams = iter(self.streams)
        named = [(name in wanted, next(streams)) for name, node in self.fields.items() for _ in _streams(node)]
        ranges = []
        for is_wanted, run in groupby(named, key=itemgetter(0)):
            own = [stream for _, stream in run]
            if is_wanted:
                start = own[0].offsets
                stop = np.max([np.where(each.lengths > 0, each.offsets + each.lengths, start) for each in own], axis=0)
                ranges.append((start, stop - start))
        return np.array(ranges, np.uint64).reshape(-1, 2, len(self.sizes)).transpose(2, 0, 1)

    def scattered(self, blocks: Numbers, memory: NDArray[np.uint8], origins: Numbers) -> dict[str, Node]:
        """Returns the fields of some of the blocks as if they were those of one block, by name.

        Args:
            blocks: int64 [n].
            memory: uint8, that holds all of them.
            origins: int64 [n]: where in it they begin.
        """
        streams = iter(self.streams)
        where = blocks, memory, origins
        return {name: _scattered(node, streams, where) for name, node in self.fields.items()}


def _scattered(node: Node, streams: Iterator[Streams], where: tuple[Numbers, NDArray[np.uint8], Numbers]) -> Node:
    own = tuple([Scattered(stream, next(streams), *where) for stream in node.streams])
    return replace(node, streams=own, children=tuple([_scattered(child, streams, where) for child in node.children]))


class Scattered(Stream):
    """One stream of many blocks, one row of each; the rows are numbered as the blocks were named.

    Attributes:
        sizes: int64 [rows], bytes.
    """

    def __init__(
        self, first: Stream, streams: Streams, blocks: Numbers, memory: NDArray[np.uint8], origins: Numbers
    ) -> None:
        """Args: `first`: of the family's first block; the others are as for `Family.scattered`."""
        self.sizes = streams.lengths[blocks]
        counts = None if streams.counts is None else streams.counts[blocks]
        super().__init__(
            0, int(self.sizes.sum()), 0, len(blocks), first.item_bytes, counts, np.empty(0, np.uint64), first.entry
        )
        self._memory = memory
        self._starts = origins + streams.offsets[blocks]
        self._units = streams.units[blocks]
        self._digests = streams.checksums[blocks]

    def row_counts(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Items of each row, int64. All rows, whatever is asked for: each block has one."""
        return np.ones(self.rows, np.int64) if self.counts is None else self.counts

    def copy(self, target: NDArray[np.uint8], places: Numbers, *, verify: bool) -> int | None:
        """Copies each row to its place, and compares the copy with its checksums.

        Returns:
            The first row that differs, or None.
        """
        stops = (self._starts + self.sizes).tolist()
        ends = (places + self.sizes).tolist()
        rows = zip(self._starts.tolist(), stops, places.tolist(), ends, self._units.tolist(), strict=True)
        memory, digests = self._memory, self._digests
        for row, (start, stop, place, end, unit) in enumerate(rows):
            copied = target[place:end]
            copied[:] = memory[start:stop]
            if verify and first_mismatch(copied, unit, digests[row]) is not None:
                return row
        return None


def families(directories: Sequence[bytes]) -> list[tuple[Family, int] | None]:
    """Finds the directories that differ in numbers alone.

    Returns:
        For each the family and its place in it; None: parse it, whatever comes of that.
    """
    by_size: dict[int, list[int]] = {}
    for index, directory in enumerate(directories):
        by_size.setdefault(len(directory), []).append(index)
    found: list[tuple[Family, int] | None] = [None] * len(directories)
    for alike in by_size.values():
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
    """Returns the family of the first directory, and which of them, all of one size, belong to it."""
    none = np.zeros(len(directories), np.bool_)
    try:
        rows, _, nodes, _ = parse(directories[0])
    except (CorruptBlock, UnsupportedVersion):
        return None, none
    streams = [stream for node in nodes for stream in _streams(node)]
    if rows != 1 or any(node.kind == SHARED for top in nodes for node in top.preorder()):
        return None, none
    size = len(directories[0])
    raw = np.frombuffer(b"".join(directories), np.uint8).reshape(-1, size)
    digests = np.fromiter(map(xxhash.xxh3_64_intdigest, raw[:, :-8]), np.uint64, len(raw))
    alike = np.ones(size, np.bool_)
    alike[SIZE_AT : SIZE_AT + 8] = alike[-8:] = False
    for stream in streams:
        entry, end = stream.entry, stream.entry_end
        alike[entry : entry + _WIDTH_AT] = alike[entry + _UNIT_AT] = alike[entry + COUNTS_AT : end] = False
    members = (digests == _numbers(raw, size - 8)) & (raw[:, alike] == raw[0, alike]).all(axis=1)

    sizes = _numbers(raw, SIZE_AT)
    start = aligned(HEADER_BYTES + size)
    ends, stops = np.full(len(raw), start, np.uint64), np.zeros(len(raw), np.uint64)
    found = []
    for stream in streams:
        own, fits = _of_stream(raw, stream, ends)
        members &= fits
        found.append(own)
        stops = np.where(own.lengths > 0, ends + own.lengths.astype(np.uint64), stops)
        ends = (ends + own.lengths.astype(np.uint64) + np.uint64(ALIGN - 1)) & np.uint64(2**64 - ALIGN)
    members &= (ends == sizes) & (sizes <= limits.BLOCK_BYTES_MAX)
    if not members[0]:
        return None, none
    fields = {node.name: node for node in nodes}
    whole = [np.where(members, numbers, 0).astype(np.int64) for numbers in (sizes, stops)]
    return Family(fields, whole[0], start, whole[1], tuple(found)), members


def _of_stream(raw: NDArray[np.uint8], stream: Stream, ends: NDArray[np.uint64]) -> tuple[Streams, NDArray[np.bool_]]:
    """Reads one stream's entry in each directory; says where it is right. `ends`: of what lies before, aligned."""
    entry = stream.entry
    offsets, lengths = _numbers(raw, entry), _numbers(raw, entry + _LENGTH_AT)
    fits = (offsets == ends) & (lengths < STREAM_BYTES_MAX)
    lengths = np.where(fits, lengths, 0)
    log2 = raw[:, entry + _UNIT_AT].astype(np.int64)
    fits &= (log2 >= UNIT_MIN.bit_length() - 1) & (log2 <= UNIT_MAX.bit_length() - 1)
    units = np.int64(1) << np.where(fits, log2, 0)
    fits &= -(-lengths.astype(np.int64) // units) == len(stream.checksums)
    counts: Numbers | None = None
    if stream.counts is None:
        fits &= lengths == stream.item_bytes
    else:
        width = stream.counts.itemsize
        given = _numbers(raw, entry + COUNTS_AT, width)
        # Bounded first, so that no product wraps.
        most = lengths if stream.item_bytes else np.uint64(limits.BLOCK_BYTES_MAX - 1)
        fits &= given <= most
        fits &= np.where(fits, given, 0) * np.uint64(stream.item_bytes) == lengths
        counts = np.where(fits, given, 0).astype(np.int64)
    at = stream.entry_end - 8 * len(stream.checksums)
    checksums = np.ascontiguousarray(raw[:, at : stream.entry_end]).view("<u8")
    plain = np.where(fits, offsets, 0).astype(np.int64), lengths.astype(np.int64)
    return Streams(*plain, units, counts, checksums), fits


def _numbers(raw: NDArray[np.uint8], at: int, width: int = 8) -> NDArray[np.uint64]:
    """Returns the number of `width` bytes that each directory has at a place."""
    return np.ascontiguousarray(raw[:, at : at + width]).view(f"<u{width}")[:, 0].astype(np.uint64)


def _streams(node: Node) -> list[Stream]:
    return [stream for each in node.preorder() for stream in each.streams]
