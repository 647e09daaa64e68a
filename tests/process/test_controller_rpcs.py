"""Every RPC of a real controller: what it does when all is well, and the typed error when it isn't."""

from __future__ import annotations

import time
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.harness import wait_until
from tests.process.controller_daemon import (
    DIRECTORY,
    EXTENT_BYTES,
    Client,
    Controller,
    Node,
    client,
    controller,
    daemon,
    ids_of,
    node,
    rows_of,
)
from tqclient import errors
from tqclient.wire.packing import I64, U64, pack_array, pack_blobs, pack_strings, unpack_blobs, unpack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller import links

__all__ = ["client", "controller", "daemon", "node"]


def test_a_partition_is_created_described_listed_sealed_and_deleted(client: Client) -> None:
    first = client.create("train/1", consumers=("b", "a"))
    second = client.create("val", consumers=())
    described = client.call("DescribePartition", pb.DescribePartitionRequest(name="train/1")).partition
    assert (described.partition_id, described.sealed, described.version) == (first, False, -1)
    assert {each.name for each in described.consumers} == {"a", "b"}
    listed = client.call("ListPartitions", pb.ListPartitionsRequest(prefix="train/")).partitions
    assert [each.name for each in listed] == ["train/1"]
    sealed = client.call("SealPartition", pb.SealPartitionRequest(mutation=client.mutation(), partition_id=second))
    assert sealed.partition.sealed
    client.call("DeletePartition", pb.DeletePartitionRequest(mutation=client.mutation(), partition_id=first))
    with pytest.raises(errors.PartitionNotFound, match="train/1"):
        client.call("DescribePartition", pb.DescribePartitionRequest(name="train/1"))
    with pytest.raises(errors.PartitionExists):
        client.create("val", consumers=())


def test_metadata_and_the_weight_version_are_kept(client: Client) -> None:
    part = client.create()
    changes: list[dict[str, Any]] = [{"set": {"a": b"1", "b": b"2"}}, {"set": {"b": b"3"}, "delete": ["a"]}]
    for change in changes:
        request = pb.SetMetadataRequest(mutation=client.mutation(), partition_id=part, **change)
        reply = client.call("SetMetadata", request)
    assert dict(reply.partition.metadata) == {"b": b"3"}
    request = pb.SetVersionRequest(mutation=client.mutation(), partition_id=part, version=4)
    assert client.call("SetVersion", request).partition.version == 4
    with pytest.raises(errors.InvalidArgument, match="older"):
        client.call("SetVersion", pb.SetVersionRequest(mutation=client.mutation(), partition_id=part, version=3))


def test_samples_go_through_commit_claim_and_ack(client: Client, node: Node) -> None:
    part = client.create()
    ids = client.commit(part, 3, keys=["a", "b", "c"])
    opened, sealed = node.next_order(), node.next_order()
    assert ids_of(opened.sessions.opened) == [client.session]
    assert rows_of(sealed.sealed.extents) == [[0, EXTENT_BYTES, client.generation, part]]
    claim = client.claim(part, 2)
    assert ids_of(claim.rows.ids) == ids[:2]
    assert unpack_strings(claim.rows.keys, what="keys") == ["a", "b"]
    (block,) = claim.rows.blocks
    assert (block.directory, block.extents[0].generation) == (DIRECTORY, client.generation)
    assert client.counts(part) == {"pending": 0, "ready": 1, "leased": 2, "consumed": 0, "dropped": 0}
    assert client.call("RenewClaim", pb.RenewClaimRequest(session=client.session, claim_id=claim.claim_id)).lease_ms
    client.settle(claim.claim_id)
    assert client.counts(part) == {"pending": 0, "ready": 1, "leased": 0, "consumed": 2, "dropped": 0}
    with pytest.raises(errors.LeaseExpired):
        client.settle(claim.claim_id)
    rest = client.claim(part, 1)
    assert rest.rows.blocks[0].directory == b""  # this session has it
    assert list(np.frombuffer(rest.rows.attempts, dtype="<u4")) == [1]


def test_a_released_claim_is_delivered_again_and_spent_ones_are_listed_and_requeued(client: Client) -> None:
    part = client.create(max_attempts=2)
    (sample,) = client.commit(part, 1)
    for attempt in (1, 2):
        claim = client.claim(part, 1)
        assert list(np.frombuffer(claim.rows.attempts, dtype="<u4")) == [attempt]
        client.settle(claim.claim_id, pb.VERDICT_RELEASE)
    dead = client.call("ListDead", pb.ListDeadRequest(partition_id=part, consumer="c"))
    assert (ids_of(dead.ids), list(np.frombuffer(dead.attempts, dtype="<u4"))) == ([sample], [2])
    request = pb.RequeueRequest(
        mutation=client.mutation(), partition_id=part, consumer="c", ids=pack_array([sample], I64)
    )
    client.call("Requeue", request)
    assert client.counts(part)["ready"] == 1
    client.settle(client.claim(part, 1).claim_id)
    client.call("ResetConsumer", pb.ResetConsumerRequest(mutation=client.mutation(), partition_id=part, consumer="c"))
    assert client.counts(part)["ready"] == 1


