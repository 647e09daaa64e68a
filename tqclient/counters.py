"""What a client has moved, by the path that it took. Safe to use from many threads."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over one kind of path since the client connected.

    Attributes:
        reads: of one block's ranges each.
        read_bytes: that were asked of the path, so as to read and verify what was wanted.
        writes: of one block to one node each.
        written_bytes: of those blocks.
    """

    reads: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0


class Counters:
    """Traffic by the name of the transport."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}

    def read(self, path: str, size_bytes: int, blocks: int = 1) -> None:
        """Counts reads of blocks that succeeded."""
        self._add(path, 0, size_bytes, blocks)

    def wrote(self, path: str, size_bytes: int) -> None:
        """Counts a write that succeeded."""
        self._add(path, 2, size_bytes)

    def _add(self, path: str, position: int, size_bytes: int, blocks: int = 1) -> None:
        with self._lock:
            counts = self._counts.setdefault(path, [0, 0, 0, 0])
            counts[position] += blocks
            counts[position + 1] += size_bytes

    def traffic(self) -> dict[str, Traffic]:
        """Returns what was counted so far, by the name of the transport."""
        with self._lock:
            return {path: Traffic(*counts) for path, counts in self._counts.items()}
