"""The transfers of one call: several in flight, each seen to its end, or left to the engine when the time is up."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import Unavailable
from tqclient.transport.mooncake.engine import Engine, Transfer
from tqclient.transport.mooncake.staging import Slot, Staging

IDLE_SECONDS: Final = 1.0
"""After such a pause the library may fail a first transfer for no reason: it is tried once more."""


class Flow:
    """A context manager. Leaving it by an exception quarantines the slots of what has not ended."""

    def __init__(self, engine: Engine, peer: str, timeout: float | None) -> None:
        """Starts the clock.

        Args:
            engine: that the caller holds.
            peer: for messages.
            timeout: seconds for all of it; None: no bound.
        """
        self._engine = engine
        self._peer = peer
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._retries = engine.idle_seconds > IDLE_SECONDS
        self._open: deque[tuple[Transfer, Slot, Callable[[], None] | None]] = deque()

    def __enter__(self) -> Flow:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._open:
            transfer, slot, _ = self._open.popleft()
            self._engine.abandon(transfer, slot.release)

    def take(self, area: Staging, length: int) -> Slot:
        """Returns a slot, as soon as one is free; transfers of this flow are ended for it.

        Raises:
            Unavailable: a transfer failed, or the time is up.
        """
        while (slot := area.take(length)) is None:
            if self._open:
                self._end_oldest()
            elif (slot := area.wait(length, self._left())) is not None:
                return slot
            else:
                raise self._late("no staging memory was free")
        return slot

    def start(
        self,
        slot: Slot,
        local: NDArray[np.uint8],
        remote: int,
        *,
        writes: bool,
        then: Callable[[], None] | None = None,
    ) -> None:
        """Starts a transfer.

        Args:
            slot: a holder's share of it goes over to this flow, until the transfer has ended.
            local: uint8, the bytes on this side; kept until then as well.
            remote: address at the peer.
            writes: to the peer, not from it.
            then: called when they are in place, before the slot is let go.

        Raises:
            Unavailable: another transfer failed, or the time is up.
        """
        try:
            self._take_item()
            transfer = Transfer(self._engine, local, remote, writes=writes)
        except BaseException:
            slot.release()
            raise
        self._open.append((transfer, slot, then))

    def finish(self) -> None:
        """Sees all transfers to their end.

        Raises:
            Unavailable: one failed, or the time is up.
        """
        while self._open:
            self._end_oldest()

    def _end_oldest(self) -> None:
        transfer, slot, then = self._open[0]
        outcome = transfer.wait(self._deadline)
        if outcome is None:
            raise self._late("a transfer did not end")
        self._open.popleft()  # it must not be polled again
        if outcome:
            if then is not None:
                then()
            slot.release()
        elif self._retries:
            self._retries = False
            self.start(slot, transfer.local, transfer.remote, writes=transfer.writes, then=then)
        else:
            slot.release()
            raise Unavailable(f"{self._peer}: a transfer of {transfer.local.size} bytes failed")

    def _take_item(self) -> None:
        while not self._engine.try_item():
            if self._open:
                self._end_oldest()
            elif self._engine.wait_item(self._left()):
                return
            else:
                raise self._late("too many transfers were in flight")

    def _left(self) -> float | None:
        return None if self._timeout is None else max(0.0, self._deadline - time.monotonic())

    def _late(self, what: str) -> Unavailable:
        return Unavailable(f"{self._peer}: {what} within {self._timeout:g} s")
