"""The controller dies at every point of a command's life: a retry is applied once, and is given the recorded reply."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness import wait_until
from tests.process.controller_daemon import Client, Controller, daemon, ids_of
from tqclient import errors
from tqclient.wire.packing import I64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver import failpoints
from tqserver.failpoints import EXIT_STATUS, POINTS

__all__ = ["daemon"]

ROWS = 6
UNJOURNALED = (failpoints.BEFORE_COMMIT, failpoints.COMMIT)
"""Where a command dies without a trace: its retry is journaled like a new one."""


def _counts(*, ready: int, leased: int, consumed: int) -> dict[str, int]:
    return {"pending": 0, "ready": ready, "leased": leased, "consumed": consumed, "dropped": 0}


class _Story:
    """A put, a claim, an ack and a clear, each of which needs the one before it."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.part = client.create()
        self.ids: list[int] = []
        self.claim_id = 0

    def put(self) -> tuple[str, Any]:
        return "Commit", self._client.commit_request(self.part, ROWS, keys=[f"key {row}" for row in range(ROWS)])

    def claim(self) -> tuple[str, Any]:
        return "Claim", self._client.claim_request(self.part, 4)

    def ack(self) -> tuple[str, Any]:
        mutation = self._client.mutation()
        return "Settle", pb.SettleRequest(mutation=mutation, claim_id=self.claim_id, verdict=pb.VERDICT_ACK)

    def clear(self) -> tuple[str, Any]:
        ids = pack_array(self.ids[3:5], I64)  # one that is consumed, and one that is ready
        return "Clear", pb.ClearRequest(mutation=self._client.mutation(), partition_id=self.part, ids=ids)

    def after_put(self, reply: Any) -> dict[str, int]:
        self.ids = ids_of(reply.ids)
        assert len(set(self.ids)) == ROWS
        return _counts(ready=6, leased=0, consumed=0)

    def after_claim(self, reply: Any) -> dict[str, int]:
        self.claim_id = reply.claim_id
        assert ids_of(reply.rows.ids) == self.ids[:4]
        assert reply.rows.attempts == pack_array([1] * 4, "<u4")
        return _counts(ready=2, leased=4, consumed=0)

    def after_ack(self, reply: Any) -> dict[str, int]:
        return _counts(ready=2, leased=0, consumed=4)

    def after_clear(self, reply: Any) -> dict[str, int]:
        assert ids_of(reply.ids) == self.ids[3:5]
        return _counts(ready=1, leased=0, consumed=3)


@pytest.mark.parametrize("point", POINTS)
def test_a_retry_after_a_crash_is_applied_once_and_given_the_recorded_reply(daemon: Controller, point: str) -> None:
    within_snapshot = point.startswith("snapshot")
    # The start's own record comes first. Two records make a snapshot here: the start's, and the command's.
    flags = ("--snapshot-records", "2") if within_snapshot else ()
    passes = 1 if within_snapshot else 2
    daemon.start()
    node, client = daemon.node(), daemon.client()
    assert node.next_order().HasField("sync")
    story = _Story(client)
    node.close()
    daemon.child.kill()
    daemon.start(*flags, env={"TQ_FAILPOINT": f"{point}:exit:{passes}"})
    for step in ("put", "claim", "ack", "clear"):
        method, request = getattr(story, step)()
        lost = _send_into_the_crash(daemon, client, method, request, may_be_answered=within_snapshot)
        # The retry passes the point as well, where the first try left nothing behind.
        armed = passes + (point in UNJOURNALED)
        daemon.start(*flags, env={"TQ_FAILPOINT": f"{point}:exit:{armed}"})
        before = _sequence(client)
        reply = client.call(method, request)
        assert client.counts(story.part) == getattr(story, f"after_{step}")(reply)
        assert _comparable(client.call(method, request)) == _comparable(reply)
        assert lost is None or _comparable(lost) == _comparable(reply)
        assert _sequence(client) - before == (point in UNJOURNALED)  # what was durable is not applied again
    assert client.call("DescribePartition", pb.DescribePartitionRequest(partition_id=story.part)).partition.samples == 4


def _send_into_the_crash(
    daemon: Controller, client: Client, method: str, request: Any, *, may_be_answered: bool
) -> Any | None:
    reply = None
    try:
        reply = client.call(method, request, timeout=10)
        assert may_be_answered, "it crashed too late"
    except errors.Unavailable:
        pass  # the reply, if there was one, went down with the process
    assert daemon.child.wait() == EXIT_STATUS
    return reply


def _sequence(client: Client) -> int:
    return int(client.call("DescribeCluster", pb.DescribeClusterRequest()).journal_sequence)


def _comparable(reply: Any) -> Any:
    """The recorded reply alone: of a block's directory, each process sends a session one copy."""
    if isinstance(reply, pb.ClaimReply):
        reply = pb.ClaimReply.FromString(reply.SerializeToString())
        del reply.rows.blocks[:]
    return reply


def test_a_snapshot_that_a_crash_cut_short_is_never_read(daemon: Controller) -> None:
    daemon.start()
    client = daemon.client()
    for number in range(5):
        client.create(f"p{number}")
    daemon.child.kill()
    daemon.spawn("--snapshot-records", "1", env={"TQ_FAILPOINT": f"{failpoints.SNAPSHOT_MIDDLE}:exit"})
    assert daemon.child.wait() == EXIT_STATUS
    (draft,) = daemon.data_dir.glob("snapshot-*")
    assert draft.suffix == ".draft"
    daemon.start("--snapshot-records", "1")
    wait_until(lambda: _snapshots(daemon), what="a snapshot that counts")
    assert not draft.exists()
    listed = client.call("ListPartitions", pb.ListPartitionsRequest()).partitions
    assert [each.name for each in listed] == [f"p{number}" for number in range(5)]


def _snapshots(daemon: Controller) -> list[str]:
    return [path.name for path in daemon.data_dir.glob("snapshot-*") if not path.suffix]
