"""The clock of the leases: it stands still while this process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from tqserver import logs

TICK_S: Final = 0.1
"""Between two looks at the time."""
STALL_S: Final = 0.25
"""The most that one look moves the clock on: in what is beyond, this process heard nobody."""

_log = logs.get("controller.leases")


class LeaseClock:
    """Seconds of another clock, without those in which this process was stopped.

    A process that is stopped, traced or swapped out, or whose host is, leaves every sign of life of every client
    unread. To count that time against them would end all sessions at once, with all that they hold, although no client
    was silent. For the event loop's thread alone; `run` must run.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now = self._seen = clock()

    def __call__(self) -> float:
        """Returns the seconds."""
        seen = self._clock()
        passed, self._seen = seen - self._seen, seen
        self._now += min(passed, STALL_S)
        if passed > STALL_S:
            _log.warning("this process stood still; no lease has run meanwhile", seconds=round(passed, 3))
        return self._now

    async def run(self) -> None:
        """Looks at the time, until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self()
