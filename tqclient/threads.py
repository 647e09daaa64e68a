"""Threads for the blocking work of asyncio clients.

The executor of the event loop has few threads, for everybody. Calls that wait for a storage node that was stopped would
take all of them, and all other calls, `close` too, would wait for those, whatever their timeouts.
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, TypeVar

T = TypeVar("T")

AT_ONCE: Final = min(32, (os.cpu_count() or 1) + 4)
"""Threads that work has at once; ..."""
STUCK_SECONDS: Final = 0.05
"""... what has waited for so long gets one more."""
IDLE_SECONDS: Final = 1.0
"""A thread that has had nothing to do for so long ends."""


class Threads:
    """As many threads as it takes for no work to wait behind work that hangs. Safe to use from many threads."""

    def __init__(self) -> None:
        self._more = threading.Condition()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._count = 0
        self._idle = 0

    def submit(self, what: Callable[[], T]) -> Future[T]:
        """Has a thread run it; `help_out` sees to it if none does soon."""
        job: Future[T] = Future()
        with self._more:
            self._waiting.append((job, what))
            if len(self._waiting) <= self._idle:
                self._more.notify()
            elif self._count < AT_ONCE:
                self._add()
            alone = self._count == 0
        if alone:  # no thread can be started any more, as at the interpreter's end
            self._run()
        return job

    def help_out(self, job: Future[Any]) -> None:
        """Starts a thread more if a job waits still."""
        if not job.running() and not job.done():
            with self._more:
                self._add()

    def _add(self) -> None:
        self._count += 1
        try:
            threading.Thread(target=self._run_for_long, name="tq-work", daemon=True).start()
        except RuntimeError:  # those that there are will do
            self._count -= 1

    def _run_for_long(self) -> None:
        while True:
            self._run()
            with self._more:
                self._idle += 1
                self._more.wait_for(lambda: self._waiting, IDLE_SECONDS)
                self._idle -= 1
                if not self._waiting:
                    self._count -= 1
                    return

    def _run(self) -> None:
        while True:
            try:
                job, what = self._waiting.popleft()
            except IndexError:
                return
            if job.set_running_or_notify_cancel():
                _carry_out(job, what)
            del job, what


def _carry_out(job: Future[Any], what: Callable[[], Any]) -> None:
    try:
        result = what()
    except StopIteration as error:  # no future of asyncio takes it: whoever awaits it would wait for ever
        failure = RuntimeError("blocking work raised StopIteration")
        failure.__cause__ = error
        job.set_exception(failure)
    except BaseException as error:  # raised where it is awaited
        job.set_exception(error)
    else:
        job.set_result(result)
    finally:
        del job  # the traceback of what it raised holds this frame


_threads = Threads()


def _forget() -> None:
    """A forked child has the object, but not the threads."""
    global _threads  # noqa: PLW0603
    _threads = Threads()


os.register_at_fork(after_in_child=_forget)


def begin(what: Callable[[], T]) -> asyncio.Future[T]:
    """Begins blocking work beside the running event loop.

    Returns:
        What becomes of it. To cancel that does not end work that has begun.
    """
    threads = _threads
    job = threads.submit(partial(contextvars.copy_context().run, what))
    timer = asyncio.get_running_loop().call_later(STUCK_SECONDS, threads.help_out, job)
    work = asyncio.wrap_future(job)
    work.add_done_callback(lambda _: timer.cancel())
    return work
