"""Log, then apply: what a restart rebuilds, and what a full disk leaves behind."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
import uvloop

from tqclient.errors import StorageFull
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver import failpoints
from tqserver.controller import pipeline as module
from tqserver.controller.core import Core, Effect, Outcome, SessionEnded, SessionOpened
from tqserver.controller.failed import FailedRecords
from tqserver.controller.group_commit import GroupCommit, Saved
from tqserver.controller.journal import JournalDamaged, JournalLocked, SqliteJournal
from tqserver.controller.pipeline import CORE_FAILED_STATUS, Pipeline, recover
from tqserver.failpoints import Failpoints


def opening(request: int) -> journal_pb2.Command:
    command = pb.OpenSessionRequest(wire_version=1)
    command.mutation.client_id, command.mutation.request = b"c" * 16, request
    return journal_pb2.Command(open_session=command)


def pipeline(core: Core, journal: SqliteJournal, effects: list[Effect], **options: Any) -> Pipeline:
    settings = {"snapshot_records": 1000, "replay_budget": 1000.0, "replayed": 0.0, **options}
    return Pipeline(core, journal, clock=time.monotonic, effect=effects.append, settled=lambda: None, **settings)


def test_commands_are_applied_in_the_order_of_the_journal_and_come_back(tmp_path: Path) -> None:
    async def run() -> tuple[list[Outcome], list[Effect], bytes]:
        journal = SqliteJournal(tmp_path)
        core = recover(journal, time.monotonic, 10.0)
        effects: list[Effect] = []
        line = pipeline(core, journal, effects, snapshot_records=7)
        outcomes = await asyncio.gather(*(line.execute(opening(number)) for number in range(1, 21)))
        await asyncio.to_thread(line.close)
        return outcomes, effects, core.snapshot()

    outcomes, effects, state = asyncio.run(run())
    sessions = [outcome.reply.session for outcome in outcomes]  # type: ignore[union-attr]
    assert sessions == list(range(1, 21))
    assert [effect.session for effect in effects if isinstance(effect, SessionOpened)] == sessions
    journal = SqliteJournal(tmp_path)
    assert recover(journal, time.monotonic, 10.0).snapshot() == state
    journal.close()


def test_a_group_that_the_disk_had_no_room_for_was_never_applied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failpoints, "_process", Failpoints("journal-commit:ENOSPC"))

    async def run() -> None:
        journal = SqliteJournal(tmp_path)
        core = recover(journal, time.monotonic, 10.0)
        line = pipeline(core, journal, [])
        assert isinstance((await line.execute(opening(1))).error, StorageFull)
        assert core.describe().sessions == 0
        assert (await line.execute(opening(1))).error is None
        assert (core.describe().sessions, core.sequence) == (1, 1)
        await asyncio.to_thread(line.close)

    asyncio.run(run())


def test_closing_waits_for_a_snapshot_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever opens the journal next removes drafts; a writer that was left behind ended its process over that."""
    begun, goes_on = threading.Event(), threading.Event()
    write_snapshot = SqliteJournal.write_snapshot

    def slow(journal: SqliteJournal, sequence: int, state: Sequence[bytes]) -> None:
        begun.set()
        goes_on.wait(30)
        write_snapshot(journal, sequence, state)

    monkeypatch.setattr(SqliteJournal, "write_snapshot", slow)

    async def run() -> None:
        journal = SqliteJournal(tmp_path)
        line = pipeline(recover(journal, time.monotonic, 10.0), journal, [], snapshot_records=1)
        await line.execute(opening(1))
        await asyncio.to_thread(begun.wait, 30)
        closing = asyncio.create_task(asyncio.to_thread(line.close))
        closed, _ = await asyncio.wait([closing], timeout=0.2)
        assert not closed
        with pytest.raises(JournalLocked):
            SqliteJournal(tmp_path)
        goes_on.set()
        await closing

    asyncio.run(run())
    SqliteJournal(tmp_path).close()


def fail_on(monkeypatch: pytest.MonkeyPatch, *sequences: int) -> None:
    """Makes the core raise what it never should, after half of a record was applied."""
    apply = Core.apply

    def fails(core: Core, command: journal_pb2.Command, now: float, sequence: int) -> Outcome:
        outcome = apply(core, command, now, sequence)
        if sequence in sequences:
            raise AssertionError("a bug")
        return outcome

    monkeypatch.setattr(Core, "apply", fails)


RECORDS = [opening(number).SerializeToString() for number in (1, 2, 3)]


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_start_refuses_a_record_that_it_cannot_apply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unreadable: bool
) -> None:
    journal = SqliteJournal(tmp_path)
    journal.append([RECORDS[0], b"\xff" if unreadable else RECORDS[1], RECORDS[2]])
    if not unreadable:
        fail_on(monkeypatch, 2)
    why = "DecodeError" if unreadable else "AssertionError.*a bug"
    with pytest.raises(JournalDamaged, match=rf"record 2 cannot be applied \({why}.*--accept-data-loss"):
        recover(journal, time.monotonic, 10.0)
    assert list(tmp_path.glob("failed-*")) == []
    journal.close()


