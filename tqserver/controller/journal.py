"""The journal: every command that changed the controller, in order, durable before it is answered.

`SqliteJournal` keeps one SQLite database in WAL mode with `synchronous=FULL`: one row a group commit, which holds the
group's records and a digest chained to the row before it. SQLite does not notice a page that changed under it; the
chain does, and a mark in another page says how far the chain goes. Opening verifies all of that: a torn tail gives a
clean prefix, anything else is refused. Snapshots lie beside the database in files of their own: they are large, and
would go through the write-ahead log and the database both.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import sqlite3
import struct
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn, Protocol

import xxhash

from tqclient.errors import StorageFull, TQError
from tqserver import failpoints, logs
from tqserver.controller import wal
from tqserver.controller.failed import FailedRecords, sync_directory

DATABASE_NAME: Final = "journal.db"
LOCK_NAME: Final = "lock"
CHECKPOINT_BYTES: Final = 32 << 20
"""Of the write-ahead log: a start reads 130 MB of it in a second, and takes four times its memory for that."""
TRIM_GROUPS_MAX: Final = 256
"""Of one deletion: a commit that waits behind it is held up for a few milliseconds."""

_UNREADABLE: Final = (sqlite3.Error, UnicodeDecodeError)
"""What a damaged database raises; a text in it, or in SQLite's message, may be no UTF-8 any more."""
_GENESIS: Final = bytes(8)
_MADE: Final = b"tq-journal 1\n"
_LENGTH: Final = struct.Struct("<I")
_SNAPSHOT_HEAD: Final = struct.Struct(
    "<8sQQ"
)  # magic, sequence, bytes of the state; the digest of all follows the state
_SNAPSHOT_MAGIC: Final = b"tq-snap1"

_SCHEMA: Final = (
    "CREATE TABLE groups (first INTEGER PRIMARY KEY, count INTEGER NOT NULL, records BLOB NOT NULL,"
    " chain BLOB NOT NULL)",
    "CREATE TABLE marks (name TEXT PRIMARY KEY, sequence INTEGER NOT NULL, chain BLOB NOT NULL)",
    "INSERT INTO marks VALUES ('tail', 0, x'0000000000000000'), ('snapshot', 0, x'0000000000000000')",
)
_TAIL_FOLLOWS: Final = (
    "CREATE TEMP TRIGGER tail_follows AFTER INSERT ON main.groups BEGIN"
    " UPDATE marks SET sequence = new.first + new.count - 1, chain = new.chain WHERE name = 'tail'; END"
)
"""Of this connection alone, so that appending is one statement: each one lets go of the interpreter's lock, and has to
wait for it again."""

_log = logs.get("controller.journal")


class JournalDamaged(TQError):
    """The journal's files are not what was written; starting on them would lose acknowledged commands in silence."""


class JournalLocked(TQError):
    """Another controller owns the data directory."""


class JournalFailed(TQError):
    """The disk failed under the journal. What is durable is unknown: the process ends, and its next start finds out."""


class Journal(Protocol):
    """Where commands are kept.

    Every method blocks. One thread at a time calls them, except for `write_snapshot` and `failed`.
    """

    @property
    def sequence(self) -> int:
        """Of the last durable record; 0 in an empty journal."""

    def snapshot(self) -> tuple[int, bytes]:
        """Returns the latest snapshot's sequence and state; (0, b"") when there is none."""

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yields (sequence, record) behind the latest snapshot, in order, without those known to have failed."""

    def failed(self, sequence: int, record: bytes, reason: str) -> None:
        """Notes durably that applying a record failed and nobody was answered: from now on it is passed over.

        Any thread may call it. What it raises leaves the record to the next start, as `give_up`.

        Raises:
            StorageFull, JournalFailed: as `append`.
        """

    def give_up(self, sequence: int, record: bytes, reason: str) -> None:
        """Passes over a record that a start cannot apply from now on, if the loss of what is damaged was accepted.

        Raises:
            JournalDamaged: it was not: the record may have been acknowledged.
            StorageFull, JournalFailed: as `append`.
        """

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of the latest snapshot, and of the records behind it."""

    def append(self, records: Sequence[bytes]) -> int:
        """Makes a group of records durable, all or none.

        Returns:
            The first one's sequence; the others follow it.

        Raises:
            StorageFull: the disk is full. Nothing was appended; a later append may succeed.
            JournalFailed: see there.
        """

    def write_snapshot(self, sequence: int, state: Sequence[bytes]) -> None:
        """Writes a snapshot, given in pieces, beside the journal; it counts once installed. May run in another thread.

        Raises:
            StorageFull, JournalFailed: as `append`.
        """

    def install_snapshot(self, sequence: int) -> None:
        """Makes a written snapshot, taken at the end of a group, the latest one.

        Raises:
            StorageFull, JournalFailed: as `append`.
        """

    def trim(self) -> bool:
        """Removes some groups that the latest snapshot covers; says whether more may be left."""

    def close(self) -> None:
        """Closes the files and gives up the lock."""


