"""How soon one put wakes everybody who waits."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

import torch

import tqclient as tq
from benchmarks.machine import Usage
from benchmarks.scale.peer import Peer
from benchmarks.statistics import Spread
from benchmarks.workers import Worker, stop_all
from tqclient.channel import OPTIONS
from tqclient.wire.dialing import dial_aio
from tqclient.wire.v1.controller_pb2_grpc import ControllerStub
from tqserver.local import LocalCluster

PROCESSES: Final = 2
SESSIONS: Final = 8
"""Of each process, each over a channel of its own."""
WAIT_MS: Final = 300_000
CONSUMER, FIELD = "waiters", "value"


@dataclass(frozen=True, slots=True)
class Wake:
    """How long claims took that one put woke.

    Attributes:
        waiting: claims that were blocked on the server, over bare asyncio stubs.
        each: from the start of the put to the arrival of each claim's reply.
        last: the same for the last claim of each round.
        put_alone: the same put, to a partition on which nobody waits.
        controller_cpu: CPU time of the controller from the start of the put to the last reply, in ticks of 10 ms. On a
            machine that does other things as well, it says more than the clock.
    """

    waiting: int
    each: Spread
    last: Spread
    put_alone: Spread
    controller_cpu: Spread


def claimers(pipe: Any, address: str, partition_id: int, waiting: int) -> None:
    """Blocks `waiting` claims of one row each whenever it is told to; answers when each had its reply."""
    asyncio.run(_claimers(pipe, address, partition_id, waiting))


async def _claimers(pipe: Any, address: str, partition_id: int, waiting: int) -> None:
    async with AsyncExitStack() as stack:
        peers = []
        for _ in range(SESSIONS):
            channel = await stack.enter_async_context(dial_aio(address, options=OPTIONS))
            peer = Peer(ControllerStub(channel), at_once=True)  # type: ignore[no-untyped-call]
            peer.opened(await peer.stub.OpenSession(peer.opening()))
            peers.append(peer)

        async def claim(peer: Peer) -> tuple[float, Peer, Any]:
            request = peer.claiming(partition_id, CONSUMER, tq.Fifo(), 1, [FIELD], WAIT_MS)
            reply = await peer.stub.Claim(request, timeout=WAIT_MS / 1e3)
            return time.monotonic(), peer, reply

        while await asyncio.to_thread(pipe.recv) is not None:
            for peer in peers:
                await peer.stub.Heartbeat(peer.renewing())
            claims = [claim(peers[number % SESSIONS]) for number in range(waiting)]
            woken = await asyncio.gather(*claims)
            pipe.send([moment for moment, _, _ in woken])
            for _, peer, reply in woken:
                await peer.stub.Settle(peer.acking(reply))


def measure(client: tq.Client, cluster: LocalCluster, *, waiting: int, repeats: int) -> Wake:
    """Blocks claims and wakes them by one put, several times over.

    Args:
        client: that puts.
        cluster: that serves it.
        waiting: claims, a multiple of `PROCESSES`.
        repeats: rounds that count.
    """
    part = client.create_partition("bench/wake", consumers=[CONSUMER])
    quiet = client.create_partition("bench/quiet", consumers=[CONSUMER])
    workers = [
        Worker(claimers, cluster.address, part._ref.partition_id, waiting // PROCESSES) for _ in range(PROCESSES)
    ]
    values = {FIELD: torch.zeros(waiting // PROCESSES * PROCESSES, 1)}
    each, last, alone, cpu = [], [], [], []
    try:
        for turn in range(1 + repeats):
            for worker in workers:
                worker.send("claim")
            while client.describe().waiting_claims < len(values[FIELD]):
                time.sleep(0.02)
                for worker in workers:
                    worker.check_alive()
            start = time.monotonic()
            quiet.put(values)
            used = Usage.of(cluster.controller.pid).cpu_s
            after = time.monotonic()
            part.put(values)
            moments = [moment - after for worker in workers for moment in worker.receive()]
            used = Usage.of(cluster.controller.pid).cpu_s - used
            if turn:  # the first round makes connections and pages
                alone.append(after - start)
                each += moments
                last.append(max(moments))
                cpu.append(used)
    finally:
        stop_all(workers)
    return Wake(len(values[FIELD]), Spread.of(each), Spread.of(last), Spread.of(alone), Spread.of(cpu))
