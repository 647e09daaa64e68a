"""What a client does when a daemon goes away and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch

import tqclient as tq
from tests.faults.probe import node_probe
from tests.harness.supervisor import Supervisor, wait_until
from tqclient.limits import MIB
from tqclient.transport.mapping import ArenaMapping, open_arena
from tqserver.local import LocalCluster

CONSUMER = """
import signal, sys
import tqclient as tq
client = tq.connect(sys.argv[1])
batch = client.partition("part").consumer("actor").claim(2, timeout=10)
signal.pause()
"""

LEAVES_ALL_OPEN = """
import sys
import tqclient as tq
client = tq.connect(sys.argv[1])
part = client.create_partition("open", exist_ok=True)
part.put({"x": [1, 2, 3, 4]})
changes, batches = part.watch(), part.consumer("actor").batches(2)
next(changes), next(batches)
"""


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_calls_go_on_over_restarts_of_both_daemons(transport: str) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tq.connect(cluster.address, transport=transport, timeout=20) as client,
    ):
        part = client.create_partition("part")
        first = part.put({"x": torch.arange(3)}, keys=["a", "b", "c"])
        held = part.consumer("actor").claim(1, timeout=5)
        for daemon in (cluster.controller, cluster.storage[0]):
            daemon.kill()
            got: list[Any] = []
            waiting = threading.Thread(target=lambda: got.append(part.put({"x": torch.arange(2)})))  # noqa: B023
            waiting.start()
            daemon.restart()
            waiting.join(20)
            assert part.get(got[0])["x"].tolist() == [0, 1]
            assert part.get(first)["x"].tolist() == [0, 1, 2]
        held.ack()
        assert part.describe().counts["actor"]["consumed"] == 1
        assert part.describe().samples == 7


def test_what_was_put_and_cleared_right_before_a_kill_of_the_controller_comes_back() -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", session_lease=1, prefault=False) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        node_probe(cluster.storage[0].address) as probe,
    ):
        part = client.create_partition("part")
        for _ in range(4):
            part.clear(part.put({"x": torch.zeros((1, 3 * MIB), dtype=torch.uint8)}))
            cluster.controller.kill()  # the node has not heard that anything was sealed, as a rule
            cluster.controller.restart()
        cluster.wait_attached()

        def used_bytes() -> int:
            described = probe.describe()
            return described.sealed_bytes + described.reserved_bytes + described.quarantined_bytes

        wait_until(lambda: used_bytes() == 0, what="all bytes are free while the client lives")
        assert client.describe().sessions == 1


@pytest.mark.parametrize("transport", ["shm", "grpc"])
def test_a_node_that_comes_back_at_another_address_costs_nobody_a_session(transport: str) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tq.connect(cluster.address, transport=transport, timeout=20) as client,
    ):
        part = client.create_partition("part")
        ids = part.put({"x": torch.arange(4)})  # leaves a window open, which the arena's table remembers
        held = part.consumer("actor").claim(4, timeout=5)
        former = cluster.storage[0].address
        cluster.storage[0].kill()
        cluster.storage[0].address = ""
        cluster.storage[0].restart()
        assert cluster.storage[0].address != former
        cluster.wait_attached()

        def moved() -> bool:
            return part.put({"x": torch.arange(1)}).size == 1 and client.describe().nodes[0].address != former

        wait_until(moved, what="the client knows where the node is now")
        time.sleep(0.5)  # a node looks for lost locks every 0.1 s
        assert part.get(ids)["x"].tolist() == [0, 1, 2, 3]
        held.ack()
        assert part.describe().counts["actor"]["consumed"] == 4


def test_a_client_keeps_no_connection_to_where_a_node_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every move of a node left a channel that dialled its former address until the client was closed."""
    monkeypatch.setattr("tqclient.channel.FORMER_SECONDS", 0.2)

    async def move(cluster: LocalCluster) -> None:
        client = await tq.aio.connect(cluster.address, transport="grpc")
        part = await client.create_partition("part")
        both = [client._channels, client._connection.channels]
        for number in range(3):
            ids = await part.put({"x": torch.zeros((1, 3 * MIB), dtype=torch.uint8)})
            await asyncio.to_thread(cluster.storage[0].kill)
            cluster.storage[0].address = ""
            await asyncio.to_thread(cluster.storage[0].restart)
            await asyncio.to_thread(cluster.wait_attached)
            assert (await part.get(ids))["x"].shape == (1, 3 * MIB), number
        end = time.monotonic() + 10
        known = {cluster.address, cluster.storage[0].address}
        while not all(set(channels._channels) | set(channels._lanes) <= known for channels in both):
            assert time.monotonic() < end
            await client.describe()
            await asyncio.sleep(0.05)
        await client.close()

    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        asyncio.run(move(cluster))


