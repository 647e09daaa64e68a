"""Log, then apply: what a restart rebuilds, and what a full disk leaves behind."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tqclient.errors import StorageFull
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver import failpoints
from tqserver.controller.core import Core, Effect, Outcome, SessionOpened
from tqserver.controller.journal import SqliteJournal
from tqserver.controller.pipeline import Pipeline, recover
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


def test_a_record_that_cannot_be_applied_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = SqliteJournal(tmp_path)
    journal.append([opening(number).SerializeToString() for number in (1, 2, 3)])
    apply = Core.apply

    def fails_on_the_second(core: Core, command: journal_pb2.Command, now: float, sequence: int) -> Outcome:
        outcome = apply(core, command, now, sequence)
        if sequence == 2:
            raise AssertionError("a bug, after half of it was applied")
        return outcome

    monkeypatch.setattr(Core, "apply", fails_on_the_second)
    core = recover(journal, time.monotonic, 10.0)
    journal.close()
    assert (core.describe().sessions, core.sequence) == (2, 3)
