"""A storage node that dies by SIGKILL comes back with every sealed extent, and with nothing else."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tqclient as tq
from tests.faults.probe import LEASE, Used, node_probe
from tests.harness import wait_until
from tests.harness.leaks import SHM
from tqserver.local import LocalCluster

READABLE_SECONDS = 3.0
CYCLES = 10


def row(number: int) -> NDArray[np.uint8]:
    """Up to 128 KiB; every row is of another length."""
    return np.random.default_rng(number).integers(256, size=number * 7919 % 131_072, dtype=np.uint8)


def assert_row(batch: Any, number: int) -> None:
    assert batch["number"].tolist() == [number]
    assert np.array_equal(batch.list("x")[0], row(number))


class Producer(threading.Thread):
    """Puts one row after the other, whatever becomes of the node; knows what was acknowledged."""

    def __init__(self, part: tq.Partition, numbers: Iterator[int], stopped: threading.Event) -> None:
        super().__init__()
        self._part = part
        self._numbers = numbers
        self._stopped = stopped
        self.put: dict[int, int] = {}
        self.failures: list[tq.TQError] = []

    def run(self) -> None:
        for number in self._numbers:
            if self._stopped.wait(0.005):
                return
            try:
                ids = self._part.put({"number": np.array([number]), "x": [row(number)]}, keys=[str(number)])
            except tq.TQError as error:
                self.failures.append(error)
            else:
                self.put[number] = int(ids[0])


@contextmanager
def producing(parts: list[tq.Partition]) -> Iterator[list[Producer]]:
    """One producer for each client; they have ended when the context has."""
    stopped, numbers = threading.Event(), itertools.count()
    producers = [Producer(part, numbers, stopped) for part in parts]
    for producer in producers:
        producer.start()
    try:
        yield producers
    finally:
        stopped.set()
        for producer in producers:
            producer.join(30)


def shm_files() -> set[str]:
    return {name for name in os.listdir(SHM) if name.startswith(f"tq-local-{os.getpid()}-")}


def cycles_of_killing(cycles: int) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="512MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, transport="shm", timeout=20) as mapped,
        tq.connect(cluster.address, transport="grpc", timeout=20) as streaming,
        node_probe(cluster.storage[0].address) as probe,
    ):
        mapped.create_partition("part")
        parts = [mapped.partition("part"), streaming.partition("part")]
        incarnations = {probe.describe().incarnation}
        with producing(parts) as producers:
            for _ in range(cycles):
                before = [len(producer.put) for producer in producers]
                wait_until(
                    lambda: all(len(p.put) >= n + 5 for p, n in zip(producers, before, strict=True)),  # noqa: B023
                    what="both producers put something more",
                )
                sealed = [max(producer.put.items()) for producer in producers]
                cluster.storage[0].kill()
                restarted = time.monotonic()
                cluster.storage[0].restart()
                for part, (number, id_) in itertools.product(parts, sealed):
                    assert_row(part.get([id_]), number)
                assert time.monotonic() - restarted <= READABLE_SECONDS
                incarnations.add(probe.describe().incarnation)
                assert len(shm_files()) == 1
        assert len(incarnations) == cycles + 1
        for producer in producers:
            assert not producer.failures
            assert len(producer.put) >= 5 * cycles

        put = {number: id_ for producer in producers for number, id_ in producer.put.items()}
        assert parts[0].describe().samples == len(put)
        for part, (number, id_) in itertools.product(parts, put.items()):
            assert_row(part.get([id_]), number)
        mapped.delete_partition("part")
        mapped.close()
        streaming.close()
        probe.wait_used(Used(0), timeout=LEASE, what="nothing is left of ten lives")


def test_a_killed_node_serves_its_sealed_extents_again(no_leaks: None) -> None:
    cycles_of_killing(CYCLES)
    assert not shm_files()


@pytest.mark.chaos
@pytest.mark.timeout(1200)
def test_a_node_killed_over_and_over_serves_its_sealed_extents_again(no_leaks: None, rounds: int | None) -> None:
    cycles_of_killing(rounds or 100)
    assert not shm_files()
