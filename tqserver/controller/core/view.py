"""Which samples are ready for one consumer and one set of fields."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CHUNK_ROWS: Final = 1_024
"""Rows that the first step of a scan looks at; each further step looks at twice as many."""


class View:
    """A bitmap of ready slots, kept up to date at every change of a row: a claim costs the same at any partition size.

    Attributes:
        fields: that make a sample ready, sorted.
        ready: bool [capacity], by slot.
        count: of ready slots.
        head: no slot below it is ready.
    """

    def __init__(self, fields: tuple[str, ...], ready: NDArray[np.bool_]) -> None:
        self.fields = fields
        self.ready = ready
        self.count = int(np.count_nonzero(ready))
        self.head = 0

    def assign(self, slots: Any, mask: NDArray[np.bool_]) -> None:
        """Sets whether slots are ready.

        Args:
            slots: int64 [n], each once, or a slice.
            mask: bool [n].
        """
        self.count += int(np.count_nonzero(mask)) - int(np.count_nonzero(self.ready[slots]))
        self.ready[slots] = mask
        if self.count and mask.any():
            first = slots.start + int(mask.argmax()) if isinstance(slots, slice) else int(slots[mask].min())
            self.head = min(self.head, first)

    def first(self, rows: int) -> NDArray[np.int64]:
        """Returns the lowest ready slots, at most `rows` of them: int64 [n], ascending."""
        rows = min(rows, self.count)
        parts: list[NDArray[np.int64]] = []
        found, start, step = 0, self.head, CHUNK_ROWS
        while found < rows:
            part = np.flatnonzero(self.ready[start : start + step])[: rows - found] + start
            if not found and len(part):
                self.head = int(part[0])
            parts.append(part)
            found += len(part)
            start, step = start + step, step * 2
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)
