"""Gets that race clears: whole bytes or SampleNotFound; no byte is used again under a reader that holds its lease."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import tqclient as tq
from tests.faults.probe import LEASE, node_probe
from tests.harness import Supervisor, wait_until
from tqclient.limits import KIB, MIB
from tqserver.local import LocalCluster

ROUNDS_CI = 1_000
ROUNDS = 10_000
"""Each is a race of three gets."""
ARENA = "6MiB"  # room for some thirty of the blocks: each is used again within a fraction of a second
ROW_BYTES = 64 * KIB

# Stops itself once it knows where rows lie, and fetches them when it is continued.
HELD = """
import os, signal, sys
import tqclient as tq
from tests.harness.stdout import keep_to_python
from tqclient.operations import claims, read

keep_to_python()

def stop_before_reading(operations):
    fetch = operations.fetch

    def fetch_late(*arguments):
        operations.fetch = fetch
        os.kill(os.getpid(), signal.SIGSTOP)
        return (yield from fetch(*arguments))

    operations.fetch = fetch_late
"""

SLOW_READER = f"""{HELD}
with tq.connect(sys.argv[1], transport=sys.argv[2], timeout=20) as client:
    part = client.partition("part")
    stop_before_reading(read)
    for ids in sys.argv[3], sys.argv[4]:
        try:
            print("got", part.get([int(ids)]).list("x")[0][:4].tolist())
        except tq.TQError as error:
            print("raised", type(error).__name__)
print("done")
"""

SLOW_CONSUMER = f"""{HELD}
with tq.connect(sys.argv[1], timeout=20) as client:
    consumer = client.partition("part").consumer("actor", sampler=tq.Lifo())  # of which nothing is read ahead
    stop_before_reading(claims)
    with consumer.claim(1, timeout=20) as batch:
        print("claimed", batch.list("x")[0][-1].item(), "at attempt", batch.attempts[0])
