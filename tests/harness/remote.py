"""An object in a process of its own, whose methods are called from here: a test's hand on another host.

Arguments, results and errors travel as pickles over a socket that the process inherits; what it measures stays there.
"""

from __future__ import annotations

import pickle
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Final

from tests.harness.supervisor import Child

CALL_SECONDS: Final = 60.0
"""Longest wait for an answer: beyond it the process hangs."""
CLOSE_SECONDS: Final = 15.0

Start = Callable[[list[str], int], Child]
"""(command, descriptor that it inherits) → the process."""


class Remote:
    """One process, and the object in it.

    Attributes:
        child: the process.
    """

    def __init__(self, start: Start, factory: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        """Starts the process; the object is made in it, and calls wait for that.

        Args:
            start: starts the process.
            factory: makes the object, whose `close`, if it has one, is called at the end; like every function here,
                one at the top of a module, or a method of a class there.
            arguments: of the factory.
            options: likewise.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            self.child = start([sys.executable, "-u", "-m", __name__, str(theirs.fileno())], theirs.fileno())
        self._connection = Connection(ours.detach())
        self._sending = threading.Lock()
        self._calls: dict[int, Future[Any]] = {}
        self._next = 0
        self._ended = False
        self._made = self._send(factory, arguments, options)
        self._thread = threading.Thread(target=self._receive, name=f"remote-{self.child.name}", daemon=True)
        self._thread.start()

    def wait_made(self) -> Remote:
        """Waits until the object is there, or raises what its factory raised; returns self."""
        self._result(self._made)
        return self

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Calls a function there with the object and the arguments; returns, or raises, what comes of it."""
        return self._result(self.start(function, *arguments, **options))

    def start(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Likewise in a thread of its own there, without waiting."""
        return self._send(function, arguments, options)

    def close(self) -> None:
        """Closes the object, and waits until the process has ended; repeatable."""
        with suppress(OSError):
            self._connection.send_bytes(b"")
        if self.child.running and not self.child.stopped:
            with suppress(AssertionError):  # it hangs, and is killed
                self.child.wait(timeout=CLOSE_SECONDS)
        self.child.end()
        self._thread.join(CLOSE_SECONDS)
        self._connection.close()

    def _result(self, future: Future[Any]) -> Any:
        try:
            return future.result(CALL_SECONDS)
        except FutureTimeoutError:
            if future.done():
                raise  # the call's own answer
            raise AssertionError(f"no answer within {CALL_SECONDS} s\n{self.child.report()}") from None

    def _send(self, *message: Any) -> Future[Any]:
        future: Future[Any] = Future()
        data = pickle.dumps(message)
        with self._sending:
            if self._ended:
                future.set_exception(self._gone())
                return future
            number, self._next = self._next, self._next + 1
            self._calls[number] = future
            with suppress(OSError):  # it is gone: the receiving thread says so
                self._connection.send_bytes(number.to_bytes(8, "little") + data)
        return future

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                number, error, value = pickle.loads(self._connection.recv_bytes())
                with self._sending:
                    future = self._calls.pop(number)
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        with self._sending:
            self._ended = True
            calls = list(self._calls.values())
        for future in calls:
            future.set_exception(self._gone())

    def _gone(self) -> AssertionError:
        return AssertionError(f"the process has ended\n{self.child.report()}")


class _Server:
    """The other end: makes the object, and answers each call in a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def serve(self) -> None:
        made: list[Any] = []
        number, message = self._next()
        self._answer(number, message, made)
        while made and (call := self._next()):
            threading.Thread(target=self._answer, args=(*call, made), daemon=True).start()
        if made and hasattr(made[0], "close"):
            made[0].close()

    def _next(self) -> Any:
        try:
            data = self._connection.recv_bytes()
        except EOFError:
            return None
        return (int.from_bytes(data[:8], "little"), data[8:]) if data else None

    def _answer(self, number: int, message: bytes, made: list[Any]) -> None:
        """Calls the function with the object, or makes the object where there is none."""
        try:
            function, arguments, options = pickle.loads(message)
            value = function(*made, *arguments, **options)
            if not made:
                made.append(value)
                value = None
            answer = pickle.dumps((number, None, value))
        except Exception as raised:
            answer = _error(number, raised)
        with self._sending:
            self._connection.send_bytes(answer)


def _error(number: int, error: Exception) -> bytes:
    error.__notes__ = ["".join(traceback.format_exception(error))]
    try:
        return pickle.dumps((number, error, None))
    except Exception:
        return pickle.dumps((number, AssertionError(repr(error)), None))


if __name__ == "__main__":
    _Server(Connection(int(sys.argv[1]))).serve()
