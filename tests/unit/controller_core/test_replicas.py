"""Blocks on several nodes: what a commit must bring, and what becomes of replicas whose arena was lost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.model.driver import ARENA, BLOCK_BYTES, NODE, Driver, extents_of, ids
from tqclient.errors import InvalidArgument, LeaseExpired
from tqclient.wire.v1 import common_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, Freed, Sealed

OTHER, OTHER_ARENA = "node-1", 0xB0B
NEW_ARENA = 0xC0FFEE


class TwoNodes(Driver):
    """A driver with two nodes, which believes every order."""

    def __init__(self) -> None:
        self.held: set[tuple[Any, ...]] = set()
        super().__init__()
        self.attach(OTHER, OTHER_ARENA)

    def attach(self, name: str, arena: int) -> None:
        node = pb.Node(name=name, address="127.0.0.1:2", arena=arena)
        self.ok("attach_node", pb.NodeHello(node=node))

    def believe(self, effects: Sequence[Any]) -> list[tuple[int, ...]]:
        for effect in effects:
            if isinstance(effect, Sealed | Freed):
                extents = {(effect.node, effect.arena, *extent) for extent in effect.extents.tolist()}
                if isinstance(effect, Sealed):
                    assert not extents & self.held
                    self.held |= extents
                else:
                    assert extents <= self.held
                    self.held -= extents
        return []

    def twice(self, partition: int, rows: int = 2, **options: Any) -> pb.CommitRequest:
        """Builds a commit with a replica of each block on either node."""
        request = self.commit(partition, rows, **options)
        for block in request.blocks:
            block.extents.append(common_pb2.Extent(node=OTHER, arena=OTHER_ARENA))
            for name in ("offset", "length", "generation"):
                setattr(block.extents[1], name, getattr(block.extents[0], name))
        return request

    def nodes_hold(self) -> dict[str, int]:
        return {node: sum(each[0] == node for each in self.held) for node in (NODE, OTHER)}


@pytest.fixture
def two() -> TwoNodes:
    return TwoNodes()


def test_both_replicas_are_sealed_and_freed(two: TwoNodes) -> None:
    session = two.open()
    p = two.partition(session, replicas=2)
    two.ok("commit", two.twice(p, blocks=[1, 1]), session=session)
    assert two.nodes_hold() == {NODE: 2, OTHER: 2}
    assert two.core.describe_partition(p).bytes == 4 * BLOCK_BYTES  # of both
    for name, arena in ((NODE, ARENA), (OTHER, OTHER_ARENA)):
        assert len(extents_of(two.core, name, arena)) == 2
    two.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(1, 2), pin=7), two.now)
    records = [two.core.block(block_id) for block_id in (1, 2)]
    assert [[e.node for e in record.extents] for record in records if record] == [[NODE, OTHER]] * 2
    two.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert two.nodes_hold() == {NODE: 2, OTHER: 2}  # the pin
    two.ok("close_session", pb.CloseSessionRequest(), session=session)
    assert two.nodes_hold() == {NODE: 1, OTHER: 1}
    two.core.check_invariants()


def _spoilt() -> list[tuple[str, Any]]:
    def second(**values: Any) -> Any:
        return lambda request: [setattr(request.blocks[0].extents[1], name, value) for name, value in values.items()]

    return [
        ("one replica", lambda r: r.blocks[0].extents.pop()),
        ("three replicas", lambda r: r.blocks[0].extents.append(r.blocks[0].extents[0])),
        ("one node twice", second(node=NODE, arena=ARENA, offset=1 << 20)),
        ("one arena twice", second(arena=ARENA, offset=1 << 20)),
        ("the nodes exchanged", second(node="node-2")),
        ("unequal lengths", second(length=BLOCK_BYTES + 1)),
        ("an arena that no node ever had", second(arena=NEW_ARENA)),
    ]


@pytest.mark.parametrize(("what", "spoil"), _spoilt(), ids=[what for what, _ in _spoilt()])
def test_replicas_that_are_none_are_refused(two: TwoNodes, what: str, spoil: Any) -> None:
    session = two.open()
    request = two.twice(two.partition(session, replicas=2))
    spoil(request)
    outcome = two.send("commit", request, session=session)
    assert type(outcome.error) is InvalidArgument
    assert two.nodes_hold() == {NODE: 0, OTHER: 0}


def test_a_window_of_an_arena_that_was_replaced_must_be_reserved_anew(two: TwoNodes) -> None:
    session = two.open()
    p = two.partition(session, replicas=2)
    request = two.twice(p)
    two.attach(OTHER, NEW_ARENA)
    outcome = two.send("commit", request, session=session)
    assert type(outcome.error) is LeaseExpired
    assert "replaced" in str(outcome.error)
    request.blocks[0].extents[1].arena = NEW_ARENA
    two.ok("commit", request, session=session)
    assert two.core.describe_partition(p).samples == 2


def test_a_lost_arena_takes_nothing_from_the_counts_and_its_extents_may_still_be_freed(two: TwoNodes) -> None:
    session = two.open()
    p = two.partition(session, replicas=2)
    two.ok("commit", two.twice(p), session=session)
    two.attach(OTHER, NEW_ARENA)
    assert not extents_of(two.core, OTHER, NEW_ARENA)  # the new arena owes nothing
    assert two.core.describe_partition(p).samples == 2
    restored = Core.restore(two.core.snapshot(), two.now)
    assert extents_of(restored, NODE, ARENA) == extents_of(two.core, NODE, ARENA)
    two.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1, 2)), session=session)
    assert two.nodes_hold() == {NODE: 0, OTHER: 0}
    two.core.check_invariants()


@pytest.mark.parametrize(("asked", "granted"), [(0, 1), (1, 1), (3, 3)])
def test_how_many_replicas_there_may_be(two: TwoNodes, asked: int, granted: int) -> None:
    p = two.partition(two.open(), replicas=asked)
    assert two.core.describe_partition(p).policy.replicas == granted
