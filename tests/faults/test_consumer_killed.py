"""A consumer that dies by SIGKILL: what it held is delivered again, soon, and says so."""

from __future__ import annotations

import time

import pytest
import torch

import tqclient as tq
from tests.faults.probe import LEASE
from tests.harness import Supervisor
from tqserver.local import LocalCluster

ROWS = 256

CONSUMER = """
import signal, sys
import tqclient as tq
client = tq.connect(sys.argv[1], transport=sys.argv[2])
consumer = client.partition("part").consumer("actor")
held = [consumer.claim(int(sys.argv[3]), timeout=20) for _ in range(int(sys.argv[4]))]
print("holding", sorted(id_ for batch in held for id_ in batch.ids.tolist()))
signal.pause()
"""


@pytest.mark.parametrize(
    ("transport", "claims", "session_lease", "claim_lease"),
    [("shm", 1, LEASE, 10 * LEASE), ("grpc", 8, 10 * LEASE, LEASE)],  # whichever of the two ends first counts
)
def test_what_a_killed_consumer_held_is_delivered_again(
    transport: str, claims: int, session_lease: float, claim_lease: float, no_leaks: None, supervisor: Supervisor
) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="32MiB", session_lease=session_lease) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
    ):
        part = client.create_partition("part", lease=claim_lease)
        ids = part.put({"x": torch.arange(ROWS), "y": [torch.arange(row) for row in range(ROWS)]}).tolist()
        part.get(ids)["y"]  # what a process does only once (imports) must not count for the redelivery
        consumer = supervisor.python(CONSUMER, cluster.address, transport, ROWS // claims, claims)
        assert consumer.wait_for("holding") == f"holding {ids}"
        assert part.describe().counts["actor"]["leased"] == ROWS

        consumer.kill()
        killed = time.monotonic()
        batch = part.consumer("actor").claim(ROWS, timeout=10)
        elapsed = time.monotonic() - killed
        assert batch.ids.tolist() == ids
        assert batch.attempts.tolist() == [2] * ROWS
        assert batch["x"].tolist() == list(range(ROWS))
        assert elapsed <= LEASE + 0.5
        batch.ack()
        counts = part.describe().counts["actor"]
        assert counts == {"pending": 0, "ready": 0, "leased": 0, "consumed": ROWS, "dropped": 0}
