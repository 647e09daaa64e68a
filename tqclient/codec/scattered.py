"""Streams of many blocks of a family, read as if they were one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.arrays import begins, bounds, spread, told_apart
from tqclient.codec.checksum import Numbers, unit_count, unit_digests, whole_units
from tqclient.codec.clips import Clip, ends_of
from tqclient.codec.directory import Stream


class Streams(NamedTuple):
    """One stream of each block: what is not the same in all of them.

    Attributes:
        offsets: int64 [blocks], bytes within the block.
        lengths: int64 [blocks], bytes.
        units: int64 [blocks], bytes per checksum.
        counts: unsigned [blocks, rows], as narrow as they all fit in, items of each row; None: rows have none.
        checksums: uint64, of all blocks.
        firsts: int64 [blocks + 1]: block i has those from firsts[i] to firsts[i + 1].
    """

    offsets: Numbers
    lengths: Numbers
    units: Numbers
    counts: NDArray[Any] | None
    checksums: NDArray[np.uint64]
    firsts: Numbers

    def bounds(self, blocks: Numbers, first: Stream) -> Numbers:
        """Where the rows of blocks lie within the stream: int64 [len(blocks), rows + 1], bytes.

        Args:
            blocks: int64 [n].
            first: of the family's first block.
        """
        if self.counts is None:
            return np.tile(first.bounds(), (len(blocks), 1))
        return bounds(self.counts[blocks]) * first.item_bytes


class Picks(NamedTuple):
    """Which rows of which blocks, in delivery order, as runs of rows that lie side by side in their block.

    Attributes:
        blocks: int64 [runs].
        firsts: int64 [runs], the first row of each.
        counts: int64 [runs], rows of each.
        origins: int64 [runs]: where in the memory its block begins.
    """

    blocks: Numbers
    firsts: Numbers
    counts: Numbers
    origins: Numbers

    @classmethod
    def of_rows(cls, blocks: Numbers, rows: Numbers, origins: Numbers, at: Numbers) -> Picks:
        """Brings rows together that lie side by side.

        Args:
            blocks: int64 [rows], of each row.
            rows: int64 [rows], within their blocks.
            origins: int64 [rows], of each row's block.
            at: int64 [rows], the place of each in delivery order.
        """
        # A run ends where the block does, or the next row is not the next one, here or in delivery order.
        order = np.arange(rows.size)
        first = np.flatnonzero(begins(blocks) | begins(rows - order) | begins(at - order))
        return cls(blocks[first], rows[first], np.diff(first, append=rows.size), origins[first])

    def rows(self) -> tuple[Numbers, Numbers]:
        """(block, row within it) of each row, int64 [rows] each."""
        return np.repeat(self.blocks, self.counts), spread(self.firsts, self.counts)

    def apart(self) -> Picks:
        """The same rows, each a run of its own."""
        blocks, rows = self.rows()
        return Picks(blocks, rows, np.ones_like(rows), np.repeat(self.origins, self.counts))

    def shared(self, index: NDArray[Any], clips: Sequence[Clip]) -> tuple[Picks, Numbers, Numbers]:
        """Finds what the rows of a shared column need, each thing once.

        Args:
            index: unsigned [blocks, rows], which value each row of each block has.
            clips: rows that share a value may want different ranges of it.

        Returns:
            Which values, in which order; the first row that needs each; and which of them each row needs.
        """
        blocks, rows = self.rows()
        numbers = index[blocks, rows].astype(np.int64)
        first, which = told_apart([blocks, numbers, *ends_of(clips)])
        origins = np.repeat(self.origins, self.counts)
        picks = Picks.of_rows(blocks[first], numbers[first], origins[first], np.arange(first.size))
        return picks, first, which


class Scattered(Stream):
    """One stream of many blocks; the rows that are wanted of it are numbered as they were picked.

    Attributes:
        sizes: int64 [rows], bytes.
    """

    def __init__(
        self, first: Stream, streams: Streams, picks: Picks, memory: NDArray[np.uint8], clip: Clip | None = None
    ) -> None:
        """Args: `first`: of the family's first block; `clip`: of the column; else as for `Family.scattered`."""
        picks = picks if clip is None else picks.apart()
        blocks, rows, counts = picks.blocks, int(picks.counts.sum()), None
        if streams.counts is not None:
            counts = streams.counts[picks.rows()].astype(np.int64)
        self.sizes = np.full(rows, first.item_bytes, np.int64) if counts is None else counts * first.item_bytes
        ends, runs = streams.bounds(blocks, first), np.arange(len(blocks))
        starts, stops = ends[runs, picks.firsts], ends[runs, picks.firsts + picks.counts]
        if clip is not None:
            starts, stops = starts + clip.starts * clip.item_bytes, starts + clip.stops * clip.item_bytes
            self.sizes = stops - starts
        lengths = stops - starts
        super().__init__(0, int(lengths.sum()), 0, rows, first.item_bytes, counts, np.empty(0, np.uint64), first.entry)
        self._memory = memory
        self._starts, self._lengths = starts, lengths
        self._units = units = streams.units[blocks]
        self._lows, self._highs = whole_units(starts, stops, units, streams.lengths[blocks])
        self._begins = picks.origins + streams.offsets[blocks]
        checks = unit_count(self._highs - self._lows, units)
        self._checksums = streams.checksums[spread(streams.firsts[blocks] + self._lows // units, checks)]
        self._check_stops, self._row_stops = np.cumsum(checks), np.cumsum(picks.counts)
        self._row_firsts, self._firsts = self._row_stops - picks.counts, picks.firsts

    def row_in_block(self, row: int) -> int:
        """Returns the number that a row has within its block."""
        run = int(np.searchsorted(self._row_stops, row, "right"))
        return int(self._firsts[run]) + row - int(self._row_firsts[run])

    def copy(self, target: NDArray[np.uint8], places: Numbers, *, verify: bool) -> int | None:
        """Copies each row to its place, and compares the copies with their checksums.

        Args:
            target: uint8.
            places: int64 [rows], bytes; the rows of a run lie side by side.
            verify: False leaves the comparison out.

        Returns:
            The first row that differs, or None.
        """
        if not self.rows:
            return None
        memory = self._memory
        scratch = np.empty(int((self._highs - self._lows).max()), np.uint8)
        digests: list[int] = []
        sources, before, ends = self._begins + self._lows, self._starts - self._lows, self._begins + self._highs
        runs = zip(
            *(each.tolist() for each in (sources, ends, before, self._lengths, places[self._row_firsts], self._units)),
            strict=True,
        )
        for source, end, skipped, size, place, unit in runs:
            copied = target[place : place + size]
            if end - source == size:
                copied[:] = memory[source:end]
            elif verify:
                units = scratch[: end - source]
                units[:] = memory[source:end]
                copied[:] = units[skipped : skipped + size]
                copied = units
            else:
                copied[:] = memory[source + skipped : source + skipped + size]
            if verify:  # while it is in the cache
                digests += unit_digests(copied, unit)
        if not verify:
            return None
        different = np.flatnonzero(np.array(digests, np.uint64) != self._checksums)
        return self._row_of(int(different[0])) if different.size else None

    def _row_of(self, check: int) -> int:
        """Returns the first row that has bytes of the unit of a checksum."""
        run = int(np.searchsorted(self._check_stops, check, "right"))
        unit = int(self._units[run])
        left = int(self._check_stops[run]) - check  # of the run, from this unit on
        start = int(self._lows[run]) + (unit_count(int(self._highs[run] - self._lows[run]), unit) - left) * unit
        first = int(self._row_firsts[run])
        ends = int(self._starts[run]) + np.cumsum(self.sizes[first : int(self._row_stops[run])])
        return first + int(np.searchsorted(ends, start, "right"))