def test_an_accepted_loss_is_of_the_records_that_fail_alone_and_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = SqliteJournal(tmp_path, accept_data_loss=True)
    journal.append([*RECORDS, opening(4).SerializeToString()])
    with monkeypatch.context() as patched:
        fail_on(patched, 2, 4)
        core = recover(journal, time.monotonic, 10.0)
        assert (core.describe().sessions, core.sequence) == (2, 3)
    journal.close()
    # What was built on the state without them must not see them again, though they could be applied by now.
    journal = SqliteJournal(tmp_path)
    assert recover(journal, time.monotonic, 10.0).snapshot() == core.snapshot()
    assert journal.append([opening(5).SerializeToString()]) == 5
    journal.close()


class Ended(BaseException):
    """Stands for the end of the process."""


@pytest.mark.parametrize("disk", ["works", "fails"])
def test_a_process_that_fails_on_a_record_names_it_and_the_next_start_passes_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: str
) -> None:
    def end(status: int) -> NoReturn:
        raise Ended(status)

    async def run() -> None:
        journal = SqliteJournal(tmp_path)
        core = recover(journal, time.monotonic, 10.0)
        line = pipeline(core, journal, [])
        assert (await line.execute(opening(1))).error is None
        if disk == "fails":
            monkeypatch.setattr(FailedRecords, "add", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "a disk")))
        with monkeypatch.context() as patched:
            fail_on(patched, 2)
            patched.setattr(os, "_exit", end)
            with pytest.raises(Ended, match=str(CORE_FAILED_STATUS)):
                line._apply(opening(2), journal.append([RECORDS[1]]), RECORDS[1])
        await asyncio.to_thread(line.close)

    asyncio.run(run())
    journal = SqliteJournal(tmp_path)
    if disk == "works":
        assert recover(journal, time.monotonic, 10.0).describe().sessions == 1
    else:
        fail_on(monkeypatch, 2)
        with pytest.raises(JournalDamaged, match="record 2"):
            recover(journal, time.monotonic, 10.0)
    journal.close()


def saving(sequences: list[int], took: Saved) -> Callable[..., None]:
    """Stands for `GroupCommit.save`: says at once what it took."""

    def save(group_commit: GroupCommit, sequence: int, state: Iterable[bytes], done: Callable[[Saved], None]) -> None:
        sequences.append(sequence)
        done(took)

    return save


@pytest.mark.parametrize(("seconds", "expected"), [(0.0, [1, 2, 3, 4, 5, 6]), (2.4, [1, 6])])
def test_a_snapshot_that_took_long_puts_off_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: list[int]
) -> None:
    """Or a controller with a million blocks would do little else."""
    saved: list[int] = []
    monkeypatch.setattr(GroupCommit, "save", saving(saved, Saved(1000, seconds)))
    ticks = itertools.count()
    monkeypatch.setattr(module.time, "perf_counter", lambda: float(next(ticks)))  # each apply takes a second

    async def run() -> None:
        journal = SqliteJournal(tmp_path)
        line = pipeline(recover(journal, time.monotonic, 10.0), journal, [], replay_budget=0.5)
        for number in range(1, 7):
            await line.execute(opening(number))
        await asyncio.to_thread(line.close)

    asyncio.run(run())
    assert saved == expected


def test_many_bytes_of_records_make_a_snapshot_and_more_of_them_when_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SNAPSHOT_AFTER_BYTES", 5 * len(RECORDS[0]))
    assert {len(record) for record in RECORDS} == {len(RECORDS[0])}
    saved: list[int] = []

    async def run(state_bytes: int, first: int, count: int) -> None:
        journal = SqliteJournal(tmp_path)
        core = recover(journal, time.monotonic, 10.0)
        monkeypatch.setattr(GroupCommit, "save", saving(saved, Saved(state_bytes, 0.0)))
        line = pipeline(core, journal, [])
        for number in range(first, first + count):
            await line.execute(opening(number))
        await asyncio.to_thread(line.close)

    asyncio.run(run(0, 1, 3))
    assert saved == []
    asyncio.run(run(0, 4, 1))
    assert saved == []
    # What the former starts left counts: the fifth record makes one; a large one puts off the next to record 5 + 8.
    asyncio.run(run(4 * len(RECORDS[0]), 5, 9))
    assert saved == [5, 13]


@pytest.mark.parametrize("run_in", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_a_deadline_that_has_passed_ends_its_session_whatever_is_answered_meanwhile(
    tmp_path: Path, run_in: Callable[[Any], None]
) -> None:
    async def run() -> None:
        now, ended = [100.0], asyncio.Event()
        journal = SqliteJournal(tmp_path)
        core = recover(journal, lambda: now[0], 10.0)
        line = Pipeline(
            core,
            journal,
            clock=lambda: now[0],
            effect=lambda effect: ended.set() if isinstance(effect, SessionEnded) else None,
            settled=lambda: None,
            snapshot_records=1000,
            replay_budget=1000.0,
            replayed=0.0,
        )
        await line.execute(opening(1))
        now[0] += 60.0
        line._answered(ends_group=False)  # the timer is set to a moment that has passed, ...
        line._answered(ends_group=False)  # ... and looked at once more before it rings
        await ended.wait()
        await asyncio.to_thread(line.close)

    run_in(asyncio.wait_for(run(), 10))
