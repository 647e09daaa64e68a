"""Random histories over nodes that fail: what was put stays readable, and no extent is ever written over."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.unit.client.fakes import FakeService
from tqclient.arguments import RowArguments
from tqclient.errors import LeaseExpired, TQError, Unavailable
from tqclient.operations import nodes
from tqclient.operations import put as operation
from tqclient.operations.cluster import start
from tqclient.operations.put import put
from tqclient.operations.read import get
from tqclient.operations.sessions import close_windows, heartbeat
from tqclient.windows import aligned
from tqclient.wire.v1 import controller_pb2 as pb

KIB = 1024
STEPS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([100, 3 * KIB, 20 * KIB]), st.integers(1, 12)),
    st.tuples(st.just("turn"), st.integers(0, 2), st.sampled_from(["well", "well", "away", "hung"])),
    st.tuples(st.just("fill"), st.integers(0, 2), st.booleans()),
    st.tuples(st.just("lose"), st.integers(0, 2), st.none()),
    st.tuples(st.just("session"), st.none(), st.none()),
    st.tuples(st.just("beat"), st.floats(0, 5), st.none()),
    st.tuples(st.just("fail"), st.sampled_from(["write", "lost", "refused", "displaced"]), st.none()),
)


class History:
    """A client, three nodes, and what was put."""

    def __init__(self, paths: tuple[str, ...], replicas: int) -> None:
        self.service = FakeService(*paths, replicas=replicas)
        self.ref = self.service.ref()
        self.rows: dict[int, torch.Tensor] = {}
        self.sealed: dict[int, list[tuple[int, int]]] = defaultdict(list)  # arena → ranges
        self.original = self.service.on_commit
        self.service.on_commit = self.commit  # type: ignore[method-assign]
        self.service.run(start(self.service.state, False))

    def commit(self, request: pb.CommitRequest) -> pb.CommitReply:
        arenas = {node.node.name: node.node.arena for node in self.service.nodes}
        extents = [extent for block in request.blocks for extent in block.extents]
        if any(arenas[extent.node] != extent.arena for extent in extents):
            raise LeaseExpired("the arena was replaced")
        for extent in extents:
            mine = extent.offset, extent.offset + aligned(extent.length)
            assert all(mine[1] <= begin or end <= mine[0] for begin, end in self.sealed[extent.arena])
            self.sealed[extent.arena].append(mine)
        return self.original(request)

    def put(self, size: int, count: int) -> None:
        number = len(self.rows)
        rows = [torch.full((size,), (number + row) % 251, dtype=torch.uint8) for row in range(count)]
        try:
            ids = self.service.run(put(self.service.state, self.ref, {"x": rows}, RowArguments(), 6.0))
        except TQError:
            return
        self.rows.update(zip(ids.tolist(), rows, strict=True))

    def fail(self, how: str) -> None:
        if how == "write":
            self.service.fault("write", Unavailable("broken"))
        elif how == "lost":
            self.service.fault("Commit", Unavailable("lost"), reply_lost=True)
        elif how == "refused":
            self.service.fault("Commit", LeaseExpired("ended"), before=self.service.end_sessions)
        else:
            self.service.fault("Commit", LeaseExpired("a node is not attached"))

    def lose(self, index: int) -> None:
        node = self.service.nodes[index]
        node.lose_arena()
        self.service.topology_version += 1

    def beat(self, seconds: float) -> None:
        self.service.clock.now += seconds
        state = self.service.state
        try:
            self.service.run(heartbeat(state, 1.0))
        except Unavailable:
            return
        state.windows.retire(idle_since=state.clock() - 2)
        self.service.run(close_windows(state, state.windows.take_closing(), timeout=0.5))

    def step(self, what: str, first: Any, second: Any) -> None:
        if what == "put":
            self.put(first, second)
        elif what == "turn":
            self.service.nodes[first].condition = second
        elif what == "fill":
            self.service.nodes[first].full = second
        elif what == "lose":
            self.lose(first)
        elif what == "session":
            self.service.end_sessions()
        elif what == "beat":
            self.beat(first)
        else:
            self.fail(first)

    def survivors(self) -> list[int]:
        """The samples of which a replica is left."""
        arenas = {node.node.arena for node in self.service.nodes}
        return [
            each
            for each in self.rows
            if any(
                extent.arena in arenas
                for extent in self.service.blocks[self.service.samples[each].fields["x"][0]].extents
            )
        ]

    def check(self) -> None:
        self.service.faults.clear()
        for node in self.service.nodes:
            node.condition = "well"
        for each in self.survivors():
            delivery = self.service.run(get(self.service.state, self.ref, [each], None, None, True, 60.0))
            assert torch.equal(delivery.columns["x"].list()[0], self.rows[each])


@example(  # the second node is reached over a path opened anew, with a window that was reserved over the former one
    paths=("shm", "mooncake", "shm"),
    replicas=3,
    steps=[("put", 100, 1), ("turn", 1, "away"), ("put", 20 * KIB, 1), ("turn", 1, "well"), ("put", 100, 1)],
)
@given(
    paths=st.tuples(*[st.sampled_from(["shm", "grpc", "mooncake"])] * 3),
    replicas=st.integers(1, 3),
    steps=st.lists(STEPS, min_size=5, max_size=40),
)
@settings(max_examples=150)
def test_histories(paths: tuple[str, ...], replicas: int, steps: list[tuple[str, Any, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "WHOLE_MIN", 16 * KIB)
        patch.setattr(operation, "BLOCK_BYTES_APART", 64 * KIB)
        patch.setattr(operation, "BLOCK_BYTES_SMALL", 16 * KIB)
        history = History(paths, replicas)
        for step in steps:
            history.step(*step)
        history.check()
