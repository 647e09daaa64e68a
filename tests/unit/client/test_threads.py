"""The threads in which asyncio clients have blocking work done."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from tests.harness import wait_until
from tests.unit.client.test_driver import Stubs
from tqclient import threads
from tqclient.driver import run_async
from tqclient.operations.effects import Operation, Work


def working() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "tq-work"]


async def work(what: Work) -> object:
    def operation() -> Operation[object]:
        return (yield what)

    return await run_async(operation(), Stubs(awaitable=True))


def test_work_does_not_wait_behind_work_that_hangs() -> None:
    go_on = threading.Event()
    hanging = threads.AT_ONCE + 40

    async def scenario() -> float:
        stuck = [asyncio.create_task(work(Work(lambda: go_on.wait(60)))) for _ in range(hanging)]
        await asyncio.sleep(0)
        try:
            start = time.monotonic()
            assert await work(Work(lambda: 5)) == 5
            waited = time.monotonic() - start
        finally:
            go_on.set()
        assert await asyncio.gather(*stuck) == [True] * hanging
        return waited

    assert asyncio.run(scenario()) < 20
    wait_until(lambda: not working(), what="threads without work end")


def test_short_work_shares_few_threads() -> None:
    async def scenario() -> None:
        answers = await asyncio.gather(*(work(Work(lambda number=number: number)) for number in range(1000)))  # type: ignore[misc]
        assert answers == list(range(1000))

    asyncio.run(scenario())
    assert 1 <= len(working()) <= threads.AT_ONCE


def test_work_that_raises_what_no_future_takes_ends_all_the_same() -> None:
    def ends() -> None:
        raise StopIteration

    async def scenario() -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(work(Work(ends)), 30)

    asyncio.run(scenario())


def test_where_no_thread_can_be_started_work_runs_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    async def scenario() -> object:
        monkeypatch.setattr(threading.Thread, "start", refuse)
        return await work(Work(threading.get_ident))

    monkeypatch.setattr(threads, "_threads", threads.Threads())
    assert asyncio.run(scenario()) == threading.get_ident()
