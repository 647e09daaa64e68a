"""Which sessions may write through a transport, and how many writes each has in progress."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqclient.errors import LeaseExpired, Unavailable
from tqclient.transport.base import Lent, Place


class WriteSessions:
    """Lets a session's writes in, and gives back what it took only when the last of them has ended."""

    def __init__(self, *, take: Callable[[int], None], drop: Callable[[int], None], end: Callable[[], None]) -> None:
        """Makes it empty.

        Args:
            take: called with a session before its first write.
            drop: called with a closed session that writes no more.
            end: called once, after `close`, when no session writes any more.
        """
        self._take = take
        self._drop = drop
        self._end = end
        self._lock = threading.Lock()
        self._writes: dict[int, int] = {}
        self._closing: set[int] = set()
        self._closed = False
        self._ended = False
        self._pid = os.getpid()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def open_session(self, session: int) -> None:
        """Lets the session write; repeatable.

        Raises:
            LeaseExpired: the session was closed.
            Unavailable: all of it is closed.
        """
        with self._lock:
            if self._closed:
                raise Unavailable("the transport is closed")
            if session in self._closing:
                raise LeaseExpired(f"session {session} was closed")
            if session not in self._writes:
                self._take(session)
                self._writes[session] = 0

    def close_session(self, session: int) -> None:
        """Lets no further write of the session in; repeatable."""
        with self._lock:
            self._close_session(session)

    def is_open(self, session: int) -> bool:
        """Whether the session may write."""
        with self._lock:
            return self._is_open(session)

    def _is_open(self, session: int) -> bool:
        return session in self._writes and session not in self._closing

    @contextmanager
    def writing(self, session: int) -> Iterator[None]:
        """Surrounds one write.

        Raises:
            LeaseExpired: the session is not open.
        """
        with self._lock:
            if not self._is_open(session):
                raise LeaseExpired(f"session {session} is not open for writing")
            self._writes[session] += 1
        try:
            yield
        finally:
            if self._pid == os.getpid():  # in a forked child nothing was begun, and the lock may be held for ever
                with self._lock:
                    self._writes[session] -= 1
                    self._settle(session)

    def close(self) -> None:
        """Closes every session; repeatable."""
        with self._lock:
            self._closed = True
            for session in list(self._writes):
                self._close_session(session)
            self._finish()

    def _close_session(self, session: int) -> None:
        if session in self._writes:
            self._closing.add(session)
            self._settle(session)

    def _settle(self, session: int) -> None:
        if session in self._closing and self._writes[session] == 0:
            self._closing.discard(session)
            del self._writes[session]
            self._drop(session)
            self._finish()

    def _finish(self) -> None:
        if self._closed and not self._writes and not self._ended:
            self._ended = True
            self._end()


class SessionWriter:
    """The part of a `NodeTransport` that admits writes by their sessions."""

    _sessions: WriteSessions

    def session_opened(self, session: int) -> None:
        """See `NodeTransport.session_opened`."""
        self._sessions.open_session(session)

    def admits(self, session: int) -> bool:
        """See `NodeTransport.admits`."""
        return self._sessions.is_open(session)

    def lend(self, place: Place, *, session: int) -> Lent | None:
        """See `NodeTransport.lend`: without a mapping of the arena there is nothing to lend."""
        return None

    def session_closed(self, session: int) -> None:
        """See `NodeTransport.session_closed`."""
        self._sessions.close_session(session)
