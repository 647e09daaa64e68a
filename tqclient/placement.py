"""Which storage nodes a client turns to first: its own host's, then the emptiest; not one that just failed it.

Nothing here talks to anybody.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from tqclient.errors import StorageFull, TQError
from tqclient.wire.v1 import controller_pb2

ASIDE_FIRST: Final = 1.0
ASIDE_MAX: Final = 30.0
"""Seconds that a node which failed is left alone, the first time and at most: not every call must pay its timeout."""
REPORT_LAG: Final = 1.0
"""Seconds after which the controller surely counts what was placed on a node; nodes report every fifth of one."""


@dataclass(slots=True)
class _Failure:
    until: float
    seconds: float


class Placement:
    """What one client knows of its nodes' condition, beyond what the controller told. Its threads share it.

    Args:
        clock: monotonic seconds.
        tie: orders nodes that are equally good, differently for each client: many that start at once must not all turn
            to the same node.
    """

    def __init__(self, clock: Callable[[], float], tie: Callable[[], float]) -> None:
        self._clock = clock
        self._tie = tie
        self._lock = threading.RLock()  # an operation that is finalized inside a holder gives up what it placed
        self._ties: dict[str, float] = {}
        # Bytes by node that were placed in this span of `REPORT_LAG`, in the one before, and earlier than that.
        self._placed: list[Counter[str]] = [Counter(), Counter(), Counter()]
        self._span_ends = clock() + REPORT_LAG
        self._failures: dict[str, _Failure] = {}

    @property
    def placed_since_report(self) -> bool:
        """Whether this client placed anything that the last report does not count."""
        with self._lock:
            return any(any(span.values()) for span in self._placed)

    def reported(self) -> None:
        """The controller told the nodes' use. What was placed a moment ago may not be in it, and counts on for a while.

        If it is in it, it counts twice, on all nodes alike. To forget it would put the next ones on the same node.
        """
        with self._lock:
            self._move_on()
            self._placed[2].clear()

    def placed(self, node: str, size_bytes: int) -> None:
        """Counts bytes that were placed on a node; negative ones were given up again."""
        with self._lock:
            self._move_on()
            self._placed[0][node] += size_bytes

    def _move_on(self) -> None:
        """Begins another span if this one is over."""
        now = self._clock()
        if now < self._span_ends:
            return
        spans = 1 if now < self._span_ends + REPORT_LAG else 2
        for _ in range(spans):
            this, before, earlier = self._placed
            earlier.update(before)  # adds
            self._placed = [Counter(), this, earlier]
        self._span_ends = now + REPORT_LAG

    def free_bytes(self, node: controller_pb2.Node) -> int:
        """Returns what is free on a node as far as this client knows."""
        placed = sum(span[node.name] for span in self._placed)
        return max(0, node.capacity_bytes - node.used_bytes - placed)

    def failed(self, node: str) -> None:
        """Sets a node aside, for longer each time until it answers."""
        with self._lock:
            former = self._failures.get(node)
            if former is not None and former.until > self._clock():
                return  # several calls failed together: that is one failure
            seconds = ASIDE_FIRST if former is None else min(2 * former.seconds, ASIDE_MAX)
            self._failures[node] = _Failure(self._clock() + seconds, seconds)

    def answered(self, node: str) -> None:
        """The node is well."""
        with self._lock:
            self._failures.pop(node, None)

    def aside(self, node: str) -> bool:
        """Whether a node is to be left alone while another will do."""
        failure = self._failures.get(node)
        return failure is not None and failure.until > self._clock()

    def suspect(self, node: str) -> bool:
        """Whether the node has not answered since it failed."""
        return node in self._failures

    def order(
        self, nodes: Iterable[controller_pb2.Node], mapped: Callable[[controller_pb2.Node], bool]
    ) -> list[controller_pb2.Node]:
        """Sorts nodes: well ones before those set aside, then this host's, then the emptiest first."""

        def rank(node: controller_pb2.Node) -> tuple[bool, bool, int, float]:
            tie = self._ties.setdefault(node.name, self._tie())
            return (self.aside(node.name), not mapped(node), -self.free_bytes(node), tie)

        return sorted(nodes, key=rank)

    def to_text(self, nodes: Mapping[str, controller_pb2.Node], told: Mapping[str, TQError]) -> str:
        """Says of each node how many bytes are free on it, and how it refused a call; for error messages."""
        parts = []
        for name, node in sorted(nodes.items()):
            error = told.get(name)
            if isinstance(error, StorageFull):  # it knows better than the controller
                parts.append(f"{name}: {error.message}")
                continue
            state = f"{max(0, node.capacity_bytes - node.used_bytes)} of {node.capacity_bytes} bytes free"
            if not node.attached:
                state = "not attached to the controller"
            parts.append(f"{name}: {state}" if error is None else f"{name}: {state}, but {error.message}")
        return "; ".join(parts) or "none is known"