def test_a_claim_that_waits_ends_when_another_thread_closes_its_client() -> None:
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        client = tq.connect(cluster.address)
        consumer = client.create_partition("part").consumer("actor")
        with ThreadPoolExecutor(1) as threads, tq.connect(cluster.address) as other:
            waiting = threads.submit(consumer.claim, 1, timeout=60)
            wait_until(lambda: other.describe().waiting_claims == 1, what="the claim waits")
            client.close()
            with pytest.raises(tq.InvalidArgument, match=r"this client is closed; call tq\.connect\(\) again"):
                waiting.result(60)
            assert (other.describe().sessions, other.describe().waiting_claims) == (1, 0)


def test_a_claim_that_waits_ends_when_another_task_closes_its_client() -> None:
    async def close_while_waiting(address: str, waits: Callable[[], bool]) -> None:
        client = await tq.aio.connect(address)
        consumer = (await client.create_partition("part")).consumer("actor")
        waiting = asyncio.create_task(consumer.claim(1, timeout=60))
        await asyncio.to_thread(wait_until, waits, what="the claim waits")
        await client.close()
        with pytest.raises(tq.InvalidArgument, match=r"this client is closed; call tq\.connect\(\) again"):
            await asyncio.wait_for(waiting, 5)

    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster, tq.connect(cluster.address) as other:
        asyncio.run(close_while_waiting(cluster.address, lambda: other.describe().waiting_claims == 1))


def test_a_path_that_is_being_opened_while_another_thread_closes_its_client_is_closed_too(
    cluster: LocalCluster, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, goes_on = threading.Event(), threading.Event()

    def open_slowly(path: str, arena: int) -> ArenaMapping:
        mapping = open_arena(path, arena)
        opened.set()
        goes_on.wait(60)
        return mapping

    client = tq.connect(cluster.address, transport="shm")
    part = client.create_partition("part")
    ids = part.put({"x": torch.arange(3)})
    state = client._state
    (node,) = state.nodes.values()
    transport = state.paths.get(node)
    assert transport is not None
    state.paths.drop(node, transport)
    monkeypatch.setattr("tqclient.transport.shm.open_arena", open_slowly)
    with ThreadPoolExecutor(1) as threads:
        reading = threads.submit(part.get, ids)
        assert opened.wait(60)
        client.close()
        goes_on.set()
        with pytest.raises(tq.InvalidArgument, match=r"this client is closed"):
            reading.result(60)


def test_a_call_ends_at_its_deadline_while_the_controller_is_away() -> None:
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        client = tq.connect(cluster.address, timeout=0.5)
        part = client.create_partition("part")
        cluster.controller.kill()
        for call in (part.describe, lambda: part.put({"x": torch.arange(1)}), part.consumer("actor").dead):
            with pytest.raises(tq.Unavailable, match="controller"):
                call()
        client.close()
        cluster.controller.restart()


def test_the_batch_of_a_killed_consumer_is_delivered_again(supervisor: Supervisor) -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", session_lease=1.0) as cluster,
        tq.connect(cluster.address, timeout=10) as client,
    ):
        part = client.create_partition("part", lease=1.0)
        ids = part.put({"x": torch.arange(2)})
        consumer = supervisor.python(CONSUMER, cluster.address, name="consumer")
        wait_until(lambda: part.describe().counts.get("actor", {}).get("leased") == 2, what="a claim")
        consumer.kill()
        batch = part.consumer("actor").claim(2, timeout=3)
        assert batch.ids.tolist() == ids.tolist()
        assert batch.attempts.tolist() == [2, 2]
        batch.ack()


