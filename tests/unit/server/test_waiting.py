"""A bound on a wait: what comes in time, what comes late, and who is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from tqserver.waiting import within


async def answer(event: asyncio.Event) -> str:
    await event.wait()
    return "answer"


def test_what_comes_in_time_is_returned_or_raised() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def scenario() -> None:
        event = asyncio.Event()
        event.set()
        assert await within(answer(event), 10) == "answer"
        with pytest.raises(ValueError, match="no"):
            await within(fail(), 10)

    asyncio.run(scenario())


def test_what_is_late_is_cancelled_and_seen_to_its_end() -> None:
    ended = []

    async def slow() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    async def scenario() -> None:
        for seconds in (0.001, 0, -1):
            with pytest.raises(asyncio.TimeoutError):
                await within(slow(), seconds)

    asyncio.run(scenario())
    assert ended == [True, True, True]


def test_a_cancellation_that_comes_together_with_the_result_is_not_lost() -> None:
    async def scenario() -> None:
        event = asyncio.Event()
        waiting = asyncio.create_task(within(answer(event), 10))
        for _ in range(3):
            await asyncio.sleep(0)  # both have begun
        event.set()
        await asyncio.sleep(0)  # the answer is there, and whoever waits has not heard of it
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            pytest.fail(f"it returned {await waiting!r}")

    asyncio.run(scenario())
