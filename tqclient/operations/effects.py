"""What an operation asks of its driver, and the time it has.

An operation is one generator. It yields effects and receives replies; a driver (`tqclient.driver`) carries them out
over a blocking or an asyncio stub. Thus each operation is written once, and a test can play driver without a server.
A failed effect is thrown into the operation as a `TQError`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from google.protobuf.message import Message

from tqclient import limits
from tqclient.arguments import seconds_of
from tqclient.errors import InternalError, Unavailable

CONTROLLER: Final = "controller"
"""The target of a call to the controller; any other target is the address of a storage node."""
UNKNOWN_OUTCOME: Final = (Unavailable, InternalError)
"""Errors after which the call may have been carried out: the reply was lost, or could not be made or read."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """One unary RPC; answered with its reply message.

    Attributes:
        target: `CONTROLLER`, or `host:port` of a storage node.
        method: name of the RPC.
        request: its message.
        timeout: seconds.
        preview: takes what comes ahead of the reply, where the driver and the way can carry that; it must not raise.
    """

    target: str
    method: str
    request: Message
    timeout: float
    preview: Callable[[bytes], None] | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Blocking work: memory copies, hashing, streams. Answered with what it returns; asyncio runs it in a thread."""

    run: Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Sleep:
    """A pause; answered with None."""

    seconds: float


Effect: TypeAlias = "Call | Work | Sleep"
Operation: TypeAlias = Generator[Effect, Any, T]


class Deadline:
    """When a call ends.

    Args:
        timeout: seconds from now; 0 means "try once".
        clock: monotonic seconds.
        waits: the call waits on the server for something to come about. It then ends a little later than the wait, so
            that the server's own answer (`ClaimTimeout`, ...) arrives.

    Raises:
        InvalidArgument: no number of seconds.
    """

    def __init__(self, timeout: float, clock: Callable[[], float], *, waits: bool = False) -> None:
        self.timeout = min(seconds_of(timeout, what="timeout"), limits.WAIT_MAX_MS / 1000)
        self._clock = clock
        start = clock()
        self._wait_end = start + self.timeout - min(WAIT_MARGIN, self.timeout / 10)
        # A reply needs some time even when the wait is over at once.
        self._end = start + max(self.timeout + REPLY_MARGIN, ONCE_SECONDS) if waits else start + self.timeout

    def remaining(self) -> float:
        """Returns the seconds that are left for the whole call; 0 when it is over."""
        return max(0.0, self._end - self._clock())

    def wait_ms(self) -> int:
        """Returns the milliseconds that the server may wait from now on."""
        return max(0, int((self._wait_end - self._clock()) * 1000))


CLOSED: Final = "this client is closed; call tq.connect() again"
"""What a call says whose client was closed before it, or during it."""
WAIT_MARGIN: Final = 0.5
"""Seconds by which a wait on the server ends ahead of the user's timeout (a tenth of a short one), ..."""
REPLY_MARGIN: Final = 0.05
"""... and by which the call may outlast it: so long may the server's answer take before it counts as none."""
ONCE_SECONDS: Final = 1.0
"""The least time for a call that waits: `timeout=0` still needs an answer."""


class Backoff:
    """Pauses between tries: exponential, with full jitter.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._tries = 0

    def next(self) -> float:
        """Returns the seconds to pause before the next try."""
        ceiling = min(limits.BACKOFF_MAX, limits.BACKOFF_FIRST * 2**self._tries)
        self._tries += 1
        return self._rng.uniform(0.0, ceiling)


def pause(backoff: Backoff, deadline: Deadline, cause: Exception) -> Operation[None]:
    """Sleeps before the next try, or raises `cause` when the deadline comes first."""
    seconds = backoff.next()
    if seconds >= deadline.remaining():
        raise cause
    yield Sleep(seconds)


def call(
    target: str,
    method: str,
    request: Any,
    deadline: Deadline,
    rng: random.Random,
    *,
    before: Callable[[], None] | None = None,
    preview: Callable[[bytes], None] | None = None,
) -> Operation[Any]:
    """Calls until there is an answer: `Unavailable` is tried again, with the same request, until the deadline.

    Args:
        target: as in `Call`.
        method: as in `Call`.
        request: a message that may be repeated.
        deadline: of all tries together.
        rng: of the jitter.
        before: run before each try, to renew what depends on the time (`wait_ms`).
        preview: as in `Call`.

    Raises:
        Unavailable: nobody answered until the deadline.
        TQError: what the daemon answered.
    """
    backoff = Backoff(rng)
    while True:
        if before is not None:
            before()
        try:
            return (yield Call(target, method, request, deadline.remaining(), preview))
        except Unavailable as error:
            yield from pause(backoff, deadline, error)