def chain(previous: bytes, first: int, records: bytes) -> bytes:
    """Returns the digest of a group and, through `previous`, of all groups before it."""
    digest = xxhash.xxh3_64(previous)
    digest.update(first.to_bytes(8, "little"))
    digest.update(records)
    return bytes(digest.digest())


def _pack_group(records: Sequence[bytes]) -> bytes:
    return b"".join(part for record in records for part in (_LENGTH.pack(len(record)), record))


def _unpack_group(packed: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(packed):
        (length,) = _LENGTH.unpack_from(packed, at)
        at += _LENGTH.size
        yield packed[at : at + length]
        at += length


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):  # whoever connects can use up the descriptors
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE)
    return "disk is full" in str(error)  # Python 3.10 has no error codes of SQLite


@contextmanager
def _disk(what: str) -> Iterator[None]:
    """Turns what a disk can do to us into StorageFull or JournalFailed."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        if _is_full(error):
            raise StorageFull(f"the controller has no room ({what}: {error}); nothing was changed") from None
        raise JournalFailed(f"{what}: {error}") from error


class SqliteJournal:
    """A journal in a directory of its own, which no other process may open meanwhile.

    Args:
        directory: made with mode 0700 when it is missing; one that exists keeps its mode.
        accept_data_loss: start from what verifies, and drop the rest for good.

    Raises:
        JournalLocked: another process has it open.
        JournalDamaged: with the file, the last good sequence, and what to do.
        StorageFull, JournalFailed: the disk is full, or fails.
        OSError: the directory cannot be made or used.
    """

    def __init__(self, directory: Path, *, accept_data_loss: bool = False) -> None:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory = directory
        self._path = directory / DATABASE_NAME
        self._accept_data_loss = accept_data_loss
        self._checkpoint_at = CHECKPOINT_BYTES
        self._connection: sqlite3.Connection | None = None
        self._sequence, self._chain = 0, _GENESIS
        self._snapshot_sequence, self._snapshot_chain = 0, _GENESIS
        self._lock_file = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            self._lock()
            self._open()
            self._failed = FailedRecords(directory)
            self._failed.forget_outside(self._snapshot_sequence + 1, self._sequence)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise JournalLocked(
                f"{self._directory}: another tq-controller has it open; give each a data_dir of its own"
            ) from None

    def _refuse(self, path: Path, what: str) -> NoReturn:
        raise JournalDamaged(
            f"{path}: {what}. Put the files of a backup in its place, or start with --accept-data-loss to go on from "
            "what verifies and lose the rest"
        )

    def _open(self) -> None:
        log_path = self._path.with_name(DATABASE_NAME + "-wal")
        scan = wal.scan(log_path.read_bytes() if log_path.exists() else b"")
        if scan.damage and not self._accept_data_loss:
            self._refuse(log_path, f"{scan.damage}; the last record before it is {self._sequence_before(log_path)}")
        self._connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False, timeout=0)
        try:
            self._open_database(scan.committed_frames)
        except _UNREADABLE as error:
            if _is_full(error):
                raise StorageFull(f"{self._path}: {error}") from None
            self._refuse(self._path, str(error))
        for path in self._directory.glob("snapshot-*"):
            if path != self._snapshot_path(self._snapshot_sequence):
                path.unlink()  # a crash came between writing and installing it, or between installing and removing

    def _sequence_before(self, damaged_log: Path) -> int | str:
        """Returns the sequence that SQLite would go on from; asks it over copies, since it would cut the log off."""
        try:
            with tempfile.TemporaryDirectory(dir=self._directory, prefix="examined-") as scratch:
                for path in (self._path, damaged_log):
                    shutil.copy(path, scratch)
                with closing(sqlite3.connect(Path(scratch) / DATABASE_NAME)) as copy:
                    (sequence,) = copy.execute("SELECT sequence FROM marks WHERE name = 'tail'").fetchone()
                    return int(sequence)
        except (*_UNREADABLE, OSError) as error:
            return f"unknown ({error})"

    def _open_database(self, committed_frames: int) -> None:
        # Exclusive: the index of the log lies in memory, and SQLite itself keeps others out as well.
        self._execute("PRAGMA locking_mode = EXCLUSIVE")
        (mode,) = self._execute("PRAGMA journal_mode = WAL").fetchone()
        self._execute("PRAGMA synchronous = FULL")
        self._execute("PRAGMA wal_autocheckpoint = 0")  # its errors would be passed over
        (tables,) = self._execute("SELECT count(*) FROM sqlite_schema").fetchone()
        made = os.pread(self._lock_file, len(_MADE), 0) == _MADE
        if tables and not self._accept_data_loss:
            (verdict,) = self._execute("PRAGMA quick_check(1)").fetchone()
            _, frames, _ = self._execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()
            if mode != "wal" or verdict != "ok" or frames != committed_frames:
                found = " ".join(verdict.split())
                self._refuse(
                    self._path, f"mode {mode}, check {found}, {frames} of {committed_frames} frames of its log taken"
                )
        if not made:
            self._make(tables)
        schema = tuple(sql for (sql,) in self._execute("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL"))
        if schema != _SCHEMA[:2]:
            self._refuse(self._path, "its tables are not those of a journal")
        # A clean slate: frames of an earlier life would make the next scan ambiguous.
        self._execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (page_bytes,) = self._execute("PRAGMA page_size").fetchone()
        self._room = wal.Room(self._path.with_name(DATABASE_NAME + "-wal"), page_bytes)
        self._execute("PRAGMA temp_store = MEMORY")
        self._execute(_TAIL_FOLLOWS)
        marks = {name: (sequence, mark) for name, sequence, mark in self._execute("SELECT * FROM marks")}
        sound = all(isinstance(sequence, int) and isinstance(mark, bytes) for sequence, mark in marks.values())
        if marks.keys() != {"tail", "snapshot"} or not sound:
            self._refuse(self._path, "its marks are unreadable")
        self._sequence, self._chain = marks["tail"]
        self._snapshot_sequence, self._snapshot_chain = marks["snapshot"]

    def _make(self, tables: int) -> None:
        """Creates the tables; until the lock file says so, a crash in the middle just means doing it again."""
        if tables == 0:
            with self._transaction():
                for statement in _SCHEMA:
                    self._execute(statement)
        self._execute("PRAGMA wal_checkpoint(TRUNCATE)")
        os.pwrite(self._lock_file, _MADE, 0)
        os.fsync(self._lock_file)
        sync_directory(self._directory)

    def _execute(self, statement: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:
        if self._connection is None:
            raise JournalFailed("the journal is closed")
        return self._connection.execute(statement, parameters)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._execute("BEGIN IMMEDIATE")
        try:
            yield
            self._execute("COMMIT")
        except BaseException:
            if self._connection is not None and self._connection.in_transaction:
                self._execute("ROLLBACK")
            raise

    @property
    def sequence(self) -> int:
        """Of the last durable record; 0 in an empty journal."""
        return self._sequence

    def _snapshot_path(self, sequence: int) -> Path:
        return self._directory / f"snapshot-{sequence:020d}"

    def snapshot(self) -> tuple[int, bytes]:
        """Returns the latest snapshot's sequence and state; (0, b"") when there is none.

        Raises:
            JournalDamaged: its file is missing or changed; no flag helps then.
        """
        if self._snapshot_sequence == 0:
            return 0, b""
        path = self._snapshot_path(self._snapshot_sequence)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise JournalDamaged(f"{path}: {error}. Put the files of a backup in its place") from None
        body, digest = data[:-8], data[-8:]
        head = _SNAPSHOT_HEAD.pack(_SNAPSHOT_MAGIC, self._snapshot_sequence, max(0, len(body) - _SNAPSHOT_HEAD.size))
        if body[: _SNAPSHOT_HEAD.size] != head or xxhash.xxh3_64(body).digest() != digest:
            raise JournalDamaged(f"{path}: its digest does not verify. Put the files of a backup in its place")
        return self._snapshot_sequence, body[_SNAPSHOT_HEAD.size :]

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Yields (sequence, record) behind the latest snapshot, in order, without those known to have failed.

        Raises:
            JournalDamaged: a record is missing or changed, after all before it were yielded.
        """
        last, mark = self._snapshot_sequence, self._snapshot_chain
        damage = ""
        try:
            with closing(self._execute("SELECT * FROM groups WHERE first > ? ORDER BY first", (last,))) as rows:
                for first, count, packed, digest in rows:
                    if first != last + 1 or not isinstance(packed, bytes) or chain(mark, first, packed) != digest:
                        damage = f"the records from {last + 1} on do not verify"
                        break
                    records = list(_unpack_group(packed))
                    yield from (each for each in enumerate(records, first) if each not in self._failed)
                    last, mark = last + len(records), digest
                    if count != len(records):
                        damage = f"the group that ends with record {last} counts {count}"
                        break
        except _UNREADABLE as error:
            damage = f"behind record {last}: {error}"
        if not damage and (last, mark) != (self._sequence, self._chain):
            damage = f"it ends with record {last}, but {self._sequence} were written"
        if damage:
            if not self._accept_data_loss:
                self._refuse(self._path, damage)
            self._cut(last, mark, damage)

    def _cut(self, last: int, mark: bytes, damage: str) -> None:
        _log.error("dropping records for good, as asked for", path=str(self._path), last_sequence=last, damage=damage)
        with _disk("cutting the journal"), self._transaction():
            self._execute("DELETE FROM groups WHERE first > ?", (last,))
            self._execute("UPDATE marks SET sequence = ?, chain = ? WHERE name = 'tail'", (last, mark))
        self._sequence, self._chain = last, mark

    def failed(self, sequence: int, record: bytes, reason: str) -> None:
        """Notes durably that applying a record failed and nobody was answered; see `Journal`."""
        with _disk(f"noting that record {sequence} failed"):
            self._failed.add(sequence, record, reason)

    def give_up(self, sequence: int, record: bytes, reason: str) -> None:
        """Passes over a record that a start cannot apply, if that was accepted; see `Journal`."""
        if not self._accept_data_loss:
            raise JournalDamaged(
                f"{self._path}: record {sequence} cannot be applied ({reason}), and it may have been acknowledged; "
                "nothing was changed. Start the version of tq-controller that wrote it, put the files of a backup in "
                "its place, or start with --accept-data-loss to lose this one record for good"
            )
        _log.error("passing over a record for good, as asked for", path=str(self._path), sequence=sequence, why=reason)
        self.failed(sequence, record, reason)

    def sizes(self) -> tuple[int, int]:
        """Returns the bytes of the latest snapshot, and of the records behind it."""
        path = self._snapshot_path(self._snapshot_sequence)
        (records_bytes,) = self._execute(
            "SELECT coalesce(sum(length(records)), 0) FROM groups WHERE first > ?", (self._snapshot_sequence,)
        ).fetchone()
        return path.stat().st_size if self._snapshot_sequence else 0, int(records_bytes)

    def append(self, records: Sequence[bytes]) -> int:
        """Makes a group of records durable, all or none; see `Journal`."""
        first, last = self._sequence + 1, self._sequence + len(records)
        packed = _pack_group(records)
        mark = chain(self._chain, first, packed)
        failpoints.hit(failpoints.BEFORE_COMMIT)
        with _disk("appending to the journal"):
            failpoints.hit(failpoints.COMMIT)
            self._execute("INSERT INTO groups VALUES (?, ?, ?, ?)", (first, len(records), packed, mark))
        failpoints.hit(failpoints.AFTER_COMMIT)
        self._sequence, self._chain = last, mark
        self._room.written(len(packed))
        if self._room.used_bytes >= self._checkpoint_at:
            self._checkpoint()
        with suppress(StorageFull), _disk("laying out room for the journal"):
            self._room.lay_out()
        return first

    def _checkpoint(self) -> bool:
        """Moves the log into the database, and says whether there was room for that.

        The log is emptied: part of it over a database that has all of it would be neither one state nor the other.
        """
        try:
            with _disk("checkpointing the journal"):
                self._execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except StorageFull as error:
            _log.warning("the write-ahead log grows until the disk has room again", error=str(error))
            self._checkpoint_at = self._room.used_bytes + CHECKPOINT_BYTES
            return False
        self._room.emptied()
        self._checkpoint_at = CHECKPOINT_BYTES
        return True

    def write_snapshot(self, sequence: int, state: Sequence[bytes]) -> None:
        """Writes a snapshot beside the journal; see `Journal`."""
        failpoints.hit(failpoints.SNAPSHOT_BEFORE)
        path = self._snapshot_path(sequence)
        draft = path.with_suffix(".draft")
        head = _SNAPSHOT_HEAD.pack(_SNAPSHOT_MAGIC, sequence, sum(map(len, state)))
        digest = xxhash.xxh3_64(head)
        with _disk("writing a snapshot"):
            try:
                with open(draft, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(head)
                    for piece in state:
                        digest.update(piece)
                        file.write(piece)
                    file.flush()
                    failpoints.hit(failpoints.SNAPSHOT_MIDDLE)
                    file.write(digest.digest())
                    file.flush()
                    os.fsync(file.fileno())
                draft.rename(path)
                sync_directory(self._directory)
            except OSError:
                draft.unlink(missing_ok=True)
                raise

    def install_snapshot(self, sequence: int) -> None:
        """Makes a written snapshot the latest one; see `Journal`."""
        with _disk("installing a snapshot"):
            row = self._execute("SELECT chain FROM groups WHERE first + count - 1 = ?", (sequence,)).fetchone()
            if row is None:
                raise ValueError(f"no group ends with record {sequence}")
            with self._transaction():
                self._execute("UPDATE marks SET sequence = ?, chain = ? WHERE name = 'snapshot'", (sequence, row[0]))
            previous = self._snapshot_sequence
            self._snapshot_sequence, self._snapshot_chain = sequence, row[0]
            failpoints.hit(failpoints.SNAPSHOT_AFTER)
        if self._checkpoint():
            if previous:
                self._snapshot_path(previous).unlink(missing_ok=True)
            with _disk("forgetting failed records"):
                self._failed.forget_outside(sequence + 1, self._sequence)

    def trim(self) -> bool:
        """Removes some groups that the latest snapshot covers; says whether more may be left."""
        with _disk("trimming the journal"), self._transaction():
            removed: int = self._execute(
                "DELETE FROM groups WHERE first IN (SELECT first FROM groups WHERE first <= ? ORDER BY first LIMIT ?)",
                (self._snapshot_sequence, TRIM_GROUPS_MAX),
            ).rowcount
        return removed == TRIM_GROUPS_MAX

    def close(self) -> None:
        """Closes the files and gives up the lock; repeatable."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._lock_file >= 0:
            os.close(self._lock_file)
            self._lock_file = -1
