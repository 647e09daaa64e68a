"""A daemon's file descriptors: it takes all that it may have, goes on without, and needs no standard ones."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path

from tests.harness import Supervisor, wait_until
from tests.process.controller_daemon import Controller, daemon
from tqclient.wire.v1 import controller_pb2 as pb

__all__ = ["daemon"]

SOFT, HARD = 64, 512
SNAPSHOT_RECORDS = 5


def test_a_daemon_takes_all_descriptors_that_it_may_have(supervisor: Supervisor, tmp_path: Path) -> None:
    limited = f'ulimit -Sn {SOFT}; ulimit -Hn {HARD}; exec "$@"'
    command = [sys.executable, "-m", "tqserver.controller", "--listen=127.0.0.1:0", f"--data-dir={tmp_path / 'data'}"]
    child = supervisor.command(["bash", "-c", limited, "bash", *command], name="limited")
    assert json.loads(child.wait_for("serving"))["pid"] == child.pid
    assert resource.prlimit(child.pid, resource.RLIMIT_NOFILE) == (HARD, HARD)
    child.signal(signal.SIGTERM)
    assert child.wait() == 0


def test_a_controller_without_a_descriptor_left_acknowledges_and_writes_its_snapshot_later(daemon: Controller) -> None:
    daemon.start("--snapshot-records", str(SNAPSHOT_RECORDS))
    client = daemon.client()
    pid = daemon.child.pid
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, before[1]))  # as after very many connections: none is free
    for number in range(4 * SNAPSHOT_RECORDS):
        client.create(f"without/{number}")
    wait_until(lambda: "no room for a snapshot" in daemon.child.stderr, what="a snapshot that failed")
    assert "Too many open files" in daemon.child.stderr
    assert not list(daemon.data_dir.glob("snapshot-*"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    for number in range(4 * SNAPSHOT_RECORDS):
        client.create(f"with/{number}")
    wait_until(lambda: list(daemon.data_dir.glob("snapshot-*[0-9]")), what="a snapshot")
    daemon.child.kill()
    assert daemon.start()["epoch"] == 2
    again = daemon.client()
    listed = again.call("ListPartitions", pb.ListPartitionsRequest(prefix="with")).partitions
    assert len(listed) == 8 * SNAPSHOT_RECORDS


def test_a_node_without_standard_streams_serves_and_prints_into_no_file_of_its_own(
    daemon: Controller, supervisor: Supervisor, tmp_path: Path
) -> None:
    daemon.start()
    client = daemon.client()
    arena = tmp_path / "arena"
    command = [sys.executable, "-m", "tqserver.storage", "--listen=127.0.0.1:0", f"--controller={daemon.address}"]
    command += [f"--arena-path={arena}", "--arena-bytes=8MiB", "--segment-bytes=1MiB", "--unlink-on-exit"]
    child = supervisor.command(["bash", "-c", 'exec "$@" <&- >&- 2>&-', "bash", *command], name="closed")

    def attached() -> bool:
        assert child.running
        return any(node.attached for node in client.call("DescribeCluster", pb.DescribeClusterRequest()).nodes)

    wait_until(attached, what="a node that serves")
    assert [os.readlink(f"/proc/{child.pid}/fd/{number}") for number in range(3)] == [os.devnull] * 3
    child.signal(signal.SIGTERM)
    assert child.wait() == 0
    assert not arena.exists()


def test_a_daemon_whose_stdout_has_no_room_serves_all_the_same(supervisor: Supervisor, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tqserver.controller", "--listen=127.0.0.1:0", f"--data-dir={tmp_path / 'data'}"]
    child = supervisor.command(["bash", "-c", 'exec "$@" >/dev/full', "bash", *command], name="full")
    told = "stdout cannot be told of serving on 127.0.0.1:"
    wait_until(lambda: told in child.stderr and '"serving"' in child.stderr, what="its log")
    child.signal(signal.SIGTERM)
    assert child.wait() == 0
