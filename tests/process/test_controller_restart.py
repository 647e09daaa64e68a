"""A real controller that is killed, stopped, locked out, damaged or out of disk, and what its next start finds."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.process.controller_daemon import Controller, Node, daemon, ids_of, rows_of
from tqclient import errors
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.failpoints import EXIT_STATUS, POINTS

__all__ = ["daemon"]


def test_what_was_answered_survives_kill_9_and_retries_get_the_same_reply(daemon: Controller) -> None:
    first = daemon.start()
    assert (first["pid"], first["epoch"]) == (daemon.child.pid, 1)
    node, client = daemon.node(), daemon.client()
    assert node.next_order().HasField("sync")
    part = client.create()
    put = client.commit_request(part, 3)
    ids = ids_of(client.call("Commit", put).ids)
    take = client.claim_request(part, 2)
    claim = client.call("Claim", take)
    daemon.child.kill()
    assert daemon.start()["epoch"] == 2
    assert ids_of(client.call("Commit", put).ids) == ids
    again = client.call("Claim", take)
    assert (again.claim_id, again.rows.ids) == (claim.claim_id, claim.rows.ids)
    assert again.rows.blocks[0].directory  # the new process has sent none yet
    assert client.call("Heartbeat", pb.HeartbeatRequest(session=client.session)).epoch == 2
    client.settle(claim.claim_id)
    assert client.counts(part) == {"pending": 0, "ready": 1, "leased": 0, "consumed": 2, "dropped": 0}
    node.close()


def test_state_comes_back_from_a_snapshot(daemon: Controller) -> None:
    daemon.start("--snapshot-records", "5")
    client = daemon.client()
    for number in range(23):
        client.create(f"p{number}")
    wait_until(lambda: list(daemon.data_dir.glob("snapshot-*[0-9]")), what="a snapshot")
    daemon.child.kill()
    daemon.start()
    listed = client.call("ListPartitions", pb.ListPartitionsRequest(prefix="p")).partitions
    assert len(listed) == 23
    assert len(list(daemon.data_dir.glob("snapshot-*"))) == 1


@pytest.mark.parametrize("point", [point for point in POINTS if not point.startswith("snapshot")])
def test_a_crash_at_any_point_leaves_a_retry_with_one_effect(daemon: Controller, point: str) -> None:
    daemon.start()
    client = daemon.client()
    daemon.child.kill()
    daemon.start(env={"TQ_FAILPOINT": f"{point}:exit:2"})  # the first pass is the start's own
    request = pb.CreatePartitionRequest(mutation=client.mutation(), name="once")
    with pytest.raises(errors.Unavailable):
        client.call("CreatePartition", request, timeout=5)
    assert daemon.child.wait() == EXIT_STATUS
    daemon.start()
    created = client.call("CreatePartition", request).partition
    assert client.call("CreatePartition", request).partition == created
    assert [each.name for each in client.call("ListPartitions", pb.ListPartitionsRequest()).partitions] == ["once"]


@pytest.mark.parametrize("point", [point for point in POINTS if point.startswith("snapshot")])
def test_a_crash_within_a_snapshot_loses_nothing(daemon: Controller, point: str) -> None:
    daemon.start()
    client = daemon.client()
    names = [f"p{number}" for number in range(6)]
    for name in names:
        client.create(name)
    daemon.child.kill()
    daemon.spawn("--snapshot-records", "1", env={"TQ_FAILPOINT": f"{point}:exit"})
    assert daemon.child.wait() == EXIT_STATUS
    daemon.start()
    listed = client.call("ListPartitions", pb.ListPartitionsRequest()).partitions
    assert [each.name for each in listed] == names


@pytest.mark.parametrize("noted", [True, False])
def test_a_command_that_cannot_be_applied_ends_the_process_and_is_lost_alone(daemon: Controller, noted: bool) -> None:
    daemon.start()
    client = daemon.client()
    client.create("before")
    daemon.child.kill()
    # Of the records 1 to 4 (start, session, partition, start), this life writes the last; the next one fails.
    daemon.start(env={"TQ_FAILPOINT": "apply:EIO:2"})
    note = daemon.data_dir / f"failed-{5:020d}"
    if not noted:
        note.mkdir()  # no file of that name can be written
    request = pb.CreatePartitionRequest(mutation=client.mutation(), name="retried")
    with pytest.raises(errors.Unavailable):
        client.call("CreatePartition", request, timeout=5)
    assert daemon.child.wait() == 5
    if noted:
        assert "failpoint apply" in note.read_text()
    else:
        note.rmdir()
        assert daemon.spawn(env={"TQ_FAILPOINT": "replay:EIO:5"}).wait() == 1
        assert "record 5 cannot be applied" in daemon.child.stderr
        daemon.start("--accept-data-loss", env={"TQ_FAILPOINT": "replay:EIO:5"})
        daemon.child.kill()
    daemon.start()
    created = client.call("CreatePartition", request).partition
    assert created.partition_id == 2  # the try that failed took no number
    daemon.child.kill()
    daemon.start()
    assert client.call("CreatePartition", request).partition == created
    listed = client.call("ListPartitions", pb.ListPartitionsRequest()).partitions
    assert [each.name for each in listed] == ["before", "retried"]


def test_an_acknowledged_record_that_cannot_be_replayed_is_never_dropped_in_silence(daemon: Controller) -> None:
    daemon.start()
    client = daemon.client()
    for name in ("first", "second"):
        client.create(name)
    daemon.child.kill()
    for _ in range(2):  # refusing changes nothing
        assert daemon.spawn(env={"TQ_FAILPOINT": "replay:EIO:3"}).wait() == 1
        assert "record 3 cannot be applied" in daemon.child.stderr
        assert "--accept-data-loss" in daemon.child.stderr
    daemon.start()
    listed = client.call("ListPartitions", pb.ListPartitionsRequest()).partitions
    assert [each.name for each in listed] == ["first", "second"]


def test_an_fsync_that_fails_ends_the_process_within_a_second_and_nothing_is_answered(daemon: Controller) -> None:
    daemon.start(env={"TQ_FAILPOINT": "journal-commit:EIO:3"})  # after the start's and the session's
    client = daemon.client()
    begin = time.monotonic()
    with pytest.raises(errors.Unavailable):
        client.create("lost")
    assert daemon.child.wait(timeout=1) == 4
    assert time.monotonic() - begin < 1.0
    assert "rather than guess" in daemon.child.stderr
    daemon.start()
    assert not client.call("ListPartitions", pb.ListPartitionsRequest()).partitions


def test_a_full_disk_refuses_mutations_serves_reads_and_recovers(daemon: Controller) -> None:
    daemon.start(env={"TQ_FAILPOINT": "journal-commit:ENOSPC:4"})
    client = daemon.client()
    client.create("before")
    request = pb.CreatePartitionRequest(mutation=client.mutation(), name="after")
    with pytest.raises(errors.StorageFull, match="nothing was changed"):
        client.call("CreatePartition", request)
    listed = client.call("ListPartitions", pb.ListPartitionsRequest()).partitions
    assert [each.name for each in listed] == ["before"]
    assert client.call("CreatePartition", request).partition.name == "after"


def test_sigterm_answers_who_waits_and_exits_0(daemon: Controller) -> None:
    daemon.start()
    client, node = daemon.client(), daemon.node()
    part = client.create()
    waiting = client.stub.Claim.future(client.claim_request(part, 1, wait_ms=30_000), timeout=30)
    wait_until(
        lambda: client.call("DescribeCluster", pb.DescribeClusterRequest()).waiting_claims == 1,
        what="the claim waits",
    )
    begin = time.monotonic()
    daemon.child.terminate()
    assert "shutting down" in str(waiting.exception())
    assert daemon.child.wait() == 0
    assert time.monotonic() - begin < 5
    assert daemon.child.stdout.count("\n") == 1
    assert all(json.loads(line)["level"] == "info" for line in daemon.child.stderr.splitlines())
    node.close()


def test_two_controllers_never_share_a_data_directory(daemon: Controller) -> None:
    daemon.start()
    running, daemon.address = daemon.child, ""
    assert daemon.spawn().wait() == 1
    assert "another tq-controller" in daemon.child.stderr
    assert running.running
    assert oct(daemon.data_dir.stat().st_mode & 0o777) == "0o700"
    assert {oct(file.stat().st_mode & 0o777) for file in daemon.data_dir.iterdir()} == {"0o600"}


def test_a_start_on_a_port_that_is_taken_leaves_the_journal_alone(daemon: Controller) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        daemon.address = in_use = f"127.0.0.1:{taken.getsockname()[1]}"
        assert daemon.spawn().wait() == 1
        assert "the port is in use" in daemon.child.stderr
        assert not daemon.data_dir.exists()
        daemon.address = ""
        first = daemon.start()
        daemon.child.kill()
        daemon.address = in_use
        for _ in range(2):
            assert daemon.spawn().wait() == 1
    daemon.address = ""
    second = daemon.start()
    assert (second["epoch"], second["sequence"]) == (first["epoch"] + 1, first["sequence"] + 1)


@pytest.mark.parametrize("name", ["file", "file/below", "/proc/tq"])
def test_a_data_directory_that_cannot_be_is_called_so(daemon: Controller, tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    daemon.data_dir = tmp_path / name
    assert daemon.spawn().wait() == 1
    (line,) = daemon.child.stderr.splitlines()
    assert json.loads(line)["error"].startswith(f"data_dir {daemon.data_dir}: ")


def refused_by_its_end(daemon: Controller, node: Node, message: str) -> None:
    """Checks that a node is refused, and that the controller ends, since its journal must be an older one."""
    with pytest.raises(errors.UnsupportedVersion, match=message):
        node.next_order()
    assert daemon.child.wait() == 3
    node.close()


def test_a_journal_older_than_what_a_node_has_seen_is_refused(daemon: Controller) -> None:
    daemon.start()
    node = daemon.node()
    assert node.next_order().HasField("sync")
    node.close()
    refused_by_its_end(daemon, daemon.node(seen=1_000_000), "restored from an older file")
    daemon.start("--accept-data-loss")
    node = daemon.node(seen=1_000_000)
    assert rows_of(node.next_order().sync.extents) == []
    node.close()


def test_a_journal_that_is_new_where_a_node_is_not_is_refused(daemon: Controller) -> None:
    """However little the node has seen: it would free all of its blocks."""
    daemon.start()
    refused_by_its_end(daemon, daemon.node(seen=1), "knows of no arena: it is a new file")


@pytest.mark.parametrize("seen", [1_000_000, 1], ids=["more", "less"])
def test_a_node_of_another_controller_keeps_its_blocks_and_does_not_end_this_one(daemon: Controller, seen: int) -> None:
    """With either history: one of a shorter one would free all that it has."""
    daemon.start()
    node = daemon.node(arena=7)
    assert node.next_order().HasField("sync")
    for _ in range(3):
        stranger = daemon.node(name="stranger", arena=8, seen=seen)
        with pytest.raises(
            errors.UnsupportedVersion, match="it knows nothing of that arena: this is another controller's node"
        ):
            stranger.next_order()
        stranger.close()
    client = daemon.client()
    client.commit(client.create(), 1)
    assert node.next_order().HasField("sessions")  # it is attached still
    assert daemon.child.running
    assert daemon.child.stderr.count("it knows nothing of that arena") == 1
    node.close()
    refused_by_its_end(daemon, daemon.node(arena=7, seen=1_000_000), "restored from an older file")  # its own node


def test_a_damaged_journal_is_refused_by_name(daemon: Controller) -> None:
    daemon.start()
    client = daemon.client()
    for number in range(4):
        client.create(f"p{number}")
    daemon.child.kill()
    log = daemon.data_dir / "journal.db-wal"
    damaged = bytearray(log.read_bytes())
    damaged[32 + 24 + 100] ^= 1
    log.write_bytes(damaged)
    assert daemon.spawn().wait() == 1
    assert "journal.db-wal" in daemon.child.stderr
    assert "--accept-data-loss" in daemon.child.stderr


def test_it_serves_within_a_second_without_torch(daemon: Controller, tmp_path: Path) -> None:
    begin = time.monotonic()
    daemon.start(env={"PYTHONPROFILEIMPORTTIME": "1"})
    took = time.monotonic() - begin
    assert took < 2.0  # 1 s alone on its machine; tests share it
    assert "tqserver.controller.core" in daemon.child.stderr
    assert " torch" not in daemon.child.stderr
    os.kill(daemon.child.pid, signal.SIGINT)
    assert daemon.child.wait() == 0
