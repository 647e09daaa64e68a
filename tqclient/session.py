"""The two daemon threads of a client: one keeps its session, and with it its claims, alive; one cleans up behind it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from typing import ClassVar, Final

from tqclient.channel import Channels
from tqclient.driver import Stubs, run_sync
from tqclient.errors import TQError
from tqclient.operations.cluster import open_paths
from tqclient.operations.effects import Deadline
from tqclient.operations.permits import return_lost_permits
from tqclient.operations.producers import renew_producers, retract_producers
from tqclient.operations.put import settle_lost_puts
from tqclient.operations.sessions import close_windows, heartbeat, release_lost_claims
from tqclient.state import ClientState

BEATS_PER_LEASE: Final = 3
WINDOW_IDLE_SECONDS: Final = 2.0
"""After this long without a put, what was reserved ahead goes back to its node."""
PERIOD_MAX: Final = 2.0
"""Seconds between two beats at most: dropped pins hold memory of storage nodes until one carries them."""
PERIOD_MIN: Final = 0.02
BEAT_TIMEOUT_MIN: Final = 0.25

_log = logging.getLogger(__name__)


class _Periodic(ABC):
    """A thread that does something each period, or as soon as it is woken, until the client is closed.

    Args:
        state: of the client.
        stubs: blocking ones; an asyncio client has them for these threads alone.
        wake: is set by whoever has something for it.
    """

    name: ClassVar[str]

    def __init__(self, state: ClientState, stubs: Stubs, wake: threading.Event) -> None:
        self._state = state
        self._stubs = stubs
        self._wake = wake
        self._thread = threading.Thread(target=self._run, name=f"tq-{self.name}", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self, timeout: float) -> None:
        """Waits for the end of the thread, once the state was marked closed."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout)

    def _period(self) -> float:
        return max(PERIOD_MIN, min(PERIOD_MAX, self._state.lease_ms / 1000 / BEATS_PER_LEASE))

    def _run(self) -> None:
        while not self._state.closed:
            self._wake.wait(self._period())
            self._wake.clear()
            if not self._state.closed:
                self._turn()

    def _turn(self) -> None:
        address = self._state.address
        try:
            self._work()
        except TQError as error:
            _log.debug("%s of controller %s failed, the next one follows: %s", self.name, address, error)
        except Exception:
            if not self._state.closed:  # whoever closes takes the channels away from under it
                _log.exception("%s of controller %s failed, the next one follows", self.name, address)

    @abstractmethod
    def _work(self) -> None: ...


class Heartbeat(_Periodic):
    """Renews the session. It does nothing else: what waits for others would cost the session."""

    name = "heartbeat"

    def __init__(self, state: ClientState, stubs: Stubs) -> None:
        super().__init__(state, stubs, state.hurry)

    def _work(self) -> None:
        state = self._state
        # A beat that takes longer than a period would delay the next one: rather try again.
        timeout = max(self._period(), BEAT_TIMEOUT_MIN)
        if run_sync(heartbeat(state, timeout), self._stubs):
            state.paths_due = True
            state.wake.set()


class Chores(_Periodic):
    """Gives back what nobody in this client needs any more, and opens the paths to new nodes.

    Args:
        state: of the client.
        channels: blocking ones; those to former addresses of nodes are closed here.
    """

    name = "chores"

    def __init__(self, state: ClientState, channels: Channels) -> None:
        super().__init__(state, channels, state.wake)
        self._channels = channels

    def _work(self) -> None:
        state = self._state
        timeout = max(self._period(), BEAT_TIMEOUT_MIN)
        state.run_forgotten()
        for former in self._channels.take_former(state.nodes.values()):
            former.close()
        run_sync(retract_producers(state, timeout), self._stubs)
        run_sync(renew_producers(state, timeout), self._stubs)
        run_sync(release_lost_claims(state), self._stubs)
        run_sync(return_lost_permits(state), self._stubs)
        run_sync(settle_lost_puts(state), self._stubs)
        state.windows.retire(idle_since=state.clock() - WINDOW_IDLE_SECONDS)
        run_sync(close_windows(state, state.windows.take_closing()), self._stubs)
        if state.paths_due:
            state.paths_due = False
            run_sync(open_paths(state, Deadline(self._period(), state.clock)), self._stubs)
