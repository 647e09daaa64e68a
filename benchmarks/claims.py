"""`tq-bench claims`: what blocked claims cost everybody else, and how soon they wake."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.machine import Usage
from benchmarks.statistics import Spread
from benchmarks.workers import Worker
from tqserver.local import LocalCluster

CHANNELS = 8
"""Clients, each with a channel of its own, that the blocked claims are spread over."""
PARTITION, CONSUMER, FIELD = "bench/claims", "waiters", "value"


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run.

    Attributes:
        waiting: claims that were blocked on the server.
        idle: `describe` of a partition while nobody waited.
        blocked: the same while all of them waited.
        wake_one: from the start of a put of one sample to the return of the claim that it met; the others wait on.
        wake_all: from the start of one put that readied all that were left to each claim's return.
        controller_grown_bytes: by which the peak of the controller's resident memory rose for them.
    """

    waiting: int
    idle: Spread
    blocked: Spread
    wake_one: Spread
    wake_all: Spread
    controller_grown_bytes: int


def claimers(pipe: Any, address: str, waiting: int, ones: int) -> None:
    """Blocks `waiting` claims of one row each, from one process; says when the first `ones` woke, and then the rest."""
    asyncio.run(_claimers(pipe, address, waiting, ones))


async def _claimers(pipe: Any, address: str, waiting: int, ones: int) -> None:
    import tqclient as tq

    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(tq.aio.connect(address)) for _ in range(CHANNELS)]
        consumers = [(await client.partition(PARTITION)).consumer(CONSUMER, fields=[FIELD]) for client in clients]
        moments: list[float] = []

        async def claim(consumer: Any) -> None:
            batch = await consumer.claim(1, timeout=300)
            moments.append(time.monotonic())
            if len(moments) <= ones:
                pipe.send(moments[-1])
            await batch.ack()

        await asyncio.gather(*[claim(consumers[number % CHANNELS]) for number in range(waiting)])
        pipe.send(moments[ones:])
        await asyncio.to_thread(pipe.recv)


def run(*, waiting: int, calls: int) -> Result:
    """Measures `describe` with and without blocked claims, and how soon they wake, in one run.

    Args:
        waiting: claims to block.
        calls: `describe` calls before and while they block.
    """
    import tqclient as tq

    ones = waiting // 5
    with LocalCluster(storage_nodes=1, arena="256MiB") as cluster, tq.connect(cluster.address) as client:
        part = client.create_partition(PARTITION, consumers=[CONSUMER])
        _describe(part, calls // 4)
        idle = _describe(part, calls)
        before = Usage.of(cluster.controller.pid)
        worker = Worker(claimers, cluster.address, waiting, ones)
        while client.describe().waiting_claims < waiting:
            time.sleep(0.02)
        blocked = _describe(part, calls)
        grown_bytes = Usage.of(cluster.controller.pid).rss_peak_bytes - before.rss_peak_bytes
        wake_one = []
        for _ in range(ones):
            start = time.monotonic()
            part.put({FIELD: torch.zeros(1, 1)})
            wake_one.append(worker.receive() - start)
        start = time.monotonic()
        part.put({FIELD: torch.zeros(waiting - ones, 1)})
        wake_all = [moment - start for moment in worker.receive()]
        worker.stop()
    spreads = [Spread.of(times) for times in (idle, blocked, wake_one, wake_all)]
    return Result(waiting, spreads[0], spreads[1], spreads[2], spreads[3], grown_bytes)


def _describe(part: Any, calls: int) -> list[float]:
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        part.describe()
        times.append(time.perf_counter() - start)
    return times
