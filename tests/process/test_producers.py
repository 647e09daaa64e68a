"""Producers over real daemons: one that is killed, one that loses its session, and the asyncio twin."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import tqclient as tq
from tests.harness.supervisor import Supervisor, wait_until
from tqclient.driver import run_sync
from tqclient.operations.effects import Call, Operation
from tqclient.operations.producers import register, unregister
from tqserver.local import LocalCluster

PRODUCER = """
import signal, sys
import torch
import tqclient as tq
client = tq.connect(sys.argv[1])
part = client.partition("part")
with part.producer():
    part.put({"x": torch.arange(3)})
    signal.pause()
"""


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", session_lease=1.0) as cluster:
        yield cluster


def producing(supervisor: Supervisor, cluster: LocalCluster, part: tq.Partition) -> Any:
    """Starts a producer; returns once it registered and put."""
    child = supervisor.python(PRODUCER, cluster.address, name="producer")
    wait_until(lambda: part.describe().samples == 3, what="a put")
    assert part.describe().producers == 1
    return child


def test_a_claim_ends_when_its_producer_was_killed(supervisor: Supervisor, cluster: LocalCluster) -> None:
    with tq.connect(cluster.address, timeout=30) as client:
        part = client.create_partition("part", consumers=["actor"], keep=True)
        child = producing(supervisor, cluster, part)
        raised: list[BaseException] = []

        def claim() -> None:
            try:
                part.consumer("actor").claim(4, timeout=30)
            except tq.TQError as error:
                raised.append(error)

        waiting = threading.Thread(target=claim)
        waiting.start()
        wait_until(lambda: client.describe().waiting_claims == 1, what="the claim")
        child.kill()
        waiting.join(20)
        (gone,) = raised
        assert isinstance(gone, tq.ProducersGone)
        assert "seal()" in str(gone)
        with pytest.raises(tq.ProducersGone, match="3"):
            part.consumer("actor").claim(4, timeout=30)
        part.seal()
        with part.consumer("actor").claim(4, timeout=5) as batch:
            assert batch["x"].tolist() == [0, 1, 2]
        with pytest.raises(tq.Sealed):
            part.consumer("actor").claim(4, timeout=5)


def test_another_producer_lets_claims_wait_again(supervisor: Supervisor, cluster: LocalCluster) -> None:
    with tq.connect(cluster.address, timeout=30) as client:
        part = client.create_partition("part")
        producing(supervisor, cluster, part).kill()
        with pytest.raises(tq.ProducersGone):
            part.consumer("actor").claim(4, timeout=30)
        with part.producer(), pytest.raises(tq.ClaimTimeout):
            part.consumer("actor").claim(4, timeout=0.1)
        with pytest.raises(tq.ClaimTimeout):  # it left in good order
            part.consumer("actor").claim(4, timeout=0.1)


def test_a_producer_that_lost_its_session_registers_again(supervisor: Supervisor, cluster: LocalCluster) -> None:
    with tq.connect(cluster.address, timeout=30) as client:
        part = client.create_partition("part")
        child = producing(supervisor, cluster, part)
        child.stop()
        wait_until(lambda: part.describe().producers == 0, what="the end of its session")
        child.resume()
        wait_until(lambda: part.describe().producers == 1, what="its registration")
        with pytest.raises(tq.ClaimTimeout):
            part.consumer("actor").claim(4, timeout=0.1)


def test_the_asyncio_twin(supervisor: Supervisor, cluster: LocalCluster) -> None:
    async def main(part: tq.Partition) -> None:
        async with tq.aio.connect(cluster.address, timeout=30) as client:
            mine = await client.partition("part")
            child = await asyncio.to_thread(producing, supervisor, cluster, part)
            async with mine.producer():
                assert (await mine.describe()).producers == 2
            with pytest.raises(tq.ClaimTimeout):
                await mine.consumer("actor").claim(4, timeout=0.1)
            child.kill()
            with pytest.raises(tq.ProducersGone):
                await mine.consumer("actor").claim(4, timeout=20)

    with tq.connect(cluster.address, timeout=30) as client:
        asyncio.run(main(client.create_partition("part")))


@pytest.mark.parametrize("answered", [False, True])
def test_who_is_cancelled_on_the_way_in_or_out_is_no_producer(cluster: LocalCluster, answered: bool) -> None:
    with tq.connect(cluster.address, timeout=30) as client:
        part = client.create_partition("part")

        def cancelled(operation: Operation[None]) -> None:
            sent = next(operation)
            assert isinstance(sent, Call)
            if answered:  # and nobody takes the answer
                getattr(client._connection.channels.stub(sent.target), sent.method)(sent.request, timeout=5)
            operation.close()

        cancelled(register(client._state, part._ref))
        wait_until(lambda: part.describe().producers == 0, what="nobody is registered")
        with part.producer():
            assert part.describe().producers == 1
            with part.producer():
                pass
            assert part.describe().producers == 1
        assert part.describe().producers == 0
        run_sync(register(client._state, part._ref), client._connection.channels)
        cancelled(unregister(client._state, part._ref))
        wait_until(lambda: part.describe().producers == 0, what="nobody is registered")
        wait_until(lambda: not client._state.retracting, what="the chores are done")
