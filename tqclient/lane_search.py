"""Whether and when a daemon's lane is looked for, and how long a call may be held up by that."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Final

import grpc

from tqclient.errors import InvalidArgument
from tqclient.wire.v1 import lane_pb2

FIND_SECONDS: Final = 0.25
"""How long a call may be held up by asking for the lane, and once more by the way into it."""
FIND_AGAIN_SECONDS: Final = 30.0
"""Between two looks for a lane that cannot be had; one that was lost is looked for at the next call."""

_log = logging.getLogger(__name__)


def wanted() -> bool:
    """Whether daemons of this host are called by their lanes; `TQ_LANE=off` calls them over gRPC as well.

    Raises:
        InvalidArgument: it is neither on nor off.
    """
    word = os.environ.get("TQ_LANE") or "on"
    if word not in ("on", "off"):
        raise InvalidArgument(f"TQ_LANE={word!r}: expected on or off")
    return word == "on"


class CallTime:
    """The time that a call has, of which looking for the lane takes its part.

    Args:
        timeout: seconds from now; None: for ever.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """Returns the seconds that are left, 0 when it is over; None: for ever."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def to_find(self) -> float:
        """Returns the seconds that one step of looking may take: half of what is left at most."""
        left = self.left()
        return FIND_SECONDS if left is None else min(FIND_SECONDS, left / 2)


class Search:
    """What is known of where a daemon's lane is, and when to look for it again. Its owner locks.

    Args:
        clock: monotonic seconds.

    Attributes:
        found: what the daemon told; None: look for it.
        answers: whether the daemon answered the last call over gRPC: who is silent is not looked for.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_at = -FIND_AGAIN_SECONDS
        self.found: lane_pb2.FindLaneReply | None = None
        self.answers = False

    def begin(self) -> bool:
        """Says whether to ask the daemon now; it is noted that it was asked."""
        now = self._clock()
        if not self.answers or now - self._looked_at < FIND_AGAIN_SECONDS:
            return False
        self._looked_at = now
        return True

    def told(self, found: lane_pb2.FindLaneReply) -> lane_pb2.FindLaneReply | None:
        """Takes the daemon's answer, and returns where the lane is, if there is one."""
        self.found = found if found.name else None
        return self.found

    def failed(self, error: grpc.RpcError) -> None:
        """Takes the failure of asking: a daemon that is away is asked again as soon as it answers."""
        _log.debug("no lane: %s", error)
        if is_away(error):
            self.answers = False
            self._looked_at = -FIND_AGAIN_SECONDS

    def refused(self, error: Exception) -> None:
        """Nobody listens where the lane was said to be, or lets one in: it is asked for again, in a while."""
        _log.debug("no lane: %s", error)
        self.found = None

    def lost(self) -> None:
        """A connection that was there is gone: another daemon may be in the place of that one."""
        self.found = None
        self._looked_at = -FIND_AGAIN_SECONDS


def is_away(error: grpc.RpcError) -> bool:
    """Says whether a call over gRPC failed because nobody is there."""
    return bool(error.code() is grpc.StatusCode.UNAVAILABLE)
