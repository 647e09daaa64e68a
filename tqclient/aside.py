"""gRPC out of the reach of signals.

What the handler of a signal raises, as that of Ctrl-C does, is raised in the main thread, wherever that is. Within
gRPC's code, it leaves the lock of a channel taken, and whoever calls next waits for ever, whatever its timeout: every
ninth Ctrl-C amid short calls did so. Hence the main thread has its calls made by another one, and waits for that.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

T = TypeVar("T")

END_SECONDS: Final = 1.0
"""So long is waited for the threads to end; calls of theirs that an exception left were cancelled by then."""


class Aside:
    """Runs things for the main thread that must not be broken off. Other threads run them themselves."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer, or the handler of a signal, may run inside any holder
        self._hands: list[_Hand] = []
        self._idle: list[_Hand] = []
        self._closed = False

    def run(self, what: Callable[[], T]) -> T:
        """Returns what it returns, or raises what it raises.

        What a signal raises meanwhile is raised at once; what runs goes on, and nobody hears what becomes of it.
        """
        hand = self._take()
        if hand is None:
            return what()
        answer: SimpleQueue[tuple[BaseException | None, Any]] = SimpleQueue()
        hand.work.put((what, answer))
        failure, result = answer.get()
        try:
            if failure is not None:
                raise failure
            returned: T = result
            return returned
        finally:
            failure = None  # its traceback holds this frame

    def channel(self, channel: Any) -> Channel:
        """Returns a channel whose calls the main thread has made by another one."""
        return Channel(channel, self)

    def close(self) -> None:
        """Ends the threads. What is run later has one for itself."""
        with self._lock:
            self._closed = True
            hands, self._hands, self._idle = self._hands, [], []
        for hand in hands:
            hand.work.put(None)
        for hand in hands:
            hand.join()

    def _take(self) -> _Hand | None:
        """Returns one that is free; None: who calls runs it itself, as at the interpreter's end, when threads stop."""
        if threading.current_thread() is not threading.main_thread() or sys.is_finalizing():
            return None
        with self._lock:
            if self._idle:
                return self._idle.pop()
            hand = _Hand(self._done)
            if not self._closed:
                self._hands.append(hand)  # first: a signal may raise while it starts, and `close` is to end it
            try:
                hand.start()
            except RuntimeError:  # no thread can be started any more: Python 3.12 says so from `atexit` on
                return None
            return hand

    def _done(self, hand: _Hand) -> bool:
        """Takes back one that is free again; False: it is to end."""
        with self._lock:
            if not self._closed:
                self._idle.append(hand)
            return not self._closed


class _Hand:
    """A thread that does one thing at a time.

    Args:
        done: is told when it is free again, before anybody hears what came of it.
    """

    def __init__(self, done: Callable[[_Hand], bool]) -> None:
        self.work: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._done = done
        self._thread = threading.Thread(target=self._run, name="tq-aside", daemon=True)

    def start(self) -> None:
        """Starts the thread; raises RuntimeError where there can be none."""
        self._thread.start()

    def _run(self) -> None:
        on = True
        while on and (wanted := self.work.get()) is not None:
            what, answer = wanted
            try:
                outcome: list[tuple[BaseException | None, Any]] = [(None, what())]
            except BaseException as error:  # raised where it is waited for
                outcome = [(error, None)]
            del wanted, what  # whoever gets the answer counts on what it passed and got being its own
            on = self._done(self)
            answer.put(outcome.pop())
            del answer

    def join(self) -> None:
        """Waits for its end."""
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(END_SECONDS)


class Channel:
    """As much of a `grpc.Channel` as stubs need."""

    def __init__(self, channel: Any, aside: Aside) -> None:
        self._channel = channel
        self._aside = aside

    def unary_unary(self, *args: Any, **options: Any) -> _Method:
        """As gRPC has it."""
        return _Method(self._channel.unary_unary(*args, **options), self._aside)

    def stream_unary(self, *args: Any, **options: Any) -> _Method:
        """As gRPC has it."""
        return _Method(self._channel.stream_unary(*args, **options), self._aside)

    def unary_stream(self, *args: Any, **options: Any) -> Callable[..., _Call]:
        """As gRPC has it."""
        return _Method(self._channel.unary_stream(*args, **options), self._aside).stream

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        """As gRPC has it: stubs want one of each kind, and clients call none of this one."""
        return self._channel.stream_stream(*args, **options)

    def close(self) -> None:
        """Ends all calls."""
        self._aside.run(self._channel.close)


class _Method:
    def __init__(self, method: Any, aside: Aside) -> None:
        self._method = method
        self._aside = aside

    def __call__(self, request: Any, timeout: float | None = None) -> Any:
        return self._aside.run(partial(self._method, request, timeout=timeout))

    def future(self, request: Any, timeout: float | None = None) -> _Call:
        """Returns the call, which goes on meanwhile."""
        return _Call(self._aside.run(partial(self._method.future, request, timeout=timeout)), self._aside)

    def stream(self, request: Any, timeout: float | None = None) -> _Call:
        """Returns the call, whose answers it yields."""
        return _Call(self._aside.run(partial(self._method, request, timeout=timeout)), self._aside)


class _Call:
    """A call under way."""

    def __init__(self, call: Any, aside: Aside) -> None:
        self._call = call
        self._aside = aside

    def __iter__(self) -> _Call:
        return self

    def __next__(self) -> Any:
        return self._aside.run(partial(next, self._call))

    def result(self) -> Any:
        """Waits for the answer."""
        return self._aside.run(self._call.result)

    def cancel(self) -> None:
        """Ends it, if it has not ended."""
        self._aside.run(self._call.cancel)
