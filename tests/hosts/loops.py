"""What clients do on their hosts while a fault lasts: over and over, until they are told to stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

import tqclient as tq
from tests.faults.test_storage_killed import assert_row, row
from tests.harness import wait_until

_stops: dict[str, threading.Event] = {}


class Attempt(NamedTuple):
    """One call.

    Attributes:
        call: its name.
        error: name of the class that it raised; empty when it succeeded.
        started: of `time.monotonic()`, which all hosts share.
        seconds: that it took.
        message: of the error.
    """

    call: str
    error: str
    started: float
    seconds: float
    message: str = ""


def attempt(call: str, function: Callable[[], Any]) -> Attempt:
    """Calls it; only the service's own errors are expected."""
    started = time.monotonic()
    error = message = ""
    try:
        function()
    except tq.TQError as raised:
        error, message = type(raised).__name__, str(raised)
    return Attempt(call, error, started, time.monotonic() - started, message)


def unexpected(attempts: list[Attempt], *errors: str) -> list[Attempt]:
    """Those that failed in another way than these."""
    return [tried for tried in attempts if tried.error and tried.error not in errors]


@contextmanager
def stoppable(name: str) -> Iterator[threading.Event]:
    """The event that `stop` sets."""
    stopped = _stops[name] = threading.Event()
    try:
        yield stopped
    finally:
        del _stops[name]


def stop(_client: tq.Client, name: str) -> None:
    """Lets a loop of this process end; it may have only just begun."""
    wait_until(lambda: name in _stops, what=f"{name} begins")
    _stops[name].set()


def delete_all(client: tq.Client) -> None:
    """Deletes every partition: what one test leaves behind is nothing to the next."""
    for partition in client.partitions():
        client.delete_partition(partition.name)


def put_rows(client: tq.Client, partition: str, numbers: list[int]) -> dict[int, int]:
    """Puts a row for each number, one after the other; returns their ids."""
    part = client.partition(partition)
    return {
        number: int(part.put({"number": np.array([number]), "x": [row(number)]}, keys=[str(number)])[0])
        for number in numbers
    }


def check_rows(client: tq.Client, partition: str, ids: dict[int, int], timeout: float = 20.0) -> None:
    """Gets every row by itself and looks at its bytes."""
    part = client.partition(partition)
    for number, id_ in ids.items():
        assert_row(part.get([id_], timeout=timeout), number)


def keep_putting(client: tq.Client, partition: str, first: int) -> tuple[dict[int, int], list[Attempt]]:
    """Puts a row about 40 times a second until `stop(..., "putting")`; returns the ids, and what did not succeed."""
    part = client.partition(partition)
    ids: dict[int, int] = {}
    failures = []
    with stoppable("putting") as stopped:
        number = first
        while not stopped.wait(0.02):

            def put(number: int = number) -> None:
                ids.update(put_rows(client, part.name, [number]))

            tried = attempt("put", put)
            failures += [tried] if tried.error else []
            number += 1
    return ids, failures


def keep_getting(client: tq.Client, partition: str, ids: dict[int, int], timeout: float) -> list[Attempt]:
    """Gets rows at random until `stop(..., "getting")`, and looks at their bytes; returns every attempt."""
    part = client.partition(partition)
    rng = np.random.default_rng(0)
    attempts = []
    with stoppable("getting") as stopped:
        while not stopped.wait(0.001):
            number = int(rng.choice(list(ids)))
            attempts.append(
                attempt("get", lambda: assert_row(part.get([ids[number]], timeout=timeout), number))  # noqa: B023
            )
    return attempts
