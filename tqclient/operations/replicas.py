"""Choosing, for each block of a read, the replica that it is read from, and another one when that fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tqclient.errors import CorruptBlock, SampleNotFound, TQError, TransportUnavailable, Unavailable
from tqclient.operations.effects import Deadline, Operation
from tqclient.operations.nodes import open_path, probe, turn_seconds
from tqclient.state import ClientState
from tqclient.transport.base import NodeTransport
from tqclient.wire.v1 import common_pb2, controller_pb2


class ExtentGone(SampleNotFound):
    """A storage node does not have the bytes (any more) that the controller had named."""


class ReplicaFailed(Exception):
    """Blocks could not be read from the replicas that were chosen.

    Attributes:
        block_ids: of the blocks.
        error: what to tell the user when there is no other replica.
    """

    def __init__(self, block_ids: Iterable[int], error: TQError) -> None:
        super().__init__(error.message)
        self.block_ids = list(block_ids)
        self.error = error


@dataclass(frozen=True, slots=True)
class Path:
    """How one block is read.

    Attributes:
        transport: to the node.
        extent: there.
        node: its name.
        spare: whether there is another replica, so that this one need not be waited for to the end.
    """

    transport: NodeTransport
    extent: common_pb2.Extent
    node: str
    spare: bool

    def seconds(self, deadline: Deadline, size_bytes: int) -> float:
        """Returns how long reading so many bytes may take."""
        return turn_seconds(deadline, size_bytes) if self.spare else deadline.remaining()


class Replicas:
    """The replicas of the blocks of one read, and which of them have failed it.

    Args:
        state: of the client.
        blocks: by id.
    """

    def __init__(self, state: ClientState, blocks: Mapping[int, common_pb2.Block]) -> None:
        self._state = state
        self._blocks = blocks
        self._failures: dict[int, dict[int, TQError]] = {block_id: {} for block_id in blocks}
        self._paths: dict[int, Path] = {}
        self._refreshed = False

    def failed(self, failure: ReplicaFailed) -> None:
        """Notes that the replicas in use of some blocks failed."""
        for block_id in failure.block_ids:
            path = self._paths.pop(block_id)
            self._failures[block_id][path.extent.arena] = failure.error
            if isinstance(failure.error, Unavailable):
                self._state.placement.failed(path.node)

    def forgive(self) -> None:
        """The nodes were asked for anew: those that were away may be back."""
        self._refreshed = True
        for failures in self._failures.values():
            for arena in [arena for arena, error in failures.items() if isinstance(error, Unavailable)]:
                del failures[arena]

    def choose(self, deadline: Deadline) -> Operation[dict[int, Path]]:
        """Returns the path of each block.

        Raises:
            Unavailable: the replicas of one are away for now.
            CorruptBlock, ExtentGone, TransportUnavailable: none of them can be read.
        """
        for block_id in self._blocks:
            if block_id not in self._paths:
                self._paths[block_id] = yield from self._choose_one(block_id, deadline)
        return dict(self._paths)

    def _choose_one(self, block_id: int, deadline: Deadline) -> Operation[Path]:
        failures = self._failures[block_id]
        known: list[tuple[common_pb2.Extent, controller_pb2.Node]] = []
        for extent in self._blocks[block_id].extents:
            node = self._state.node_of(extent.arena)
            if extent.arena in failures:
                continue
            if node is None:
                failures[extent.arena] = self._lost(extent)
            else:
                known.append((extent, node))
        if len(known) > 1:
            known.sort(key=lambda each: self._rank(each[1]))
        for index, (extent, node) in enumerate(known):
            spare = index + 1 < len(known)
            try:
                transport = yield from self._open(node, spare, deadline)
                return Path(transport, extent, node.name, spare)
            except (Unavailable, TransportUnavailable) as error:
                failures[extent.arena] = error
        raise self._outcome(block_id)

    def _lost(self, extent: common_pb2.Extent) -> TQError:
        where = f"arena {extent.arena:016x} of storage node {extent.node!r}"
        present = self._state.nodes.get(extent.node)
        if present is not None and present.attached and self._refreshed:
            return ExtentGone(f"{where} is lost: the node has another arena now, {present.arena:016x}")
        return Unavailable(f"{where} is not known now")

    def _rank(self, node: controller_pb2.Node) -> tuple[bool, bool, bool, float]:
        state = self._state
        transport = state.paths.get(node)
        near = transport is not None and transport.mapped
        return (not near, state.placement.aside(node.name), not node.attached, state.rng.random())

    def _open(self, node: controller_pb2.Node, spare: bool, deadline: Deadline) -> Operation[NodeTransport]:
        state = self._state
        transport = yield from open_path(state, node, deadline)
        if spare and not transport.mapped and state.placement.suspect(node.name):
            try:
                yield from probe(node, deadline)
            except Unavailable:
                state.placement.failed(node.name)
                raise
            state.placement.answered(node.name)
        return transport

    def _outcome(self, block_id: int) -> TQError:
        """What to say of a block none of whose replicas could be read: first of all, whether that may change."""
        failures = list(self._failures[block_id].values())
        for kind in (Unavailable, CorruptBlock, ExtentGone, TransportUnavailable):
            for failure in failures:
                if isinstance(failure, kind):
                    return failure
        return CorruptBlock(f"block {block_id} has no extent")
