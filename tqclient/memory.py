"""Mapped pages as numpy arrays: mapping, populating and unmapping them without the GIL.

The first touch of a page costs ten times what copying it costs, so pages are populated in bulk, ahead of use.
`mmap.mmap` is not used: it keeps a duplicate of the descriptor that a forked child cannot close, and can't be unmapped
by the death of its last view.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.limits import POPULATE_BYTES

_MADV_DONTFORK: Final = 10
_MADV_HUGEPAGE: Final = 14
_MADV_POPULATE_READ: Final = 22
_MADV_POPULATE_WRITE: Final = 23
MAP_FIXED: Final = 0x10
MAP_NORESERVE: Final = 0x4000
_PROT_NONE: Final = 0
HUGE_PAGE_BYTES: Final = 2 << 20
"""Of most processors. A huge page of a file is one of a mapping where both lie alike by it."""
MAP_FAILED: Final = ctypes.c_void_p(-1).value

libc: Final = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def last_error(what: str) -> OSError:
    """Returns why the last call to `libc` of this thread failed."""
    code = ctypes.get_errno()
    return OSError(code, f"{what}: {os.strerror(code)}")


class Memory:
    """A run of mapped pages, which stays mapped while this object or an array over it lives.

    Attributes:
        address: of the first byte; on a page boundary.
        length: bytes.
        writable: whether a store is allowed; a store to other memory ends the process.
    """

    def __init__(self, length: int, *, descriptor: int = -1, writable: bool = True, inherited: bool = True) -> None:
        """Maps a file from its start, or, without a descriptor, fresh zeroed memory.

        Args:
            length: bytes, at least 1.
            descriptor: of the file; it may be closed afterwards.
            writable: see above.
            inherited: whether a forked child has the mapping too; if not, it must not touch an array over it.

        Raises:
            OSError: no address space or no permission.
        """
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        if descriptor >= 0:
            address = _map_file(descriptor, length, protection)
        else:
            address = _map(None, length, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address: int = address
        self.length = length
        self.writable = writable
        self._unmap = weakref.finalize(self, libc.munmap, address, length)
        self._unmap.atexit = False  # threads may use the memory until the process is gone
        if not inherited:
            libc.madvise(address, length, _MADV_DONTFORK)
            _not_inherited.add(self)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        data = (self.address, not self.writable)
        return {"version": 3, "typestr": "|u1", "shape": (self.length,), "data": data}

    def array(self) -> NDArray[np.uint8]:
        """Returns a view of the whole memory, uint8 `[length]`; it and all views of it keep the memory mapped."""
        return np.asarray(self)

    def prefer_huge_pages(self) -> None:
        """Asks for huge pages, where the kernel has them for such memory."""
        libc.madvise(self.address, self.length, _MADV_HUGEPAGE)

    def populate(self, start: int, stop: int) -> None:
        """Makes the pages of bytes `[start, stop)` present, in pieces, so that using them causes no page fault.

        Args:
            start: a multiple of the page size.
            stop: at most `length`.

        Raises:
            OSError: the pages can't be had: the file ends before them, or memory is out.
        """
        advice = _MADV_POPULATE_WRITE if self.writable else _MADV_POPULATE_READ
        for piece in range(start, stop, POPULATE_BYTES):
            length = min(POPULATE_BYTES, stop - piece)
            if libc.madvise(self.address + piece, length, advice) == 0:
                continue
            error = last_error(f"cannot populate {length} bytes")
            if error.errno != errno.EINVAL:
                raise error
            # Linux before 5.14: reading a byte of each page maps it, if less cheaply.
            self.array()[piece : piece + length : mmap.PAGESIZE].sum()


def _map_file(descriptor: int, length: int, protection: int) -> int:
    """Maps a file from its start, at an address where its huge pages fit."""
    room = length + HUGE_PAGE_BYTES
    start = _map(None, room, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _map(address, length, protection, mmap.MAP_SHARED | MAP_FIXED, descriptor)
    except OSError:
        libc.munmap(start, room)
        raise
    stop = -(-(address + length) // mmap.PAGESIZE) * mmap.PAGESIZE
    for first, last in ((start, address), (stop, start + room)):
        if first < last:
            libc.munmap(first, last - first)
    return address


def _map(address: int | None, length: int, protection: int, flags: int, descriptor: int = -1) -> int:
    mapped: int = libc.mmap(address, length, protection, flags, descriptor, 0)
    if mapped == MAP_FAILED:
        raise last_error(f"cannot map {length} bytes")
    return mapped


_not_inherited: Final[weakref.WeakSet[Memory]] = weakref.WeakSet()


def _forget_uninherited() -> None:
    """In a forked child, something else may lie at these addresses by now: they must not be unmapped."""
    for memory in list(_not_inherited):
        memory._unmap.detach()


os.register_at_fork(after_in_child=_forget_uninherited)
