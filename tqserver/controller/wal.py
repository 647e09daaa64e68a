"""SQLite's write-ahead log: read for damage that SQLite itself passes over in silence, and laid out ahead of its end.

SQLite takes the log up to the first frame that does not verify, and drops the rest. That is right for a torn tail: the
process died inside its last commit. It is wrong for a bit that flipped further up: commits that were acknowledged would
vanish. So the log is looked at before SQLite opens it. The format is documented under "WAL-mode File Format" in
https://www.sqlite.org/fileformat2.html.

Each frame's checksum continues the one before it, so with the stored checksum of its predecessor every frame can be
verified by itself, and all of them at once.

Room ahead of the log's end is laid out in zeros: a commit that makes the file longer has the file system write its own
journal before it is durable, one over bytes that the file has does not. Zeros are no frames, to SQLite and to the scan.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

HEADER_BYTES: Final = 32
FRAME_HEADER_BYTES: Final = 24
_MAGIC: Final = 0x377F0682  # the lowest bit says that checksums run over big-endian words
_VERSION: Final = 3007000
_PAGE_BYTES: Final = tuple(1 << bits for bits in range(9, 17))
ROOM_STEP_BYTES: Final = 1 << 20
"""Laid out at one time: 2 ms."""
ROOM_AHEAD_BYTES: Final = 256 << 10
"""Left when more is laid out."""
_PAGES_BESIDE: Final = 3
"""That a commit of one row writes, at most, beside those that the row fills: the leaf that names them, the marks, and
a node above."""


@dataclass(frozen=True, slots=True)
class WalScan:
    """What a write-ahead log holds.

    Attributes:
        committed_frames: frames that SQLite will take: up to the last commit before anything invalid.
        damage: what is wrong with the log; empty when it ends cleanly or in a torn tail.
    """

    committed_frames: int
    damage: str = ""


def _checksum(words: NDArray[np.uint32], seeds: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Continues each row's checksum over its words.

    SQLite's checksum is the recurrence s0 += x[2i] + s1; s1 += x[2i+1] + s0 (mod 2**32). It is linear: step i of n
    contributes M**(n-1-i) · (x[2i], x[2i] + x[2i+1]) with M = [[1, 1], [1, 2]], whose powers hold Fibonacci numbers.

    Args:
        words: uint32 [rows, 2 n].
        seeds: uint32 [rows, 2], the checksum so far.

    Returns:
        uint32 [rows, 2].
    """
    steps = words.shape[1] // 2
    fibonacci = [0, 1]
    while len(fibonacci) < 2 * steps + 2:
        fibonacci.append((fibonacci[-1] + fibonacci[-2]) & 0xFFFFFFFF)
    table = np.array(fibonacci, dtype=np.uint32)

    def power(exponents: Any) -> tuple[Any, Any, Any]:  # of M: [[F(2k-1), F(2k)], [F(2k), F(2k+1)]], with F(-1) = 1
        return (
            np.where(exponents > 0, table[2 * exponents - 1], np.uint32(1)),
            table[2 * exponents],
            table[2 * exponents + 1],
        )

    first = words[:, 0::2]
    second = first + words[:, 1::2]
    a, b, d = power(np.arange(steps - 1, -1, -1))
    low = (first * a + second * b).sum(axis=1, dtype=np.uint32)
    high = (first * b + second * d).sum(axis=1, dtype=np.uint32)
    a, b, d = power(np.array(steps))
    low += seeds[:, 0] * a + seeds[:, 1] * b
    high += seeds[:, 0] * b + seeds[:, 1] * d
    return np.stack([low, high], axis=1)


