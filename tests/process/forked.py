"""A forked child inherits all that its parent holds, and whatever it does to that has no effect.

`test_forked.py` runs these in an interpreter of their own.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
import tqclient.torch
from tests.harness.supervisor import wait_until
from tqclient import driver
from tqserver.local import LocalCluster

HUNG, FAILED = 9, 3


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        yield cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, timeout=20) as client:
        yield client


@pytest.fixture
def part(client: tq.Client, request: pytest.FixtureRequest) -> Iterator[tq.Partition]:
    yield client.create_partition(request.node.name)
    client.delete_partition(request.node.name)


def in_child(action: Callable[[], None]) -> None:
    """Does something in a forked child; a child that fails or hangs fails the test."""
    gc.collect()  # the child is to collect what it drops itself, and nothing of gRPC's that was dropped before
    child = os.fork()
    if child == 0:
        threading.Thread(target=lambda: (time.sleep(20), os._exit(HUNG)), daemon=True).start()
        try:
            action()
        except BaseException:
            traceback.print_exc()
            os._exit(FAILED)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_rows_that_are_being_filled_in(part: tq.Partition) -> None:
    """The child's own memory may lie where the parent's tensors do."""

    def leave() -> None:
        own = [np.frombuffer(mmap.mmap(-1, 1 << 20), np.uint8) for _ in range(64)]
        for each in own:
            each.fill(7)
        writer.__exit__(None, None, None)
        writer._finalizer()
        gc.collect()
        assert all((each == 7).all() for each in own)

    with part.allocate(4, {"y": ("int64", [64 * 1024])}) as writer:
        writer["y"].fill_(5)
        in_child(leave)
        ids = writer.commit()
    assert (part.get(ids)["y"] == 5).all()


@pytest.mark.parametrize("locked", [False, True])
def test_batches_and_views(part: tq.Partition, client: tq.Client, locked: bool) -> None:
    """Also while a thread that is not there holds a lock."""
    ids = part.put({"x": torch.arange(8)})
    claimed, forgotten = [part.consumer("c").claim(2) for _ in range(2)]
    views = [part.get(ids[:2], copy=False) for _ in range(2)]

    def leave() -> None:
        nonlocal forgotten
        claimed.__exit__(None, None, None)
        del forgotten
        views[0].close()
        views.clear()
        gc.collect()
        assert not client._state.lost_claims
        assert not client._state._dropped_pins

    if locked:
        held, done = threading.Event(), threading.Event()

        def hold() -> None:
            with client._state._lock, client._state.requests._lock, client._state.windows._lock:
                held.set()
                done.wait(30)

        holder = threading.Thread(target=hold)
        holder.start()
        held.wait(10)
        in_child(leave)
        done.set()
        holder.join()
    else:
        in_child(leave)
    assert views[1]["x"].tolist() == [0, 1]
    claimed.ack()
    forgotten.ack()
    assert part.describe().counts["c"]["consumed"] == 4
    for each in views:
        each.close()


def test_permits_producers_watches_and_the_client(part: tq.Partition, client: tq.Client) -> None:
    changes = part.watch(timeout=20)
    next(changes)
    with part.permit(2) as permit, part.producer() as producer:

        def leave() -> None:
            permit.close()
            permit.__exit__(None, None, None)
            producer.__exit__(None, None, None)
            changes.close()
            client.close()

        in_child(leave)
        part.put({"x": torch.arange(2)}, permit=permit)
    assert isinstance(next(change for change in changes if isinstance(change, tq.Written)), tq.Written)
    changes.close()


def test_an_asyncio_client(cluster: LocalCluster, client: tq.Client) -> None:
    async def run() -> None:
        async with tq.aio.connect(cluster.address, timeout=20) as own:
            part = await own.create_partition("aio-forked")
            await part.put({"x": torch.arange(4)})
            batch = await part.consumer("c").claim(2)
            permit = await part.permit(1)
            waiting = asyncio.ensure_future(part.consumer("c", where={"never": 1}).claim(1, timeout=3))
            await asyncio.to_thread(wait_until, lambda: client.describe().waiting_claims == 1, what="the claim waits")

            def leave() -> None:  # by hand: the loop's descriptors are the parent's
                for each in (permit.close(), permit.__aexit__(None, None, None), batch.__aexit__(None, None, None)):
                    with pytest.raises(StopIteration):
                        each.send(None)
                with pytest.raises(StopIteration):
                    own.close().send(None)

            in_child(leave)
            with pytest.raises(tq.ClaimTimeout):
                await waiting
            await batch.ack()
            await permit.close()
            await own.delete_partition("aio-forked")

    asyncio.run(run())


@pytest.mark.parametrize("workers", [0, 1])
def test_loaders(part: tq.Partition, client: tq.Client, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    """The workers, and a claim that waits, are the parent's."""
    part.put({"x": torch.arange(2)})
    loader = tqclient.torch.StreamingLoader(part.consumer("c"), batch_size=1, prefetch=2, num_workers=workers)
    batches: Any = iter(loader)
    seen = next(batches)["x"].tolist()
    wait_until(lambda: len(batches._feed._fetched) == 1, what="the rest is fetched")
    wait_until(lambda: client.describe().waiting_claims == 1, what="the claim for more waits")
    claims: list[Any] = []
    perform = driver._perform

    def counted(effect: Any, stubs: Any) -> Any:
        claims.extend([effect] if getattr(effect, "method", "") == "Claim" else [])
        return perform(effect, stubs)

    def forget() -> None:
        nonlocal batches
        del batches
        gc.collect()

    def close() -> None:
        loader.close()
        assert list(batches) == []

    def go_on() -> None:
        for action in (lambda: next(batches), loader.ack, lambda: iter(loader)):
            with pytest.raises(tq.InvalidArgument, match="after a fork"):
                action()

    monkeypatch.setattr(driver, "_perform", counted)
    for action in (forget, close, go_on):
        in_child(action)
    time.sleep(0.3)
    assert not claims  # the one that waits was not cut short
    part.put({"x": torch.arange(2, 4)})
    part.seal()
    seen += [value for batch in batches for value in batch["x"].tolist()]
    assert sorted(seen) == [0, 1, 2, 3]
    assert part.describe().counts["c"]["consumed"] == 4


def test_a_cluster_is_not_stopped(cluster: LocalCluster, client: tq.Client) -> None:
    def leave() -> None:
        cluster.stop()
        cluster.__exit__(None, None, None)

    in_child(leave)
    assert all(not daemon.died for daemon in (cluster.controller, *cluster.storage))
    assert all(path.exists() for path in (cluster.directory, *cluster._arenas))
    assert client.describe().nodes
