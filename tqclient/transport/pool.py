"""Receive and staging buffers whose pages stay warm from one call to the next."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.limits import KIB, POOL_IDLE_BYTES_MAX, POPULATE_BYTES
from tqclient.memory import Memory

BUFFER_BYTES_MIN: Final = 64 * KIB
"""Of the smallest size class."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counts since the pool was made, and bytes now.

    Attributes:
        hits: buffers handed out that had been used before.
        misses: buffers that had to be made.
        live_bytes: of buffers that arrays lie over.
        idle_bytes: of buffers that wait to be handed out.
    """

    hits: int
    misses: int
    live_bytes: int
    idle_bytes: int


def size_class(length: int) -> int:
    """Returns the size of the buffer that serves `length` bytes: the next quarter step between powers of two."""
    if length <= BUFFER_BYTES_MIN:
        return BUFFER_BYTES_MIN
    step = 1 << ((length - 1).bit_length() - 3)
    return -(-length // step) * step


class _Buffer:
    """Memory of one size class, and how much of it is warm."""

    __slots__ = ("idle_since", "memory", "populated_bytes")

    def __init__(self, size: int) -> None:
        self.memory = Memory(size)
        self.populated_bytes = 0
        self.idle_since = 0
        if size >= POPULATE_BYTES:
            self.memory.prefer_huge_pages()

    def warm(self, length: int) -> None:
        stop = min(-(-length // mmap.PAGESIZE) * mmap.PAGESIZE, self.memory.length)
        if stop > self.populated_bytes:
            self.memory.populate(self.populated_bytes, stop)
            self.populated_bytes = stop


class _Lease:
    """What the arrays over a buffer hold: when the last of them dies, this does, and the buffer is free again."""

    __slots__ = ("__array_interface__", "__weakref__")

    def __init__(self, memory: Memory, length: int) -> None:
        interface: dict[str, Any] = memory.__array_interface__
        self.__array_interface__ = {**interface, "shape": (length,)}


class BufferPool:
    """Hands out buffers and takes them back when nobody can see them any more. Safe to use from many threads.

    A buffer comes back when the last array or tensor over it is gone: `torch.from_numpy`, slices and nested tensors
    keep the array that they came from. A forked child starts with an empty pool; arrays that it inherited stay good.
    """

    def __init__(self, idle_bytes_max: int = POOL_IDLE_BYTES_MAX) -> None:
        """Makes an empty pool.

        Args:
            idle_bytes_max: how much waits at most; the buffers idle longest go first.
        """
        self._idle_bytes_max = idle_bytes_max
        self._lock = threading.Lock()
        self._idle: dict[int, deque[_Buffer]] = {}
        self._returned: deque[_Buffer] = deque()
        self._clock = 0
        self._hits = self._misses = self._live_bytes = self._idle_bytes = 0
        _pools.add(self)

    def take(self, length: int) -> NDArray[np.uint8]:
        """Returns a writable array, uint8 `[length]`, of arbitrary content, at the start of a page.

        Its pages are present. Views of it, and tensors over them, keep the buffer from being handed out again.

        Raises:
            MemoryError: the system has no more.
        """
        size = size_class(length)
        with self._lock:
            waiting = self._idle.get(size)
            buffer = waiting.pop() if waiting else None
            if buffer is None:
                self._misses += 1
            else:
                self._hits += 1
                self._idle_bytes -= size
            self._live_bytes += size
        self._collect()
        try:
            buffer = buffer or _Buffer(size)
            buffer.warm(length)
        except OSError as error:
            with self._lock:
                self._live_bytes -= size
            raise MemoryError(f"no buffer of {length} bytes: {error.strerror}") from None
        lease = _Lease(buffer.memory, length)
        weakref.finalize(lease, self._give_back, buffer).atexit = False
        return np.asarray(lease)

    def stats(self) -> PoolStats:
        """Returns the counters, taken at one instant."""
        self._collect()
        with self._lock:
            stats = PoolStats(self._hits, self._misses, self._live_bytes, self._idle_bytes)
        self._collect()
        return stats

    def clear(self) -> None:
        """Returns every idle buffer to the system."""
        self._collect()
        with self._lock:
            idle, self._idle, self._idle_bytes = self._idle, {}, 0
        idle.clear()
        self._collect()

    def _give_back(self, buffer: _Buffer) -> None:
        # Runs wherever an array dies, possibly inside `take` of this very thread: it must not wait for the lock.
        self._returned.append(buffer)
        self._collect()

    def _collect(self) -> None:
        """Moves returned buffers to the idle ones.

        A buffer that is returned while another thread holds the lock is seen by that thread's next look: every holder
        looks after letting go.
        """
        while self._returned and self._lock.acquire(blocking=False):
            released: list[_Buffer] = []  # unmapped after the lock is let go
            try:
                while self._returned:
                    self._put_idle(self._returned.popleft())
                while self._idle_bytes > self._idle_bytes_max:
                    released.append(self._pop_oldest())
            finally:
                self._lock.release()

    def _put_idle(self, buffer: _Buffer) -> None:
        size = buffer.memory.length
        self._clock += 1
        buffer.idle_since = self._clock
        self._idle.setdefault(size, deque()).append(buffer)
        self._live_bytes -= size
        self._idle_bytes += size

    def _pop_oldest(self) -> _Buffer:
        waiting = min((queue for queue in self._idle.values() if queue), key=lambda queue: queue[0].idle_since)
        buffer = waiting.popleft()
        self._idle_bytes -= buffer.memory.length
        return buffer

    def _reset_in_child(self) -> None:
        self._lock = threading.Lock()  # a thread that does not exist here may hold the old one
        self._idle, self._idle_bytes = {}, 0


_pools: Final[weakref.WeakSet[BufferPool]] = weakref.WeakSet()


def _reset_pools() -> None:
    for pool in list(_pools):
        pool._reset_in_child()


os.register_at_fork(after_in_child=_reset_pools)
