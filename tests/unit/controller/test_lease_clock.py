"""The clock of the leases runs with another one, but for the time in which the process was stopped."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.unit.controller.test_service import Bench, run
from tqserver.controller import lease_clock as module
from tqserver.controller.core.limits import LEASE_MIN_MS
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


def test_a_claim_that_nobody_took_is_kept_while_it_stands_still(
    tmp_path: Path,
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.part = bench.driver.partition(bench.session, "short", lease_ms=LEASE_MIN_MS)
        bench.driver.put(bench.session, bench.part, 1)
        await bench.claim_and_leave()
        await asyncio.sleep(2 * LEASE_MIN_MS / 1000)
        await bench.set_version(2)
        assert bench.driver.counts(bench.part) == (0, 0, 1, 0, 0)
        bench.driver.now += LEASE_MIN_MS / 1000
        await asyncio.sleep(2 * LEASE_MIN_MS / 1000)
        await bench.set_version(3)
        assert bench.driver.counts(bench.part) == (0, 1, 0, 0, 0)

    run(tmp_path, scenario)