print("done")
"""


def row(number: int) -> NDArray[np.int64]:
    return np.full(ROW_BYTES // 8, number)


class Race:
    """Two rows in a block of their own; several readers get them while one thread clears one of them, or both."""

    def __init__(self, writer: tq.Partition, readers: dict[str, Callable[[list[int]], Any]]) -> None:
        self._writer = writer
        self._readers = readers
        self._barrier = threading.Barrier(len(readers) + 2)
        self._round: tuple[int, list[int]] | None = None
        self.outcomes: dict[str, Counter[str]] = {name: Counter() for name in readers}
        self.failures: list[BaseException] = []

    def run(self, rounds: int) -> None:
        threads = [threading.Thread(target=self._race, args=(name, get)) for name, get in self._readers.items()]
        threads.append(threading.Thread(target=self._race, args=("clear", None)))
        for thread in threads:
            thread.start()
        try:
            for number in range(rounds):
                ids = self._writer.put({"x": [row(2 * number), row(2 * number + 1)]}).tolist()
                self._round = number, ids
                self._barrier.wait(60)  # off they go
                self._barrier.wait(60)  # all are there
                if self.failures:
                    break
        finally:
            self._round = None
            self._barrier.wait(60)
            for thread in threads:
                thread.join(60)
        if self.failures:
            raise self.failures[0]

    def _race(self, name: str, get: Callable[[list[int]], Any] | None) -> None:
        while True:
            self._barrier.wait(60)
            if self._round is None:
                return
            number, ids = self._round
            try:
                if get is None:
                    self._writer.clear(ids=ids)
                else:
                    self.outcomes[name][self._outcome(get, number, ids)] += 1
            except BaseException as error:
                self.failures.append(error)
            self._barrier.wait(60)

    @staticmethod
    def _outcome(get: Callable[[list[int]], Any], number: int, ids: list[int]) -> str:
        try:
            batch = get(ids)
        except tq.SampleNotFound as error:
            return "not found" if set(error.ids) <= set(ids) else f"{error.ids} were not asked for"
        for index, value in enumerate(batch.list("x")):
            assert np.array_equal(value, row(2 * number + index)), f"round {number} has the bytes of {value[0] // 2}"
        batch.close()
        return "whole"


def race(rounds: int) -> None:
    with (
        LocalCluster(storage_nodes=1, arena=ARENA, session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as writer,
        tq.connect(cluster.address, transport="shm", timeout=20) as mapped,
        tq.connect(cluster.address, transport="grpc", timeout=20) as streaming,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = writer.create_partition("part")
        shm, grpc = mapped.partition("part"), streaming.partition("part")
        readers: dict[str, Callable[[list[int]], Any]] = {
            "copies": shm.get,
            "views": lambda ids: shm.get(ids, copy=False),
            "streams": grpc.get,
        }
        races = Race(part, readers)
        races.run(rounds)
        for name, outcomes in races.outcomes.items():
            assert outcomes.keys() <= {"whole", "not found"}
            assert sum(outcomes.values()) == rounds
            assert min(outcomes["whole"], outcomes["not found"]) > 0, f"{name} always won, or always lost: {outcomes}"
        assert rounds * 2 * ROW_BYTES > 20 * MIB, "too few to use any byte again"
        for client in (mapped, streaming):
            client.close()  # their pins go with them
        wait_until(lambda: probe.used().sealed == 0, timeout=LEASE, what="everything that was cleared is free")


@pytest.mark.timeout(180)
def test_a_get_that_races_a_clear_is_whole_or_not_found(no_leaks: None) -> None:
    race(ROUNDS_CI)


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_ten_thousand_gets_that_race_clears_are_whole_or_not_found(no_leaks: None, rounds: int | None) -> None:
    race(100 * rounds if rounds else ROUNDS)  # one alone is over in milliseconds


def fill(part: tq.Partition, first: int) -> int:
    """Puts rows of 8 KiB until the node is full; returns how many went in."""
    count = 0
    while True:
        try:
            part.put({"x": [np.full(KIB, first + count)]}, timeout=5)
        except tq.StorageFull:
            return count
        count += 1


@pytest.mark.parametrize("held", ["a view", "a claim"])
def test_bytes_are_used_again_only_when_the_read_lease_is_over(held: str, no_leaks: None) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="4MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = client.create_partition("part", lease=LEASE)
        ids = part.put({"x": [row(1), row(2), row(3)]})
        block_bytes = probe.used_once_sealed().sealed
        batch: Any = (
            part.get(ids, copy=False) if held == "a view" else part.consumer("actor").claim(3, copy=False, timeout=5)
        )
        assert len(part.clear(ids=ids)) == 3
        with pytest.raises(tq.SampleNotFound):
            part.get(ids[:1])
        others = fill(part, first=100)
        node = probe.describe()
        assert node.sealed_bytes > block_bytes + others * 8 * KIB
        assert node.capacity_bytes - node.sealed_bytes < ROW_BYTES, "nobody has looked for every free byte"
        for value, number in zip(batch.list("x"), (1, 2, 3), strict=True):
            assert np.array_equal(value, row(number)), "bytes were used again under a reader that holds its lease"
        if held == "a view":
            batch.close()
        else:
            batch.ack()
        assert fill(part, first=100) * 9 * KIB > 2 * ROW_BYTES, "bytes did not come back with the lease"


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_reader_slower_than_its_lease_gets_no_other_bytes(
    transport: str, no_leaks: None, supervisor: Supervisor
) -> None:
    """It was told where the rows lie; when it looks, others have been there for long."""
    with (
        LocalCluster(storage_nodes=1, arena="4MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = client.create_partition("part")
        cleared, kept = part.put({"x": [row(1)]}).tolist() + part.put({"x": [row(2)]}).tolist()
        reader = supervisor.python(SLOW_READER, cluster.address, transport, cleared, kept)
        wait_until(lambda: reader.stopped, what="the reader stops")
        sealed = probe.used().sealed
        part.clear(ids=[cleared])
        assert probe.used().sealed == sealed  # for as long as the reader's lease lasts
        wait_until(lambda: probe.used().sealed == sealed // 2, timeout=LEASE + 0.5, what="its pin ends with its lease")
        fill(part, first=100)
        node = probe.describe()
        assert node.capacity_bytes - sum(probe.used()) < ROW_BYTES, "nobody has taken the bytes that it will look at"
        reader.resume()
        reader.wait_for("done")
        assert reader.stdout.splitlines() == ["raised SampleNotFound", "got [2, 2, 2, 2]", "done"]
        assert reader.wait() == 0


def test_a_claim_read_later_than_its_lease_is_made_anew(no_leaks: None, supervisor: Supervisor) -> None:
    """Another consumer has acked its row meanwhile, and others lie where it was."""
    with (
        LocalCluster(storage_nodes=1, arena="4MiB", session_lease=LEASE) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = client.create_partition("part")
        ids = part.put({"x": [row(1)]})
        reader = supervisor.python(SLOW_CONSUMER, cluster.address)
        wait_until(lambda: reader.stopped, what="the consumer stops")
        with part.consumer("actor").claim(1, timeout=20) as batch:
            assert (batch.ids.tolist(), batch.attempts.tolist()) == (ids.tolist(), [2])
        part.clear(ids=ids)
        others = fill(part, first=100)
        node = probe.describe()
        assert node.capacity_bytes - sum(probe.used()) < ROW_BYTES, "nobody has taken the bytes that it will look at"
        reader.resume()
        reader.wait_for("done")
        assert reader.stdout.splitlines() == [f"claimed {99 + others} at attempt 1", "done"]
        assert reader.wait() == 0
        assert part.describe().counts["actor"]["consumed"] == 1
