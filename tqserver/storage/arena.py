"""The arena file: one page of identity, a table of windows, and the bytes.

    0                 ArenaHeader, and the highest controller sequence seen
    4096              the next generation (u64), and how much of the file is allocated (u64)
    8192              windows table: WINDOWS_MAX rows of 64 bytes
    data_offset       extents, to the end of the file

The file outlives the process. What a restarted node must know before the controller tells it the rest is in the table:
which runs of bytes a writer of the former life may still touch. Every row is filled first and marked last, so that
one that was being written when the process died counts as absent. Afterwards a row only shrinks, one end at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, StorageFull, TQError, Unavailable
from tqclient.memory import Memory
from tqclient.wire import arena as wire
from tqserver import limits
from tqserver.config import format_size
from tqserver.storage.extents import Run
from tqserver.storage.segments import align_up

_GENERATION_OFFSET: Final = wire.HEADER_BYTES
_ALLOCATED_OFFSET: Final = _GENERATION_OFFSET + 8
_TABLE_OFFSET: Final = _GENERATION_OFFSET + mmap.PAGESIZE
_ROW: Final = np.dtype(
    [
        ("generation", "<u8"),
        ("session", "<u8"),
        ("partition", "<u8"),
        ("start", "<u8"),
        ("end", "<u8"),
        ("mapped", "u1"),
        ("state", "u1"),
        ("padding", "V6"),
        ("ticket", "<u8"),
        ("unused", "V8"),
    ]
)
_DATA_OFFSET: Final = align_up(_TABLE_OFFSET + limits.WINDOWS_MAX * _ROW.itemsize, 1 << 16)
_ALLOCATED: Final = struct.Struct("<Q")
_NODE_LOCK: Final = struct.Struct("@hhqqi4x")  # struct flock


class Arena:
    """An open, locked and mapped arena file. Use `open_arena`.

    Attributes:
        header: its first page.
        path: of the file.
        created: whether this open made the file.
        told: whether anybody may know of it; set by who tells.
        data: the whole file, uint8 `[file_bytes]`, writable.
        table: the windows table; the allocator's ledger.
    """

    def __init__(self, descriptor: int, path: Path, header: wire.ArenaHeader, *, created: bool) -> None:
        self._descriptor = descriptor
        self.path = path
        self.header = header
        self.created = created
        self.told = False
        self.data: NDArray[np.uint8] = Memory(header.file_bytes, descriptor=descriptor).array()
        self._sequence = wire.seen_sequence(self.data)
        self._allocated = np.frombuffer(self.data, dtype="<u8", count=1, offset=_ALLOCATED_OFFSET)
        self.table = WindowTable(self.data)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the file, from its start, that the file system has promised. Only these may be touched."""
        return int(self._allocated[0])

    @property
    def controller_sequence(self) -> int:
        """The highest journal sequence that a controller told this arena."""
        return int(self._sequence[0])

    @controller_sequence.setter
    def controller_sequence(self, sequence: int) -> None:
        self._sequence[0] = sequence

    def saw_sequence(self, sequence: int) -> None:
        """Remembers a sequence of the controller, if it is higher than those before."""
        if sequence > self.controller_sequence:
            self._sequence[0] = sequence

    def writer_lock_held(self, session: int) -> bool:
        """Whether some process holds the session's writer lock."""
        return wire.session_locked(self._descriptor, session)

    def allocate_more(self) -> bool:
        """Allocates the next step of the file; says whether there was one. Runs without the GIL.

        Raises:
            StorageFull: the file system gave the room to somebody else since the start.
        """
        if self.allocated_bytes >= self.header.file_bytes:
            return False
        end = min(self.allocated_bytes + limits.ALLOCATE_STEP_BYTES, self.header.file_bytes)
        _allocate(self._descriptor, self.path, self.allocated_bytes, end)
        self._allocated[0] = end
        return True

    def is_removed(self) -> bool:
        """Whether the file has lost its name, to another file or to none; mappings of it stay good."""
        try:
            return not os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:  # it cannot be told
            return False

    def unlink(self) -> None:
        """Removes the file's name, unless another file has it by now; mappings of it stay good."""
        if not self.is_removed():
            with contextlib.suppress(FileNotFoundError):
                self.path.unlink()

    def close(self) -> None:
        """Lets go of the file and its lock. The mapping itself goes with the last view of it."""
        if self._descriptor >= 0:
            # Said aloud because the mapping keeps the open file, and with it the lock, alive.
            fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _node_lock(fcntl.F_UNLCK))
            os.close(self._descriptor)
            self._descriptor = -1


