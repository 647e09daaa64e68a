"""Channels that follow their certificates: gRPC reads them once, and a client may outlive several."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import grpc

from tqclient.errors import InvalidArgument

RECHECK_SECONDS: Final = 1.0
"""How often the files are looked at for a change, at most."""

_log = logging.getLogger(__name__)


class RenewedChannel:
    """A channel that is opened anew once its files have changed; calls under way end on the one that they began on.

    A connection that is there outlives its certificate. The next one, after a restart of the daemon, would be refused
    for ever. Safe to use from many threads.

    Args:
        files: that `open_channel` reads.
        open_channel: opens a blocking channel; raises InvalidArgument for files that are off.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        files: Sequence[str | os.PathLike[str]],
        open_channel: Callable[[], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._open = open_channel
        self._clock = clock
        self._lock = threading.Lock()
        self._look_at = clock() + RECHECK_SECONDS
        self._stamps = self._stat()
        self._channel = open_channel()
        self._former: Any = None
        self._opened = weakref.WeakSet([self._channel])

    def _stat(self) -> list[tuple[int, int, int]]:
        try:
            stats = [os.stat(file) for file in self._files]
        except (OSError, ValueError):  # one is about to be replaced, or can be none: whoever reads it says so
            return []
        return [(stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats]

    def current(self) -> Any:
        """Returns the channel for a call that begins now."""
        if self._clock() >= self._look_at and self._lock.acquire(blocking=False):
            try:
                self._look()
            finally:
                self._lock.release()
        return self._channel

    def _look(self) -> None:
        self._look_at = max(self._look_at, self._clock() + RECHECK_SECONDS)  # never, once it is closed
        stamps = self._stat()
        if not stamps or stamps == self._stamps:
            return
        try:
            channel = self._open()
        except InvalidArgument as error:  # one of them was replaced, and the other not yet
            _log.warning("keeping the former certificates: %s", error)
            return
        oldest, self._former, self._channel = self._former, self._channel, channel
        self._stamps = stamps
        self._opened.add(channel)
        if oldest is not None:
            self._retire(oldest)

    def _retire(self, channel: Any) -> None:
        """Ends one that no call has begun on since the change before the last."""
        channel.close()  # what is under way is tried again by its operation

    def close(self) -> Any:
        """Ends all calls."""
        for channel in self._end():
            channel.close()

    def _end(self) -> list[Any]:
        with self._lock:
            self._look_at = float("inf")
            return list(self._opened)

    def unary_unary(self, *described: Any, **options: Any) -> Any:
        """As a channel has it."""
        return _Callable(self, "unary_unary", described, options)

    def unary_stream(self, *described: Any, **options: Any) -> Any:
        """As a channel has it."""
        return _Callable(self, "unary_stream", described, options)

    def stream_unary(self, *described: Any, **options: Any) -> Any:
        """As a channel has it."""
        return _Callable(self, "stream_unary", described, options)

    def stream_stream(self, *described: Any, **options: Any) -> Any:
        """As a channel has it."""
        return _Callable(self, "stream_stream", described, options)


class RenewedAioChannel(RenewedChannel):
    """The same of asyncio channels: each is there for as long as calls are under way on it, and closes itself then.

    To close it before would cancel the tasks that wait for them.
    """

    def _retire(self, channel: Any) -> None:
        """Leaves it to itself."""

    async def close(self) -> None:
        """Ends all calls."""
        for channel in self._end():
            await channel.close()


class _Callable:
    """One method, called over the channel that is current then."""

    def __init__(self, channel: RenewedChannel, kind: str, described: Any, options: Any) -> None:
        self._channel = channel
        self._make = kind, described, options
        self._made: tuple[Any, Any] = None, None  # channel, its method

    def _current(self) -> tuple[Any, Any]:
        channel, (made_of, method) = self._channel.current(), self._made
        if made_of is not channel:
            kind, described, options = self._make
            method = getattr(channel, kind)(*described, **options)
            self._made = channel, method
        return channel, method

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        channel, method = self._current()
        call = method(*arguments, **options)
        if isinstance(call, grpc.aio.Call):
            call.add_done_callback(partial(_keep, channel))
        return call

    def future(self, *arguments: Any, **options: Any) -> Any:
        """As a blocking method has it."""
        _, method = self._current()
        return method.future(*arguments, **options)


def _keep(channel: Any, call: Any) -> None:
    """Does nothing; until it is called, there is somebody who refers to the channel."""
