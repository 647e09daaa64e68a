"""The disk under the journal is full, or fails, or holds an older file than it did."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tqclient as tq
from tests.harness import Child, SmallDisk, Supervisor, wait_until
from tests.process.controller_daemon import Client, Controller, daemon, ids_of
from tqclient import errors
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.group_commit import JOURNAL_FAILED_STATUS
from tqserver.controller.main import LOST_DATA_STATUS
from tqserver.local import LocalCluster

__all__ = ["daemon"]

DISK_BYTES = 2 << 20
FILLER_BYTES = 1 << 20
CALLERS = 8
KEY_CHARS = 400
ROWS = 16
ENDS_SECONDS = 1.0
JOIN_SECONDS = 20


class _Confined(Controller):
    """A controller whose journal lies on a small disk."""

    def __init__(self, supervisor: Supervisor, disk: SmallDisk) -> None:
        super().__init__(supervisor, disk.directory / "data")
        self._disk = disk

    def spawn(self, *flags: str, env: dict[str, str] | None = None) -> Child:
        self.starts += 1
        command = [*self._disk.enter, sys.executable, "-m", "tqserver.controller.main"]
        command += ["--listen", self.address or "127.0.0.1:0", "--data-dir", str(self.data_dir), *flags]
        self.child = self._supervisor.command(command, name=f"confined-{self.starts}", env=env)
        return self.child


@pytest.fixture
def disk(supervisor: Supervisor, tmp_path: Path) -> SmallDisk:
    return SmallDisk(supervisor, tmp_path / "disk", DISK_BYTES)


@pytest.fixture
def confined(supervisor: Supervisor, disk: SmallDisk) -> Iterator[_Confined]:
    controller = _Confined(supervisor, disk)
    yield controller
    controller.close()


class _Caller:
    """Puts rows with long keys until a put fails; knows what was acknowledged, and what was not."""

    def __init__(self, daemon: Controller, part: int, number: int) -> None:
        self.client: Client = daemon.client()
        self.acked: list[int] = []
        self.pending: Any = None
        self.error: errors.TQError | None = None
        self._part = part
        self._name = f"{number}-{'k' * KEY_CHARS}"

    def put_until_it_fails(self) -> None:
        self.error = None
        while self.error is None:
            keys = [f"{self._name}-{len(self.acked)}-{row}" for row in range(ROWS)]
            self.pending = self.client.commit_request(self._part, ROWS, keys=keys)
            try:
                self.retry()
            except errors.TQError as error:
                self.error = error

    def retry(self) -> None:
        # One that asks when the process has ended waits for the next one.
        self.acked += ids_of(self.client.call("Commit", self.pending, timeout=JOIN_SECONDS / 2).ids)


def _located(client: Client, part: int, ids: list[int]) -> int:
    request = pb.LocateRequest(session=client.session, partition_id=part, ids=np.array(ids, "<i8").tobytes())
    return len(ids_of(client.call("Locate", request).rows.ids))


def _acked(callers: list[_Caller]) -> list[int]:
    ids = [id_ for caller in callers for id_ in caller.acked]
    assert len(set(ids)) == len(ids)
    return ids


def test_a_full_disk_refuses_mutations_serves_reads_and_recovers_when_there_is_room(
    disk: SmallDisk, confined: _Confined
) -> None:
    disk.fill(FILLER_BYTES)
    confined.start()
    node, client = confined.node(), confined.client()
    assert node.next_order().HasField("sync")
    part = client.create()
    callers = [_Caller(confined, part, number) for number in range(CALLERS)]
    with ThreadPoolExecutor(CALLERS) as pool:
        list(pool.map(_Caller.put_until_it_fails, callers))
        assert {type(caller.error) for caller in callers} == {errors.StorageFull}
        for _ in range(3):  # again and again; a lone put may fit where a group of them did not
            callers[0].put_until_it_fails()
            assert isinstance(callers[0].error, errors.StorageFull)
            assert "nothing was changed" in callers[0].error.message
        ids = _acked(callers)  # whatever was refused has no effect
        assert len(ids) > 10 * ROWS
        assert client.counts(part)["ready"] == len(ids)
        assert _located(client, part, ids) == len(ids)
        assert confined.child.running
        disk.free()
        for caller in callers:
            caller.retry()
        list(pool.map(_Caller.put_until_it_fails, callers))  # the disk fills up once more
        assert {type(caller.error) for caller in callers} == {errors.StorageFull}
    more = _acked(callers)
    assert len(more) >= len(ids) + CALLERS * ROWS
    node.close()
    _kill(confined)
    disk.fill_up()
    assert confined.spawn().wait() == 1  # it can't write down that it started
    assert "disk is full" in confined.child.stderr


def _kill(daemon: Controller) -> None:
    """`nsenter` is the daemon itself: it made no child to run it."""
    daemon.child.kill()


def test_nothing_acknowledged_before_the_disk_was_full_is_lost_to_a_kill(disk: SmallDisk, confined: _Confined) -> None:
    disk.fill(FILLER_BYTES)
    confined.start()
    node, client = confined.node(), confined.client()
    assert node.next_order().HasField("sync")
    part = client.create()
    caller = _Caller(confined, part, 0)
    caller.put_until_it_fails()
    assert isinstance(caller.error, errors.StorageFull)
    _kill(confined)
    disk.free()
    confined.start()
    assert _located(client, part, caller.acked) == len(caller.acked)
    caller.retry()
    assert client.counts(part)["ready"] == len(caller.acked)
    node.close()


def test_a_disk_that_fails_under_load_ends_the_process_and_nothing_acknowledged_is_lost(daemon: Controller) -> None:
    daemon.start(env={"TQ_FAILPOINT": "journal-commit:EIO:40"})
    node, client = daemon.node(), daemon.client()
    assert node.next_order().HasField("sync")
    part = client.create()
    callers = [_Caller(daemon, part, number) for number in range(CALLERS)]
    threads = [threading.Thread(target=caller.put_until_it_fails) for caller in callers]
    for thread in threads:
        thread.start()
    wait_until(lambda: any(caller.error for caller in callers), what="the disk fails")
    begin = time.monotonic()
    assert daemon.child.wait() == JOURNAL_FAILED_STATUS
    assert time.monotonic() - begin <= ENDS_SECONDS
    for thread in threads:
        thread.join(JOIN_SECONDS)
    assert {type(caller.error) for caller in callers} == {errors.Unavailable}
    assert daemon.child.stderr.count("rather than guess") == 1  # it did not try the same disk again
    daemon.start()
    ids = _acked(callers)
    assert _located(client, part, ids) == len(ids)
    for caller in callers:
        caller.retry()  # what was under way is applied now, unless it was durable already
    assert len(_acked(callers)) == len(ids) + CALLERS * ROWS
    assert client.counts(part)["ready"] == len(ids) + CALLERS * ROWS
    node.close()


def test_a_controller_restored_from_an_older_file_refuses_the_storage_that_has_seen_more() -> None:
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster, tq.connect(cluster.address, timeout=20) as client:
        data = cluster.directory / "controller"
        part = client.create_partition("part")
        old = part.put({"x": np.arange(3)})
        cluster.controller.kill()
        shutil.copytree(data, cluster.directory / "backup")
        cluster.controller.restart()
        cluster.wait_attached()
        new = part.put({"x": np.arange(3) + 10})
        cluster.controller.kill()
        data.rename(cluster.directory / "newest")
        shutil.copytree(cluster.directory / "backup", data)
        cluster.controller.launch()
        wait_until(lambda: cluster.controller.returncode is not None, what="it refuses")
        assert cluster.controller.returncode == LOST_DATA_STATUS
        assert "it was restored from an older file" in cluster.controller.log.read_text()
        shutil.rmtree(data)
        (cluster.directory / "newest").rename(data)
        cluster.controller.restart()
        cluster.wait_attached()
        assert part.get([*old, *new])["x"].tolist() == [0, 1, 2, 10, 11, 12]
