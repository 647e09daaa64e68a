"""Watching a partition over real daemons."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import wait_until
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.local import LocalCluster

PUTS = 40


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, timeout=10) as client:
        yield client


def put(part: tq.Partition, rows: int = 1, **options: Any) -> list[int]:
    ids: list[int] = part.put({"x": torch.arange(rows)}, **options).tolist()
    return ids


def test_a_watcher_sees_everything_once(client: tq.Client) -> None:
    part = client.create_partition("part", consumers=["actor"], keep=True)
    held = put(part, 2, keys=["a", "b"], tags=[{"turn": 1}, {}])
    watching = part.watch(timeout=5)
    listed = next(watching)
    assert isinstance(listed, tq.Listed)
    assert (listed.ids.tolist(), listed.keys, listed.tags) == (held, ["a", "b"], [{"turn": 1}, {}])
    assert (listed.first, listed.complete, listed.last) == (True, True, True)
    new = put(part, 1)
    part.put({"y": torch.ones(3)}, ids=held + new)
    part.set_tags(held[:1], {"turn": 2})
    part.consumer("actor").claim(2, timeout=5).ack()
    part.clear(keys=["a"])
    part.seal()
    added, column, tagged, settled, removed, sealed = (next(watching) for _ in range(6))
    assert isinstance(added, tq.Written)
    assert (added.ids.tolist(), added.fields, added.added, added.keys) == (new, ("x",), True, [None])
    assert isinstance(column, tq.Written)
    assert (column.ids.tolist(), column.fields, column.added) == (held + new, ("y",), False)
    assert (column.keys, column.tags) == (["a", "b", None], [{"turn": 1}, {}, {}])
    assert isinstance(tagged, tq.Tagged)
    assert (tagged.ids.tolist(), tagged.tags) == (held[:1], [{"turn": 2}])
    assert isinstance(settled, tq.Settled)
    assert (settled.consumer, settled.consumed.tolist(), settled.dropped.tolist()) == ("actor", held, [])
    assert isinstance(removed, tq.Removed)
    assert removed.ids.tolist() == held[:1]
    assert isinstance(sealed, tq.Changed)
    assert sealed.info.sealed
    watching.close()
    told = [added, column, tagged, settled, removed, sealed]
    again = list(part.watch(column.sequence, timeout=0.1))
    assert [each.sequence for each in again] == [each.sequence for each in told[2:]]
    assert list(part.watch(sealed.sequence, timeout=0.05)) == []


def test_a_deleted_partition_ends_the_watch(client: tq.Client) -> None:
    part = client.create_partition("part")
    watching = part.watch(timeout=10)
    next(watching)
    client.delete_partition("part")
    with pytest.raises(tq.PartitionNotFound):
        next(watching)


@pytest.mark.parametrize("arguments", [{"from_seq": -1}, {"from_seq": 1.5}, {"timeout": 0}, {"timeout": -1}])
def test_what_is_no_watch(client: tq.Client, arguments: dict[str, float]) -> None:
    part = client.create_partition("part")
    with pytest.raises(tq.InvalidArgument):
        part.watch(**arguments)  # type: ignore[arg-type]


def test_closing_the_client_or_the_iterator_ends_a_watch(cluster: LocalCluster) -> None:
    with tq.connect(cluster.address, timeout=10) as client:
        part = client.create_partition("part")
        watching = part.watch()
        next(watching)
        watching.close()
        assert not [each for each in threading.enumerate() if each.name == "tq-watch"]
        waiting = part.watch()
        next(waiting)
    with pytest.raises(tq.InvalidArgument, match="closed"):
        next(waiting)
    assert not [each for each in threading.enumerate() if each.name == "tq-watch"]


def test_it_goes_on_after_the_controller_was_killed() -> None:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tq.connect(cluster.address, timeout=20) as client,
    ):
        part = client.create_partition("part")
        seen: list[tq.Listed | tq.Written] = []

        def follow() -> None:
            for change in part.watch():
                assert isinstance(change, tq.Listed | tq.Written | tq.Changed)
                if isinstance(change, tq.Changed):
                    return
                seen.append(change)

        watcher = threading.Thread(target=follow)
        watcher.start()
        wait_until(lambda: seen, what="the listing")
        written = []
        for number in range(PUTS):
            if number in (10, 25):
                cluster.controller.kill()
                cluster.controller.restart()
            written += put(part, keys=[f"k{number}"])
        part.seal()
        watcher.join(20)
        assert isinstance(seen[0], tq.Listed)
        assert [row for each in seen for row in each.ids.tolist()] == written
        assert [key for each in seen[1:] for key in each.keys] == [f"k{number}" for number in range(PUTS)]
        assert [each.sequence for each in seen] == sorted({each.sequence for each in seen})


def test_a_controller_that_stays_away_ends_a_watch_with_a_timeout() -> None:
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        client = tq.connect(cluster.address, timeout=0.5)
        watching = client.create_partition("part").watch(timeout=0.5)
        next(watching)
        cluster.controller.kill()
        with pytest.raises(tq.Unavailable, match="controller"):
            next(watching)
        client.close()
        cluster.controller.restart()


def test_what_the_controller_forgot_comes_as_a_listing() -> None:
    """It remembers what its last snapshot does not hold."""
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", controller_args=["--snapshot-records=8"]) as cluster,
        tq.connect(cluster.address, timeout=20) as client,
    ):
        part = client.create_partition("part")
        written = put(part)
        first = next(part.watch(timeout=5))
        for _ in range(20):
            written += put(part)
        cluster.controller.terminate()
        cluster.controller.restart()
        listed = next(part.watch(first.sequence, timeout=5))
        assert isinstance(listed, tq.Listed)
        assert (listed.ids.tolist(), listed.first, listed.complete) == (written, True, True)


def test_a_slow_watcher_gets_a_listing(client: tq.Client) -> None:
    """Its messages fill the connection's window and the client's; meanwhile the controller forgets."""
    part = client.create_partition("part")
    watching = part.watch(timeout=10)
    assert isinstance(next(watching), tq.Listed)
    live = put(part, 1)
    values, rows = {"x": torch.arange(128)}, 128
    for _ in range(14):  # 8 MiB of tags each, and the controller remembers 8 MiB
        ids = part.put(values, tags=[{"tag": "x" * (63 << 10)}] * rows).tolist()
        live = [*live, *ids]
    kinds = []
    known: set[int] = set()
    for change in watching:
        kinds.append(type(change))
        if isinstance(change, tq.Listed) and change.first:
            known = set()
        if isinstance(change, tq.Listed | tq.Written):
            assert not known & set(change.ids.tolist())
            known |= set(change.ids.tolist())
        if known == set(live):
            break
    watching.close()
    assert tq.Listed in kinds


@pytest.mark.parametrize("blocking", [True, False])
def test_a_token_goes_with_it(tmp_path: object, blocking: bool) -> None:
    with LocalCluster(storage_nodes=1, arena="64MiB", environ={"TQ_TOKEN": "secret-token-of-the-cluster"}) as cluster:
        with tq.connect(cluster.address, token="secret-token-of-the-cluster", timeout=10) as client:
            part = client.create_partition("part")
            if blocking:
                assert isinstance(next(part.watch(timeout=5)), tq.Listed)
        if not blocking:

            async def main() -> None:
                async with tq.aio.connect(cluster.address, token="secret-token-of-the-cluster", timeout=10) as client:
                    part = await client.partition("part")
                    async for change in part.watch(timeout=5):
                        assert isinstance(change, tq.Listed)
                        break

            asyncio.run(main())


def test_the_asyncio_twin() -> None:
    async def main(cluster: LocalCluster) -> None:
        async with tq.aio.connect(cluster.address, timeout=20) as client:
            part = await client.create_partition("part")
            seen: list[tq.Listed | tq.Written] = []

            async def follow() -> None:
                async for change in part.watch():
                    if isinstance(change, tq.Changed):
                        return
                    assert isinstance(change, tq.Listed | tq.Written)
                    seen.append(change)

            following = asyncio.create_task(follow())
            written = []
            for number in range(10):
                if number == 5:
                    await asyncio.to_thread(cluster.controller.kill)
                    await asyncio.to_thread(cluster.controller.restart)
                written += (await part.put({"x": torch.arange(2)})).tolist()
            await part.seal()
            await asyncio.wait_for(following, 20)
            assert [row for each in seen for row in each.ids.tolist()] == written
            idle = [type(change) async for change in part.watch(seen[-1].sequence, timeout=0.2)]
            assert idle == [tq.Changed]
            cancelled = asyncio.ensure_future(anext(part.watch(timeout=10)))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            assert cancelled.cancelled()

    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        asyncio.run(main(cluster))


def test_many_watchers_do_not_delay_a_put(client: tq.Client) -> None:
    """The same puts into a partition that nobody watches, and one that has 100 watchers, in turn."""
    quiet, watched = client.create_partition("quiet"), client.create_partition("watched")
    stub = client._connection.channels.stub("controller")
    session = client._state.session
    assert session is not None
    request = pb.WatchRequest(session=session.session, partition_id=watched._ref.partition_id)
    streams = [stub.Watch(request) for _ in range(100)]  # nobody reads on: who does not keep up delays nobody
    for stream in streams:
        next(stream)
    seconds: dict[str, list[float]] = {"quiet": [], "watched": []}
    for _ in range(30):
        for part in (quiet, watched):
            start = time.perf_counter()
            put(part, 8)
            seconds[part.name].append(time.perf_counter() - start)
    for stream in streams:
        stream.cancel()
        with pytest.raises(grpc.RpcError):
            list(stream)
    # On a machine that is busy for a while, one third or another of the puts tells.
    thirds = [slice(low, low + 10) for low in range(0, 30, 10)]
    medians = [[statistics.median(seconds[name][third]) for name in ("watched", "quiet")] for third in thirds]
    ratios = [among / alone for among, alone in medians]
    assert min(ratios) < 4, seconds
