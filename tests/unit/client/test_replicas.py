from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.client.fakes import FakeNode, FakeService
from tqclient.arguments import RowArguments
from tqclient.errors import CorruptBlock, LeaseExpired, SampleNotFound, StorageFull, Unavailable
from tqclient.operations.claims import claim
from tqclient.operations.cluster import start
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.nodes import NODE_SECONDS
from tqclient.operations.put import put
from tqclient.operations.read import get
from tqclient.operations.sessions import close_windows
from tqclient.samplers import Fifo
from tqclient.wire.v1 import controller_pb2 as pb

ROWS = {"x": [torch.arange(3), torch.arange(50)], "name": ["a", "b"]}


def connected(*paths: str, replicas: int = 2) -> FakeService:
    service = FakeService(*paths, replicas=replicas)
    service.run(start(service.state, False))
    return service


def do_put(service: FakeService, timeout: float = 5.0) -> list[int]:
    ids: list[int] = service.run(put(service.state, service.ref(), ROWS, RowArguments(), timeout)).tolist()
    return ids


def read_back(service: FakeService, ids: list[int], timeout: float = 5.0) -> list[Any]:
    delivery = service.run(get(service.state, service.ref(), ids, None, None, True, timeout))
    assert delivery.columns["name"].list() == ["a", "b"]
    return [row.tolist() for row in delivery.columns["x"].list()]


def blocks(service: FakeService) -> list[pb.BlockWrite]:
    return [block for name, request in service.calls if name == "Commit" for block in request.blocks]


def stored(service: FakeService, extent: Any) -> bytes:
    node = next(node for node in service.nodes if node.node.name == extent.node)
    assert node.node.arena == extent.arena
    return node.memory[extent.offset : extent.offset + extent.length].tobytes()


def is_back(service: FakeService, ids: list[int]) -> bool:
    return read_back(service, ids) == [list(range(3)), list(range(50))]


