"""The heartbeat: one daemon thread per client keeps its session, and with it its claims, alive."""

from __future__ import annotations

import logging
import threading
from typing import Final

from tqclient.driver import Stubs, run_sync
from tqclient.errors import TQError
from tqclient.operations.cluster import open_paths
from tqclient.operations.effects import Deadline
from tqclient.operations.permits import return_lost_permits
from tqclient.operations.producers import renew_producers
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


class Heartbeat:
    """The thread of one client.

    Args:
        state: of the client.
        stubs: blocking ones; an asyncio client has them for this thread alone.
    """

    def __init__(self, state: ClientState, stubs: Stubs) -> None:
        self._state = state
        self._stubs = stubs
        self._thread = threading.Thread(target=self._run, name="tq-heartbeat", daemon=True)

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
        state = self._state
        while not state.closed:
            state.wake.wait(self._period())
            state.wake.clear()
            if not state.closed:
                self._beat()

    def _beat(self) -> None:
        state = self._state
        period = self._period()
        state.run_forgotten()
        try:
            # A beat that takes longer than a period would delay the next one: rather try again.
            timeout = max(period, BEAT_TIMEOUT_MIN)
            if run_sync(heartbeat(state, timeout), self._stubs):
                run_sync(open_paths(state, Deadline(timeout, state.clock)), self._stubs)
            run_sync(release_lost_claims(state), self._stubs)
            run_sync(return_lost_permits(state), self._stubs)
            run_sync(renew_producers(state, timeout), self._stubs)
            state.windows.retire(idle_since=state.clock() - WINDOW_IDLE_SECONDS)
            # A node that does not answer must not cost the session: half a period, once for each.
            run_sync(close_windows(state, state.windows.take_closing(), timeout=period / 2), self._stubs)
        except TQError as error:
            _log.debug("heartbeat to controller %s failed, the next one follows: %s", state.address, error)
        except Exception:
            if not state.closed:  # whoever closes takes the channels away from under a beat
                _log.exception("heartbeat to controller %s failed, the next one follows", state.address)
