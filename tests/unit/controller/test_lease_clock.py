"""The clock of the leases runs with another one, but for the time in which the process was stopped."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from tqserver.controller import lease_clock as module
from tqserver.controller.lease_clock import STALL_S, TICK_S, LeaseClock


def test_it_runs_with_the_other_clock_while_it_is_looked_at() -> None:
    now = 100.0
    clock = LeaseClock(lambda: now)
    assert clock() == 100
    for _ in range(50):
        now += TICK_S
        clock()
    assert clock() == pytest.approx(105)


def test_a_stall_counts_as_one_look(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    clock = LeaseClock(lambda: now)
    now += 3600
    assert clock() == clock() == 100 + STALL_S
    now += TICK_S
    assert clock() == pytest.approx(100 + STALL_S + TICK_S)
    assert [record.message for record in caplog.records] == ["this process stood still; no lease has run meanwhile"]


def test_it_looks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TICK_S", 0.001)
    looks = itertools.count(1)

    async def run() -> None:
        seen = asyncio.Event()

        def other() -> float:
            if next(looks) == 10:
                seen.set()
            return 100.0

        ticking = asyncio.create_task(LeaseClock(other).run())
        await seen.wait()
        ticking.cancel()

    asyncio.run(asyncio.wait_for(run(), 10))