class WindowTable:
    """The rows that outlive the process: a `Ledger` for the allocator.

    Each run has a row, and while all rows are taken, what is left of a run shares one: it reaches from the first of the
    runs to the end of the last. As rows become free the runs get one each. Until all have theirs, no row is free.
    """

    def __init__(self, mapping: NDArray[np.uint8]) -> None:
        self._generation = np.frombuffer(mapping, dtype="<u8", count=1, offset=_GENERATION_OFFSET)
        self._rows: NDArray[Any] = np.frombuffer(mapping, dtype=_ROW, count=limits.WINDOWS_MAX, offset=_TABLE_OFFSET)
        used = np.flatnonzero(self._rows["state"]).tolist()
        self._slots = {self._run(slot): slot for slot in used}
        self._free = sorted(set(range(limits.WINDOWS_MAX)) - set(self._slots.values()), reverse=True)
        self._shared: dict[int, list[Run]] = {}  # slot → two runs or more, ascending

    def runs(self) -> list[Run]:
        """Returns every run that is in the table."""
        return list(self._slots)

    def has_room(self) -> bool:
        """Whether another window may be opened."""
        return len(self._free) > limits.WINDOWS_SPARE

    def next_generation(self) -> int:
        """Returns a number that it never returned before in the life of the file."""
        generation = int(self._generation[0]) + 1
        self._generation[0] = generation
        return generation

    def add(self, run: Run) -> None:
        """Writes a run into a free row."""
        if not self._free:
            raise TableFull(f"all {limits.WINDOWS_MAX} rows of the arena's windows table are taken")
        slot = self._free.pop()
        self._rows[slot] = (*run[:-1], 0, b"", run.ticket, b"")  # state 0: it counts only when the rest is there
        self._rows["state"][slot] = 1
        self._slots[run] = slot

    def replace(self, run: Run, rests: Sequence[Run]) -> None:
        """Writes what is left of a run in its place; `rests` share its row when there is no other."""
        slot = self._slots.pop(run)
        runs = self._shared.pop(slot, [run])
        index = bisect_left(runs, run)
        runs[index : index + 1] = rests
        self._slots.update(dict.fromkeys(rests, slot))
        self._write(slot, runs)
        while self._free and self._shared:
            self._write(*self._shared.popitem())

    def _write(self, slot: int, runs: list[Run]) -> None:
        """Cuts a row down to these runs: to the first one alone where there are rows for the others."""
        while len(runs) > 1 and self._free:
            self.add(runs.pop())
        if not runs:
            self._rows["state"][slot] = 0
            self._free.append(slot)
            return
        # Only now: a death before it leaves bytes too many in the table, not too few.
        self._rows["start"][slot] = runs[0].start
        self._rows["end"][slot] = runs[-1].end
        if len(runs) > 1:
            self._shared[slot] = runs

    def _run(self, slot: int) -> Run:
        generation, session, partition, start, end, mapped, _, _, ticket, _ = self._rows[slot].tolist()
        return Run(generation, session, partition, start, end, bool(mapped), ticket)


class TableFull(RuntimeError):
    """A run that must be remembered cannot be: the daemon ends rather than forget it."""


def open_arena(path: Path, *, node: str, file_bytes: int, segment_bytes: int) -> Arena:
    """Opens a node's arena file, or makes it.

    Args:
        path: of the file, on a tmpfs or hugetlbfs.
        node: the node's name; another node's file is refused.
        file_bytes: its size. There must be room for all of it; of a new file, `limits.ARENA_FIRST_BYTES` are allocated
            here and the rest by `Arena.allocate_more`.
        segment_bytes: size of a full segment.

    Raises:
        InvalidArgument: the file is another node's, of another size, or none of ours; or the size is too small to use.
        StorageFull: the file system has no room for it.
        Unavailable: another process serves this file, an engine of its former node still runs, or the directory cannot
            be written to.
    """
    if file_bytes < limits.ARENA_BYTES_MIN:
        raise InvalidArgument(
            f"arena_bytes {format_size(file_bytes)}: at least {format_size(limits.ARENA_BYTES_MIN)}, of which "
            f"{format_size(_DATA_OFFSET)} hold the table of windows"
        )
    if segment_bytes < limits.SEGMENT_BYTES_MIN or segment_bytes & (segment_bytes - 1):
        raise InvalidArgument(
            f"segment_bytes {format_size(segment_bytes)}: a power of two, at least {limits.SEGMENT_BYTES_MIN} bytes"
        )
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise Unavailable(f"arena file {path}: {error.strerror}") from None
    created = False
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"arena file {path}: not a regular file")
        _lock(descriptor, path)
        _await_engines_end(descriptor, path)
        created = _is_blank(descriptor)
        os.fchmod(descriptor, 0o600)
        if created:
            header = _format(descriptor, path, node, file_bytes, segment_bytes)
        else:
            header = _check(descriptor, path, node, file_bytes, segment_bytes)
            # Its former life may have ended before all of it was allocated; blocks lie only in what was.
            allocated_bytes = read_allocated_bytes(descriptor, path, header)
            _require_room(descriptor, path, allocated_bytes)
            _allocate(descriptor, path, 0, allocated_bytes)
        return Arena(descriptor, path, header, created=created)
    except (TQError, OSError):
        if created:
            path.unlink()
        os.close(descriptor)
        raise


def _node_lock(kind: int) -> bytes:
    return _NODE_LOCK.pack(kind, 0, 0, 1, 0)


