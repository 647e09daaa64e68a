from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.unit.client.fakes import ARENA_BYTES, Clock, FakeService
from tqclient.arguments import RowArguments
from tqclient.errors import LeaseExpired, StorageFull, TransportUnavailable, Unavailable
from tqclient.operations import nodes
from tqclient.operations import put as operation
from tqclient.operations.cluster import start
from tqclient.operations.effects import Deadline
from tqclient.operations.nodes import open_path
from tqclient.operations.put import put
from tqclient.operations.read import get
from tqclient.operations.sessions import close_session, close_windows, heartbeat
from tqclient.placement import REPORT_LAG, Placement
from tqclient.wire.v1 import controller_pb2 as pb

KIB = 1024


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake arena holds 1 MiB: what is large is moved to where it can be shown."""
    monkeypatch.setattr(nodes, "WHOLE_MIN", 16 * KIB)
    monkeypatch.setattr(operation, "BLOCK_BYTES_APART", 64 * KIB)
    monkeypatch.setattr(operation, "BLOCK_BYTES_SMALL", 16 * KIB)


def connected(*paths: str, replicas: int = 1) -> FakeService:
    """A service whose client has opened its paths."""
    service = FakeService(*paths, replicas=replicas)
    service.run(start(service.state, False))
    return service


def rows(size_bytes: int, count: int = 1) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(size_bytes * count)
    return {"x": [torch.randint(256, (size_bytes,), dtype=torch.uint8, generator=generator) for _ in range(count)]}


def do_put(service: FakeService, size_bytes: int, count: int = 1, timeout: float = 10.0) -> list[int]:
    operation = put(service.state, service.ref(), rows(size_bytes, count), RowArguments(), timeout)
    return service.run(operation).tolist()  # type: ignore[no-any-return]


def is_back(service: FakeService, ids: list[int], size_bytes: int) -> bool:
    delivery = service.run(get(service.state, service.ref(), ids, None, None, True, 10.0))
    return all(map(torch.equal, delivery.columns["x"].list(), rows(size_bytes, len(ids))["x"]))


def seconds(service: FakeService, call: Any) -> float:
    before = service.clock.now
    call()
    return service.clock.now - before


def holders(service: FakeService) -> list[list[str]]:
    """The nodes of each block, in the order of the commits."""
    return [
        [extent.node for extent in block.extents]
        for name, request in service.calls
        if name == "Commit"
        for block in request.blocks
    ]


@pytest.mark.parametrize("size_bytes", [1 * KIB, 32 * KIB])
def test_puts_are_balanced_by_what_this_client_placed_since_the_last_report(size_bytes: int) -> None:
    service = connected("grpc", "grpc", "grpc")
    for _ in range(9):
        do_put(service, size_bytes)
    placed = [names[0] for names in holders(service)]
    assert {placed.count(f"n{index}") for index in range(3)} == {3}


def test_puts_are_balanced_over_a_report_that_does_not_count_the_last_ones() -> None:
    service = connected("grpc", "grpc", "grpc")
    nodes = [node.node for node in service.nodes]
    for number in range(9):
        do_put(service, 32 * KIB)
        service.clock.now += 0.1
        if number % 2:
            service.state.nodes_changed(nodes, 1)  # they are said to be empty
    placed = [names[0] for names in holders(service)]
    assert [placed.count(f"n{index}") for index in range(3)] == [3, 3, 3]


def test_what_a_report_surely_counts_counts_once() -> None:
    placement = Placement(clock := Clock(), lambda: 0.5)
    node = pb.Node(name="n", capacity_bytes=1000)

    def free_after(seconds: float) -> int:
        clock.now += seconds
        placement.reported()
        return placement.free_bytes(node)

    placement.placed("n", 100)
    assert free_after(REPORT_LAG / 2) == 900
    placement.placed("n", 10)
    placement.placed("n", -4)  # given up
    assert free_after(REPORT_LAG) == 894
    assert free_after(REPORT_LAG) == 1000
    assert not placement.placed_since_report
    placement.placed("n", 7)
    clock.now += 100
    assert placement.free_bytes(node) == 993  # nobody has reported since
    assert free_after(0) == 1000


def test_the_emptiest_node_comes_first() -> None:
    service = connected("grpc", "grpc", "grpc")
    for node, used in zip(service.nodes, (500_000, 200_000, 300_000), strict=True):
        node.node.used_bytes = used
    service.state.nodes_changed([node.node for node in service.nodes], 1)
    for _ in range(4):
        do_put(service, 60 * KIB)  # 61,440 bytes, the header of the block, and its directory
    assert holders(service) == [["n1"], ["n1"], ["n2"], ["n1"]]


def test_a_node_of_this_host_comes_before_an_emptier_one() -> None:
    service = connected("grpc", "shm", "grpc")
    service.nodes[1].node.used_bytes = ARENA_BYTES // 2
    service.state.nodes_changed([node.node for node in service.nodes], 1)
    for _ in range(3):
        do_put(service, 32 * KIB)
    service.nodes[1].full = True
    do_put(service, 32 * KIB)
    assert [names[0] for names in holders(service)][:3] == ["n1"] * 3
    assert holders(service)[3] != ["n1"]


def test_the_nodes_use_is_asked_for_again_while_puts_go_on() -> None:
    service = connected("grpc", "grpc")
    service.clock.now += 6
    service.run(heartbeat(service.state, 1.0))
    assert service.count("DescribeCluster") == 0  # nothing was put
    do_put(service, 32 * KIB)
    service.run(heartbeat(service.state, 1.0))
    assert service.count("DescribeCluster") == 1
    service.run(heartbeat(service.state, 1.0))
    assert service.count("DescribeCluster") == 1


def test_a_hung_node_costs_one_put_its_patience_and_later_ones_a_short_probe() -> None:
    service = connected("grpc", "grpc")
    service.first.condition = "hung"
    service.nodes[1].node.used_bytes = ARENA_BYTES // 2  # so that the hung one is preferred
    service.state.nodes_changed([node.node for node in service.nodes], 1)
    paid = [seconds(service, lambda: do_put(service, 32 * KIB)) for _ in range(4)]
    assert paid == [nodes.NODE_SECONDS, 0, 0, 0]
    for pause in (1.0, 2.0, 4.0):
        service.clock.now += pause
        assert [seconds(service, lambda: do_put(service, 8 * KIB)) for _ in range(2)] == [nodes.PROBE_SECONDS, 0]
    assert {names[0] for names in holders(service)} == {"n1"}
    service.first.condition = "well"
    service.clock.now += 8.0
    assert seconds(service, lambda: do_put(service, 32 * KIB)) == 0
    assert holders(service)[-1] == ["n0"]


def test_a_small_put_to_a_node_that_hangs_is_written_to_another() -> None:
    service = connected("grpc", "grpc")
    for _ in range(2):
        do_put(service, 4 * KIB)  # both have a window with room now
    service.first.condition = "hung"
    assert nodes.NODE_SECONDS <= seconds(service, lambda: [do_put(service, 4 * KIB) for _ in range(4)]) < 2.2
    assert [names[0] for names in holders(service)][2:] == ["n1"] * 4


def test_a_short_deadline_leaves_time_for_another_node() -> None:
    service = connected("grpc", "grpc")
    service.first.condition = "hung"
    service.nodes[1].node.used_bytes = ARENA_BYTES // 2
    service.state.nodes_changed([node.node for node in service.nodes], 1)
    assert seconds(service, lambda: do_put(service, 32 * KIB, timeout=1.0)) < 1.0


def test_a_dead_node_is_passed_over_at_once() -> None:
    service = connected("grpc", "grpc")
    service.first.condition = "away"
    assert seconds(service, lambda: [do_put(service, 32 * KIB) for _ in range(4)]) == 0
    assert {names[0] for names in holders(service)} == {"n1"}


def test_the_only_node_is_waited_for_whatever_it_failed() -> None:
    service = connected("grpc")
    service.first.condition = "away"
    original = service.on_describe_cluster

    def comes_back(request: pb.DescribeClusterRequest) -> pb.DescribeClusterReply:
        if service.count("DescribeCluster") == 5:
            service.first.condition = "well"
        return original(request)

    service.on_describe_cluster = comes_back  # type: ignore[method-assign]
    do_put(service, 32 * KIB)
    assert service.count("DescribeCluster") == 5
    assert sum(service.sleeps) <= 0.62  # pauses below 20, 40, 80, 160 and 320 ms


def test_a_put_larger_than_any_node_is_split_over_them() -> None:
    service = connected("grpc", "shm", "grpc")
    ids = do_put(service, 20 * KIB, count=100)  # 2 MB: two nodes of 1 MiB hardly hold it
    assert {names[0] for names in holders(service)} == {"n0", "n1", "n2"}
    assert is_back(service, ids, 20 * KIB)
    assert is_back(service, ids, 20 * KIB)


def test_full_nodes_are_named_with_what_is_free_on_them() -> None:
    service = connected("grpc", "grpc", "grpc")
    service.first.full = True
    do_put(service, 32 * KIB)
    assert holders(service) != [["n0"]]
    service.nodes[1].full = service.nodes[2].full = True
    service.nodes[2].node.used_bytes = 1000
    service.nodes[2].condition = "away"
    with pytest.raises(StorageFull) as caught:
        do_put(service, 32 * KIB)
    for text in ("n0: node n0 has 1048576 bytes free", "n1: ", "n2: 1047576 of 1048576 bytes free, but connection"):
        assert text in caught.value.message


def test_room_that_was_found_in_vain_is_given_back() -> None:
    service = connected("grpc", "grpc")
    service.nodes[1].full = True
    with pytest.raises(StorageFull):
        do_put(service, 20 * KIB, count=60)  # 1.2 MB: the first node alone takes a part of it
    service.run(close_windows(service.state, service.state.windows.take_closing()))
    assert service.first.free_offset == 0


def test_a_required_transport_that_cannot_be_had_is_said_at_once() -> None:
    service = FakeService("grpc")

    def refuse(node: pb.Node, seconds: float) -> Any:
        raise TransportUnavailable("no shm: another host")

    service.state.open_transport = refuse
    with pytest.raises(TransportUnavailable, match="another host"):
        do_put(service, 1 * KIB)


# Paths.


def path(service: FakeService) -> Any:
    deadline = Deadline(5.0, service.clock)
    return service.run(open_path(service.state, service.first.node, deadline))


def test_a_path_that_is_broken_is_opened_anew() -> None:
    service = connected("mooncake")
    first = path(service)
    assert path(service) is first
    first.usable = False
    second = path(service)
    assert second is not first
    assert first.closed
    assert not second.closed


@pytest.mark.parametrize(("kind", "survives"), [("shm", True), ("grpc", True), ("mooncake", False)])
def test_a_path_through_an_engine_ends_with_its_nodes_life(kind: str, survives: bool) -> None:
    service = connected(kind)
    first = path(service)
    service.first.node.incarnation += 1
    service.state.nodes_changed([service.first.node], 2)
    assert first.closed is not survives
    assert (path(service) is first) is survives


@pytest.mark.parametrize(("kind", "survives"), [("shm", True), ("grpc", False), ("mooncake", False)])
def test_a_mapping_outlives_its_nodes_address(kind: str, survives: bool) -> None:
    service = connected(kind)
    first = path(service)
    service.first.node.address = "node:elsewhere"
    service.state.nodes_changed([service.first.node], 2)
    assert first.closed is not survives
    assert (path(service) is first) is survives
    service.first.node.arena += 100
    service.state.nodes_changed([service.first.node], 3)
    assert first.closed


def test_a_better_path_takes_the_place_of_a_fall_back_once_it_can_be_had() -> None:
    service = FakeService("grpc")
    service.first.transport.better_after = 3.0
    service.run(start(service.state, False))
    first = path(service)
    service.clock.now += 2.9
    assert path(service) is first
    service.clock.now += 0.2
    assert path(service) is first  # tried; there was none
    opened = service.first.opened
    assert path(service) is first
    assert service.first.opened == opened  # once
    service.state.paths.better_tried(service.first.node, None)
    service.first.condition = "away"
    service.clock.now += 3.1
    assert path(service) is first  # the try failed
    service.first.condition, service.first.path = "well", "mooncake"
    service.clock.now += 3.1
    better = path(service)
    assert better.name == "mooncake"
    assert not first.closed  # a call that is in progress ends on it
    service.state.paths.close()
    assert first.closed
    assert better.closed


def test_an_engine_that_was_replaced_is_asked_for_and_the_put_goes_on() -> None:
    service = connected("mooncake", "mooncake")
    do_put(service, 32 * KIB)
    for node in service.nodes:
        node.segment = "engine-2"
    assert seconds(service, lambda: [do_put(service, 32 * KIB) for _ in range(2)]) == 0
    segments = [request.segment for name, request in service.calls if name == "Reserve"]
    assert segments == ["engine-1", "engine-1", "engine-2", "engine-1", "engine-2"]
    assert sorted(names[0] for names in holders(service)[1:]) == ["n0", "n1"]


def test_a_window_is_written_only_in_the_way_that_it_was_reserved_for() -> None:
    service = connected("grpc")
    do_put(service, 1 * KIB)
    service.first.path = "mooncake"
    service.state.paths.drop(service.first.node, service.first.transport)
    do_put(service, 1 * KIB)
    assert [request.segment for name, request in service.calls if name == "Reserve"] == ["", "engine-1"]


# One-sided writers and readers, when their session ends.


def lose_session(service: FakeService) -> None:
    service.end_sessions()
    service.run(heartbeat(service.state, 1.0))
    service.run(close_windows(service.state, service.state.windows.take_closing()))


@pytest.mark.parametrize(("kind", "closed"), [("mooncake", True), ("grpc", False), ("shm", False)])
def test_windows_of_a_one_sided_writer_are_closed_when_their_session_ends(kind: str, closed: bool) -> None:
    service = connected(kind)
    do_put(service, 1 * KIB)
    (window,) = service.first.windows.values()
    lose_session(service)
    assert [(each.session, each.generation) for each in service.first.closings] == ([(1, 1)] if closed else [])
    if closed:  # what was committed is not given up: the order that seals it may still be on its way to the node
        assert window[0] < service.first.closings[0].end < window[0] + window[1]


def test_a_window_of_which_nothing_was_committed_is_given_back_whole() -> None:
    service = connected("mooncake")
    service.fault("Commit", LeaseExpired("the session has ended"), before=service.end_sessions)
    do_put(service, 1 * KIB)
    lose_session(service)
    assert [each.session for each in service.first.closings] == [1, 2]
    assert service.first.closings[0].end == 0  # of the window


def test_a_window_with_a_put_under_way_is_closed_behind_it() -> None:
    service = connected("mooncake")
    do_put(service, 1 * KIB)

    def meanwhile() -> None:
        lose_session(service)
        assert service.first.closings == []

    service.fault("Commit", LeaseExpired("the session has ended"), before=meanwhile)
    do_put(service, 1 * KIB)
    service.run(close_windows(service.state, service.state.windows.take_closing()))
    assert [each.session for each in service.first.closings] == [1]


@pytest.mark.parametrize("session_ends", [True, False])
def test_a_window_is_not_closed_while_a_transfer_that_was_given_up_is_under_way(session_ends: bool) -> None:
    service = connected("mooncake")
    service.fault("write", Unavailable("timed out"))
    given_up = service.run(open_path(service.state, service.first.node, service.state.deadline(None)))
    given_up.quiet = False
    do_put(service, 1 * KIB)
    offset, _ = service.first.windows[1]
    service.state.windows.retire()
    if session_ends:
        lose_session(service)
    service.run(close_windows(service.state, service.state.windows.take_closing()))
    assert [each.generation for each in service.first.closings] == [2]  # of the try that succeeded
    given_up.quiet = True
    service.run(close_windows(service.state, service.state.windows.take_closing()))
    assert [each.generation for each in service.first.closings] == [2, 1]
    assert service.first.closings[1].end == offset  # all of it, for nothing in it was committed
    service.run(close_session(service.state))


def test_a_one_sided_read_counts_only_when_the_session_lived_to_its_end() -> None:
    service = connected("mooncake")
    ids = do_put(service, 1 * KIB)
    transport = service.first.transport
    original = transport.bring

    def read(*arguments: Any, **options: Any) -> Any:
        transport.bring = original  # type: ignore[method-assign]
        lose_session(service)
        return original(*arguments, **options)

    transport.bring = read  # type: ignore[method-assign]
    assert is_back(service, ids, 1 * KIB)
    assert service.count("Locate") == 2
    assert service.count("OpenSession") == 2
