"""One consumer's progress over a partition."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core import limits
from tqserver.controller.core.view import View

OPEN: Final = 0
"""Pending, or ready once the fields that are asked for are written."""
LEASED: Final = 1
CONSUMED: Final = 2
DEAD: Final = 3
"""Dropped: given up after max_attempts deliveries."""
STALE: Final = 4
"""Dropped: ruled out by max_staleness."""
GONE: Final = 5
"""No sample lies in this slot any more."""
STATES: Final = 6

Written = Callable[[tuple[str, ...], Any], "NDArray[np.bool_]"]


class Consumer:
    """State and attempts of every slot, and the views over them.

    Attributes:
        name: of the consumer.
        state: uint8 [capacity].
        attempts: uint16 [capacity]: deliveries so far.
        counts: int64 [STATES]: slots in each state.
        last_fields: those of its latest claim; its pending and ready samples are counted by them.
    """

    def __init__(self, name: str, capacity: int, written: Written) -> None:
        self.name = name
        self.state = np.zeros(capacity, dtype=np.uint8)
        self.attempts = np.zeros(capacity, dtype=np.uint16)
        self.counts = np.zeros(STATES, dtype=np.int64)
        self.last_fields: tuple[str, ...] | None = None
        # A cache: what a view says follows from the states and the columns.
        self.views: OrderedDict[tuple[str, ...], View] = OrderedDict()
        self._written = written

    def resize(self, capacity: int) -> None:
        """Makes room for more slots."""
        self.state = grown(self.state, capacity)
        self.attempts = grown(self.attempts, capacity)
        for view in self.views.values():
            view.ready = grown(view.ready, capacity)

    def begin(self, alive: NDArray[np.bool_], stale: NDArray[np.bool_]) -> None:
        """Takes in the first slots, of which nothing is known yet: as open, or stale, where a sample lies in them."""
        stale = stale & alive
        states = self.state[: len(alive)]
        states[:] = OPEN
        states[stale] = STALE
        states[~alive] = GONE
        dropped, live = int(np.count_nonzero(stale)), int(np.count_nonzero(alive))
        self.counts[[OPEN, STALE, GONE]] = live - dropped, dropped, len(alive) - live

    def extend(self, start: int, stop: int) -> None:
        """Takes in new samples, as open."""
        self.state[start:stop] = OPEN
        self.attempts[start:stop] = 0
        self.counts[OPEN] += stop - start

    def move(self, slots: NDArray[np.int64], state: int) -> None:
        """Puts slots, each named once, into a state."""
        if not len(slots):
            return
        self.counts -= np.bincount(self.state[slots], minlength=STATES)
        self.counts[state] += len(slots)
        self.state[slots] = state
        self.refresh(slots)

    def vacate(self, slots: NDArray[np.int64]) -> None:
        """No sample lies in these slots any more."""
        self.move(slots, GONE)

    def refresh(self, slots: Any) -> None:
        """Brings the views up to date for slots (int64 [n] or a slice) whose state or columns changed."""
        if self.views:
            is_open = self.state[slots] == OPEN
            for view in self.views.values():
                mask = is_open & self._written(view.fields, slots) if is_open.any() else is_open
                view.assign(slots, mask)

    def view(self, fields: tuple[str, ...], size: int) -> View:
        """Returns the view over a sorted field set, made on first use (linear in the partition's size)."""
        view = self.views.get(fields)
        if view is None:
            ready = np.zeros(len(self.state), dtype=np.bool_)
            used = slice(0, size)
            ready[used] = (self.state[used] == OPEN) & self._written(fields, used)
            view = self.views[fields] = View(fields, ready)
            if len(self.views) > limits.VIEWS_PER_CONSUMER_MAX:
                self.views.popitem(last=False)
        self.views.move_to_end(fields)
        return view

    def pending(self, view: View) -> int:
        """Returns how many samples wait for one of the view's fields."""
        return int(self.counts[OPEN]) - view.count

    def compact(self, kept: NDArray[np.int64], capacity: int) -> None:
        """Keeps these slots, in this order, as the first ones."""
        self.state = grown(self.state[kept], capacity)
        self.attempts = grown(self.attempts[kept], capacity)
        self.counts[GONE] = 0
        for fields, view in self.views.items():
            self.views[fields] = View(fields, grown(view.ready[kept], capacity))


def grown(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    """Returns a copy of an array with zeros behind it, up to `capacity`."""
    target = np.zeros(capacity, dtype=array.dtype)
    target[: len(array)] = array
    return target
