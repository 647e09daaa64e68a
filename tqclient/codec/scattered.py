"""Streams of many blocks of a family, read as if they were one."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.arrays import spread
from tqclient.codec.checksum import unit_count, unit_digests
from tqclient.codec.directory import Stream

Numbers = NDArray[np.int64]


class Streams(NamedTuple):
    """One stream of each block: what is not the same in all of them.

    Attributes:
        offsets: int64 [blocks], bytes within the block.
        lengths: int64 [blocks], bytes.
        units: int64 [blocks], bytes per checksum.
        counts: int64 [blocks, rows], items of each row; None: rows have none.
        checksums: uint64, of all blocks.
        firsts: int64 [blocks + 1]: block i has those from firsts[i] to firsts[i + 1].
    """

    offsets: Numbers
    lengths: Numbers
    units: Numbers
    counts: Numbers | None
    checksums: NDArray[np.uint64]
    firsts: Numbers


class Scattered(Stream):
    """One stream of many blocks, all rows of each; they are numbered as the blocks were named.

    Attributes:
        sizes: int64 [rows], bytes.
    """

    def __init__(
        self, first: Stream, streams: Streams, blocks: Numbers, memory: NDArray[np.uint8], origins: Numbers
    ) -> None:
        """Args: `first`: of the family's first block; the others are as for `Family.scattered`."""
        counts = None if streams.counts is None else streams.counts[blocks].reshape(-1)
        rows, none = first.rows * len(blocks), np.empty(0, np.uint64)
        self._lengths = streams.lengths[blocks]
        super().__init__(0, int(self._lengths.sum()), 0, rows, first.item_bytes, counts, none, first.entry)
        self.sizes = np.full(rows, first.item_bytes) if counts is None else counts * first.item_bytes
        self._rows = first.rows
        self._memory = memory
        self._starts = origins + streams.offsets[blocks]
        self._units = streams.units[blocks]
        firsts = streams.firsts[blocks]
        self._checksums = streams.checksums[spread(firsts, streams.firsts[blocks + 1] - firsts)]

    def row_counts(self, rows: Numbers | None = None) -> Numbers:
        """Items of each row, int64. All rows, whatever is asked for: every block is wanted whole."""
        return np.ones(self.rows, np.int64) if self.counts is None else self.counts

    def copy(self, target: NDArray[np.uint8], places: Numbers, *, verify: bool) -> int | None:
        """Copies each row to its place, and compares the copies with their checksums.

        Args:
            target: uint8.
            places: int64 [rows], bytes; the rows of a block lie side by side.
            verify: False leaves the comparison out.

        Returns:
            The first row that differs, or None.
        """
        firsts = places[:: self._rows]
        stops, ends = (self._starts + self._lengths).tolist(), (firsts + self._lengths).tolist()
        memory = self._memory
        digests: list[int] = []
        blocks = zip(self._starts.tolist(), stops, firsts.tolist(), ends, self._units.tolist(), strict=True)
        for start, stop, place, end, unit in blocks:
            copied = target[place:end]
            copied[:] = memory[start:stop]
            if verify:  # while it is in the cache
                digests += unit_digests(copied, unit)
        if not verify:
            return None
        different = np.flatnonzero(np.array(digests, np.uint64) != self._checksums)
        return self._row_of(int(different[0])) if different.size else None

    def _row_of(self, checksum: int) -> int:
        """Returns the first row that has bytes of a checksum's unit."""
        stops = np.cumsum(-(-self._lengths // self._units))
        block = int(np.searchsorted(stops, checksum, "right"))
        unit, rows = int(self._units[block]), slice(block * self._rows, (block + 1) * self._rows)
        start = (checksum - int(stops[block]) + unit_count(int(self._lengths[block]), unit)) * unit
        return rows.start + int(np.searchsorted(np.cumsum(self.sizes[rows]), start, "right"))
