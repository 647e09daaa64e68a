"""Sets of small numbers, such as the slots of samples."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core.arrays import grown

CHUNK_ROWS: Final = 1_024
"""Rows that the first step of a scan looks at, at most; each further step looks at twice as many."""
CHUNK_PER_ROW: Final = 16
"""Rows that it looks at for each one that it is to find: the few that one claim takes cost little."""


class Bitmap:
    """A set of small numbers that is kept up to date at every change: finding the lowest or highest few costs the same
    however many there are.

    Attributes:
        ready: bool [capacity], by number.
        count: of the members.
        head: no number below it is a member.
        tail: no number from it on is a member.
    """

    def __init__(self, ready: NDArray[np.bool_]) -> None:
        self.ready = ready
        self.count = int(np.count_nonzero(ready))
        self.head = 0
        self.tail = len(ready)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return self.ready.nbytes

    def resize(self, capacity: int) -> None:
        """Makes room for more numbers."""
        self.ready = grown(self.ready, capacity)

    def assign(self, slots: Any, mask: NDArray[np.bool_]) -> None:
        """Sets whether numbers are members.

        Args:
            slots: int64 [n], each once, or a slice.
            mask: bool [n].
        """
        self.count += int(np.count_nonzero(mask)) - int(np.count_nonzero(self.ready[slots]))
        self.ready[slots] = mask
        if self.count and mask.any():
            if isinstance(slots, slice):
                first = slots.start + int(mask.argmax())
                last = slots.start + len(mask) - 1 - int(mask[::-1].argmax())
            else:
                chosen = slots[mask]
                first, last = int(chosen.min()), int(chosen.max())
            self.head = min(self.head, first)
            self.tail = max(self.tail, last + 1)

    def discard(self, slots: Any) -> None:
        """Takes numbers out, whether they are members or not; `slots` as in `assign`."""
        if isinstance(slots, np.ndarray) and len(slots) == 1:  # the claims of a stream: `first` finds the next at once
            slot = slots.item()
            self.count -= self.ready.item(slot)
            self.ready[slot] = False
            self.head += slot == self.head
            return
        self.count -= int(np.count_nonzero(self.ready[slots]))
        self.ready[slots] = False

    def first(self, rows: int) -> NDArray[np.int64]:
        """Returns the lowest members, at most `rows` of them: int64 [n], ascending."""
        rows = min(rows, self.count)
        if rows == 1 and self.ready[self.head]:
            return np.array([self.head], dtype=np.int64)
        parts: list[NDArray[np.int64]] = []
        found, start, step = 0, self.head, min(CHUNK_ROWS, CHUNK_PER_ROW * rows)
        while found < rows:
            part = self.ready[start : start + step].nonzero()[0][: rows - found] + start
            if not found and len(part):
                self.head = int(part[0])
            parts.append(part)
            found += len(part)
            start, step = start + step, step * 2
        return _joined(parts)

    def last(self, rows: int) -> NDArray[np.int64]:
        """Returns the highest members, at most `rows` of them: int64 [n], descending."""
        rows = min(rows, self.count)
        parts: list[NDArray[np.int64]] = []
        found, stop, step = 0, self.tail, min(CHUNK_ROWS, CHUNK_PER_ROW * rows)
        while found < rows:
            start = max(stop - step, 0)
            part = self.ready[start:stop].nonzero()[0][::-1][: rows - found] + start
            if not found and len(part):
                self.tail = int(part[0]) + 1
            parts.append(part)
            found += len(part)
            stop, step = start, step * 2
        return _joined(parts)


def _joined(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    if len(parts) == 1:  # as a rule: where the last claim stopped, others are ready
        return parts[0]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
