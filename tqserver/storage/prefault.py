"""Makes the arena's pages ready ahead of the first writer, who would otherwise pay ten times the price of the copy."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from tqclient.errors import StorageFull
from tqserver import limits, logs
from tqserver.storage.arena import Arena
from tqserver.storage.populate import collapse, populate

_PAGE: Final = os.sysconf("SC_PAGE_SIZE")

_log = logs.get("storage.prefault")


class Prefault:
    """A thread that allocates what is left of a new arena file, then populates its mapping; it changes no byte.

    Args:
        arena: open.
        allocated: called, on the thread, with `arena.allocated_bytes` each time it has grown.
        populate: whether to do the second half.
        huge_pages: whether it brings the pages together in huge ones, where the kernel can.
        finished: called, on the thread, once all of that is done.
    """

    def __init__(
        self,
        arena: Arena,
        allocated: Callable[[int], object],
        *,
        populate: bool,
        huge_pages: bool = True,
        finished: Callable[[], object] = lambda: None,
    ) -> None:
        self._arena = arena
        self._allocated = allocated
        self._populates = populate
        self._huge_pages = huge_pages
        self._finished = finished
        self._done_bytes = 0
        self._huge_pages_bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prefault", daemon=True)

    @property
    def done_bytes(self) -> int:
        """Bytes populated so far, from the front."""
        return self._done_bytes

    @property
    def huge_pages_bytes(self) -> int:
        """Bytes of those that are in huge pages."""
        return self._huge_pages_bytes

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self) -> None:
        """Ends after the step under way. Does nothing when it was never started."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        self._allocate()
        if self._populates:
            self._populate()
        if not self._stop.is_set():
            self._finished()

    def _allocate(self) -> None:
        while not self._stop.is_set():
            try:
                if not self._arena.allocate_more():
                    return
                self._allocated(self._arena.allocated_bytes)
            except (StorageFull, OSError) as error:
                # Somebody took the room since the start; they may give it back.
                _log.error(
                    "the arena is smaller than it should be", bytes=self._arena.allocated_bytes, reason=str(error)
                )
                self._stop.wait(limits.ALLOCATE_RETRY)

    def _populate(self) -> None:
        data = self._arena.data
        base, size = data.ctypes.data, self._arena.allocated_bytes
        can_populate = True
        for start in range(0, size, limits.PREFAULT_STEP_BYTES):
            if self._stop.is_set():
                return
            length = min(limits.PREFAULT_STEP_BYTES, size - start)
            if can_populate and (number := populate(base + start, length)) != 0:
                can_populate = False
                if number != errno.EINVAL:
                    _log.warning("cannot populate ahead; reading instead", error=os.strerror(number))
            if not can_populate:
                # A read brings the page in as well, and unlike a write it cannot undo somebody's store.
                np.max(data[start : start + length : _PAGE])
            if self._huge_pages:
                self._huge_pages_bytes += collapse(base + start, length)
            self._done_bytes = start + length
        _log.info("arena is populated", bytes=size, huge_pages_bytes=self._huge_pages_bytes)
