"""A host that is cut off, both ways or one: calls end in time, everything heals, nothing is acked twice."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tqclient as tq
from tests.faults.probe import LEASE
from tests.harness import Ledger, LedgerWriter, Outcome, wait_until
from tests.harness.hosts import Direction
from tests.harness.remote import Remote
from tests.hosts.cluster import CLIENTS, CONTROLLER, RECLAIM_SECONDS, STORAGE, TRANSPORT, HostCluster, wait_seconds
from tests.hosts.loops import Attempt, attempt, delete_all, stop, stoppable, unexpected

ARENA_BYTES = 128 << 20
CALL_SECONDS = 1.0
PARTITION_SECONDS_CI = 2.5
PARTITION_SECONDS = 5.0
LATE_SECONDS = 0.25
"""How much later than its deadline a call may end: 100 ms, and what a scheduler with more processes than CPUs adds."""
HEAL_SECONDS = 8.0
"""TCP's own pause before it tries again has doubled all the while."""
ROW_VALUES = 4 * 1024
PAUSE_SECONDS = 0.02
IN_USE = "storage"
"""The storage node that rows are being put to."""
CALLS = ("put", "get", "consume")
_callers: dict[str, Caller] = {}
_names = map("part-{}".format, itertools.count())


@pytest.fixture(scope="module")
def users(cluster: HostCluster) -> dict[str, Remote]:
    """A client on each host, whose calls are short."""
    found = {host: cluster.user(host, transport=TRANSPORT, timeout=CALL_SECONDS) for host in CLIENTS}
    return {host: user.wait_made() for host, user in found.items()}


def create(client: tq.Client, name: str) -> None:
    client.create_partition(name, consumers=["trainer"], lease=LEASE)


class Caller:
    """Puts, gets, and claims and acks, each over and over in a thread of its own; writes down what it is told."""

    def __init__(self, client: tq.Client, name: str, ledger: LedgerWriter, first: int) -> None:
        self._part = client.partition(name)
        self._consumer = self._part.consumer("trainer")
        self._ledger = ledger
        self._numbers = itertools.count(first)
        self._stored: tuple[int, int] | None = None  # number, id
        self.attempts: list[Attempt] = []
        self.failures: list[BaseException] = []
        self.put()

    def put(self) -> None:
        number = next(self._numbers)
        token = self._ledger.putting(1)
        ids = self._part.put({"x": [np.full(ROW_VALUES, number)]}, keys=[str(number)])
        self._ledger.put(token, ids)
        self._stored = number, int(ids[0])

    def get(self) -> None:
        assert self._stored is not None
        number, id_ = self._stored
        batch: Any = self._part.get([id_])
        assert np.array_equal(batch.list("x")[0], np.full(ROW_VALUES, number))

    def consume(self) -> None:
        batch: Any = self._consumer.claim(1)
        assert np.array_equal(batch.list("x")[0], np.full(ROW_VALUES, int(batch.keys[0])))
        token = self._ledger.claimed("trainer", batch.ids)
        self._ledger.acking(token)
        try:
            batch.ack()
        except tq.LeaseExpired:
            self._ledger.refused(token)
            raise
        self._ledger.acked(token)

    def run(self, call: Callable[[], None], stopped: threading.Event) -> None:
        try:
            while not stopped.wait(PAUSE_SECONDS):
                self.attempts.append(attempt(call.__name__, call))
        except BaseException as error:
            self.failures.append(error)


