"""The block directories that this client knows, so that each crosses the wire once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from tqclient.limits import KIB, MIB

if TYPE_CHECKING:
    from tqclient.codec import Layout

DIRECTORIES_BYTES_MAX: Final = 64 * MIB
"""Of the directories that a client keeps: their encoded bytes, and `LAYOUT_BYTES` for each."""
LAYOUT_BYTES: Final = 16 * KIB
"""What the objects of a parsed directory are taken to need; 9 KB were measured for four fields."""


class DirectoryCache:
    """Layouts by block id; the least recently used ones go first. Safe to use from many threads.

    Args:
        bytes_max: of all entries together.
    """

    def __init__(self, bytes_max: int = DIRECTORIES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._entries: OrderedDict[int, tuple[Layout, int]] = OrderedDict()
        self._bytes = 0

    def get(self, block_id: int) -> Layout | None:
        """Returns the layout of a block, or None when it is not known (any more)."""
        with self._lock:
            entry = self._entries.get(block_id)
            if entry is None:
                return None
            self._entries.move_to_end(block_id)
            return entry[0]

    def put(self, block_id: int, layout: Layout, size_bytes: int) -> None:
        """Remembers the layout of a block, whose encoded directory has `size_bytes`."""
        with self._lock:
            if block_id in self._entries:
                return
            size_bytes += LAYOUT_BYTES
            self._entries[block_id] = (layout, size_bytes)
            self._bytes += size_bytes
            while self._bytes > self._bytes_max:
                _, (_, evicted) = self._entries.popitem(last=False)
                self._bytes -= evicted

    def replace(self, block_id: int, layout: Layout) -> None:
        """Remembers another layout of the same block, if one is remembered."""
        with self._lock:
            if block_id in self._entries:
                self._entries[block_id] = layout, self._entries[block_id][1]

    def __len__(self) -> int:
        return len(self._entries)
