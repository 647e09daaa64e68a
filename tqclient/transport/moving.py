"""Pages of a mapping, moved to an address of their own and back: whoever keeps the address loses the pages.

A producer fills tensors in the arena itself. Once they are published nobody may change them, but a tensor can't be
taken away from those who hold it. So it is made over an address to which the arena's pages were moved. When they move
back, zeroed private memory takes their place there, and a store that comes late goes nowhere.

The kernel moves page tables, not pages: some tens of microseconds, whatever the size. To map the pages a second time,
and to unmap them again, takes longer than copying what is in them.
"""

from __future__ import annotations

import mmap
import os
import threading
from contextlib import suppress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.memory import MAP_FAILED, MAP_FIXED, MAP_NORESERVE, Memory, last_error, libc

_MREMAP_MAYMOVE: Final = 1
_MREMAP_FIXED: Final = 2
_MREMAP_DONTUNMAP: Final = 4
"""The source stays mapped, without pages: an access finds those of the file again. Of shared mappings: Linux 5.13."""
_TABLE_BYTES: Final = 2 << 20
"""What one table of page-table entries maps: tables move as a whole between addresses that are congruent by it."""


class MovedPages:
    """The pages that hold bytes `[start, stop)` of a mapping, at another address until `take_back`.

    What others do to the same bytes, or to others on the same pages, through the mapping itself goes on as before: it
    finds the pages again, at the cost of a page fault each.

    Attributes:
        array: uint8 `[stop - start]`, the bytes. It and all views of it keep the address mapped; after `take_back` they
            show zeros at first, and memory that is nobody else's.
    """

    def __init__(self, memory: Memory, start: int, stop: int) -> None:
        """Moves them.

        Args:
            memory: a mapping of a file, shared and writable. It stays mapped until `take_back`.
            start: of the bytes.
            stop: of the bytes; more than `start`.

        Raises:
            OSError: the kernel cannot do it: EINVAL before Linux 5.13.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self._length = -(-stop // mmap.PAGESIZE) * mmap.PAGESIZE - first
        self._home = memory.address + first
        self._memory: Memory | None = memory
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._returning = False  # the pages may have left the address, where there may be private memory by now
        region = Memory(self._length + _TABLE_BYTES, inherited=False)
        skip = (self._home - region.address) % _TABLE_BYTES
        self._address = region.address + skip
        _move(self._home, self._address, self._length)
        # A huge page that holds others' bytes as well does not move: what is of it at either end is fetched at once.
        end = skip + self._length
        head, tail = -(-skip // _TABLE_BYTES) * _TABLE_BYTES, end // _TABLE_BYTES * _TABLE_BYTES
        for edge_start, edge_end in ((skip, min(head, end)), (max(head, tail), end)):
            region.populate(edge_start, edge_end)
        begin = skip + start - first
        self.array: NDArray[np.uint8] = region.array()[begin : begin + stop - start]

    def take_back(self) -> None:
        """Moves the pages back; repeatable. From its return on, no store to `array` reaches them.

        An interrupt may end it between any two steps: called again, it does what is left. In a forked child it does
        nothing: there, other memory may lie at these addresses.

        Raises:
            OSError: no address space; the pages are where they were.
        """
        if self._pid != os.getpid():
            return
        with self._lock:
            if self._memory is None:
                return
            # At most once: a second time, it could move the private memory to where the arena's pages belong.
            first, self._returning = not self._returning, True
            if first:
                with suppress(OSError):  # what matters is the next step; the mapping finds the pages again one by one
                    _move(self._address, self._home, self._length)
            protection = mmap.PROT_READ | mmap.PROT_WRITE
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE
            if libc.mmap(self._address, self._length, protection, flags, -1, 0) == MAP_FAILED:
                raise last_error(f"cannot take back {self._length} bytes")
            self._memory = None


def _move(source: int, target: int, length: int) -> None:
    flags = _MREMAP_MAYMOVE | _MREMAP_FIXED | _MREMAP_DONTUNMAP
    if libc.mremap(source, length, length, flags, target) == MAP_FAILED:
        raise last_error(f"cannot move the pages of {length} bytes")
