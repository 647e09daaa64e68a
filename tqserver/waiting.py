"""Waiting with a bound, in asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def within(work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Does as `asyncio.wait_for`, which before Python 3.12 loses a cancellation that comes together with the result.

    Args:
        work: cancelled, and seen to its end, when the time is up or the caller is cancelled.
        seconds: for it.

    Raises:
        TimeoutError: asyncio's; the time was up first.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise asyncio.TimeoutError
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # looked at, or asyncio complains of it
