"""Puts and permits that wait for their trainer, over real daemons."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import tqclient as tq
from tests.harness import wait_until
from tests.harness.supervisor import ROOT
from tqserver.local import LocalCluster

_numbers = itertools.count()
WAIT: dict[str, Any] = {"staleness": "wait", "max_staleness": 0, "samples_per_version": 4}


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", session_lease=2.0) as running:
        yield running


@pytest.fixture
def client(shared_cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(shared_cluster.address, timeout=10) as connected:
        yield connected


def make(client: tq.Client, **policy: Any) -> tq.Partition:
    return client.create_partition(f"part-{next(_numbers)}", consumers=["actor"], **policy)


def rows(count: int) -> dict[str, Any]:
    return {"x": torch.arange(count)}


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def admitted(part: tq.Partition) -> tuple[int, int]:
    described = part.describe()
    return described.accepted, described.running


def test_policies_come_back_as_they_went_in(client: tq.Client) -> None:
    rate = tq.SamplesPerInsert(2.5, min_samples=3)
    part = make(client, **WAIT, capacity_versions=3, samples_per_insert=rate)
    policy = part.describe().policy
    assert (policy.staleness, policy.max_staleness, policy.samples_per_version) == ("wait", 0, 4)
    assert policy.capacity_versions == 3
    assert policy.samples_per_insert == tq.SamplesPerInsert(2.5, min_samples=3, error_buffer=7.5)
    again = {"consumers": ["actor"], "exist_ok": True, "capacity_versions": 3, **WAIT}
    client.create_partition(part.name, samples_per_insert=rate, **again)
    with pytest.raises(tq.PartitionExists, match="rate_limit"):
        client.create_partition(part.name, samples_per_insert=2.5, **again)


def test_a_permit_holds_generation_until_the_trainer_is_there(client: tq.Client) -> None:
    part = make(client, **WAIT)
    with part.permit(3) as permit:
        assert (permit.version, permit.samples) == (None, 3)
        ids = part.put(rows(2), permit=permit)
        assert admitted(part) == (2, 1)
        assert part.get(ids).weight_versions.tolist() == [[-1, -1]] * 2
    assert admitted(part) == (2, 0)
    thread, granted = in_background(lambda: part.permit(4, timeout=10))
    thread.join(0.05)
    assert granted == []
    part.set_version(1)
    thread.join(60)
    (permit,) = granted
    part.set_version(2)
    assert permit.version == 1
    ids = part.put(rows(3), weight_version=None, permit=permit)
    assert part.get(ids).weight_versions.tolist() == [[1, 1]] * 3  # as generation began, whatever the version is now
    (late,) = part.put(rows(1), weight_version=2, permit=permit)
    assert part.get([late]).weight_versions.tolist() == [[2, 2]]
    permit.close()
    permit.close()
    with pytest.raises(tq.InvalidArgument, match="was returned"):
        part.put(rows(1), permit=permit)


def test_a_blocked_put_ends_at_its_deadline_and_says_what_for(client: tq.Client) -> None:
    part = make(client, **WAIT)
    part.put(rows(4))
    with pytest.raises(tq.BackpressureTimeout, match="max_staleness=0: at version 0, 4 samples are admitted"):
        part.put(rows(1), timeout=0.2)
    with pytest.raises(tq.BackpressureTimeout, match="4 were accepted, 0 are running"):
        part.permit(1, timeout=0.2)
    thread, put = in_background(lambda: part.put(rows(2), timeout=10))
    part.set_version(1)
    thread.join(60)
    assert len(put[0]) == 2


def test_permits_of_another_partition_are_refused(client: tq.Client) -> None:
    part, other = make(client), make(client)
    with part.permit(1) as permit, pytest.raises(tq.InvalidArgument, match="not of this one"):
        other.put(rows(1), permit=permit)
    with pytest.raises(tq.InvalidArgument, match="samples=0"):
        part.permit(0)


CHILD = """
import sys
import tqclient as tq

