"""The highest numbers among ready samples, found without looking at all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core.arrays import distinct, grown
from tqserver.controller.core.bitmap import Bitmap

FACTOR: Final = 2
"""A run is more than so many times as long as the next one; otherwise the two become one."""


@dataclass(frozen=True, slots=True)
class _Run:
    """Slots in the order of their numbers, the highest first, the lower slot of equals first.

    Attributes:
        slots: int64 [n]; some may belong to a later run by now.
        ready: which of them are ready and belong to this run, by their place in it.
    """

    slots: NDArray[np.int64]
    ready: Bitmap


class PriorityIndex:
    """All slots in a few sorted runs, of lengths that fall at least by half from one to the next.

    New slots, and those whose number changed, become a run of their own, which takes in those before it that are not
    much longer: a slot is sorted anew as often as the logarithm of their number says (the logarithmic method of Bentley
    and Saxe, 1980). Finding the highest few looks at the first ready ones of each run.
    """

    def __init__(self) -> None:
        self._runs: dict[int, _Run] = {}  # by serial number, the longest and oldest first
        self._serial = 0
        self._size = 0  # slots that are known
        self._touched: list[NDArray[np.int64]] = []
        self._touched_count = 0
        # By slot: its run, its place in it, and its number as it was sorted by.
        self._run_of = np.zeros(0, dtype=np.int64)
        self._place = np.zeros(0, dtype=np.int64)
        self._number = np.zeros(0, dtype=np.float64)

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        by_slot = self._run_of.nbytes + self._place.nbytes + self._number.nbytes
        return by_slot + sum(run.slots.nbytes + run.ready.nbytes for run in self._runs.values())

    def touch(self, slots: Any) -> None:
        """The readiness or the numbers of slots (int64 [n], or a slice) may have changed."""
        if isinstance(slots, slice):
            slots = np.arange(slots.start, min(slots.stop, self._size))
        known: NDArray[np.int64] = slots[slots < self._size]
        if len(known):
            self._touched.append(known)
            self._touched_count += len(known)
        if self._touched_count > self._size:  # nobody asks: it need not grow for ever
            self._touched = [distinct(np.concatenate(self._touched))]
            self._touched_count = len(self._touched[0])

    def highest(
        self, ready: NDArray[np.bool_], numbers: NDArray[np.float64], size: int, rows: int
    ) -> NDArray[np.int64]:
        """Returns the ready slots with the highest numbers, the lower slot of equals first.

        Args:
            ready: bool, by slot.
            numbers: float64, by slot.
            size: slots in use.
            rows: how many, at most.
        """
        self._refresh(ready, numbers, size)
        found = np.concatenate([run.slots[run.ready.first(rows)] for run in self._runs.values()] or [self._run_of[:0]])
        return found[np.lexsort((found, -numbers[found]))[:rows]]

    def _refresh(self, ready: NDArray[np.bool_], numbers: NDArray[np.float64], size: int) -> None:
        fresh = np.arange(self._size, size)
        self._reserve(size)
        if self._touched:
            touched = distinct(np.concatenate(self._touched))
            self._touched, self._touched_count = [], 0
            moved = self._number[touched] != numbers[touched]
            self._assign(touched, ready[touched] & ~moved)
            self._run_of[touched[moved]] = 0
            fresh = np.concatenate([touched[moved], fresh])
        if len(fresh):
            self._insert(fresh, ready, numbers)

    def _reserve(self, size: int) -> None:
        self._size = size
        if size <= len(self._number):
            return
        for name in ("_run_of", "_place", "_number"):
            old = getattr(self, name)
            setattr(self, name, grown(old, max(size, 2 * len(old))))

    def _assign(self, slots: NDArray[np.int64], mask: NDArray[np.bool_]) -> None:
        runs = self._run_of[slots]
        for serial in distinct(runs).tolist():
            mine = runs == serial
            self._runs[serial].ready.assign(self._place[slots[mine]], mask[mine])

    def _insert(self, slots: NDArray[np.int64], ready: NDArray[np.bool_], numbers: NDArray[np.float64]) -> None:
        """Makes a run of slots that belong to none."""
        while self._runs:
            serial, last = next(reversed(self._runs.items()))
            if len(last.slots) > FACTOR * len(slots):
                break
            del self._runs[serial]
            slots = np.concatenate([last.slots[self._run_of[last.slots] == serial], slots])
        slots = np.sort(slots)
        slots = slots[np.argsort(-numbers[slots], kind="stable")]
        self._serial += 1
        self._runs[self._serial] = _Run(slots, Bitmap(ready[slots]))
        self._run_of[slots] = self._serial
        self._place[slots] = np.arange(len(slots))
        self._number[slots] = numbers[slots]