def scan(log: bytes) -> WalScan:
    """Looks through a write-ahead log.

    Args:
        log: the whole `-wal` file.

    Returns:
        How much of it SQLite will take, and the damage that this would hide.
    """
    if len(log) < HEADER_BYTES:
        return WalScan(0)  # its header was never finished, so no frame followed
    header = np.frombuffer(log, dtype=">u4", count=8).astype(np.uint32)
    magic, version, page_bytes = (int(word) for word in header[:3])
    if magic & ~1 == _MAGIC and version == _VERSION and page_bytes in _PAGE_BYTES:
        order = ">u4" if magic & 1 else "<u4"
        words = np.frombuffer(log, dtype=order, count=6).astype(np.uint32).reshape(1, -1)
        if np.array_equal(_checksum(words, np.zeros((1, 2), dtype=np.uint32))[0], header[6:8]):
            return _scan_frames(log, header, page_bytes, order)
    if len(log) == HEADER_BYTES or log.count(0) == len(log):
        return WalScan(0)  # nothing behind it, or never written: a file of zeros
    return WalScan(0, "its header does not verify, so SQLite would drop everything in it")


def _scan_frames(log: bytes, header: NDArray[np.uint32], page_bytes: int, order: str) -> WalScan:
    frame_bytes = FRAME_HEADER_BYTES + page_bytes
    count = (len(log) - HEADER_BYTES) // frame_bytes
    if count == 0:
        return WalScan(0)
    raw = np.frombuffer(log, dtype=np.uint8, count=count * frame_bytes, offset=HEADER_BYTES).reshape(count, frame_bytes)
    fields = np.ascontiguousarray(raw[:, :FRAME_HEADER_BYTES]).view(">u4").astype(np.uint32)
    ours = (fields[:, 2] == header[4]) & (fields[:, 3] == header[5])  # the salts; others are left from an earlier round
    seeds = np.concatenate([header[None, 6:8], fields[:-1, 4:6]])
    covered = np.concatenate([raw[:, :8], raw[:, FRAME_HEADER_BYTES:]], axis=1)
    words = covered.view(order).astype(np.uint32)
    valid = ours & (fields[:, 0] != 0) & (_checksum(words, seeds) == fields[:, 4:6]).all(axis=1)
    commits = ours & (fields[:, 1] != 0)
    end = count if bool(valid.all()) else int(np.argmin(valid))
    taken = np.flatnonzero(commits[:end])
    committed = int(taken[-1]) + 1 if len(taken) else 0
    behind = np.flatnonzero(commits[end + 1 :])
    if end < count and len(behind):
        offset = HEADER_BYTES + end * frame_bytes
        return WalScan(
            committed,
            f"frame {end + 1} (at byte {offset}) does not verify, but {len(behind)} finished commits lie behind it",
        )
    return WalScan(committed)


class Room:
    """The bytes of a log that are laid out ahead of its end.

    Where the log ends is reckoned, not known; whatever is laid out lies behind the end of the file, and so of the log.

    Args:
        path: of the `-wal` file of a database that this process alone has open.
        page_bytes: of the database.

    Attributes:
        used_bytes: of the log, about; never much less.
    """

    def __init__(self, path: Path, page_bytes: int) -> None:
        self._path = path
        self._page_bytes = page_bytes
        self._size_bytes = 0
        self.used_bytes = HEADER_BYTES

    def emptied(self) -> None:
        """A checkpoint cut the log off."""
        self._size_bytes, self.used_bytes = 0, HEADER_BYTES

    def written(self, row_bytes: int) -> None:
        """A row of so many bytes was committed."""
        pages = -(-row_bytes // (self._page_bytes - 4)) + _PAGES_BESIDE  # each page of a long row names the next one
        self.used_bytes += pages * (FRAME_HEADER_BYTES + self._page_bytes)

    def lay_out(self) -> None:
        """Makes room where little is left.

        Raises:
            OSError: the disk has none, or fails. The log is what it was.
        """
        if self.used_bytes + ROOM_AHEAD_BYTES <= self._size_bytes:
            return
        log = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            end = os.fstat(log).st_size
            written = os.pwrite(log, bytes(ROOM_STEP_BYTES), end)
            os.fdatasync(log)
        finally:
            os.close(log)
        self._size_bytes = end + written
