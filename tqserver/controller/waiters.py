"""Everybody who waits on the server, and who is looked at again when something changes. `lines` has the order."""

from __future__ import annotations

from collections.abc import Callable

from tqclient.errors import PartitionNotFound, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.lines import ClaimLine, Coming, Gauge, Line, RoomLine, Served, Waiter

Schedule = Callable[[float, Callable[[], None]], Callable[[], object]]
"""(seconds, callback) → what cancels it."""


class Waiters:
    """All lines.

    Args:
        gauge: the core.
        schedule: calls something later.

    Attributes:
        claims: how many claims wait.
    """

    def __init__(self, gauge: Gauge, schedule: Schedule) -> None:
        self._gauge = gauge
        self._schedule = schedule
        self._claims: dict[int, dict[str, ClaimLine]] = {}
        self._room: dict[int, RoomLine] = {}
        self._dirty: dict[Line, bool] = {}  # whether nothing changed for it but how many samples are ready

    @property
    def claims(self) -> int:
        """How many claims wait."""
        return sum(len(line) for lines in self._claims.values() for line in lines.values())

    def _line(self, waiter: Waiter) -> Line:
        request = waiter.request
        if isinstance(request, pb.ClaimRequest):
            lines = self._claims.setdefault(request.partition_id, {})
            return lines.setdefault(request.consumer, ClaimLine(self._gauge))
        return self._room.setdefault(request.partition_id, RoomLine(self._gauge))

    def _drop_if_idle(self, waiter: Waiter, line: Line) -> None:
        request = waiter.request
        if not line.idle:
            return
        if isinstance(line, ClaimLine):
            lines = self._claims.get(request.partition_id, {})
            lines.pop(request.consumer, None)
            if not lines:
                self._claims.pop(request.partition_id, None)
        else:
            self._room.pop(request.partition_id, None)

    def wait(self, waiter: Waiter, seconds: float) -> None:
        """Puts a call in its line; it is granted or refused at once if it can be.

        Args:
            waiter: a new one, or one that was granted, settled, and found its grant void.
            seconds: after which it is refused; 0 or less does not wait at all.
        """
        line = self._line(waiter)
        try:
            line.add(waiter)
        except Exception as error:
            self._answer(line, [(waiter, waiter.refusal(error))])
            return
        self._answer(line, line.serve(newcomer=waiter))
        if waiter not in line:
            return  # answered
        if seconds <= 0:
            self._expire(waiter)
            return
        crowded = line.crowded(waiter)
        if crowded is not None:
            line.remove(waiter)
            waiter.refuse(crowded)
            return
        waiter.cancel_deadline = self._schedule(seconds, lambda: self._expire(waiter))

    def _expire(self, waiter: Waiter) -> None:
        line = self._line(waiter)
        if line.remove(waiter):
            waiter.refuse(line.timeout(waiter))
            self._dirty[line] = False  # whoever stood behind it may be first now
            self.serve()
        self._drop_if_idle(waiter, line)

    def withdraw(self, waiter: Waiter) -> bool:
        """The caller is gone; says whether it was still waiting."""
        line = self._line(waiter)
        waiting = line.remove(waiter)
        waiter.cancel_deadline()
        if waiting:
            self._dirty[line] = False  # whoever stands behind it may be first now
            self.serve()
        self._drop_if_idle(waiter, line)
        return waiting

    def settled(self, waiter: Waiter) -> None:
        """What was granted took effect or failed; `serve` looks at its line again."""
        line = self._line(waiter)
        line.settled(waiter)
        self._dirty[line] = False
        self._drop_if_idle(waiter, line)

    def readiness_changed(self, partition_id: int, *, by_count: bool = False) -> None:
        """Claims on this partition may have become grantable: `serve` looks at them.

        Args:
            partition_id: of the partition.
            by_count: nothing changed but how many samples are ready.
        """
        for line in self._claims.get(partition_id, {}).values():
            self._dirty[line] = by_count and self._dirty.get(line, True)

    def coming(self, request: pb.CommitRequest) -> None:
        """A put went to the journal: grants the claims that it seems to meet, for their records to follow its own."""
        coming = Coming.of(request)
        for line in list(self._claims.get(request.partition_id, {}).values()):
            self._answer(line, line.serve(coming=coming), request)

    def session_ended(self) -> None:
        """Whoever waits for a session that is gone is refused, and holds up nobody: `serve` looks at all lines."""
        for lines in self._claims.values():
            self._dirty.update(dict.fromkeys(lines.values(), False))
        self._dirty.update(dict.fromkeys(self._room.values(), False))

    def room_changed(self, partition_id: int) -> None:
        """Puts and permits of this partition may fit now: `serve` looks at them."""
        if partition_id in self._room:
            self._dirty[self._room[partition_id]] = False

    def gone(self, partition_id: int, name: str) -> None:
        """A partition was deleted; whoever waits on it is refused."""
        self._refuse_all(
            [*self._claims.get(partition_id, {}).values(), *filter(None, [self._room.get(partition_id)])],
            PartitionNotFound(f"partition {name!r} was deleted meanwhile"),
        )

    def close(self, error: TQError) -> None:
        """Refuses everybody."""
        lines: list[Line] = [line for lines in self._claims.values() for line in lines.values()]
        self._refuse_all([*lines, *self._room.values()], error)

    def _refuse_all(self, lines: list[Line], error: TQError) -> None:
        for line in lines:
            waiters = list(line)
            for waiter in waiters:
                line.remove(waiter)
            self._answer(line, [(waiter, error) for waiter in waiters])

    def serve(self) -> None:
        """Goes through the lines in which something changed."""
        while self._dirty:
            line, by_count = self._dirty.popitem()
            self._answer(line, line.serve(by_count=by_count))

    def _answer(self, line: Line, served: Served, coming: pb.CommitRequest | None = None) -> None:
        for waiter, error in served:
            waiter.cancel_deadline()
            if error is None:
                waiter.grant()
                if waiter.alone:
                    waiter.preview(coming)
            else:
                waiter.refuse(error)
                self._drop_if_idle(waiter, line)