def test_nothing_is_lost_or_acked_twice_while_daemons_are_killed() -> None:
    """Producers and consumers in threads; the ledger is what they were told."""
    put_ids: list[int] = []
    acked: list[int] = []
    stopped = threading.Event()

    def produce(part: tq.Partition, number: int) -> None:
        turn = 0
        while not stopped.wait(0.01):
            values = {"x": torch.full((4,), number), "y": [torch.arange(turn % 7)] * 4}
            put_ids.extend(part.put(values, keys=[f"{number}-{turn}-{row}" for row in range(4)]).tolist())
            turn += 1

    def consume(part: tq.Partition) -> None:
        for batch in part.consumer("actor", fields=["x", "y"]).batches(4):
            assert len(batch.list("y")) == batch.rows
            batch.ack()
            acked.extend(batch.ids.tolist())

    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tq.connect(cluster.address, timeout=20) as client,
        tq.connect(cluster.address, transport="grpc", timeout=20) as other,
    ):
        client.create_partition("part")
        parts = [client.partition("part"), other.partition("part")]
        producers = [threading.Thread(target=produce, args=(part, number)) for number, part in enumerate(parts)]
        consumers = [threading.Thread(target=consume, args=(part,)) for part in parts]
        for thread in [*producers, *consumers]:
            thread.start()
        for daemon in (cluster.controller, cluster.storage[0], cluster.controller):
            before = len(acked)
            wait_until(lambda: len(acked) >= before + 40, what="forty more samples")  # noqa: B023
            daemon.kill()
            daemon.restart()
        stopped.set()
        for thread in producers:
            thread.join(30)
        parts[0].seal()
        for thread in consumers:
            thread.join(30)
        assert sorted(acked) == sorted(put_ids)
        assert len(set(acked)) == len(acked)


def test_closing_that_is_interrupted_leaves_no_channel_open(
    cluster: LocalCluster, no_leaks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gRPC waits for the calls of a channel that is open when the interpreter ends, and nobody serves them any more."""
    client = tq.connect(cluster.address)
    client.create_partition("closing", exist_ok=True).put({"x": torch.arange(3)})

    def interrupt(timeout: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(client._connection.threads[0], "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        client.close()
    with pytest.raises(tq.InvalidArgument, match="this client is closed"):
        client._connection.channels.channel(cluster.address)
    client._connection.threads[0]._thread.join(60)
    client.close()


@pytest.mark.parametrize("lane", ["on", "off"])
def test_an_interpreter_ends_whatever_is_open(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    monkeypatch.setenv("TQ_LANE", lane)
    command = [sys.executable, "-W", "ignore", "-c", LEAVES_ALL_OPEN, cluster.address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_calls_of_asyncio_end_in_time_whatever_the_others_wait_for() -> None:
    """As many as wait for a node that was stopped: an event loop's executor has fewer threads."""

    async def scenario(cluster: LocalCluster) -> list[float]:
        client = await tq.aio.connect(cluster.address, transport="grpc", timeout=60)
        part = await client.create_partition("part")
        ids = await part.put({"x": torch.arange(3)})
        os.kill(cluster.storage[0].pid, signal.SIGSTOP)
        took = []
        try:
            stuck = [asyncio.create_task(part.get(ids)) for _ in range(64)]
            await asyncio.sleep(0.5)
            for last in (part.get(ids, timeout=1), client.close()):
                start = time.monotonic()
                with suppress(tq.Unavailable):
                    await last
                took.append(time.monotonic() - start)
        finally:
            os.kill(cluster.storage[0].pid, signal.SIGCONT)
        for each in await asyncio.gather(*stuck, return_exceptions=True):
            assert isinstance(each, tq.TQError)
        return took

    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        assert max(asyncio.run(scenario(cluster))) < 20
