"""Making the pages of a mapping ready ahead of their first use, which would otherwise pay for it."""

from __future__ import annotations

import ctypes
from typing import Final

from tqclient.memory import HUGE_PAGE_BYTES, libc

MADV_POPULATE_WRITE: Final = 23  # Linux 5.14; the mmap module has no name for these
MADV_COLLAPSE: Final = 25  # Linux 6.1


def populate(address: int, length: int) -> int:
    """Populates a piece of a mapping, without the GIL; it changes no byte.

    Args:
        address: of its first page.
        length: bytes. The mapping is locked against changes meanwhile.

    Returns:
        0, or the error's number: EINVAL where the kernel cannot do it.
    """
    return _advise(address, length, MADV_POPULATE_WRITE)


def collapse(address: int, length: int) -> int:
    """Brings the pages of a piece of a mapping together in huge pages, likewise; they must be there.

    Every other mapping of the file has huge pages there from then on, where it lies alike. It does not matter whether
    the kernel makes such pages by itself for shared memory, which it mostly does not.

    Returns:
        How many bytes are in huge pages then; fewer than all where memory is in small pieces, pinned, or the kernel
        older than 6.1.
    """
    first = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    pages = range(first, address + length - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES)
    return sum(HUGE_PAGE_BYTES for page in pages if _advise(page, HUGE_PAGE_BYTES, MADV_COLLAPSE) == 0)


def _advise(address: int, length: int, advice: int) -> int:
    return 0 if libc.madvise(address, length, advice) == 0 else ctypes.get_errno()
