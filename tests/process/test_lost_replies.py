"""Room that nobody would give back: of puts that were given up, and of answers that never came."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import tqclient as tq
from tests.harness.proxy import FaultProxy
from tests.harness.supervisor import wait_until
from tqclient.wire.v1 import storage_pb2, storage_pb2_grpc
from tqserver.local import LocalCluster

LARGE = {"x": torch.zeros(1, 20_000_000, dtype=torch.uint8)}
LARGE_BYTES = 20_000_000


def used(client: tq.Client) -> tuple[int, int]:
    """Sealed and reserved bytes of the first node, which is asked directly."""
    node = client.describe().nodes[0]
    stub = storage_pb2_grpc.StorageStub(client._connection.channels.channel(node.address))
    reply = stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=5)
    return reply.sealed_bytes, reply.reserved_bytes


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_puts_that_are_cancelled_while_they_wait_for_room_leave_none_behind() -> None:
    async def cancel_some(address: str) -> None:
        async with tq.aio.connect(address) as client:
            part = await client.create_partition("part", capacity_samples=1)
            await part.put(LARGE)
            for _ in range(3):
                with pytest.raises(asyncio.TimeoutError):
                    await asyncio.wait_for(part.put(LARGE), 0.4)
            with tq.connect(address) as other:
                wait_until(lambda: used(other)[1] == 0, what="all room is back")
                assert LARGE_BYTES <= used(other)[0] < LARGE_BYTES + 65536
            assert (await part.describe()).samples == 1

    with LocalCluster(storage_nodes=1, arena="128MiB") as cluster:
        asyncio.run(cancel_some(cluster.address))


def test_a_put_whose_outcome_is_unknown_is_stored_or_leaves_no_room_behind() -> None:
    with LocalCluster(storage_nodes=1, arena="128MiB") as cluster, tq.connect(cluster.address) as client:
        part = client.create_partition("part")
        part.clear(ids=part.put(LARGE))
        with stopped(cluster.controller.pid):
            for _ in range(3):
                with pytest.raises(tq.Unavailable):
                    part.put(LARGE, timeout=0.5)
        wait_until(lambda: used(client)[1] == 0, what="nothing is reserved any more")
        wait_until(lambda: used(client)[0] // LARGE_BYTES == part.describe().samples, what="all is sealed")
        client.delete_partition("part")
        wait_until(lambda: used(client) == (0, 0), what="all room is back")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    """Stands between clients and the storage node of `behind`."""
    monkeypatch.setenv("TQ_LANE", "off")  # it would lead around the proxy
    with FaultProxy("127.0.0.1:1") as proxy:
        yield proxy


@contextmanager
def behind(proxy: FaultProxy, *, mooncake: str = "off", session_lease: float = 10) -> Iterator[LocalCluster]:
    arguments = [f"--advertise={proxy.address}"]
    with LocalCluster(
        storage_nodes=1, arena="512MiB", mooncake=mooncake, session_lease=session_lease, storage_args=arguments
    ) as cluster:
        proxy.upstream = cluster.storage[0].address
        yield cluster


def test_reservations_whose_reply_is_lost_come_back(proxy: FaultProxy) -> None:
    with behind(proxy) as cluster, tq.connect(cluster.address) as client:
        part = client.create_partition("part")
        part.clear(ids=part.put(LARGE))
        for _ in range(3):
            proxy.drop_next_reply()
            part.clear(ids=part.put(LARGE, timeout=10))
        assert proxy.counters.dropped_replies == 3
        wait_until(lambda: used(client) == (0, 0), what="all room is back")


def test_a_slow_way_to_a_node_costs_no_session(proxy: FaultProxy) -> None:
    """Each one-sided put leaves a window to be closed; six threads leave them faster than one call each would do."""
    with (
        behind(proxy, mooncake="on", session_lease=2) as cluster,
        tq.connect(cluster.address, transport="mooncake") as client,
    ):
        part = client.create_partition("part")
        values = {"x": torch.zeros(1, 2_200_000, dtype=torch.uint8)}
        part.clear(ids=part.put(values))
        session = client._connection.state.session
        proxy.delay(0.05)
        end = time.monotonic() + 8

        def go_on_putting() -> None:
            while time.monotonic() < end:
                part.clear(ids=part.put(values, timeout=20))

        threads = [threading.Thread(target=go_on_putting) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert client._connection.state.session is session
        proxy.delay(0)
        wait_until(lambda: used(client) == (0, 0), what="all windows are closed")
