"""Numbers of requests, by which a daemon knows a repeated one."""

from __future__ import annotations

import threading


class Numbering:
    """Numbers what one client sends, and knows which of it has its answer. Safe to use from many threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the finalizer of a batch may run inside any holder
        self._next = 1
        self._open: set[int] = set()

    def take(self) -> int:
        """Returns the number of a new one."""
        with self._lock:
            number = self._next
            self._next += 1
            self._open.add(number)
            return number

    def settle(self, number: int) -> None:
        """Says that it is not repeated any more. Repeatable."""
        with self._lock:
            self._open.discard(number)

    def settled_below(self) -> int:
        """Returns the lowest number that may still be repeated."""
        with self._lock:
            return min(tuple(self._open), default=self._next)

    def still_open(self) -> tuple[int, list[int]]:
        """Returns the next number, and those below it that may still be repeated, ascending."""
        with self._lock:
            return self._next, sorted(self._open)
