"""Which samples are ready for one consumer, one set of fields and one choice of tags."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core import limits
from tqserver.controller.core.arrays import grown
from tqserver.controller.core.bitmap import Bitmap
from tqserver.controller.core.cache import Cache
from tqserver.controller.core.groups import GroupIndex
from tqserver.controller.core.priorities import PriorityIndex
from tqserver.controller.core.tags import TagFilter


class ViewKey(NamedTuple):
    """What tells the views of a consumer apart.

    Attributes:
        fields: that make a sample ready, sorted.
        where: tags that it must have: an encoded map, or nothing.
        unaborted: it must not be tagged as aborted.
    """

    fields: tuple[str, ...]
    where: bytes = b""
    unaborted: bool = False


def _few() -> Cache[Any, Any]:
    return Cache(limits.IDLE_INDEXES_MAX, limits.INDEXES_PER_VIEW_MAX)


class View(Bitmap):
    """The slots of the samples that are ready. A claim costs the same at any partition size.

    Attributes:
        key: what makes a sample ready.
        filter: of tags; None: all samples.
        open: of a view with a filter, the slots that match it and lack nothing but fields, at most.
        priorities: tag → where its highest numbers are.
        group_indexes: group size (None: as tagged) → which groups are complete.
    """

    def __init__(
        self, key: ViewKey, ready: NDArray[np.bool_], matching: tuple[TagFilter, NDArray[np.bool_]] | None
    ) -> None:
        super().__init__(ready)
        self.key = key
        self.filter = matching[0] if matching else None
        self.open = Bitmap(matching[1]) if matching else None
        self.priorities: Cache[str, PriorityIndex] = _few()
        self.group_indexes: Cache[int | None, GroupIndex] = _few()

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about, with those of its indexes."""
        by_tags = 0 if self.open is None else self.open.nbytes
        indexes = sum(each.nbytes for each in self.priorities) + sum(each.nbytes for each in self.group_indexes)
        return super().nbytes + by_tags + indexes

    def resize(self, capacity: int) -> None:
        """Makes room for more slots."""
        super().resize(capacity)
        if self.open is not None:
            self.open.resize(capacity)

    def compacted(self, kept: NDArray[np.int64], capacity: int) -> View:
        """Returns the view of these slots alone, in this order, as the first ones."""
        matching = None
        if self.filter is not None and self.open is not None:
            matching = (self.filter, grown(self.open.ready[kept], capacity))
        return View(self.key, grown(self.ready[kept], capacity), matching)

    def update(self, slots: Any, mask: NDArray[np.bool_], matching: NDArray[np.bool_]) -> None:
        """Sets whether slots are ready, and whether they match the filter and are open; as `assign`."""
        delta = mask.astype(np.int64) - self.ready[slots] if len(self.group_indexes) else None
        self.assign(slots, mask)
        if self.open is not None:
            self.open.assign(slots, matching)
        self._changed(slots, delta)

    def close(self, slots: Any) -> None:
        """None of these slots is ready or open any more."""
        delta = -self.ready[slots].astype(np.int64) if len(self.group_indexes) else None
        self.discard(slots)
        if self.open is not None:
            self.open.discard(slots)
        self._changed(slots, delta)

    def _changed(self, slots: Any, delta: NDArray[np.int64] | None) -> None:
        if len(self.priorities):
            for priorities in self.priorities:
                priorities.touch(slots)
            self.priorities.changed()
        if delta is not None:
            for index in self.group_indexes:
                index.change(slots, delta)
            self.group_indexes.changed()
