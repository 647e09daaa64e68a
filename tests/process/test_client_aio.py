"""The asyncio client against real daemons: the same operations, so a tour of them and what asyncio adds."""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
import torch

import tqclient as tq
from tqserver.local import LocalCluster

_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", session_lease=2.0) as running:
        yield running


@pytest.fixture(params=["shm", "grpc"])
def run(shared_cluster: LocalCluster, request: pytest.FixtureRequest) -> Callable[[Any], None]:
    """Runs a test with a client and a partition."""

    def start(test: Callable[[tq.aio.Client, tq.aio.Partition], Awaitable[None]]) -> None:
        async def main() -> None:
            async with tq.aio.connect(shared_cluster.address, transport=request.param, timeout=10) as client:
                await test(client, await client.create_partition(f"part-{next(_numbers)}"))

        asyncio.run(main())

    return start


async def counts(part: tq.aio.Partition, consumer: str) -> dict[str, int]:
    return {state: count for state, count in (await part.describe()).counts[consumer].items() if count}


async def claims_waiting(client: tq.aio.Client, count: int) -> None:
    for _ in range(10_000):
        if (await client.describe()).waiting_claims >= count:
            return
    raise AssertionError(f"{count} claims are not waiting")


def test_a_tour(run: Callable[[Any], None]) -> None:
    async def test(client: tq.aio.Client, part: tq.aio.Partition) -> None:
        ids = await part.put({"tokens": [torch.arange(3), torch.arange(4)]}, keys=["a", "b"])
        await part.put({"reward": torch.tensor([1.0, 2.0])}, ids=ids)
        batch = await part.get(keys=["b"])
        assert batch["tokens"][0].tolist() == [0, 1, 2, 3]
        assert batch["reward"].tolist() == [2.0]
        actor = part.consumer("actor", fields=["tokens", "reward"])
        async with actor.claim(1, timeout=5) as batch:
            assert batch.ids.tolist() == [ids[0]]
        with pytest.raises(RuntimeError, match="no"):
            async with await actor.claim(1, timeout=5):
                raise RuntimeError("no")
        assert await counts(part, "actor") == {"consumed": 1, "ready": 1}
        held = await actor.claim(1, timeout=5)
        await held.renew()
        await held.release()
        await part.set_tags(ids, {"done": True})
        await part.set_version(3)
        await part.metadata.update({"n": (1, 2)})
        assert await part.metadata.get("n") == (1, 2)
        await part.metadata.delete(["n"])
        assert await part.metadata.to_dict() == {}
        await part.seal()
        assert [batch.ids.tolist() async for batch in actor.batches(5)] == [[ids[1]]]
        assert await counts(part, "actor") == {"consumed": 2}
        await actor.reset()
        assert await actor.dead() == []
        assert (await part.clear(tags={"done": True})).tolist() == ids.tolist()
        assert part.name in [info.name for info in await client.partitions("part-")]
        (node,) = (await client.describe()).nodes
        assert node.transport in ("shm", "grpc")
        await client.delete_partition(part.name)
        with pytest.raises(tq.PartitionNotFound):
            await client.partition(part.name)

    run(test)


def test_waiting_does_not_block_the_loop(run: Callable[[Any], None]) -> None:
    async def test(client: tq.aio.Client, part: tq.aio.Partition) -> None:
        actor = part.consumer("actor")
        waiting = [asyncio.create_task(actor.claim(1, timeout=10)) for _ in range(20)]
        await claims_waiting(client, 20)
        await part.put({"x": torch.arange(20)})
        batches = await asyncio.gather(*waiting)
        assert sorted(int(batch["x"][0]) for batch in batches) == list(range(20))
        await asyncio.gather(*(batch.ack() for batch in batches))
        assert await counts(part, "actor") == {"consumed": 20}

    run(test)


def test_many_puts_at_once(run: Callable[[Any], None]) -> None:
    async def test(client: tq.aio.Client, part: tq.aio.Partition) -> None:
        ids = await asyncio.gather(*(part.put({"x": torch.full((2,), number)}) for number in range(50)))
        for number, pair in enumerate(ids):
            assert (await part.get(pair))["x"].tolist() == [number, number]

    run(test)


def test_a_cancelled_claim_leaves_nothing_leased(run: Callable[[Any], None]) -> None:
    async def test(client: tq.aio.Client, part: tq.aio.Partition) -> None:
        actor = part.consumer("actor")
        waiting = asyncio.create_task(actor.claim(2, timeout=10))
        await claims_waiting(client, 1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await part.put({"x": torch.arange(2)})
        async with await actor.claim(2, timeout=10) as batch:
            assert batch["x"].tolist() == [0, 1]

    run(test)


def test_errors_are_the_same(run: Callable[[Any], None]) -> None:
    async def test(client: tq.aio.Client, part: tq.aio.Partition) -> None:
        ids = await part.put({"x": torch.arange(2)}, keys=["a", "b"])
        with pytest.raises(tq.SampleNotFound):
            await part.get([int(ids[-1]) + 1000])
        with pytest.raises(tq.DuplicateKey):
            await part.put({"x": torch.arange(1, 2)}, keys=["a"])
        with pytest.raises(tq.SchemaMismatch):
            await part.put({"x": torch.ones(2)})
        with pytest.raises(tq.ClaimTimeout):
            await part.consumer("actor").claim(5, timeout=0)
        with pytest.raises(tq.InvalidArgument, match="token_field"):
            await part.consumer("actor").claim(5, max_tokens=1)
        await client.close()
        await client.close()
        with pytest.raises(tq.InvalidArgument, match="closed"):
            await part.describe()

    run(test)


def test_another_event_loop_is_refused_before_anything_is_sent(run: Callable[[Any], None]) -> None:
    async def test(client: tq.aio.Client, part: tq.aio.Partition) -> None:
        await part.put({"x": torch.arange(2)})

        def put() -> None:
            asyncio.run(part.put({"x": torch.arange(2)}))

        for _ in range(2):
            with pytest.raises(tq.InvalidArgument, match=r"belongs to the event loop that ran when it connected"):
                await asyncio.to_thread(put)
        assert (await part.describe()).samples == 2

    run(test)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of sockets whose event loop has ended
def test_any_event_loop_closes_a_client(shared_cluster: LocalCluster) -> None:
    async def begin() -> tuple[tq.aio.Client, asyncio.Task[Any]]:
        client = await tq.aio.connect(shared_cluster.address)
        part = await client.create_partition(f"part-{next(_numbers)}", consumers=["actor"])
        await part.put({"x": torch.arange(2)})
        claiming = asyncio.create_task(_claimed(part))
        await claims_waiting(client, 1)
        return client, claiming

    async def while_its_own_runs() -> None:
        client, claiming = await begin()
        await asyncio.to_thread(asyncio.run, client.close())
        with pytest.raises(tq.InvalidArgument, match="closed"):
            await asyncio.wait_for(claiming, 10)

    asyncio.run(while_its_own_runs())
    client, claiming = asyncio.run(begin())
    asyncio.run(client.close())
    with tq.connect(shared_cluster.address) as other:
        assert other.describe().sessions == 1
    del client, claiming
    gc.collect()


async def _claimed(part: tq.aio.Partition) -> None:
    async with part.consumer("actor").claim(3, timeout=30):
        pass