def exercise(client: tq.Client, name: str, directory: Path, first: int) -> list[Attempt]:
    """Runs a caller until `stop(..., "exercise")`."""
    with stoppable("exercise") as stopped, LedgerWriter(directory) as ledger:
        caller = _callers[name] = Caller(client, name, ledger, first)
        threads = [
            threading.Thread(target=caller.run, args=(call, stopped))
            for call in (caller.put, caller.get, caller.consume)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if caller.failures:
        raise caller.failures[0]
    return caller.attempts


def outcome(client: tq.Client, name: str, ids: list[int]) -> Outcome:
    """The state at the end, as the ledger compares it."""
    part = client.partition(name)
    batch: Any = part.get(ids, timeout=20)
    return Outcome(frozenset(batch.ids.tolist()), {"trainer": part.describe().counts["trainer"]["consumed"]})


def late_seconds(tried: Attempt) -> float:
    """How long after its deadline a call ended."""
    # `consume` is two calls: a claim, and its ack.
    return tried.seconds - CALL_SECONDS * (2 if tried.call == "consume" else 1)


def again(_client: tq.Client, name: str, healed: float) -> bool:
    """Whether each call of the caller in this process has succeeded since."""
    return all(math.isfinite(healed_after(_callers[name].attempts, call, healed)) for call in CALLS)


def healed_after(attempts: list[Attempt], call: str, healed: float) -> float:
    """Seconds from the end of the partition to the first success of a call that began after it."""
    ends = [
        each.started + each.seconds
        for each in attempts
        if each.call == call and not each.error and each.started > healed
    ]
    return min(ends, default=math.inf) - healed


def cut_off(
    cluster: HostCluster,
    users: dict[str, Remote],
    ledger: Ledger,
    victim: str,
    direction: Direction,
    seconds: float,
) -> None:
    name = next(_names)
    users[CLIENTS[1]].call(delete_all)
    users[CLIENTS[0]].call(create, name)
    for node in STORAGE:
        wait_until(lambda: cluster.probe(node).used().sealed == 0, timeout=RECLAIM_SECONDS, what=f"{node} is empty")  # noqa: B023
    loops = {
        host: user.start(exercise, name, ledger.directory, 1_000_000 * index)
        for index, (host, user) in enumerate(users.items(), start=1)
    }
    wait_seconds(0.5)
    if victim == IN_USE:
        victim = max(STORAGE, key=lambda node: cluster.probe(node).used().sealed)
    began = time.monotonic()
    with cluster.network.partitioned(cluster.network[victim], direction):
        wait_seconds(seconds)
    healed = time.monotonic()
    for user in users.values():
        # By the calls that began after the heal: others may have been answered by chance.
        wait_until(lambda: user.call(again, name, healed), timeout=HEAL_SECONDS, what="every call succeeds again")  # noqa: B023
    for user in users.values():
        user.call(stop, "exercise")
    attempts = {host: loop.result(30) for host, loop in loops.items()}
    everything = [each for tried in attempts.values() for each in tried]
    assert not unexpected(everything, "Unavailable", "ClaimTimeout", "LeaseExpired")
    latest = max(everything, key=late_seconds)
    took = max(healed_after(tried, call, healed) for tried in attempts.values() for call in CALLS)
    print(f"latest call {late_seconds(latest):+.3f} s after its deadline, healed after {took:.2f} s")  # noqa: T201
    assert late_seconds(latest) <= LATE_SECONDS, latest
    cut = [each for each in everything if each.error and began < each.started < healed]
    assert cut, "nobody has noticed"
    if victim in CLIENTS:
        cut = [each for each in attempts[victim] if began + CALL_SECONDS < each.started < healed - CALL_SECONDS]
        assert all(each.error for each in cut)
    for host, tried in attempts.items():
        served = any(not each.error and began < each.started < healed for each in tried)
        assert served or victim in (host, CONTROLLER), f"{host} was not cut off, and got nothing done"
    put = [id_ for event in ledger.events() if event["event"] == "put" for id_ in event["ids"]]
    ledger.check(users[CLIENTS[1]].call(outcome, name, put))


CUTS: list[tuple[str, Direction]] = [
    (CLIENTS[0], "out"),
    (CLIENTS[0], "in"),
    (IN_USE, "both"),
]


@pytest.mark.parametrize(("victim", "direction"), CUTS)
def test_a_host_that_is_cut_off_for_a_while_heals(
    cluster: HostCluster, users: dict[str, Remote], ledger: Ledger, victim: str, direction: Direction
) -> None:
    cut_off(cluster, users, ledger, victim, direction, PARTITION_SECONDS_CI)


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("direction", ["out", "in", "both"])
@pytest.mark.parametrize("victim", [CLIENTS[0], IN_USE, CONTROLLER])
def test_a_host_that_is_cut_off_for_longer_heals(
    cluster: HostCluster, users: dict[str, Remote], ledger: Ledger, victim: str, direction: Direction
) -> None:
    cut_off(cluster, users, ledger, victim, direction, PARTITION_SECONDS)
