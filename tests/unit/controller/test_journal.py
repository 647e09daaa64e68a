"""The journal: order, atomicity, recovery from any cut, refusal of any flip, and full and failing disks."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.harness.journals import LOG, end_of
from tqclient.errors import StorageFull, TQError
from tqserver import failpoints
from tqserver.controller import journal as module
from tqserver.controller import wal
from tqserver.controller.journal import JournalDamaged, JournalFailed, JournalLocked, SqliteJournal
from tqserver.failpoints import Failpoints

SNAPSHOT = b"the state" * 1000


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[SqliteJournal]:
    opened = SqliteJournal(tmp_path / "data")
    yield opened
    opened.close()


def fill(journal: SqliteJournal, groups: int, rng: random.Random) -> list[list[bytes]]:
    written = [[rng.randbytes(rng.randrange(600)) for _ in range(rng.randrange(1, 4))] for _ in range(groups)]
    for group in written:
        journal.append(group)
    return written


def read(directory: Path, **options: bool) -> tuple[int, list[bytes]] | TQError:
    """Opens a journal; returns (sequence of its snapshot, the records behind it) or why it refuses."""
    try:
        journal = SqliteJournal(directory, **options)
    except TQError as error:
        return error
    try:
        sequence, state = journal.snapshot()
        assert state == (SNAPSHOT if sequence else b"")
        return sequence, [record for _, record in journal.records()]
    except TQError as error:
        return error
    finally:
        journal.close()


def test_records_come_back_in_order_with_their_sequences(journal: SqliteJournal, tmp_path: Path) -> None:
    assert journal.append([b"a", b"", b"c"]) == 1
    assert journal.append([b"d"]) == 4
    assert journal.sequence == 4
    assert list(journal.records()) == [(1, b"a"), (2, b""), (3, b"c"), (4, b"d")]
    journal.close()
    assert read(tmp_path / "data") == (0, [b"a", b"", b"c", b"d"])


def test_a_snapshot_replaces_the_records_before_it(
    journal: SqliteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TRIM_GROUPS_MAX", 10)
    for number in range(35):
        journal.append([b"%d" % number])
    journal.write_snapshot(35, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
    assert journal.snapshot() == (0, b"")  # it counts once installed
    journal.append([b"behind"])
    journal.install_snapshot(35)
    trims = 0
    while journal.trim():
        trims += 1
    assert trims == 3
    assert list(journal.records()) == [(36, b"behind")]
    journal.write_snapshot(36, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
    journal.install_snapshot(36)
    assert [path.name for path in (tmp_path / "data").glob("snapshot-*")] == ["snapshot-00000000000000000036"]
    journal.close()
    assert read(tmp_path / "data") == (36, [])


def test_snapshots_that_were_never_installed_are_removed(journal: SqliteJournal, tmp_path: Path) -> None:
    journal.append([b"a"])
    journal.write_snapshot(1, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
    journal.close()
    assert read(tmp_path / "data") == (0, [b"a"])
    assert not list((tmp_path / "data").glob("snapshot-*"))


def test_one_process_at_a_time_and_nobody_else_reads_it(journal: SqliteJournal, tmp_path: Path) -> None:
    with pytest.raises(JournalLocked, match="another tq-controller"):
        SqliteJournal(tmp_path / "data")
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_a_directory_that_exists_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o751)  # somebody may have meant /tmp
    SqliteJournal(tmp_path).close()
    assert tmp_path.stat().st_mode & 0o777 == 0o751


class Damage:
    """A journal as a crash left it, and copies of it with changed files."""

    def __init__(self, directory: Path, *, checkpointed: bool) -> None:
        journal = SqliteJournal(directory / "whole")
        rng = random.Random(2)
        before = fill(journal, 12, rng)
        self.snapshot = sum(map(len, before))
        journal.write_snapshot(self.snapshot, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
        journal.install_snapshot(self.snapshot)
        groups = fill(journal, 12, rng)
        if checkpointed:
            assert journal._checkpoint()
        self.records = [record for group in groups for record in group]
        self.last_group = len(groups[-1])
        self.files = {path.name: path.read_bytes() for path in (directory / "whole").iterdir()}
        journal.close()
        self._copy = directory / "copy"

    def read(self, name: str, data: bytes) -> tuple[int, list[bytes]] | TQError:
        """Opens a copy in which one file is another."""
        shutil.rmtree(self._copy, ignore_errors=True)
        self._copy.mkdir(mode=0o700)
        for each, original in self.files.items():
            (self._copy / each).write_bytes(data if each == name else original)
        return read(self._copy)

    def flips(self, name: str, count: int, seed: int) -> Iterator[tuple[int, bytes]]:
        """Yields (bit, the file with that bit flipped); of the log, without the room behind it."""
        rng = random.Random(seed)
        data = self.files[name]
        size = end_of(data) if name == LOG else len(data)
        for _ in range(count):
            bit = rng.randrange(size * 8)
            flipped = bytearray(data)
            flipped[bit // 8] ^= 1 << bit % 8
            yield bit, bytes(flipped)


def test_a_log_cut_anywhere_opens_with_an_exact_prefix(tmp_path: Path) -> None:
    damage = Damage(tmp_path, checkpointed=False)
    log = damage.files[LOG]
    lengths = set()
    for length in [*range(0, end_of(log), 1499), end_of(log), len(log)]:
        found = damage.read(LOG, log[:length])
        assert not isinstance(found, TQError), f"cut at {length}: {found}"
        start, records = found
        assert start == damage.snapshot
        assert records == damage.records[: len(records)]
        lengths.add(len(records))
    assert {0, len(damage.records)} < lengths
    assert len(lengths) == 13  # after each of the 12 groups, and none


@pytest.mark.parametrize("name", ["journal.db", "snapshot"])
def test_a_cut_of_what_was_synced_long_ago_is_refused(tmp_path: Path, name: str) -> None:
    damage = Damage(tmp_path, checkpointed=True)
    name = name if name in damage.files else f"snapshot-{damage.snapshot:020d}"
    files = damage.files
    for length in range(0, len(files[name]), 997):
        found = damage.read(name, files[name][:length])
        whole = (damage.snapshot, damage.records)
        assert isinstance(found, TQError) or found == whole, f"cut at {length}"


@pytest.mark.parametrize(
    ("name", "checkpointed", "count"),
    [(LOG, False, 200), ("journal.db", True, 300), ("journal.db", False, 60), ("snapshot", True, 60)],
)
def test_a_flipped_bit_never_loses_a_record_in_silence(
    tmp_path: Path, seed: int, name: str, checkpointed: bool, count: int
) -> None:
    damage = Damage(tmp_path, checkpointed=checkpointed)
    name = name if name in damage.files else f"snapshot-{damage.snapshot:020d}"
    refused = 0
    for bit, data in damage.flips(name, count, seed):
        found = damage.read(name, data)
        if isinstance(found, TQError):
            assert isinstance(found, JournalDamaged), f"bit {bit}: {found!r}"
            refused += 1
            continue
        start, records = found
        assert start == damage.snapshot, f"bit {bit}"
        assert records == damage.records[: len(records)], f"bit {bit}"
        lost = len(damage.records) - len(records)
        # Only a flip within the very last commit looks like a torn one.
        assert lost == 0 or (lost == damage.last_group and name == LOG), f"bit {bit} lost {lost}"
    assert refused or name == "journal.db"  # most of its pages are superseded by the log


def test_a_missing_snapshot_and_an_emptied_database_are_refused(tmp_path: Path) -> None:
    damage = Damage(tmp_path, checkpointed=True)
    assert isinstance(damage.read("journal.db", b""), JournalDamaged)
    del damage.files[f"snapshot-{damage.snapshot:020d}"]
    assert isinstance(damage.read("", b""), JournalDamaged)


def test_data_loss_that_was_accepted_cuts_the_journal_and_goes_on(tmp_path: Path) -> None:
    directory = tmp_path / "data"
    journal = SqliteJournal(tmp_path / "whole")
    for number in range(8):
        journal.append([b"%d" % number * 3000])
    shutil.copytree(tmp_path / "whole", directory)  # as a kill would leave it
    journal.close()
    log = bytearray((directory / LOG).read_bytes())
    log[end_of(log) // 2] ^= 1
    (directory / LOG).write_bytes(log)
    refused = read(directory)
    assert isinstance(refused, JournalDamaged)
    assert "journal.db-wal" in str(refused)
    last_good = re.search(r"the last record before it is (\d+)", str(refused))
    assert "--accept-data-loss" in str(refused)
    found = read(directory, accept_data_loss=True)
    assert not isinstance(found, TQError)
    kept = found[1]
    assert 0 < len(kept) < 8
    assert last_good is not None
    assert int(last_good[1]) == len(kept)
    assert kept == [b"%d" % number * 3000 for number in range(len(kept))]
    journal = SqliteJournal(directory)
    assert journal.append([b"next"]) == len(kept) + 1
    journal.close()
    assert read(directory) == (0, [*kept, b"next"])


def armed(monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    monkeypatch.setattr(failpoints, "_process", Failpoints(spec))


def test_a_full_disk_appends_nothing_and_a_later_append_succeeds(
    journal: SqliteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append([b"a"])
    armed(monkeypatch, "journal-commit:ENOSPC")
    with pytest.raises(StorageFull, match="nothing was changed"):
        journal.append([b"b", b"c"])
    assert journal.append([b"d"]) == 2
    journal.close()
    assert read(tmp_path / "data") == (0, [b"a", b"d"])


def test_sqlite_running_out_of_pages_is_a_full_disk(journal: SqliteJournal) -> None:
    journal.append([b"a"])
    journal._execute("PRAGMA max_page_count = 20")
    with pytest.raises(StorageFull):
        journal.append([os.urandom(1 << 20)])
    journal._execute("PRAGMA max_page_count = 100000")
    assert journal.append([b"b"]) == 2
    assert list(journal.records()) == [(1, b"a"), (2, b"b")]


def test_a_failing_disk_is_no_full_one(journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    armed(monkeypatch, "journal-commit:EIO")
    with pytest.raises(JournalFailed, match="failpoint journal-commit"):
        journal.append([b"a"])


def test_a_snapshot_without_room_leaves_no_trace(
    journal: SqliteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.append([b"a"])
    armed(monkeypatch, "snapshot-middle:ENOSPC")
    with pytest.raises(StorageFull):
        journal.write_snapshot(1, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
    assert not list((tmp_path / "data").glob("snapshot-*"))


@pytest.mark.parametrize(("size", "log_bytes"), [(40, 12 << 10), (4096, 16 << 10), (1 << 20, 1 << 20)])
def test_the_log_is_checkpointed_before_it_grows_without_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, log_bytes: int
) -> None:
    """What a start has to read is the log, which takes three pages and more for the shortest record."""
    monkeypatch.setattr(module, "CHECKPOINT_BYTES", 64 << 10)
    journal = SqliteJournal(tmp_path / "data")
    longest = 0
    for _ in range(4 * wal.ROOM_STEP_BYTES // log_bytes):  # four times the room that is laid out
        journal.append([bytes(size)])
        longest = max(longest, (tmp_path / "data" / LOG).stat().st_size)
    assert longest <= (64 << 10) + wal.ROOM_STEP_BYTES + wal.ROOM_AHEAD_BYTES
    journal.close()


def test_a_checkpoint_without_room_is_tried_again_when_the_log_is_as_much_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHECKPOINT_BYTES", 160 << 10)
    journal = SqliteJournal(tmp_path / "data")
    execute, tried, full = journal._execute, [], True
    error = sqlite3.OperationalError("database or disk is full")

    def refuse(statement: str, parameters: Sequence[object] = ()) -> sqlite3.Cursor:
        if statement.startswith("PRAGMA wal_checkpoint"):
            tried.append(journal.sequence)
            if full:
                raise error
        return execute(statement, parameters)

    monkeypatch.setattr(journal, "_execute", refuse)
    for _ in range(60):
        journal.append([b"a"])
    assert [after - before for before, after in itertools.pairwise(tried)] == [10] * (len(tried) - 1)
    assert len(tried) >= 5
    full = False
    for _ in range(10):
        journal.append([b"a"])
    assert end_of((tmp_path / "data" / LOG).read_bytes()) < 160 << 10
    assert journal._room.used_bytes < 160 << 10
    journal.close()
    assert read(tmp_path / "data") == (0, [b"a"] * 70)


def test_commits_write_over_room_that_was_laid_out(tmp_path: Path, seed: int) -> None:
    journal = SqliteJournal(tmp_path / "data")
    rng = random.Random(seed)
    records = [rng.randbytes(int(2 ** rng.uniform(0, 17))) for _ in range(100)]
    journal.append([records[0]])
    steps = 0
    for record in records[1:]:
        before = (tmp_path / "data" / LOG).stat().st_size
        journal.append([record])
        log = (tmp_path / "data" / LOG).read_bytes()
        assert end_of(log) <= journal._room.used_bytes <= before
        assert len(log) in (before, before + wal.ROOM_STEP_BYTES)
        steps += len(log) > before
    assert steps == len(log) // wal.ROOM_STEP_BYTES - 1 > 0
    assert journal._room.used_bytes < 1.5 * end_of(log)  # it lays out about what it needs
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    journal.close()
    assert read(tmp_path / "killed") == (0, records)


def test_room_begins_anew_behind_a_checkpoint_and_where_a_long_record_went_beyond_it(tmp_path: Path) -> None:
    journal = SqliteJournal(tmp_path / "data")
    records = [bytes(100), os.urandom(3 << 20), bytes(100)]
    for record in records:
        journal.append([record])
        assert (tmp_path / "data" / LOG).stat().st_size >= journal._room.used_bytes + wal.ROOM_AHEAD_BYTES
    assert journal._checkpoint()
    assert (tmp_path / "data" / LOG).stat().st_size == 0
    journal.append([b"behind"])
    assert (tmp_path / "data" / LOG).stat().st_size < 2 * wal.ROOM_STEP_BYTES
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    journal.close()
    assert read(tmp_path / "killed") == (0, [*records, b"behind"])


def test_a_disk_without_room_to_lay_out_takes_commits_while_it_can(
    journal: SqliteJournal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("tqserver.controller.wal.os.pwrite", full)
        assert journal.append([b"a"]) == 1
        assert journal.append([b"b"]) == 2
    shutil.copytree(tmp_path / "data", tmp_path / "killed")
    assert read(tmp_path / "killed") == (0, [b"a", b"b"])
    assert journal.append([b"c"]) == 3
    assert (tmp_path / "data" / LOG).stat().st_size > wal.ROOM_STEP_BYTES


def test_a_disk_that_fails_under_the_room_fails_under_the_journal(
    journal: SqliteJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("tqserver.controller.wal.os.pwrite", failing)
    with pytest.raises(JournalFailed, match="laying out room"):
        journal.append([b"a"])


def failed(directory: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("failed-")) for path in directory.glob("failed-*"))


def test_a_failed_record_is_passed_over_until_a_snapshot_covers_it(journal: SqliteJournal, tmp_path: Path) -> None:
    journal.append([b"a", b"b"])
    journal.append([b"c"])
    journal.failed(2, b"b", "a bug")
    journal.failed(3, b"c", "another")
    assert list(journal.records()) == [(1, b"a")]
    journal.close()
    assert failed(tmp_path / "data") == [2, 3]
    assert read(tmp_path / "data") == (0, [b"a"])
    opened = SqliteJournal(tmp_path / "data")
    opened.write_snapshot(2, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
    opened.install_snapshot(2)
    assert failed(tmp_path / "data") == [3]
    assert list(opened.records()) == []
    opened.append([b"d"])
    opened.close()
    assert read(tmp_path / "data") == (2, [b"d"])


def test_a_failed_record_of_another_life_of_the_journal_hides_nothing(journal: SqliteJournal, tmp_path: Path) -> None:
    data = tmp_path / "data"
    journal.append([b"a", b"b"])
    journal.close()
    shutil.copytree(data, tmp_path / "backup")
    for sequence, record in ((2, b"another's"), (3, b"c")):
        opened = SqliteJournal(data)
        if opened.sequence < sequence:
            opened.append([record])
        opened.failed(sequence, record, "a bug")
        opened.close()
    assert failed(data) == [2, 3]
    (data / "failed-00000000000000000001").write_text("")  # a crash cut it short
    for name in (path.name for path in (tmp_path / "backup").iterdir()):
        shutil.copy(tmp_path / "backup" / name, data)
    assert read(data) == (0, [b"a", b"b"])
    assert failed(data) == [1, 2]  # the third one is ahead of what was restored
    opened = SqliteJournal(data)
    assert opened.append([b"c"]) == 3
    opened.close()
    assert read(data) == (0, [b"a", b"b", b"c"])


def test_sizes_are_of_the_snapshot_and_of_what_lies_behind_it(journal: SqliteJournal) -> None:
    assert journal.sizes() == (0, 0)
    journal.append([b"a" * 10, b"b" * 20])
    journal.append([b"c" * 5])
    assert journal.sizes() == (0, 4 + 10 + 4 + 20 + 4 + 5)  # each behind its length
    journal.write_snapshot(2, [SNAPSHOT[:1000], SNAPSHOT[1000:]])
    journal.install_snapshot(2)
    snapshot_bytes, records_bytes = journal.sizes()
    assert records_bytes == 4 + 5
    assert len(SNAPSHOT) < snapshot_bytes <= len(SNAPSHOT) + 64
