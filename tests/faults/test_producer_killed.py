"""A producer that dies by SIGKILL in the middle of a put leaves nothing behind: no sample, no key, no byte."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest

import tqclient as tq
from tests.faults.probe import LEASE, Used, node_probe
from tests.faults.slow_writing import STEP_BYTES
from tests.harness import Ledger, Outcome, Supervisor, wait_until
from tqclient.limits import CHUNK_BYTES, MIB
from tqserver.local import LocalCluster

RECLAIM_SECONDS = 1.0

# Everything is imported once; each fork waits for its turn, and is then a producer like any other.
PRODUCERS = """
import os, signal, sys
import numpy as np
import tqclient as tq
from tests.faults.slow_writing import send_in_steps, write_in_steps
from tqclient.client import connect

address, transport, values = sys.argv[1], sys.argv[2], int(sys.argv[3])

def put(stop):
    def reached(done_bytes):
        if done_bytes >= stop:
            print(f"{os.getpid()} wrote {done_bytes}.\\n", end="")
            signal.pause()
    (write_in_steps if transport == "shm" else send_in_steps)(reached)
    client = connect(address, transport=transport, timeout=20)
    client.partition("part").put({"x": [np.full(values, 7)]}, keys=["new"])

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
for stop in map(int, sys.argv[4:]):
    pid = os.fork()
    if pid == 0:
        signal.sigwait({signal.SIGUSR1})
        put(stop)
        sys.exit("was not stopped")
    print(f"stop {stop}: {pid}\\n", end="")
for _ in sys.argv[4:]:
    os.wait()
"""

# Puts as fast as it can, and writes down what it was told; the row's bytes follow from its key.
STEADY_PRODUCER = """
import sys
from pathlib import Path
import numpy as np
import tqclient as tq
from tests.harness import LedgerWriter

address, transport, first, ledger = sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4])
with tq.connect(address, transport=transport, timeout=20) as client, LedgerWriter(ledger) as writer:
    part = client.partition("part")
    print("ready")
    for number in range(first, first + 1_000_000):
        token = writer.putting(1)
        writer.put(token, part.put({"x": np.full((1, 1 << 16), number)}, keys=[str(number)]))
