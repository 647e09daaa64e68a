"""The open paths of one client to its storage nodes. Safe to use from many threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tqclient.wire.v1 import controller_pb2

if TYPE_CHECKING:
    from tqclient.transport.base import NodeTransport

NEVER: Final = float("inf")


@dataclass(slots=True)
class _Path:
    """One open path.

    Attributes:
        transport: that it is.
        address: of the node when it was opened.
        incarnation: of the node when it was opened.
        better_at: when a better one is worth a try.
        former: the path that this one took the place of: calls that were in progress end on it.
    """

    transport: NodeTransport
    address: str
    incarnation: int
    better_at: float = NEVER
    former: NodeTransport | None = None

    def serves(self, node: controller_pb2.Node) -> bool:
        """Whether it still leads to the node as the controller describes it. An engine ends with its node's life.

        A mapping has no address: with it would go the locks of sessions that live, and these would be taken for dead.
        """
        transport = self.transport
        if transport.arena != node.arena or not transport.usable:
            return False
        if transport.mapped:
            return True
        return self.address == node.address and (not transport.segment or self.incarnation == node.incarnation)

    @property
    def transports(self) -> list[NodeTransport]:
        return [self.transport] if self.former is None else [self.transport, self.former]

    def close(self) -> None:
        for transport in self.transports:
            transport.close()


class Paths:
    """By the nodes' arenas.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[int, _Path] = {}
        self._refusals: dict[int, str] = {}
        self._closed = False

    def get(self, node: controller_pb2.Node) -> NodeTransport | None:
        """Returns the path to a node; None when there is none that still leads there."""
        path = self._open.get(node.arena)
        return path.transport if path is not None and path.serves(node) else None

    def mapped(self, node: controller_pb2.Node) -> bool:
        """Whether the node is known to be on this host."""
        path = self._open.get(node.arena)
        return path is not None and path.transport.mapped

    def opened(self, node: controller_pb2.Node, transport: NodeTransport) -> NodeTransport:
        """Books a path; returns the one to use, which is another when two threads opened one.

        One that comes after `close` is closed as well: whoever was about to use it is told by the transport.
        """
        fresh = _Path(transport, node.address, node.incarnation, self._better_at(transport))
        with self._lock:
            former = self._open.get(node.arena)
            kept = former if former is not None and former.serves(node) else fresh
            closing = fresh if kept is not fresh or self._closed else former
            if not self._closed:
                self._open[node.arena] = kept
            self._refusals.pop(node.arena, None)
        if closing is not None:
            closing.close()
        return kept.transport

    def refused(self, node: controller_pb2.Node, reason: str) -> None:
        """Notes why there is no path to a node, for `describe`."""
        self._refusals[node.arena] = reason

    def refusal(self, node: controller_pb2.Node) -> str:
        """Returns why there is no path to a node; empty when none was tried."""
        return self._refusals.get(node.arena, "")

    def take_better_due(self, node: controller_pb2.Node) -> bool:
        """Whether a better path is worth a try now; true for one caller, who reports with `better_tried`."""
        path = self._open.get(node.arena)
        if path is None or path.better_at > self._clock():
            return False
        with self._lock:
            due, path.better_at = path.better_at <= self._clock(), NEVER
        return due

    def better_tried(self, node: controller_pb2.Node, found: NodeTransport | None) -> None:
        """Books the outcome of that try.

        Args:
            node: that it was.
            found: what could be opened, if anything. It takes the old path's place when it is of another kind, and is
                closed when all of them were.
        """
        closing: NodeTransport | None = None
        with self._lock:
            path = self._open.get(node.arena)
            if self._closed:
                closing = found
            elif path is not None and (found is None or found.name == path.transport.name):
                path.better_at = self._better_at(found or path.transport)
                closing = found
            elif found is not None:
                former, closing = (path.transport, path.former) if path is not None else (None, None)
                self._open[node.arena] = _Path(found, node.address, node.incarnation, self._better_at(found), former)
        if closing is not None:
            closing.close()

    def _better_at(self, transport: NodeTransport) -> float:
        return NEVER if transport.better_after is None else self._clock() + transport.better_after

    def drop(self, node: controller_pb2.Node, transport: NodeTransport) -> None:
        """Closes a path, to be opened anew; without effect when it was replaced already."""
        with self._lock:
            path = self._open.get(node.arena)
            if path is None or path.transport is not transport:
                return
            del self._open[node.arena]
        path.close()

    def nodes_changed(self, nodes: Iterable[controller_pb2.Node]) -> None:
        """Closes the paths to nodes that changed so that these lead nowhere."""
        known = {node.arena: node for node in nodes}
        with self._lock:
            gone = [arena for arena, path in self._open.items() if arena not in known or not path.serves(known[arena])]
            stale = [self._open.pop(arena) for arena in gone]
        for path in stale:
            path.close()

    def session_ended(self, session: int) -> None:
        """Ends a session's writes on every path."""
        with self._lock:
            paths = list(self._open.values())
        for path in paths:
            for transport in path.transports:
                transport.session_closed(session)

    def close(self) -> None:
        """Closes every path, and each one that is opened from now on."""
        with self._lock:
            self._closed = True
            paths = list(self._open.values())
            self._open.clear()
        for path in paths:
            path.close()
