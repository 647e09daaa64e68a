"""A thousand claims that wait: nobody is slower for it, one put wakes them all, and those that give up are gone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tqclient as tq
from tests.harness import wait_until
from tests.process.controller_daemon import Client, Controller, daemon, ids_of
from tqclient.limits import MIB
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.local import LocalCluster

__all__ = ["daemon"]

WAITING = 1000
CHANNELS = 8
RSS_GROWTH_MAX = 64 * MIB
CALLS = 200
CONSUMER = "waiter"


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", log_level="warning") as running:
        yield running


@asynccontextmanager
async def _clients(address: str) -> AsyncIterator[list[Any]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(tq.aio.connect(address, timeout=60)) for _ in range(CHANNELS)]


async def _until(condition: Callable[[], Awaitable[bool]], what: str) -> None:
    deadline = time.monotonic() + 30
    while not await condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        await asyncio.sleep(0.01)


async def _blocked(clients: list[Any], count: int) -> list[asyncio.Task[Any]]:
    """Starts claims of one sample each, and waits until all of them wait on the server."""
    parts = [await client.partition("part") for client in clients]
    consumers = [part.consumer(CONSUMER, fields=["x"]) for part in parts]
    tasks = [asyncio.create_task(_claimed(consumers[number % CHANNELS])) for number in range(count)]

    async def all_wait() -> bool:
        return (await clients[0].describe()).waiting_claims == count

    await _until(all_wait, f"{count} claims wait")
    return tasks


async def _claimed(consumer: Any) -> Any:
    return await consumer.claim(1, timeout=60)


async def _laps(part: Any) -> float:
    """Seconds that the median call takes while nothing else of this process runs."""
    laps = []
    for _ in range(CALLS):
        start = time.perf_counter()
        await part.describe()
        laps.append(time.perf_counter() - start)
    return sorted(laps)[CALLS // 2]


def _rss_bytes(pid: int) -> int:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) * 1024


def test_a_put_wakes_a_thousand_claims_which_cost_the_others_nothing(no_leaks: None, cluster: LocalCluster) -> None:
    async def scenario() -> None:
        async with _clients(cluster.address) as clients:
            part = await clients[0].create_partition("part", consumers=[CONSUMER])
            await _laps(part)  # warms up
            idle = await _laps(part)
            rss_bytes = _rss_bytes(cluster.controller.pid)
            tasks = await _blocked(clients, WAITING)
            blocked = await _laps(part)
            # Two tries on one machine may differ by this much; a look at each waiting claim would cost far more.
            assert blocked <= 3 * idle + 0.002, f"{idle * 1e3:.2f} ms before, {blocked * 1e3:.2f} ms while they waited"
            ids = await part.put({"x": np.arange(WAITING)})
            batches = await asyncio.gather(*tasks)
            grown = _rss_bytes(cluster.controller.pid) - rss_bytes
            assert grown <= RSS_GROWTH_MAX, f"{grown / MIB:.1f} MiB"
            assert sorted(id_ for batch in batches for id_ in batch.ids.tolist()) == ids.tolist()
            assert {batch.rows for batch in batches} == {1}
            assert [batch["x"].tolist() for batch in batches] == [[id_ - ids[0]] for id_ in _ids(batches)]
            assert (await part.describe()).counts[CONSUMER]["leased"] == WAITING
            await asyncio.gather(*[batch.ack() for batch in batches])
            assert (await part.describe()).counts[CONSUMER]["consumed"] == WAITING

    asyncio.run(scenario())


def _ids(batches: list[Any]) -> list[int]:
    return [int(batch.ids[0]) for batch in batches]


def test_claims_that_are_cancelled_while_they_wait_leave_nothing_behind(no_leaks: None, cluster: LocalCluster) -> None:
    async def scenario() -> None:
        async with _clients(cluster.address) as clients:
            # A delivery to one that is gone would spend the only attempt.
            part = await clients[0].create_partition("part", consumers=[CONSUMER], max_attempts=1)
            tasks = await _blocked(clients, WAITING)
            kept = tasks[1::2]
            for task in tasks[::2]:
                task.cancel()
            assert all(isinstance(each, asyncio.CancelledError) for each in await _outcomes(tasks[::2]))

            async def half_wait() -> bool:
                return (await clients[0].describe()).waiting_claims == WAITING // 2

            await _until(half_wait, "the others go on waiting")
            ids = await part.put({"x": np.arange(WAITING)})
            batches = await asyncio.gather(*kept)
            assert sorted(_ids(batches)) == ids[: WAITING // 2].tolist()  # first come first served; nothing went astray
            counts = (await part.describe()).counts[CONSUMER]
            assert (counts["leased"], counts["ready"], counts["dropped"]) == (WAITING // 2, WAITING // 2, 0)
            await asyncio.gather(*[batch.ack() for batch in batches])
            assert (await clients[0].describe()).claims == 0

    asyncio.run(scenario())


async def _outcomes(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_a_thousand_waiting_claims_survive_a_restart_of_the_controller(no_leaks: None, cluster: LocalCluster) -> None:
    async def scenario() -> None:
        async with _clients(cluster.address) as clients:
            part = await clients[0].create_partition("part", consumers=[CONSUMER])
            tasks = await _blocked(clients, WAITING)
            cluster.controller.kill()
            await asyncio.to_thread(cluster.controller.restart)
            ids = await part.put({"x": np.arange(WAITING)})
            batches = await asyncio.gather(*tasks)
            assert sorted(_ids(batches)) == ids.tolist()
            assert {batch.attempts[0] for batch in batches} == {1}

    asyncio.run(scenario())


def test_raw_calls_that_wait_are_woken_once_each_whatever_their_channel(daemon: Controller) -> None:
    """Without the client's own machinery: eight bare channels, and callers that go away as their process dies."""
    daemon.start()
    node, watcher = daemon.node(), daemon.client()
    assert node.next_order().HasField("sync")
    part = watcher.create()
    clients = [daemon.client() for _ in range(CHANNELS)]
    calls = [_waiting_call(clients[number % CHANNELS], part) for number in range(WAITING)]
    _wait_for_waiting(watcher, WAITING)
    for call in calls[WAITING // 2 :]:
        call.cancel()
    _wait_for_waiting(watcher, WAITING // 2)
    ids = watcher.commit(part, WAITING)
    replies = [call.result() for call in calls[: WAITING // 2]]
    assert len({reply.claim_id for reply in replies}) == WAITING // 2
    assert sorted(id_ for reply in replies for id_ in ids_of(reply.rows.ids)) == ids[: WAITING // 2]
    counts = watcher.counts(part)
    assert (counts["leased"], counts["ready"]) == (WAITING // 2, WAITING // 2)
    node.close()


def _waiting_call(client: Client, part: int) -> Any:
    return client.stub.Claim.future(client.claim_request(part, 1, wait_ms=60_000), timeout=60)


def _wait_for_waiting(client: Client, count: int) -> None:
    wait_until(
        lambda: client.call("DescribeCluster", pb.DescribeClusterRequest()).waiting_claims == count,
        what=f"{count} claims wait",
    )
