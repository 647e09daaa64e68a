"""A producer that is held for longer than its lease in the middle of a put, and then goes on as if nothing had been."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tqclient as tq
from tests.faults.probe import LEASE, node_probe
from tests.harness import Supervisor, wait_until
from tqclient.limits import KIB, MIB
from tqserver.local import LocalCluster

STOP_LEASES = 10
FOREIGN_ROWS = 1_000
VALUES = 2 * MIB // 8  # of the blocks of the producers that are held
ROW_VALUES = 1024  # of a foreign row

# Stops itself halfway through its write. `put` is what users call; `once` is the same without its second tries.
PRODUCER = """
import os, signal, sys
import numpy as np
import tqclient as tq
from tests.faults.slow_writing import send_in_steps, write_in_steps
from tqclient.operations import put, sessions

address, transport, how, number, values = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
stops = [values * 4]

def reached(done_bytes):
    if stops and done_bytes >= stops[0]:
        stops.pop()
        os.kill(os.getpid(), signal.SIGSTOP)

def try_once(state, deadline, attempt):
    session = yield from sessions.live_session(state, deadline)
    return (yield from attempt(session))

(write_in_steps if transport == "shm" else send_in_steps)(reached)
if how == "once":
    put.in_session = try_once
with tq.connect(address, transport=transport, timeout=20) as client:
    try:
        print("answer:", client.partition("part").put({"x": [np.full(values, number)]}).tolist())
    except tq.TQError as error:
        print(f"answer: {type(error).__name__}: {error}")
"""


def foreign_row(number: int) -> NDArray[np.int64]:
    return np.random.default_rng(number).integers(1 << 62, size=ROW_VALUES)


def fill(part: tq.Partition, rows: int) -> dict[int, NDArray[np.int64]]:
    """Puts at least so many rows, and then more until the node is full; returns them by sample."""
    stored: dict[int, NDArray[np.int64]] = {}
    for rows_per_put in (10, 1):  # the small ones fit where no large one does
        while True:
            values = [foreign_row(len(stored) + index) for index in range(rows_per_put)]
            try:
                ids = part.put({"x": values}, timeout=5)
            except tq.StorageFull:
                break
            stored.update(zip(ids.tolist(), values, strict=True))
    assert len(stored) >= rows, f"full after {len(stored)} rows"
    return stored


def assert_unchanged(part: tq.Partition, stored: dict[int, NDArray[np.int64]]) -> None:
    ids = list(stored)
    for start in range(0, len(ids), 200):
        chosen = ids[start : start + 200]
        batch: Any = part.get(chosen)
        for id_, value in zip(chosen, batch.list("x"), strict=True):
            assert np.array_equal(value, stored[id_]), f"sample {id_} has changed"


@pytest.mark.timeout(120)
def test_a_stopped_producer_changes_no_foreign_byte_and_its_late_seal_is_refused(
    no_leaks: None, supervisor: Supervisor
) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="16MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        tq.connect(cluster.address, transport="grpc", timeout=20) as streaming,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = client.create_partition("part")
        held = {
            name: supervisor.python(PRODUCER, cluster.address, *name.split(), number, VALUES, name=name)
            for number, name in enumerate(["shm put", "shm once", "grpc once"], start=1)
        }
        for producer in held.values():
            wait_until(lambda: producer.stopped, what=f"{producer.name} stops")  # noqa: B023
        resumes = time.monotonic() + STOP_LEASES * LEASE
        # What a stopped process has mapped stays out of use; what it would have to send can go to others.
        wait_until(lambda: probe.used().reserved == 0, timeout=LEASE + 0.5, what="the leases of the stopped run out")
        held_bytes = probe.used().quarantined
        assert 2 * 8 * VALUES < held_bytes < 2 * (8 * VALUES + 8 * KIB)

        stored = fill(part, FOREIGN_ROWS)
        wait_until(lambda: time.monotonic() >= resumes, timeout=2 * STOP_LEASES, what="ten leases")
        node = probe.describe()
        assert node.quarantined_bytes == held_bytes
        assert node.capacity_bytes - sum(probe.used()) < VALUES, "a late write could miss every foreign row"

        for producer in held.values():
            producer.resume()
        for name in ("shm once", "grpc once"):
            answer = held[name].wait_for("answer: ")
            assert answer.startswith("answer: LeaseExpired: "), answer
        recovered = int(held["shm put"].wait_for("answer: [").removeprefix("answer: [").rstrip("]"))
        for producer in held.values():
            assert producer.wait() == 0, producer.report()

        assert part.describe().samples == len(stored) + 1
        for reader in (part, streaming.partition("part")):
            assert_unchanged(reader, stored)
            assert np.array_equal(reader.get([recovered]).list("x")[0], np.full(VALUES, 1))
        wait_until(lambda: probe.used().quarantined == 0, timeout=1.0, what="nobody is left who could write")
