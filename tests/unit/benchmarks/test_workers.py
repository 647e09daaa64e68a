"""What a worker's caller hears of a failure, and what a worker hears of Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from benchmarks.workers import Worker, _portable, serve


class Holding(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.RLock()


def test_an_error_that_cannot_be_sent_is_sent_as_what_it_says() -> None:
    error = _portable(Holding("268435456 bytes do not fit"))
    assert type(error) is RuntimeError
    assert str(error) == "Holding: 268435456 bytes do not fit"


@pytest.mark.parametrize("error", [ValueError("rows"), TimeoutError()])
def test_any_other_error_is_sent_as_it_is(error: Exception) -> None:
    assert _portable(error) is error


def test_an_interrupt_is_for_the_parent_alone() -> None:
    worker = Worker(serve, {"title": str.title})
    os.kill(worker.pid, signal.SIGINT)
    assert worker.call("title", "still there") == "Still There"
    worker.stop()
    assert worker._process.exitcode == 0
