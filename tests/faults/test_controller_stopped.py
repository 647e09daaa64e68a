"""A controller that is held for longer than a lease: nobody's session ends by that."""

from __future__ import annotations

import os
import signal
import time

import torch

import tqclient as tq
from tests.faults.probe import LEASE
from tests.harness import Supervisor
from tqserver.local import LocalCluster

LEASES = 3
ROWS = 8

CONSUMER = """
import signal, sys
import tqclient as tq
client = tq.connect(sys.argv[1])
batch = client.partition("part").consumer("actor").claim(int(sys.argv[2]), timeout=20)
print("holding")
signal.pause()
"""


def hold(cluster: LocalCluster) -> None:
    """Holds the controller for some leases."""
    os.kill(cluster.controller.pid, signal.SIGSTOP)
    time.sleep(LEASES * LEASE)
    os.kill(cluster.controller.pid, signal.SIGCONT)


def test_what_clients_hold_outlives_a_controller_that_was_held_for_leases(no_leaks: None) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="32MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        tq.connect(cluster.address, timeout=20) as other,
    ):
        part = client.create_partition("part", consumers=["actor"], lease=LEASE)
        part.put({"x": torch.arange(2 * ROWS)})
        batch = part.consumer("actor").claim(ROWS)
        writer = part.allocate(1, {"x": ("int64", [])})
        hold(cluster)
        again = other.partition("part").consumer("actor").claim(ROWS, timeout=10)
        assert again.attempts.tolist() == [1] * ROWS
        time.sleep(LEASE)  # and they go on to be renewed
        assert part.describe().counts["actor"]["leased"] == 2 * ROWS
        writer["x"][:] = 7
        assert part.get(writer.commit())["x"].tolist() == [7]
        batch.ack()
        again.ack()
        assert part.describe().counts["actor"]["consumed"] == 2 * ROWS
        assert "this process stood still" in cluster.controller.log.read_text()


def test_a_client_that_is_gone_when_the_controller_goes_on_loses_its_claim(
    no_leaks: None, supervisor: Supervisor
) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="32MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
    ):
        part = client.create_partition("part", consumers=["actor"], lease=LEASE)
        part.put({"x": torch.arange(ROWS)})
        consumer = supervisor.python(CONSUMER, cluster.address, ROWS)
        consumer.wait_for("holding")
        consumer.kill()
        hold(cluster)
        gone_on = time.monotonic()
        batch = part.consumer("actor").claim(ROWS, timeout=10)
        assert time.monotonic() - gone_on <= LEASE + 0.5
        assert batch.attempts.tolist() == [2] * ROWS
