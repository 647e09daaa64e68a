"""Where puts go when there are several storage nodes."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import stop_processes, wait_until
from tqclient.limits import KIB, MIB
from tqserver.local import Daemon, LocalCluster

TRANSPORTS = ("shm", "grpc")
ARENA = 32 * MIB
TURN_SECONDS = 3.5
"""A put must have found another node by then: `nodes.NODE_SECONDS`, and what a busy machine takes."""

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=3, arena=ARENA, prefault=False) as running:
        yield running


@pytest.fixture(params=TRANSPORTS)
def client(cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, timeout=20) as observer:
        with tq.connect(cluster.address, transport=request.param, timeout=20) as connected:
            yield connected
        # With its session goes what it reserved, also where the node's answer never came.
        wait_until(lambda: not any(used(observer).values()), what="the nodes are empty again")


@pytest.fixture
def part(client: tq.Client) -> Iterator[tq.Partition]:
    partition = client.create_partition(f"part-{next(_numbers)}")
    yield partition
    client.delete_partition(partition.name)


def used(client: tq.Client) -> dict[str, int]:
    return {node.name: node.used_bytes for node in client.describe().nodes}


def noise(size_bytes: int, seed: int, rows: int = 1) -> dict[str, Any]:
    data = np.random.default_rng(seed).integers(256, size=(rows, size_bytes // rows), dtype=np.uint8)
    return {"x": list(torch.from_numpy(data).unbind())}


def same(part: tq.Partition, ids: Any, rows: list[torch.Tensor]) -> bool:
    """Whether the samples are these rows, byte for byte."""
    return all(map(torch.equal, part.get(ids).list("x"), rows))


@contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    stop_processes(daemon.pid)
    try:
        yield
    finally:
        os.kill(daemon.pid, signal.SIGCONT)


def spread(client: tq.Client, total_bytes: int) -> list[int]:
    """Returns what each node holds, once they have told the controller of all of it."""
    wait_until(lambda: sum(used(client).values()) >= total_bytes, what="the nodes report their use")
    return sorted(used(client).values())


def test_large_puts_are_balanced(client: tq.Client, part: tq.Partition) -> None:
    for number in range(12):
        part.put(noise(2 * MIB, number))
    least, _, most = spread(client, 24 * MIB)
    assert most - least <= 3 * MIB  # the size of a put, and what the nodes hold beside


def test_small_puts_are_balanced(client: tq.Client, part: tq.Partition) -> None:
    ids = [part.put(noise(32 * KIB, number))[0] for number in range(150)]
    least, _, most = spread(client, 150 * 32 * KIB)
    assert least >= MIB  # a third is 1.6 MiB
    assert most <= 6 * MIB  # a third, and a window that was reserved ahead
    assert same(part, ids, [noise(32 * KIB, number)["x"][0] for number in range(150)])


def test_puts_of_several_clients_are_balanced(cluster: LocalCluster, client: tq.Client, part: tq.Partition) -> None:
    others = [tq.connect(cluster.address, transport="grpc", timeout=20) for _ in range(4)]

    def put_some(other: tq.Client, number: int) -> None:
        for turn in range(3):
            other.partition(part.name).put(noise(2 * MIB, 10 * number + turn))

    threads = [threading.Thread(target=put_some, args=(other, n)) for n, other in enumerate(others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    least, _, most = spread(client, 24 * MIB)
    assert most - least <= 8 * MIB
    for other in others:
        other.close()


def test_a_batch_larger_than_a_node_is_split_over_nodes(client: tq.Client, part: tq.Partition) -> None:
    values = noise(72 * MIB, 1, rows=36)  # of 3 * 32
    ids = part.put(values)
    assert spread(client, 72 * MIB)[0] >= 8 * MIB
    assert same(part, ids, values["x"])
    picked = [35, 0, 17, 18]
    assert same(part, ids[picked], [values["x"][row] for row in picked])
    assert part.describe().samples == 36


def test_full_nodes_are_routed_around_and_named_when_all_are(client: tq.Client, part: tq.Partition) -> None:
    ids = [part.put(noise(20 * MIB, number))[0] for number in range(3)]  # one on each: no node takes another
    assert spread(client, 60 * MIB)[0] >= 20 * MIB
    ids.append(part.put(noise(20 * MIB, 3, rows=20))[0])  # into what is left of all three
    before = time.monotonic()
    with pytest.raises(tq.StorageFull) as caught:
        part.put(noise(16 * MIB, 4))
    assert time.monotonic() - before <= 5
    for name in ("storage-0", "storage-1", "storage-2"):
        assert re.search(rf"{name}: .*?\d+ of \d+ bytes are free", str(caught.value))
    for number in range(3):
        assert same(part, [ids[number]], noise(20 * MIB, number)["x"])
    assert same(part, [ids[3]], noise(20 * MIB, 3, rows=20)["x"][:1])


def test_a_stopped_node_is_routed_around(cluster: LocalCluster, client: tq.Client, part: tq.Partition) -> None:
    ids = [part.put(noise(3 * MIB, number))[0] for number in range(3)]
    with stopped(cluster.storage[0]):
        started = time.monotonic()
        slowest = 0.0
        for number in range(3, 9):
            before = time.monotonic()
            ids.append(part.put(noise(2 * MIB, number), timeout=10)[0])
            ids.append(part.put(noise(2 * KIB, 100 + number), timeout=10)[0])
            slowest = max(slowest, time.monotonic() - before)
        assert slowest <= TURN_SECONDS
        assert time.monotonic() - started <= 2 * TURN_SECONDS  # not every put pays
    sizes = [len(part.get([each]).list("x")[0]) for each in ids[:5]]
    assert sizes == [3 * MIB] * 3 + [2 * MIB, 2 * KIB]


def test_a_killed_node_is_routed_around_and_used_again(cluster: LocalCluster, client: tq.Client) -> None:
    part = client.create_partition(f"part-{next(_numbers)}")
    first = [part.put(noise(2 * MIB, number))[0] for number in range(3)]
    cluster.storage[1].kill()
    slowest, ids = 0.0, []
    for number in range(3, 9):
        before = time.monotonic()
        ids.append(part.put(noise(2 * MIB, number), timeout=10)[0])
        slowest = max(slowest, time.monotonic() - before)
    assert slowest <= TURN_SECONDS
    cluster.storage[1].restart()
    for number, each in enumerate([*first, *ids]):
        assert same(part, [each], noise(2 * MIB, number)["x"])
    before = used(client)["storage-1"]

    def grows() -> bool:
        part.put(noise(2 * MIB, 50))
        return used(client)["storage-1"] > before

    wait_until(grows, what="the node that came back is used again")
    client.delete_partition(part.name)


def test_a_get_from_a_stopped_node_ends_at_its_deadline(cluster: LocalCluster) -> None:
    with tq.connect(cluster.address, transport="grpc", timeout=20) as client:
        part = client.create_partition(f"part-{next(_numbers)}")
        before = used(client)["storage-2"]
        ids = []

        def grows() -> bool:
            ids.append(part.put(noise(2 * MIB, len(ids)))[0])
            return used(client)["storage-2"] >= before + 2 * MIB

        wait_until(grows, what="storage-2 holds something")
        with stopped(cluster.storage[2]):
            started = time.monotonic()
            with pytest.raises(tq.Unavailable, match=re.escape(cluster.storage[2].address)):
                part.get(ids, timeout=1)
            assert time.monotonic() - started <= 1.5
        client.delete_partition(part.name)