def test_samples_are_located_by_id_and_key_and_their_directories_asked_for_again(client: Client) -> None:
    part = client.create()
    ids = client.commit(part, 2, keys=["a", "b"])
    by_key = client.call(
        "Locate", pb.LocateRequest(session=client.session, partition_id=part, keys=pack_strings(["b"]))
    )
    assert ids_of(by_key.rows.ids) == ids[1:]
    by_id = pb.LocateRequest(
        session=client.session,
        partition_id=part,
        ids=pack_array(ids, I64),
        dropped_pins=pack_array([by_key.pin], U64),
    )
    (block,) = client.call("Locate", by_id).rows.blocks
    assert block.directory == b""
    wanted = pack_array([block.block_id], U64)
    reply = client.call("GetDirectories", pb.GetDirectoriesRequest(session=client.session, block_ids=wanted))
    assert unpack_blobs(reply.directories, what="directories") == [DIRECTORY]
    missing = pb.LocateRequest(session=client.session, partition_id=part, ids=pack_array([ids[0], 999], I64))
    with pytest.raises(errors.SampleNotFound) as caught:
        client.call("Locate", missing)
    assert caught.value.ids == (999,)


def test_tags_select_what_is_cleared_and_bytes_wait_for_the_pin(daemon: Controller) -> None:
    daemon.start("--session-lease", "1")  # nothing is freed for one lease after a start
    node = daemon.node()
    assert node.next_order().HasField("sync")
    client = daemon.client()
    part = client.create()
    ids = client.commit(part, 2)
    assert node.next_order().HasField("sessions")
    sealed = node.next_order()
    assert rows_of(sealed.sealed.extents) == [[0, EXTENT_BYTES, client.generation, part]]
    tags = pack_blobs([b"\x81\xa1s\x01", b"\x81\xa1s\x02"])  # {"s": 1}, {"s": 2}
    packed = pack_array(ids, I64)
    client.call("SetTags", pb.SetTagsRequest(mutation=client.mutation(), partition_id=part, ids=packed, tags=tags))
    look_up = pb.LocateRequest(session=client.session, partition_id=part, ids=packed, pin=5)
    for _ in range(2):  # as after a lost reply: both tries hold one pin
        pinned = client.call("Locate", look_up)
    assert pinned.pin == 5
    by_tags = pb.ClearRequest(mutation=client.mutation(), partition_id=part, tags=b"\x81\xa1s\x02")
    assert ids_of(client.call("Clear", by_tags).ids) == ids[1:]
    by_id = pb.ClearRequest(mutation=client.mutation(), partition_id=part, ids=packed)
    assert ids_of(client.call("Clear", by_id).ids) == ids[:1]
    beat = pb.HeartbeatRequest(session=client.session, dropped_pins=pack_array([pinned.pin], U64))
    assert client.call("Heartbeat", beat).lease_ms == 1_000
    assert rows_of(node.next_order().freed.extents) == [[0, EXTENT_BYTES, client.generation, part]]
    node.close()


def test_a_closed_session_releases_its_claims(client: Client, controller: Controller, node: Node) -> None:
    part = client.create()
    client.commit(part, 1)
    other = controller.client()
    other.claim(part, 1)
    other.call("CloseSession", pb.CloseSessionRequest(mutation=other.mutation()))
    assert client.counts(part)["ready"] == 1
    with pytest.raises(errors.LeaseExpired):
        other.call("Heartbeat", pb.HeartbeatRequest(session=other.session))
    cluster = client.call("DescribeCluster", pb.DescribeClusterRequest())
    assert (cluster.epoch, cluster.sessions, cluster.claims) == (1, 1, 0)


def test_a_node_is_synchronised_reports_usage_and_ends_the_sessions_of_dead_writers(
    client: Client, controller: Controller, node: Node
) -> None:
    part = client.create()
    client.commit(part, 1)
    node.next_order(), node.next_order()  # opened, sealed
    second = controller.node()  # the same name: replaces the first link
    sync = second.next_order()
    assert [0, EXTENT_BYTES, client.generation, part] in rows_of(sync.sync.extents)
    assert ids_of(sync.sync.sessions) == [client.session]
    second.report(usage=pb.NodeUsage(used_bytes=4096))
    second.report(writer_gone=pb.WriterGone(session=client.session))
    assert ids_of(second.next_order().sessions.ended) == [client.session]
    watcher = controller.client()
    cluster = watcher.call("DescribeCluster", pb.DescribeClusterRequest())
    assert [(each.name, each.attached, each.used_bytes) for each in cluster.nodes] == [("node", True, 4096)]
    with pytest.raises(errors.Unavailable, match="replaced"):
        node.next_order()
    second.close()