with tq.connect(sys.argv[1]) as client:
    permit = client.partition(sys.argv[2]).permit(4)
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_killed_producers_permit_comes_back(client: tq.Client, shared_cluster: LocalCluster) -> None:
    part = make(client, **WAIT)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", CHILD, shared_cluster.address, part.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        assert admitted(part) == (0, 4)
        child.kill()
    with part.permit(4, timeout=10):
        assert admitted(part) == (0, 4)


def test_a_permit_that_nobody_took_comes_back(client: tq.Client, shared_cluster: LocalCluster) -> None:
    """The reply to a cancelled call is lost; the heartbeat finds out what became of it."""
    part = make(client, **WAIT)

    async def main() -> None:
        async with tq.aio.connect(shared_cluster.address, timeout=10) as mine:
            same = await mine.partition(part.name)
            for _ in range(20):
                task = asyncio.ensure_future(same.permit(1))
                await asyncio.sleep(0)
                await asyncio.sleep(0.001)
                task.cancel()
                held = await asyncio.gather(task, return_exceptions=True)
                if isinstance(held[0], tq.aio.Permit):
                    await held[0].close()
            await asyncio.to_thread(wait_until, lambda: admitted(part) == (0, 0), what="permits are back")

    asyncio.run(main())


def test_permits_with_await(shared_cluster: LocalCluster) -> None:
    async def main() -> None:
        async with tq.aio.connect(shared_cluster.address, timeout=10) as client:
            part = await client.create_partition(f"part-{next(_numbers)}", **WAIT)
            await part.set_version(0)
            async with part.permit(4) as permit:
                ids = await part.put(rows(1), permit=permit)
                assert permit.version == 0
                waiting = asyncio.ensure_future(part.put(rows(1), timeout=10))
            await waiting
            assert (await part.get(ids)).weight_versions.tolist() == [[0, 0]]
            assert ((await part.describe()).accepted, (await part.describe()).running) == (2, 0)

    asyncio.run(main())


def test_permits_outlive_a_restart_of_the_controller(client: tq.Client, shared_cluster: LocalCluster) -> None:
    part = make(client, **WAIT)
    with part.permit(3) as permit:
        shared_cluster.controller.kill()
        shared_cluster.controller.restart()
        part.put(rows(2), permit=permit, timeout=20)
        assert admitted(part) == (2, 1)
    wait_until(lambda: admitted(part) == (2, 0), what="the rest is returned")


def test_puts_and_claims_keep_pace(client: tq.Client) -> None:
    part = make(client, samples_per_insert=tq.SamplesPerInsert(1, min_samples=4, error_buffer=4))
    part.put(rows(4))
    part.put(rows(4))  # 8 - 0 = 4 + 4
    thread, put = in_background(lambda: part.put(rows(2), timeout=10))
    thread.join(0.05)
    assert put == []
    with part.consumer("actor").claim(2):
        thread.join(60)
        assert len(put[0]) == 2
    described = part.describe()
    assert (described.inserted, described.delivered) == (10, 2)
    with pytest.raises(tq.InvalidArgument, match="a put of 9 samples moves the balance"):
        part.put(rows(9))


def test_groups_that_are_stale_in_part_are_dropped_whole_and_listed(client: tq.Client) -> None:
    part = make(client, max_staleness=1)
    consumer = part.consumer("actor", sampler=tq.GroupSampler(2))
    part.put(rows(2), groups=["z", "z"], weight_version=2)
    with consumer.claim(2):
        pass
    old = part.put(rows(4), groups=["a", "a", "b", "b"], weight_version=[0, 2, 2, 2])
    part.set_version(2)
    dropped = consumer.dropped()
    assert (dropped.stale, dropped.dead, dropped.surplus) == (old[:2].tolist(), [], [])
    with consumer.claim(2) as batch:
        assert batch.groups == ["b", "b"]
