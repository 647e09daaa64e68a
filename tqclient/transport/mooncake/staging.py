"""Slots of registered memory: handed out, kept back while a transfer may still use them, and taken back."""

from __future__ import annotations

import threading
from bisect import bisect_left
from typing import Final

ALIGN: Final = 64
"""Bytes; every slot begins on a multiple of it."""


class Slot:
    """A run of registered bytes that nobody else uses while this has a holder.

    Attributes:
        offset: in the registered memory.
        length: bytes.
    """

    __slots__ = ("_area", "_holders", "length", "offset")

    def __init__(self, area: Staging, offset: int, length: int) -> None:
        self._area = area
        self._holders = 1
        self.offset = offset
        self.length = length

    def hold(self) -> None:
        """Adds a holder."""
        with self._area.changed:
            self._holders += 1

    def release(self) -> None:
        """Takes a holder away; the last one gives the bytes back."""
        with self._area.changed:
            self._holders -= 1
            if self._holders == 0:
                self._area._give_back(self.offset, self.length)


class Staging:
    """One area of registered memory. Safe to use from many threads."""

    def __init__(self, start: int, length: int) -> None:
        """Makes it all free.

        Args:
            start: of the area in the registered memory; a multiple of `ALIGN`.
            length: bytes; a multiple of `ALIGN`.
        """
        self.length = length
        self.changed = threading.Condition()
        self._free = [(start, length)]  # ascending, no two adjacent
        self._taken_bytes = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes of the slots that have a holder."""
        return self._taken_bytes

    def take(self, length: int) -> Slot | None:
        """Returns a slot with one holder; None when there is no room for it now."""
        with self.changed:
            return self._take(length)

    def wait(self, length: int, timeout: float | None) -> Slot | None:
        """Does as `take`, once there is room; None when the time is up before."""
        with self.changed:
            return self.changed.wait_for(lambda: self._take(length), timeout)

    def _take(self, length: int) -> Slot | None:
        size = max(ALIGN, -(-length // ALIGN) * ALIGN)
        # The lowest that fits: what was used before has its pages.
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
                self._taken_bytes += size
                return Slot(self, offset, size)
        return None

    def _give_back(self, offset: int, length: int) -> None:
        self._taken_bytes -= length
        start, stop = offset, offset + length
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == stop:
            stop += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == start:
            start = self._free.pop(index - 1)[0]
            index -= 1
        self._free.insert(index, (start, stop - start))
        self.changed.notify_all()