def test_a_namesake_is_refused_until_the_nodes_link_has_ended(daemon: Controller) -> None:
    daemon.start()
    node, client = daemon.node(), daemon.client()
    assert node.next_order().HasField("sync")
    part = client.create()
    client.commit(part, 1)
    before = client.call("DescribeCluster", pb.DescribeClusterRequest())
    for _ in range(3):  # it tries again and again
        with pytest.raises(errors.Unavailable, match=r"attached already, at 127\.0\.0\.1:1 .* a name of its own"):
            daemon.node(arena=8).next_order()
    after = client.call("DescribeCluster", pb.DescribeClusterRequest())
    assert after == before  # neither journaled nor heeded
    assert (after.nodes[0].arena, after.nodes[0].attached) == (7, True)
    client.commit(part, 1)

    node.close()
    daemon.child.kill()
    daemon.start()  # the first to come is not the heir: the node itself is on its way
    with pytest.raises(errors.Unavailable, match=r"until this controller was restarted, at .* a name of its own"):
        daemon.node(arena=8).next_order()
    node = daemon.node()
    assert [0, EXTENT_BYTES, client.generation, part] in rows_of(node.next_order().sync.extents)

    node.close()  # its host is gone, and its arena
    wait_until(
        lambda: not client.call("DescribeCluster", pb.DescribeClusterRequest()).nodes[0].attached,
        what="the link has ended",
    )
    with pytest.raises(errors.Unavailable, match="until just now"):
        daemon.node(arena=8).next_order()
    time.sleep(links.RETURN_S)
    heir = daemon.node(arena=8)
    assert heir.next_order().sync.extents == b""
    (known,) = client.call("DescribeCluster", pb.DescribeClusterRequest()).nodes
    assert (known.arena, known.attached) == (8, True)
    heir.close()


def test_a_node_has_the_capacity_that_it_reports_and_without_a_report_that_of_its_hello(
    client: Client, node: Node
) -> None:
    def capacity_and_used_bytes() -> tuple[int, int]:
        (told,) = client.call("DescribeCluster", pb.DescribeClusterRequest()).nodes
        return told.capacity_bytes, told.used_bytes

    def wait_told(capacity_bytes: int, used_bytes: int) -> None:
        told = (capacity_bytes, used_bytes)
        wait_until(lambda: capacity_and_used_bytes() == told, what=f"{told} is told")

    node.next_order()  # it is attached
    wait_told(1 << 30, 0)
    node.report(usage=pb.NodeUsage(used_bytes=1))  # as nodes did that knew of no other capacity
    wait_told(1 << 30, 1)
    node.report(usage=pb.NodeUsage(used_bytes=2, capacity_bytes=8192))
    wait_told(8192, 2)
    node.close()
    wait_told(1 << 30, 0)


@pytest.mark.parametrize("method", ["Commit", "Claim", "Heartbeat", "OpenSession", "DescribeCluster"])
def test_bytes_that_are_no_request_are_an_invalid_argument(controller: Controller, method: str) -> None:
    raw = controller.channel().unary_unary(f"/tq.v1.Controller/{method}")
    with pytest.raises(grpc.RpcError) as caught:
        raw(b"\xff\xff\xff\x00garbage", timeout=5, wait_for_ready=True)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT  # type: ignore[attr-defined]


def test_a_malformed_request_names_what_is_wrong(client: Client) -> None:
    part = client.create()
    request = client.commit_request(part, 2)
    request.ids = b"12345"
    with pytest.raises(errors.InvalidArgument, match="ids: 5 bytes, expected 2 × 8"):
        client.call("Commit", request)
    intruder = client.claim_request(part, 1)
    intruder.mutation.client_id = b"x" * 16
    with pytest.raises(errors.InvalidArgument, match="another client"):
        client.call("Claim", intruder)


def test_health_and_reflection_name_the_service(controller: Controller) -> None:
    channel = controller.channel()
    health = health_pb2_grpc.HealthStub(channel)
    reply = health.Check(health_pb2.HealthCheckRequest(service="tq.v1.Controller"), timeout=5, wait_for_ready=True)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    (listed,) = reflection.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    names = {service.name for service in listed.list_services_response.service}
    assert {"tq.v1.Controller", "grpc.health.v1.Health"} <= names