"""


class Stage:
    """A cluster with one sample, its producers, and what the node holds without them."""

    def __init__(self, cluster: LocalCluster, client: tq.Client, supervisor: Supervisor) -> None:
        self._cluster = cluster
        self._supervisor = supervisor
        self.part = client.create_partition("part")
        self.first = np.arange(1 << 18)
        self.ids = self.part.put({"x": [self.first]})  # large enough for a window of its own, which is closed behind it

    def producers(self, transport: str, values: int, stops: list[int]) -> list[int]:
        """Returns a pid for each of the stops."""
        script = self._supervisor.python(PRODUCERS, self._cluster.address, transport, values, *stops, name=transport)
        self._output = script
        return [int(script.wait_for(f"stop {stop}: ").rpartition(" ")[2]) for stop in stops]

    def start(self, pid: int) -> int:
        """Lets a producer put; returns how many bytes it had written when it stopped."""
        os.kill(pid, signal.SIGUSR1)
        line = self._output.wait_for(f"{pid} wrote ")
        return int(line.rpartition(" ")[2].rstrip("."))

    def assert_nothing_came_of_it(self) -> None:
        assert self.part.describe().samples == 1
        with pytest.raises(tq.SampleNotFound):
            self.part.get(keys=["new"])
        assert np.array_equal(self.part.get(self.ids).list("x")[0], self.first)


def kill_at_each_step(supervisor: Supervisor, block_bytes: int) -> None:
    stops = [*range(0, block_bytes + 1, STEP_BYTES), block_bytes + 1]  # the last one: all in place, not committed
    with (
        LocalCluster(storage_nodes=1, arena=6 * MIB + block_bytes, session_lease=20 * RECLAIM_SECONDS) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        stage = Stage(cluster, client, supervisor)
        baseline = probe.used_once_sealed()
        assert baseline.sealed > MIB
        assert baseline == Used(baseline.sealed)
        reached = []
        for pid in stage.producers("shm", block_bytes // 8, stops):
            reached.append(stage.start(pid))
            held = probe.used()
            assert held.sealed == baseline.sealed
            assert held.reserved > block_bytes
            os.kill(pid, signal.SIGKILL)
            probe.wait_used(baseline, timeout=RECLAIM_SECONDS, what=f"killed at {reached[-1]}, bytes come back")
            stage.assert_nothing_came_of_it()
        assert reached[:-1] == stops[:-1]
        assert reached[-1] > block_bytes
        stage.part.put({"x": [np.zeros(4, np.int64)]}, keys=["new"])


def test_a_producer_killed_at_each_step_of_its_write_leaves_nothing(no_leaks: None, supervisor: Supervisor) -> None:
    kill_at_each_step(supervisor, MIB)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_a_producer_killed_at_each_step_of_a_large_write_leaves_nothing(no_leaks: None, supervisor: Supervisor) -> None:
    kill_at_each_step(supervisor, 16 * MIB)


def test_producers_killed_in_the_middle_of_their_streams_leave_nothing(no_leaks: None, supervisor: Supervisor) -> None:
    """A node cannot see the death of a writer on another host: its bytes come back with the lease."""
    with (
        LocalCluster(storage_nodes=1, arena="32MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        stage = Stage(cluster, client, supervisor)
        baseline = probe.used_once_sealed()
        stops = [chunks * CHUNK_BYTES for chunks in range(4)]
        pids = stage.producers("grpc", 3 * MIB // 8, [*stops, 3 * MIB + 1])
        assert [stage.start(pid) for pid in pids][:4] == stops
        held = probe.used()
        assert held.sealed == baseline.sealed
        assert held.reserved > 5 * 3 * MIB
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        probe.wait_used(baseline, timeout=LEASE + 0.5, what="killed, bytes come back")
        stage.assert_nothing_came_of_it()


@pytest.mark.chaos
@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_producers_killed_at_random_instants_lose_nothing_that_was_acknowledged(
    transport: str, no_leaks: None, supervisor: Supervisor, ledger: Ledger, seed: int, rounds: int | None
) -> None:
    rng = random.Random(seed)
    with (
        LocalCluster(storage_nodes=1, arena="256MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = client.create_partition("part")
        for turn in range(rounds or 20):
            producer = supervisor.python(
                STEADY_PRODUCER, cluster.address, transport, turn * 1_000_000, ledger.directory, name=f"steady-{turn}"
            )
            producer.wait_for("ready")
            end = time.monotonic() + rng.uniform(0.0, 0.5)
            wait_until(lambda: time.monotonic() >= end, what="its turn")  # noqa: B023
            producer.kill()
            wait_until(lambda: probe.used()[1:] == (0, 0), timeout=LEASE + 0.5, what="reserved bytes come back")
            present = check_rows(part, ledger, turn * 1_000_000)
            ledger.check(Outcome(present=frozenset(present), consumed={}))
            part.clear(ids=sorted(present))
            with ledger.writer() as writer:
                writer.clearing(present)
                writer.cleared(present)
        probe.wait_used(Used(0), timeout=RECLAIM_SECONDS, what="cleared bytes come back")


def check_rows(part: tq.Partition, ledger: Ledger, first: int) -> list[int]:
    """Reads every sample that this turn's producer put, acknowledged or in doubt, and returns their ids."""
    answered = [event for event in ledger.events() if event["event"] == "put"]
    last = max((int(id_) for event in answered for id_ in event["ids"]), default=0)
    present: list[int] = []
    number = first
    while True:
        try:
            batch: Any = part.get(keys=[str(number)])
        except tq.SampleNotFound:
            break
        assert np.array_equal(batch["x"], np.full((1, 1 << 16), number))
        present += batch.ids.tolist()
        number += 1
    assert part.describe().samples == len(present)
    assert not present or max(present) >= last
    return present
