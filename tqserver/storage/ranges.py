"""Disjoint runs of bytes, coalesced and kept in address order."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator


class Ranges:
    """A set of byte addresses, held as maximal `[start, end)` runs.

    Attributes:
        total: bytes in the set.
    """

    __slots__ = ("_ends", "_starts", "_widest", "total")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._widest = 0  # no run is longer than this; exact after a search that found nothing
        self.total = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self._starts, self._ends, strict=True)

    def __len__(self) -> int:
        return len(self._starts)

    def covers(self, start: int, end: int) -> bool:
        """Whether every byte of `[start, end)` is in the set."""
        index = bisect_right(self._starts, start) - 1
        return index >= 0 and end <= self._ends[index]

    def widest(self) -> int:
        """Returns the length of the longest run."""
        self._widest = max((end - start for start, end in self), default=0)
        return self._widest

    def add(self, start: int, end: int) -> None:
        """Adds bytes none of which is in the set.

        Raises:
            ValueError: one of them is.
        """
        index = bisect_left(self._starts, start)
        if (index and self._ends[index - 1] > start) or (index < len(self._starts) and self._starts[index] < end):
            raise ValueError(f"[{start}, {end}) overlaps a run that is in the set")
        self.total += end - start
        joins_left = index > 0 and self._ends[index - 1] == start
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            self._ends[index - 1] = self._ends.pop(index)
            del self._starts[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = start
        else:
            self._starts.insert(index, start)
            self._ends.insert(index, end)
        at = index - 1 if joins_left else index
        self._widest = max(self._widest, self._ends[at] - self._starts[at])

    def remove(self, start: int, end: int) -> None:
        """Removes bytes all of which are in one run.

        Raises:
            ValueError: one of them is not.
        """
        index = bisect_right(self._starts, start) - 1
        if index < 0 or end > self._ends[index]:
            raise ValueError(f"[{start}, {end}) is not within one run of the set")
        self.total -= end - start
        run_start, run_end = self._starts[index], self._ends[index]
        if run_start == start and run_end == end:
            del self._starts[index], self._ends[index]
        elif run_start == start:
            self._starts[index] = end
        elif run_end == end:
            self._ends[index] = start
        else:
            self._ends[index] = start
            self._starts.insert(index + 1, end)
            self._ends.insert(index + 1, run_end)

    def take_first(self, length: int) -> int | None:
        """Removes `length` bytes at the lowest address where they lie in one piece; returns it, or None."""
        if length > self._widest:
            return None
        for start, end in self:
            if end - start >= length:
                self.remove(start, start + length)
                return start
        self.widest()
        return None

    def take_last(self, length: int) -> int | None:
        """Removes `length` bytes at the highest address where they lie in one piece; returns it, or None."""
        if length > self._widest:
            return None
        for index in range(len(self._starts) - 1, -1, -1):
            end = self._ends[index]
            if end - self._starts[index] >= length:
                self.remove(end - length, end)
                return end - length
        self.widest()
        return None
