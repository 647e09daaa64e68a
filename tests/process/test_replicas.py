"""A partition with replicas=2 outlives the loss of any one storage node."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import wait_until
from tqclient.limits import MIB
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import storage_pb2, storage_pb2_grpc
from tqserver.local import Daemon, LocalCluster

TRANSPORTS = ("shm", "grpc")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=3, arena=32 * MIB, prefault=False) as cluster:
        yield cluster


@pytest.fixture(params=TRANSPORTS)
def client(three: LocalCluster, request: pytest.FixtureRequest) -> Iterator[tq.Client]:
    with tq.connect(three.address, transport=request.param, timeout=20) as connected:
        yield connected


@pytest.fixture
def part(client: tq.Client) -> tq.Partition:
    return client.create_partition(f"part-{next(_numbers)}", replicas=2)


@contextmanager
def service(storage_nodes: int, transport: str) -> Iterator[tuple[LocalCluster, tq.Client, tq.Partition]]:
    with (
        LocalCluster(storage_nodes=storage_nodes, arena=32 * MIB, prefault=False) as cluster,
        tq.connect(cluster.address, transport=transport, timeout=20) as client,
    ):
        yield cluster, client, client.create_partition("part", consumers=["actor"], replicas=2)


def row(number: int) -> torch.Tensor:
    """Up to 96 KiB; every row is of another length."""
    data = np.random.default_rng(number).integers(256, size=1 + number * 7919 % 98_304, dtype=np.uint8)
    return torch.from_numpy(data)


def put_rows(part: tq.Partition, numbers: range) -> dict[int, int]:
    """Puts some rows in puts of four; returns id → number."""
    ids: dict[int, int] = {}
    for start in numbers[::4]:
        mine = list(range(start, min(start + 4, numbers.stop)))
        ids.update(zip(part.put({"x": [row(n) for n in mine]}).tolist(), mine, strict=True))
    return ids


def check_rows(part: tq.Partition, ids: dict[int, int]) -> None:
    got = part.get(list(ids)).list("x")
    assert all(torch.equal(value, row(number)) for value, number in zip(got, ids.values(), strict=True))


def arena_of(daemon: Daemon) -> Path:
    with dial(daemon.address) as channel:
        stub = storage_pb2_grpc.StorageStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        return Path(stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=5).arena_path)


def lose(daemon: Daemon) -> None:
    """The node dies, and its arena with it."""
    arena = arena_of(daemon)
    daemon.kill()
    arena.unlink()


def occurrences(arena: Path, payload: bytes) -> list[int]:
    """Where the payload lies in an arena."""
    data, found, at = arena.read_bytes(), [], -1
    while (at := data.find(payload, at + 1)) >= 0:
        found.append(at)
    return found


def test_every_block_lies_on_two_nodes(three: LocalCluster, client: tq.Client, part: tq.Partition) -> None:
    assert client.partition(part.name).describe().policy.replicas == 2
    random = np.random.default_rng(int(part.name[5:]))  # what was freed lies in the arenas yet
    sizes = [100, 5000, 20_000, 300, 70_000, 3 * MIB]
    values = [torch.from_numpy(random.integers(256, size=size, dtype=np.uint8)) for size in sizes]
    for value in values:
        part.put({"x": [value]})
    arenas = [arena_of(daemon) for daemon in three.storage]
    for value in values:
        payload = value.numpy().tobytes()
        assert sorted(len(occurrences(arena, payload)) for arena in arenas) == [0, 1, 1]
    assert part.describe().bytes >= 2 * sum(sizes)
    client.delete_partition(part.name)

    def freed() -> bool:
        return not any(node.used_bytes for node in client.describe().nodes)

    wait_until(freed, what="both replicas of everything are freed")


def test_a_damaged_replica_is_read_from_the_other(three: LocalCluster, client: tq.Client, part: tq.Partition) -> None:
    ids: dict[int, int] = {}
    for index, number in enumerate(range(60, 66)):
        ids.update(put_rows(part, range(number, number + 1)))
        payload = row(number).numpy().tobytes()
        holders = [arena for arena in map(arena_of, three.storage) if occurrences(arena, payload)]
        with holders[index % 2].open("r+b") as file:
            file.seek(occurrences(holders[index % 2], payload)[0])
            file.write(bytes(64))
    check_rows(part, ids)
    for each, number in ids.items():
        with part.get([each], copy=False) as views:  # of whichever replica; not compared unless asked for
            sound = torch.equal(views.list("x")[0], row(number))
            with nullcontext() if sound else pytest.raises(tq.CorruptBlock, match=f"'x', row 0, sample {each}"):
                views.verify()
    with part.consumer("actor").claim(6, timeout=5) as batch:
        assert all(map(torch.equal, batch.list("x"), (row(ids[each]) for each in batch.ids.tolist())))
    client.delete_partition(part.name)


@pytest.mark.parametrize("replicas", [0, 4, True, 1.5])
def test_as_many_replicas_as_there_may_be(three: LocalCluster, replicas: Any) -> None:
    with tq.connect(three.address, timeout=10) as client:
        with pytest.raises(tq.InvalidArgument, match=f"replicas={replicas!r}: .* from 1 to 3"):
            client.create_partition("refused", replicas=replicas)
        assert client.partitions("refused") == []


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lost_arena_loses_nothing(transport: str) -> None:
    with service(2, transport) as (cluster, _, part):
        ids = put_rows(part, range(32))
        held = part.consumer("actor").claim(4, timeout=5)
        views = part.get(list(ids), copy=False)
        lose(cluster.storage[0])
        started = time.monotonic()
        check_rows(part, ids)
        assert all(map(torch.equal, views.list("x"), map(row, ids.values())))
        views.close()
        with tq.connect(cluster.address, transport=transport if transport == "grpc" else "auto", timeout=10) as late:
            check_rows(late.partition("part"), ids)  # a client that never saw the node that is gone
        held.ack()
        batch = part.consumer("actor").claim(8, timeout=5)
        assert all(map(torch.equal, batch.list("x"), (row(ids[each]) for each in batch.ids.tolist())))
        batch.ack()
        assert time.monotonic() - started <= 10
        assert part.describe().counts["actor"] == {"pending": 0, "ready": 20, "leased": 0, "consumed": 12, "dropped": 0}

        cluster.storage[0].restart()  # with an arena that is empty
        more = put_rows(part, range(32, 40))
        check_rows(part, {**ids, **more})
        lose(cluster.storage[1])  # now the new ones lie on the other alone
        check_rows(part, more)
        # The first client may see the bytes for a while yet, if it mapped them; nobody else can.
        gone = pytest.raises(tq.Unavailable, match=r"arena .* is not known now|storage-1")
        with tq.connect(cluster.address, transport=transport, timeout=1) as late, gone:
            late.partition("part").get([next(iter(ids))])
        cluster.storage[1].restart()
        with tq.connect(cluster.address, transport=transport, timeout=5) as late:
            with pytest.raises(tq.CorruptBlock, match=r"arena .* of storage node 'storage-.' is lost"):
                late.partition("part").get([next(iter(ids))])
            check_rows(late.partition("part"), more)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_put_never_makes_do_with_fewer_nodes(transport: str) -> None:
    with service(2, transport) as (cluster, client, part):
        ids = put_rows(part, range(4))
        cluster.storage[1].kill()
        # Until the controller hears of it, the arena, which is mapped here, counts as that of a node that is there.
        wait_until(lambda: [each.attached for each in client.describe().nodes].count(True) == 1, what="one node")
        for size in (1, 2 * MIB):
            started = time.monotonic()
            with pytest.raises(tq.Unavailable, match=r"replicas=2.*storage-1"):
                part.put({"x": [torch.zeros(size, dtype=torch.uint8)]}, timeout=0.6)
            assert time.monotonic() - started <= 1.6
        assert part.describe().samples == len(ids)
        with pytest.raises(tq.Unavailable, match=r"replicas=3.*storage-0.*storage-1"):
            client.create_partition("three", replicas=3).put({"x": [row(1)]}, timeout=0.3)

        cluster.storage[1].restart()
        ids.update(put_rows(part, range(4, 12)))
        check_rows(part, ids)
        free = {node.name: node.capacity_bytes - node.used_bytes for node in client.describe().nodes}
        assert min(free.values()) > 20 * MIB  # what was reserved in vain is not lost


def test_puts_and_claims_go_on_while_nodes_lose_their_arenas() -> None:
    """Three nodes, of which one at a time is lost and comes back empty, before it is written to again."""
    with service(3, "shm") as (cluster, _, part), tq.connect(cluster.address, transport="grpc") as other:
        stopped = threading.Event()
        ids: dict[int, int] = {}
        failures: list[Exception] = []

        def produce() -> None:
            for start in range(0, 10_000, 4):
                if stopped.wait(0.005):
                    return
                try:
                    ids.update(put_rows(part, range(start, start + 4)))
                except tq.TQError as error:
                    failures.append(error)

        producer = threading.Thread(target=produce)
        producer.start()
        wait_until(lambda: len(ids) >= 24, what="some rows")
        lose(cluster.storage[0])
        reached = len(ids)
        wait_until(lambda: len(ids) >= reached + 40, what="puts go on over the other two")
        cluster.storage[0].restart()
        reached = len(ids)
        wait_until(lambda: len(ids) >= reached + 40, what="puts go on over all three")
        stopped.set()
        producer.join(20)
        assert failures == []
        known = dict(ids)
        check_rows(part, known)
        seen = 0
        while seen < len(known):
            with other.partition("part").consumer("actor").claim(min(16, len(known) - seen), timeout=5) as batch:
                for each, value in zip(batch.ids.tolist(), batch.list("x"), strict=True):
                    assert torch.equal(value, row(known[each]))
                seen += batch.rows
        assert part.describe().counts["actor"]["consumed"] == len(known)
