"""The controller is killed while many callers are at it: nothing that was acknowledged is lost, and nobody is told."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

import tqclient as tq
from tests.faults.mixed_load import MixedLoad, check
from tests.harness import Ledger, Supervisor, wait_until
from tqserver.local import LocalCluster

LEASE = 1.0
CALLERS = 64
OPERATIONS_PER_SECOND_MIN = 50
RESUME_SECONDS = 20.0
"""Callers are at work again in this time; generous, since the machine may be busy with other things."""
BETWEEN_KILLS_BYTES = 60_000
"""Of the ledger, at most: some 600 events."""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="512MiB", session_lease=LEASE, log_level="warning") as running:
        yield running


def _kill_at_random_instants(
    cluster: LocalCluster, supervisor: Supervisor, ledger: Ledger, *, kills: int, seed: int
) -> None:
    rng = random.Random(seed)
    with tq.connect(cluster.address, timeout=RESUME_SECONDS) as client:
        part = client.create_partition("part", lease=LEASE)
        load = MixedLoad(supervisor, ledger, cluster.address, "part", callers=CALLERS, seed=seed)
        start = time.monotonic()
        for number in range(kills + 1):
            goal = load.written_bytes + rng.randint(1, BETWEEN_KILLS_BYTES)
            wait_until(lambda: load.written_bytes >= goal, timeout=RESUME_SECONDS, what=f"work after kill {number}")  # noqa: B023
            if number < kills:
                cluster.controller.kill()
                cluster.controller.restart()
        rate = ledger.operations_per_second(start, time.monotonic())
        load.stop()
        assert rate >= OPERATIONS_PER_SECOND_MIN, f"void: {rate:.0f} operations a second while it was killed"
        check(ledger, part)


def test_no_acknowledged_command_is_lost_to_20_kills(
    no_leaks: None, cluster: LocalCluster, supervisor: Supervisor, ledger: Ledger, seed: int
) -> None:
    _kill_at_random_instants(cluster, supervisor, ledger, kills=20, seed=seed)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_no_acknowledged_command_is_lost_to_100_kills(
    no_leaks: None, cluster: LocalCluster, supervisor: Supervisor, ledger: Ledger, seed: int, rounds: int | None
) -> None:
    _kill_at_random_instants(cluster, supervisor, ledger, kills=rounds or 100, seed=seed)
