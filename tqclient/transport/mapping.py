"""The arena file of a storage node on this host, mapped once per process, whatever number of clients share it."""

from __future__ import annotations

import os
import stat
import threading
import weakref
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import TQError, TransportUnavailable, Unavailable
from tqclient.limits import ARENA_WARM_BYTES_MAX, POPULATE_BYTES
from tqclient.memory import Memory
from tqclient.transport.moving import MovedPages
from tqclient.wire.arena import HEADER_BYTES, ArenaHeader, lock_session, unlock_session

_WARMING_NICENESS: Final = 10


class _Pages:
    """One mapping of the file, and which of its pieces are populated."""

    def __init__(self, memory: Memory, data_offset: int) -> None:
        self.memory = memory
        self.bytes = memory.array()
        self._first = data_offset // POPULATE_BYTES
        # A byte per piece, so that one search tells whether anything is left to do.
        self._warm = bytearray(-(-memory.length // POPULATE_BYTES))

    @property
    def all_warm(self) -> bool:
        """Whether every piece that holds extents is populated."""
        return self._warm.find(0, self._first) < 0

    def populate(self, start: int, stop: int) -> None:
        """Makes the pieces that hold bytes `[start, stop)` present. Two threads may do so at once."""
        if start >= stop:
            return
        piece, end = start // POPULATE_BYTES, (stop - 1) // POPULATE_BYTES + 1
        while (piece := self._warm.find(0, piece, end)) >= 0:
            begin = piece * POPULATE_BYTES
            self.memory.populate(begin, min(begin + POPULATE_BYTES, self.memory.length))
            self._warm[piece] = 1


class ArenaMapping:
    """A mapped arena: views for reading, targets for writing, and the locks that say who may write.

    Writing and reading have a mapping each. The one to write through belongs to the open file description that carries
    the session locks, so a lock outlasts every store that it stands for; no forked child inherits it, so no child keeps
    a dead parent's lock. The one to read through refuses stores: a sealed extent can't be changed by mistake.

    Attributes:
        header: of the file, as it was when it was mapped.
        path: of the file.
    """

    def __init__(self, path: str, header: ArenaHeader, descriptor: int) -> None:
        """Takes over the descriptor; use `open_arena`."""
        self.header = header
        self.path = path
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._write_pages: _Pages | None = None
        self._read_pages: _Pages | None = None
        self._warmers: list[threading.Thread] = []
        self._writers: dict[int, int] = {}  # session → transports that write for it: they share its lock
        self._closed = threading.Event()
        _mappings.add(self)

    def target(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Returns a writable view of arena bytes, uint8 `[length]`, with its pages present. The caller checks bounds.

        Raises:
            Unavailable: the pages can't be had, or this process was forked from the one that mapped the arena.
        """
        return self._present(offset, length).bytes[offset : offset + length]

    def move_out(self, offset: int, length: int) -> MovedPages | None:
        """Moves the pages of arena bytes to an address of their own, present. The caller checks bounds.

        Returns:
            None where the kernel cannot do it.

        Raises:
            Unavailable: as `target`.
        """
        pages = self._present(offset, length)
        try:
            return MovedPages(pages.memory, offset, offset + length)
        except OSError:
            return None

    def _present(self, offset: int, length: int) -> _Pages:
        """Returns the mapping to write through, with the pages of these bytes present."""
        pages = self._write_pages or self._open_pages(writable=True)
        self._populate(pages, offset, offset + length)
        return pages

    def source(self, offset: int, runs: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Returns a read-only view of the whole arena file, uint8. The caller checks bounds.

        Args:
            offset: in the arena.
            runs: int64 `[n, 2]`: start, stop, relative to `offset`: the bytes that will be used; their pages are made
                present.

        Raises:
            Unavailable: the pages can't be had.
        """
        pages = self._read_pages or self._open_pages(writable=False)
        if not pages.all_warm:
            for start, stop in runs.tolist():
                self._populate(pages, offset + start, offset + stop)
        return pages.bytes

    def lock_session(self, session: int) -> None:
        """Takes the lock that says that this process writes for the session; once for each transport that does.

        Raises:
            Unavailable: the lock is held elsewhere, or locks can't be had.
        """
        with self._lock:
            self._require_open()
            try:
                taken = lock_session(self._descriptor, session)
            except OSError as error:
                raise Unavailable(f"cannot lock {self.path} for session {session}: {error.strerror}") from None
            if not taken:
                raise Unavailable(f"another process writes to {self.path} for session {session}")
            self._writers[session] = self._writers.get(session, 0) + 1

    def unlock_session(self, session: int) -> None:
        """Takes back one `lock_session`; with the last one the lock goes, and nothing may write for the session."""
        with self._lock:
            writers = self._writers.pop(session, 1) - 1
            if writers:
                self._writers[session] = writers
            elif self._descriptor >= 0:
                unlock_session(self._descriptor, session)

    def close(self) -> None:
        """Stops the warming and closes the descriptor; memory goes with the last view of it."""
        self._closed.set()
        with self._lock:
            self._write_pages = self._read_pages = None
            if self._descriptor >= 0:
                os.close(self._descriptor)
                self._descriptor = -1
        for warmer in self._warmers:
            warmer.join()

    def _require_open(self) -> None:
        if self._descriptor < 0:
            raise Unavailable(f"{self.path} is no longer mapped here: connect again (after a fork, in the child)")

    def _populate(self, pages: _Pages, start: int, stop: int) -> None:
        try:
            pages.populate(start, stop)
        except OSError as error:
            raise Unavailable(f"bytes [{start}, {stop}) of {self.path}: {error.strerror}") from None

    def _open_pages(self, *, writable: bool) -> _Pages:
        with self._lock:
            self._require_open()
            pages = self._write_pages if writable else self._read_pages
            if pages is not None:
                return pages
            try:
                pages = _Pages(self._map(writable=writable), self.header.data_offset)
            except OSError as error:
                raise Unavailable(f"cannot map {self.path}: {error.strerror}") from None
            if writable:
                self._write_pages = pages
            else:
                self._read_pages = pages
            warmer = threading.Thread(target=self._warm, args=(pages,), name="tq-arena-warming", daemon=True)
            self._warmers.append(warmer)
            warmer.start()
            return pages

    def _map(self, *, writable: bool) -> Memory:
        if writable:
            return Memory(self.header.file_bytes, descriptor=self._descriptor, inherited=False)
        descriptor = os.open(f"/proc/self/fd/{self._descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            return Memory(self.header.file_bytes, descriptor=descriptor, writable=False)
        finally:
            os.close(descriptor)

    def _warm(self, pages: _Pages) -> None:
        """Populates what has not been used yet, piece by piece, at low priority."""
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _WARMING_NICENESS)
        start = self.header.data_offset // POPULATE_BYTES * POPULATE_BYTES
        stop = min(self.header.file_bytes, start + ARENA_WARM_BYTES_MAX)
        for piece in range(start, stop, POPULATE_BYTES):
            if self._closed.is_set():
                return
            try:
                pages.populate(piece, min(piece + POPULATE_BYTES, stop))
            except OSError:
                return  # whoever uses such a page is told

    def _reset_in_child(self) -> None:
        # The child's copy of the descriptor would keep the parent's locks; the mapping to write through is not there.
        self._lock = threading.Lock()
        self._writers = {}
        self._write_pages = None
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


_mappings: Final[weakref.WeakSet[ArenaMapping]] = weakref.WeakSet()


class _Registry:
    """The arenas that this process has mapped, by (device, inode), and how many users each has."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[tuple[int, int], tuple[ArenaMapping, int]] = {}

    def acquire(self, path: str, arena: int) -> ArenaMapping:
        descriptor = -1
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            header = _checked_header(descriptor, arena)
            status = os.fstat(descriptor)
            with self._lock:
                key = (status.st_dev, status.st_ino)
                mapping, users = self._open.get(key) or (None, 0)
                if mapping is None:
                    mapping, descriptor = ArenaMapping(path, header, descriptor), -1
                self._open[key] = (mapping, users + 1)
                return mapping
        except OSError as error:
            raise TransportUnavailable(f"cannot open {path}: {error.strerror}") from None
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def release(self, mapping: ArenaMapping) -> None:
        with self._lock:
            for key, (known, users) in self._open.items():
                if known is not mapping:
                    continue
                if users > 1:
                    self._open[key] = (known, users - 1)
                    return
                del self._open[key]
                break
        mapping.close()


def _checked_header(descriptor: int, arena: int) -> ArenaHeader:
    """Returns the header once it is proved that the file is the arena and can be mapped whole."""
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        raise TransportUnavailable("the arena's path is no file on this host")
    try:
        header = ArenaHeader.from_bytes(os.pread(descriptor, HEADER_BYTES, 0))
    except TQError as error:
        raise TransportUnavailable(error.message) from None
    if header.arena != arena:
        raise TransportUnavailable(
            f"the file of that path is arena {header.arena:016x}, but the node's is {arena:016x}: another host"
        )
    if status.st_size < header.file_bytes:
        # Using what lies behind the end would be SIGBUS.
        raise TransportUnavailable(f"the arena's file has {status.st_size} bytes, its header says {header.file_bytes}")
    return header


_registry = _Registry()


def open_arena(path: str, arena: int) -> ArenaMapping:
    """Maps an arena of this host, or shares the mapping that this process has already.

    Args:
        path: of the file, as the node sees it.
        arena: identity that the node told; the file's header must have it, which proves that this is the node's host.

    Returns:
        A mapping to be given back with `close_arena`, once per call.

    Raises:
        TransportUnavailable: there is no such file here, it may not be opened, or it is another one.
    """
    return _registry.acquire(path, arena)


def close_arena(mapping: ArenaMapping) -> None:
    """Gives back what `open_arena` returned; the last user's call closes it. Views stay good."""
    _registry.release(mapping)


def _reset_in_child() -> None:
    global _registry  # noqa: PLW0603
    _registry = _Registry()
    for mapping in list(_mappings):
        mapping._reset_in_child()


os.register_at_fork(after_in_child=_reset_in_child)