def _lock(descriptor: int, path: Path) -> None:
    """Takes the node's own lock, on the first byte. It goes with the open file, however the process ends."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _node_lock(fcntl.F_WRLCK))
        # Who held the lock until just now may have removed the file.
        if not os.path.samestat(os.fstat(descriptor), os.stat(path)):
            raise Unavailable(f"arena file {path} was removed by its former node just now; start again")
    except FileNotFoundError:
        raise Unavailable(f"arena file {path} was removed by its former node just now; start again") from None
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise
        raise Unavailable(f"arena file {path} is served by another process; give each node a name of its own") from None


def _await_engines_end(descriptor: int, path: Path) -> None:
    """Waits until no engine of a former life can write to the file: what its windows held may then be used again."""
    deadline = time.monotonic() + limits.ENGINE_GONE_WAIT
    while wire.engine_locked(descriptor):
        if time.monotonic() >= deadline:
            raise Unavailable(
                f"arena file {path}: an engine of its former node still runs after {limits.ENGINE_GONE_WAIT} s; "
                "end it (`fuser` names its pid), then start again"
            )
        time.sleep(limits.ENGINE_GONE_POLL)


def _is_blank(descriptor: int) -> bool:
    """Whether the file is new, or its making was cut short: the header is written last."""
    page = os.pread(descriptor, wire.HEADER_BYTES, 0)
    return not any(page)


def read_allocated_bytes(descriptor: int, path: Path, header: wire.ArenaHeader) -> int:
    """Reads how much of a file that exists is allocated: by the node that serves it, or by its former life.

    Raises:
        InvalidArgument: what the file says of it cannot be.
    """
    (allocated_bytes,) = _ALLOCATED.unpack(os.pread(descriptor, _ALLOCATED.size, _ALLOCATED_OFFSET))
    if not header.data_offset < allocated_bytes <= header.file_bytes:
        raise InvalidArgument(f"arena file {path}: {allocated_bytes} bytes of it cannot be allocated; remove it")
    return int(allocated_bytes)


def _require_room(descriptor: int, path: Path, file_bytes: int) -> None:
    """Refuses a size that the file system has no room for. A tmpfs takes the memory it has before it says so."""
    missing_bytes = file_bytes - os.fstat(descriptor).st_blocks * 512
    if missing_bytes > _free_bytes(path):
        raise _no_room(path, file_bytes)


def _allocate(descriptor: int, path: Path, start: int, end: int) -> None:
    """Makes the file system promise bytes [start, end) now: a page that it cannot give later is a SIGBUS."""
    try:
        os.posix_fallocate(descriptor, start, end - start)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise _no_room(path, end) from None


def _free_bytes(path: Path) -> int:
    file_system = os.statvfs(path.parent)
    return file_system.f_bavail * file_system.f_frsize


def _no_room(path: Path, file_bytes: int) -> StorageFull:
    return StorageFull(
        f"arena file {path}: {format_size(file_bytes)} do not fit, {_free_bytes(path)} bytes are free there; "
        f"give less with --arena-bytes, or make {path.parent} bigger"
    )


def _format(descriptor: int, path: Path, node: str, file_bytes: int, segment_bytes: int) -> wire.ArenaHeader:
    _require_room(descriptor, path, file_bytes)
    first_bytes = min(file_bytes, limits.ARENA_FIRST_BYTES)
    _allocate(descriptor, path, 0, first_bytes)
    os.ftruncate(descriptor, file_bytes)
    os.pwrite(descriptor, _ALLOCATED.pack(first_bytes), _ALLOCATED_OFFSET)
    arena = secrets.randbits(64) | 1  # 0 is "no arena" on the wire
    header = wire.ArenaHeader(arena, file_bytes, _DATA_OFFSET, segment_bytes, node)
    os.pwrite(descriptor, header.to_bytes(), 0)
    return header


def _check(descriptor: int, path: Path, node: str, file_bytes: int, segment_bytes: int) -> wire.ArenaHeader:
    """Reads the header of a file that exists, and compares it with the configuration."""
    try:
        header = wire.ArenaHeader.from_bytes(os.pread(descriptor, wire.HEADER_BYTES, 0))
    except TQError as error:
        raise type(error)(f"{path}: {error.message}; if nothing in it is needed, remove it") from None
    if header.node != node:
        raise InvalidArgument(f"arena file {path} belongs to node {header.node!r}, not to {node!r}")
    for option, found, wanted in (
        ("arena-bytes", header.file_bytes, file_bytes),
        ("segment-bytes", header.segment_bytes, segment_bytes),
    ):
        if found != wanted:
            raise InvalidArgument(
                f"arena file {path} was made with --{option} {format_size(found)}, not {format_size(wanted)}; "
                f"start with the former value, or remove the file and lose its blocks"
            )
    if os.fstat(descriptor).st_size != header.file_bytes or header.data_offset != _DATA_OFFSET:
        raise InvalidArgument(f"arena file {path}: its length or layout is not what its first page says; remove it")
    return header
