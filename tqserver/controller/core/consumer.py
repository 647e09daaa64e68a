"""One consumer's progress over a partition."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core import limits
from tqserver.controller.core.arrays import grown
from tqserver.controller.core.cache import Cache
from tqserver.controller.core.groups import GroupIndex
from tqserver.controller.core.priorities import PriorityIndex
from tqserver.controller.core.shares import RankGroup, Share
from tqserver.controller.core.tags import TagFilter
from tqserver.controller.core.view import View, ViewKey

if TYPE_CHECKING:
    from tqserver.controller.core.changes import Changes
    from tqserver.controller.core.samples import SampleTable

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
SURPLUS: Final = 6
"""Dropped: its group was granted without it."""
STATES: Final = 7
_SETTLED: Final = (CONSUMED, DEAD, STALE, SURPLUS)


class Consumer:
    """State and attempts of every slot, and the views over them.

    Attributes:
        name: of the consumer.
        state: uint8 [capacity].
        attempts: uint16 [capacity]: deliveries so far.
        counts: int64 [STATES]: slots in each state.
        last_fields: those of its latest claim; its pending and ready samples are counted by them.
        grants: claims and shares that it was granted so far; a random sampler draws by it.
        changes: of its partition, once it is one of that one's consumers.
        ranks: its topology and the shares of its DP ranks; None: no rank ever registered.
        granted_groups: encoded groups that were granted whole: who joins them later is surplus.
    """

    def __init__(self, name: str, capacity: int, samples: SampleTable) -> None:
        self.name = name
        self.state = np.zeros(capacity, dtype=np.uint8)
        self.attempts = np.zeros(capacity, dtype=np.uint16)
        self.counts = np.zeros(STATES, dtype=np.int64)
        self.last_fields: tuple[str, ...] | None = None
        # What a view says follows from the states and the columns.
        self.views: Cache[ViewKey, View] = Cache(
            limits.IDLE_VIEWS_MAX, limits.VIEWS_PER_CONSUMER_MAX, limits.VIEWS_BYTES_MAX
        )
        self.grants = 0
        self.granted_groups: dict[bytes, None] = {}
        self.ranks: RankGroup | None = None
        self.changes: Changes | None = None
        self._samples = samples

    def resize(self, capacity: int) -> None:
        """Makes room for more slots."""
        self.state = grown(self.state, capacity)
        self.attempts = grown(self.attempts, capacity)
        for view in self.views:
            view.resize(capacity)

    def twin(self) -> Consumer:
        """Returns another one of the same progress, which was granted nothing; it takes all views but the latest."""
        twin = Consumer("", 0, self._samples)
        twin.state, twin.attempts, twin.counts = self.state.copy(), self.attempts.copy(), self.counts.copy()
        key, view = self.views.pop_latest()
        self.views, twin.views = twin.views, self.views
        self.views.add(key, view)
        return twin

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
        if self.changes is not None and state in _SETTLED:
            self.changes.settle(self.name, slots, self._samples, consumed=state == CONSUMED)
        if len(slots) == 1:
            self.counts[self.state[slots.item()]] -= 1
        else:
            self.counts -= np.bincount(self.state[slots], minlength=STATES)
        self.counts[state] += len(slots)
        self.state[slots] = state
        if state == OPEN:
            self.refresh(slots)
        else:
            for view in self.views:
                view.close(slots)
            self.views.changed()

    def vacate(self, slots: NDArray[np.int64]) -> None:
        """No sample lies in these slots any more."""
        self.move(slots, GONE)

    def refresh(self, slots: Any) -> None:
        """Brings the views up to date for slots (int64 [n] or a slice) whose state or columns changed."""
        if not len(self.views):
            return
        is_open = self.state[slots] == OPEN
        any_open = bool(is_open.any())
        for view in self.views:
            matching = is_open
            if any_open and view.filter is not None:
                matching = is_open & self._samples.matching(view.filter, slots)
            if any_open and matching.any():
                view.update(slots, matching & self._samples.written(view.key.fields, slots), matching)
            else:
                view.close(slots)
        self.views.changed()

    def shares(self) -> list[Share]:
        """Returns the shares of all of its DP ranks."""
        return [] if self.ranks is None else self.ranks.shares()

    def forget_groups(self) -> None:
        """Samples changed their groups, or groups their numbers: which ones are complete is found out anew."""
        for view in self.views:
            view.group_indexes.clear()

    def view(self, key: ViewKey, size: int) -> View:
        """Returns the view of a key, made on first use (linear in the partition's size)."""
        view = self.views.get(key)
        if view is not None:
            return view
        used = slice(0, size)
        is_open = self.state[used] == OPEN
        matching = None
        if key.where or key.unaborted:
            passes = TagFilter(key.where, key.unaborted)
            is_open &= self._samples.matching(passes, used)
            matching = (passes, grown(is_open, len(self.state)))
        ready = grown(is_open & self._samples.written(key.fields, used), len(self.state))
        return self.views.add(key, View(key, ready, matching))

    def groups(self, view: View, size: int | None) -> GroupIndex:
        """Returns which groups are complete in a view, found out on first use (linear in the partition's size)."""
        index = view.group_indexes.get(size)
        return index or view.group_indexes.add(size, GroupIndex(self._samples, view.ready, size))

    def priorities(self, view: View, tag: str) -> PriorityIndex:
        """Returns where the highest numbers under a tag are, found out on first use."""
        return view.priorities.get(tag) or view.priorities.add(tag, PriorityIndex())

    def pending(self, view: View) -> int:
        """Returns how many samples of the view's choice wait for one of its fields."""
        return (int(self.counts[OPEN]) if view.open is None else view.open.count) - view.count

    def compact(self, kept: NDArray[np.int64], capacity: int) -> None:
        """Keeps these slots, in this order, as the first ones."""
        self.state = grown(self.state[kept], capacity)
        self.attempts = grown(self.attempts[kept], capacity)
        self.counts[GONE] = 0
        self.views.replace(lambda view: view.compacted(kept, capacity))
