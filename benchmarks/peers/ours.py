"""This service: a controller and a storage node, put, and a claim that waits on the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

import tqclient as tq
from benchmarks import workloads
from benchmarks.peers import forms, host
from benchmarks.workloads import ROLLOUT_SOURCE, ROLLOUT_VALUES, Columns
from tqclient.limits import MIB
from tqclient.transport.mooncake.transport import MooncakeTransport
from tqserver.local import LocalCluster

PARTITION: Final = "bench/compare"
CRITIC, ACTOR = "critic", "actor"
COPIES, JAGGED, IN_PLACE = "default", "jagged tensors", "in place"
ARENA_SPARE_BYTES: Final = 512 * MIB
ARENA_BATCHES: Final = 3
"""That fit into the arena at once: one that lies there, and two whose bytes may still be on their way back."""


class Storage(host.Storage):
    """The two daemons."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._cluster = LocalCluster(storage_nodes=1, arena=ARENA_BATCHES * setup.size_bytes + ARENA_SPARE_BYTES)
        self._cluster.start()
        self._cluster.wait_prefaulted()

    def where(self) -> dict[str, Any]:
        """Returns the controller's address, and the pids of the daemons."""
        pids = {"tq-storage": self._cluster.storage[0].pid, "tq-controller": self._cluster.controller.pid}
        return {**self.setup.storage, "address": self._cluster.address, "pids": pids}

    def close(self) -> None:
        """Stops them."""
        self._cluster.stop()


def _connect(setup: host.Setup) -> tq.Client:
    return tq.connect(setup.storage["address"], transport=setup.storage.get("transport", "auto"))


def _partition(client: tq.Client) -> tq.Partition:
    return client.create_partition(PARTITION, consumers=[CRITIC, ACTOR], exist_ok=True)


def _registrations(client: Any) -> int:
    """Returns how often a client's transports have registered memory."""
    paths = [client._state.paths.get(node) for node in client._state.nodes.values()]
    counts = [path.stats() for path in paths if isinstance(path, MooncakeTransport)]
    return sum(count["registrations"] for count in counts)


class Source(host.Source):
    """Puts."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._client = _connect(setup)
        self._partition = _partition(self._client)
        self._spec: Any = workloads.spec(self.columns)
        self._given: Columns = self.columns
        self._filled: tuple[Any, float]
        self._put: dict[int, np.ndarray[Any, Any]] = {}
        self._lock = threading.Lock()

    def prepare(self, way: str, number: int) -> None:
        """Does what the producer has done in any case: makes jagged tensors, or fills in what it allocates.

        To allocate is of the put.
        """
        self._given = forms.jagged(self.columns) if way == JAGGED else self.columns
        if way != IN_PLACE:
            return
        start = time.perf_counter()
        writer = self._partition.allocate(self.setup.rows, self._spec)
        self._filled = writer, time.perf_counter() - start
        workloads.fill(writer, self.columns)

    def put(self, way: str, number: int) -> float | None:
        """One put of the whole batch, or the commit of one that lies there."""
        spent_s = None
        if way == IN_PLACE:
            writer, spent_s = self._filled
            ids = writer.commit()
        else:
            ids = self._partition.put(self._given)
        with self._lock:
            self._put[number] = ids
        return spent_s

    def announce(self, way: str, number: int) -> None:
        """The claim waits on the server."""

    def drop(self, way: str, number: int) -> None:
        """Clears the samples."""
        self.drop_all(way, [number])

    def drop_all(self, way: str, numbers: Sequence[int]) -> None:
        """Clears the samples of some batches with one call."""
        if numbers:
            self._partition.clear(ids=np.concatenate([self._put.pop(number) for number in numbers]))

    def commands(self) -> host.Commands:
        """Returns what the runner may ask."""
        return {**super().commands(), "registrations": lambda: _registrations(self._client)}

    def close(self) -> None:
        """Ends the session."""
        self._client.close()
        super().close()


class Target(host.Target):
    """Claims."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._client = _connect(setup)
        self._partition = _partition(self._client)
        self._critic = self._partition.consumer(CRITIC, fields=setup.fields)
        self._actor = self._partition.consumer(ACTOR, fields=[*setup.fields, ROLLOUT_VALUES])
        self._batches: list[Any] = []

    def wait(self, way: str) -> int:
        """The claim waits, and brings the values with it."""
        return 0

    def take(self, way: str, number: int) -> Columns:
        """One claim of the whole batch, and each value of it."""
        return self._claim(self._critic, way)

    def write_back(self, way: str, number: int, values: Columns) -> None:
        """Puts a column to the samples of the claim, and settles that."""
        batch = self._batches.pop()
        self._partition.put({ROLLOUT_VALUES: values[ROLLOUT_SOURCE]}, ids=batch.ids)
        batch.ack()

    def retake(self, way: str, number: int) -> Columns:
        """The claim of another consumer, which names the column that was written."""
        return self._claim(self._actor, way)

    def _claim(self, consumer: Any, way: str) -> Columns:
        batch = consumer.claim(self.setup.rows, copy=way == COPIES, timeout=host.WAIT_SECONDS)
        self._batches.append(batch)
        return {field: batch[field] for field in batch.fields}

    def columns(self, way: str, values: Columns) -> Columns:
        """Returns the rows of what was claimed last."""
        return {field: self._batches[-1].list(field) for field in values}

    def get(self, way: str) -> float:
        """Reads the samples of the claim once more, by id; returns the seconds that it took."""
        ids = self._batches[-1].ids
        start = time.perf_counter()
        batch = self._partition.get(ids, copy=way == COPIES)
        values = [batch[field] for field in batch.fields]
        elapsed = time.perf_counter() - start
        del values, batch
        return elapsed

    def commands(self) -> host.Commands:
        """Returns what the runner may ask."""
        return {**super().commands(), "get": self.get, "registrations": lambda: _registrations(self._client)}

    def drop(self, way: str, number: int) -> None:
        """Settles the claim."""
        for batch in self._batches:
            batch.ack()
        self._batches.clear()

    def close(self) -> None:
        """Ends the session."""
        self._client.close()
        super().close()