def damage(node: FakeNode, extent: Any) -> None:
    node.memory[extent.offset + extent.length // 2 : extent.offset + extent.length] ^= 0xFF


@pytest.mark.parametrize("paths", [("shm", "shm"), ("shm", "grpc"), ("grpc", "mooncake"), ("grpc", "shm", "mooncake")])
@pytest.mark.parametrize("replicas", [2, 3])
def test_each_block_is_written_to_as_many_nodes(paths: tuple[str, ...], replicas: int) -> None:
    service = connected(*paths, *["grpc"] * (replicas - 2), replicas=replicas)
    ids = do_put(service)
    (block,) = blocks(service)
    assert len({extent.node for extent in block.extents}) == replicas
    assert len({stored(service, extent) for extent in block.extents}) == 1
    assert any(stored(service, block.extents[0]))
    assert is_back(service, ids)


def test_too_few_nodes_are_an_error_at_the_deadline_and_nothing_is_visible() -> None:
    service = connected("grpc", "grpc")
    service.nodes[1].condition = "away"
    started = service.clock.now
    with pytest.raises(Unavailable, match=r"too few .* replicas=2 .*n0: .* bytes free; n1: .*connection refused"):
        do_put(service, timeout=5.0)
    assert 4 <= service.clock.now - started <= 5.2
    service.nodes[1].node.attached = False
    with pytest.raises(Unavailable, match=r"n1: not attached"):
        do_put(service, timeout=1.0)
    assert service.count("Commit") == 0
    service.state.windows.retire()
    service.run(close_windows(service.state, service.state.windows.take_closing()))
    assert service.first.free_offset == 0  # what was found in vain was given back
    service.nodes[1].condition, service.nodes[1].node.attached = "well", True
    assert is_back(service, do_put(service))


def test_a_full_node_among_too_few() -> None:
    service = connected("grpc", "grpc")
    service.nodes[1].full = True
    with pytest.raises(StorageFull, match=r"2 times on different nodes \(n0: .* bytes free; n1: node n1 has"):
        do_put(service)
    assert service.samples == {}


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("condition", ["hung", "away"])
def test_a_third_node_takes_the_place_of_one_that_fails(failing: int, condition: str) -> None:
    service = connected("grpc", "grpc", "grpc")
    do_put(service)
    named = {extent.node for extent in blocks(service)[0].extents}
    node = [node for node in service.nodes if node.node.name in named][failing]
    node.condition = condition
    started = service.clock.now
    for _ in range(3):
        assert is_back(service, do_put(service))
    assert service.clock.now - started <= 2 * (NODE_SECONDS + 0.1)  # one write and, at most, one read
    assert all(node.node.name not in {e.node for e in block.extents} for block in blocks(service)[1:])


def test_a_write_that_fails_costs_the_other_replica_no_room() -> None:
    service = connected("grpc", "shm")
    service.fault("write", Unavailable("broken"))
    do_put(service)
    offsets = {extent.node: extent.offset for extent in blocks(service)[0].extents}
    assert min(offsets.values()) == 0


def test_a_commit_refused_for_a_node_that_is_away_is_put_elsewhere_and_the_bytes_stay_as_they_are() -> None:
    service = connected("grpc", "grpc", "grpc")
    do_put(service)

    def detach() -> None:
        service.first.node.attached = False

    service.fault("Commit", LeaseExpired("storage node 'n0' is not attached"), before=detach)
    do_put(service)
    do_put(service)
    requests = [request for name, request in service.calls if name == "Commit"]
    places = [(e.node, e.offset) for request in requests for block in request.blocks for e in block.extents]
    assert len(set(places)) == len(places)  # also those of the commit that was refused: it may be under way
    assert all(e.node != "n0" for request in requests[2:] for block in request.blocks for e in block.extents)


def test_the_mapped_replica_is_read() -> None:
    service = connected("grpc", "shm", "grpc")
    for _ in range(4):
        ids = do_put(service)
        assert is_back(service, ids)
    assert [len(node.transport.fetched) for node in service.nodes] == [0, 4, 0]


def test_reads_are_spread_over_equal_replicas() -> None:
    service = connected("grpc", "grpc")
    ids = do_put(service)
    for _ in range(40):
        read_back(service, ids)
    first, second = (len(node.transport.fetched) for node in service.nodes)
    assert first + second == 40
    assert 10 <= first <= 30


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("how", ["away", "hung", "detached", "damaged", "gone", "lost"])
def test_the_other_replica_is_read_within_the_deadline(failing: int, how: str) -> None:
    service = connected("grpc", "grpc")
    ids = do_put(service)
    node = service.nodes[failing]
    extent = next(e for e in blocks(service)[0].extents if e.node == node.node.name)
    if how == "lost":
        node.lose_arena()
        service.state.nodes_changed([each.node for each in service.nodes], 2)
    elif how == "damaged":
        damage(node, extent)
    elif how == "gone":

        def gone(*_: Any, **__: Any) -> Any:
            raise SampleNotFound("it was freed")

        node.transport.bring = gone  # type: ignore[method-assign]
    elif how == "detached":
        node.condition, node.node.attached = "away", False
        service.state.nodes_changed([each.node for each in service.nodes], 2)
    else:
        node.condition = how
    started = service.clock.now
    for _ in range(8):
        assert is_back(service, ids)
    assert service.clock.now - started <= (NODE_SECONDS + 1 if how == "hung" else 0.1)
    consumer = ConsumerRef(service.ref(), "actor", (), Fifo())
    _, delivery = service.run(claim(service.state, consumer, 2, True, 5.0))
    assert delivery.columns["name"].list() == ["a", "b"]


def test_both_replicas_damaged() -> None:
    service = connected("grpc", "grpc")
    ids = do_put(service)
    for node, extent in zip(service.nodes, sorted(blocks(service)[0].extents, key=lambda e: e.node), strict=True):
        damage(node, extent)
    with pytest.raises(CorruptBlock, match="checksum"):
        read_back(service, ids)


def test_one_replica_damaged_and_the_other_away_for_a_while() -> None:
    service = connected("grpc", "grpc")
    ids = do_put(service)
    damage(service.first, next(e for e in blocks(service)[0].extents if e.node == "n0"))
    service.nodes[1].condition = "away"
    with pytest.raises(Unavailable):
        read_back(service, ids, timeout=1.0)
    original = service.on_describe_cluster

    def comes_back(request: pb.DescribeClusterRequest) -> pb.DescribeClusterReply:
        service.nodes[1].condition = "well"
        return original(request)

    service.on_describe_cluster = comes_back  # type: ignore[method-assign]
    assert is_back(service, ids)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_block_whose_arenas_are_all_lost_is_said_to_be_lost_soon(replicas: int) -> None:
    service = connected("grpc", "grpc", replicas=replicas)
    ids = do_put(service)
    for node in service.nodes:
        node.lose_arena()
    started = service.clock.now
    with pytest.raises(CorruptBlock, match=r"arena .* of storage node 'n.' is lost: the node has another arena now"):
        read_back(service, ids)
    assert service.clock.now - started <= 1
    assert is_back(service, do_put(service))


def test_an_arena_that_this_client_has_not_heard_of_yet_is_not_lost() -> None:
    service = connected("grpc", replicas=1)
    stale = pb.Node()
    stale.CopyFrom(service.first.node)
    service.first.lose_arena()
    service.state.nodes_changed([service.first.node], 2)
    ids = do_put(service)
    service.state.nodes_changed([stale], 2)  # as one sees it that has not heard of the new arena, in which others put
    assert is_back(service, ids)
