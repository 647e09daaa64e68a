"""The scan of a write-ahead log, against logs that SQLite wrote and against SQLite's own recovery."""

from __future__ import annotations

import random
import sqlite3
import struct
from pathlib import Path

import pytest

from tqserver.controller import wal

FRAME_BYTES = wal.FRAME_HEADER_BYTES + 4096


def written(path: Path, commits: int, *, rows: int = 1) -> bytes:
    """Writes commits into a fresh database and returns its log."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute("CREATE TABLE numbers (value INTEGER PRIMARY KEY, text TEXT)")
    for commit in range(commits):
        with connection:
            connection.execute("BEGIN")
            values = [(commit * rows + row, "x" * 500) for row in range(rows)]
            connection.executemany("INSERT INTO numbers VALUES (?, ?)", values)
    log = path.with_name(path.name + "-wal").read_bytes()
    connection.close()
    return log


def reference_checksum(data: bytes, seed: tuple[int, int]) -> tuple[int, int]:
    """The checksum as the file format's documentation spells it out, a word at a time, little-endian."""
    words = struct.unpack(f"<{len(data) // 4}I", data)
    low, high = seed
    for first, second in zip(words[::2], words[1::2], strict=True):
        low = (low + first + high) & 0xFFFFFFFF
        high = (high + second + low) & 0xFFFFFFFF
    return low, high


def test_the_checksum_is_the_documented_recurrence() -> None:
    data = random.Random(5).randbytes(4096)
    for length in (8, 24, 4096):
        for seed in ((0, 0), (0xFFFFFFFF, 1), (123456789, 3987654321)):
            words = wal.np.frombuffer(data[:length], dtype="<u4").reshape(1, -1).astype(wal.np.uint32)
            seeds = wal.np.array([seed], dtype=wal.np.uint32)
            assert tuple(wal._checksum(words, seeds)[0].tolist()) == reference_checksum(data[:length], seed)


def test_every_frame_of_a_whole_log_is_committed(tmp_path: Path) -> None:
    log = written(tmp_path / "db", 20, rows=30)
    assert wal.scan(log) == wal.WalScan((len(log) - wal.HEADER_BYTES) // FRAME_BYTES)


@pytest.mark.parametrize("log", [b"", b"short", bytes(32), bytes(9000)])
def test_a_log_that_was_never_begun_holds_nothing(log: bytes) -> None:
    assert wal.scan(log) == wal.WalScan(0)


def test_a_torn_tail_ends_at_the_last_whole_commit(tmp_path: Path) -> None:
    log = written(tmp_path / "db", 6, rows=20)
    commits = [
        frame + 1
        for frame in range((len(log) - 32) // FRAME_BYTES)
        if struct.unpack_from(">I", log, 32 + frame * FRAME_BYTES + 4)[0]
    ]
    for length in range(32, len(log), 1021):
        whole = (length - 32) // FRAME_BYTES
        assert wal.scan(log[:length]) == wal.WalScan(max((end for end in commits if end <= whole), default=0))


def test_frames_of_an_earlier_round_are_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "db"
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("CREATE TABLE numbers (value INTEGER)")
    for value in range(50):
        connection.execute("INSERT INTO numbers VALUES (?)", (value,))
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    connection.execute("INSERT INTO numbers VALUES (50)")
    log = path.with_name("db-wal").read_bytes()
    connection.close()
    assert len(log) > 10 * FRAME_BYTES
    assert wal.scan(log) == wal.WalScan(1)


def test_a_flipped_bit_is_damage_unless_only_the_last_commit_can_be_lost(tmp_path: Path, seed: int) -> None:
    log = written(tmp_path / "db", 12)
    frames = (len(log) - 32) // FRAME_BYTES
    rng = random.Random(seed)
    for _ in range(300):
        bit = rng.randrange(len(log) * 8)
        flipped = bytearray(log)
        flipped[bit // 8] ^= 1 << bit % 8
        scan = wal.scan(bytes(flipped))
        if bit // 8 >= 32 + (frames - 1) * FRAME_BYTES:
            assert scan.committed_frames < frames
        else:
            assert scan.damage, f"bit {bit}"
