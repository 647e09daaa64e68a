"""Calls that wait on the server: claims for samples, commits for room. A waiting call is an entry in a line, no task.

Claims stand in one line per (partition, consumer). When something changed, those that can be met are granted, from the
front of the line. A granted claim takes effect only once it is journaled; until then its rows are promised, so that no
more claims are granted than there are rows for, however many one put wakes. Claims of one shape (fields, batch size)
can be met or not alike, so a change costs as much as there are shapes in the line, not as there are calls.

Commits stand in one line per partition, strictly in order: a large put is not overtaken for ever by small ones. While
some wait they are let in one at a time, because each changes how much room the next one finds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final, Protocol

from tqclient.errors import BackpressureTimeout, ClaimTimeout, PartitionNotFound, Sealed, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Readiness

GRANTS_MAX: Final = 64
"""Claims of one line that are granted in one go; the next ones follow as soon as one of these took effect."""

Shape = tuple[Any, ...]
Schedule = Callable[[float, Callable[[], None]], Callable[[], object]]
"""(seconds, callback) → what cancels it."""


class Gauge(Protocol):
    """What the core knows of waiting requests."""

    def readiness(self, request: pb.ClaimRequest) -> Readiness:
        """Whether the claim could be granted now, later, or never."""

    def ready_count(self, request: pb.ClaimRequest) -> int:
        """How many samples are ready for its consumer and fields."""

    def needs_room(self, request: pb.CommitRequest) -> bool:
        """Whether the put brings new samples to a partition with limits."""

    def has_room(self, request: pb.CommitRequest) -> bool:
        """Whether the partition has room for the put."""


class Waiter:
    """A call that waits for its turn.

    Args:
        request: a ClaimRequest or a CommitRequest.
        grant: called when it is its turn; whoever is granted says `settled` once that took effect, or failed to.
        refuse: called when its turn will not come.
    """

    _tickets = count(1)

    def __init__(self, request: Any, grant: Callable[[], None], refuse: Callable[[TQError], None]) -> None:
        self.request = request
        self.grant = grant
        self.refuse = refuse
        self.ticket = next(self._tickets)
        self.shape: Shape = ()
        self.promised = 0
        self.cancel_deadline: Callable[[], object] = lambda: None


Served = list[tuple[Waiter, TQError | None]]
"""Who left the line, and what for it is refused."""


class Line(ABC):
    """Those who wait for one thing, by shape, each shape in the order of its tickets.

    Attributes:
        promised: what was granted and has not taken effect yet.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._shapes: dict[Shape, dict[Waiter, None]] = {}
        self.promised = 0

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for queue in self._shapes.values() for waiter in queue)

    def __len__(self) -> int:
        return sum(map(len, self._shapes.values()))

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._shapes.get(waiter.shape, ())

    @property
    def idle(self) -> bool:
        """Nobody waits, and nothing is promised."""
        return not self._shapes and not self.promised

    @abstractmethod
    def shape_of(self, request: Any) -> Shape:
        """Returns what a request shares with those that can be met when it can."""

    @abstractmethod
    def serve(self, newcomer: Waiter | None = None) -> Served:
        """Takes out those whose turn it is; with a newcomer, only its own shape can have changed."""

    @abstractmethod
    def timeout(self, waiter: Waiter) -> TQError:
        """Returns what to say to one who waited in vain."""

    def add(self, waiter: Waiter) -> None:
        """Puts one in its place: at the end, or further up if it was granted and came back."""
        shape = waiter.shape = self.shape_of(waiter.request)
        queue = self._shapes.setdefault(shape, {})
        came_back = bool(queue) and next(reversed(queue)).ticket > waiter.ticket
        queue[waiter] = None
        if came_back:
            self._shapes[shape] = dict.fromkeys(sorted(queue, key=lambda each: each.ticket))

    def remove(self, waiter: Waiter) -> bool:
        """Takes one out; says whether it was there."""
        queue = self._shapes.get(waiter.shape, {})
        if waiter not in queue:
            return False
        del queue[waiter]
        if not queue:
            del self._shapes[waiter.shape]
        return True


class ClaimLine(Line):
    """The claims of one consumer of one partition."""

    def shape_of(self, request: Any) -> Shape:
        """Fields, batch size and sampler."""
        return tuple(request.fields), request.batch_size, request.sampler.SerializeToString(deterministic=True)

    def serve(self, newcomer: Waiter | None = None) -> Served:
        """Grants, in the order of their tickets, the claims that can be met."""
        served: Served = []
        shapes = list(self._shapes) if newcomer is None else [newcomer.shape]
        counts: dict[Any, int] = {}
        grants = 0
        while shapes and grants < GRANTS_MAX:
            first: Waiter | None = None
            for shape in tuple(shapes):
                head = self._head(shape, counts, served)
                if head is None:
                    shapes.remove(shape)  # promises only grow in here: not this time
                elif first is None or head.ticket < first.ticket:
                    first = head
            if first is None:
                break
            first.promised = min(first.request.batch_size, counts[tuple(first.request.fields)])
            self.promised += first.promised
            served.append((first, None))
            self.remove(first)
            grants += 1
        return served

    def _head(self, shape: Shape, counts: dict[Any, int], served: Served) -> Waiter | None:
        """Returns the first claim of a shape if it can be met; takes out those before it that never will be."""
        while shape in self._shapes:
            head = next(iter(self._shapes[shape]))
            try:
                verdict = self._verdict(head.request, counts)
            except TQError as error:  # of this one alone: its session ended, say
                served.append((head, error))
                self.remove(head)
                continue
            if verdict is Readiness.DRAINED:
                sealed = Sealed(
                    f"partition {head.request.partition_id} is sealed, and consumer {head.request.consumer!r} "
                    "has had all of it"
                )
                served.extend((waiter, sealed) for waiter in self._shapes.pop(shape))
            return head if verdict is Readiness.READY else None
        return None

    def _verdict(self, request: pb.ClaimRequest, counts: dict[Any, int]) -> Readiness:
        fields = tuple(request.fields)
        if fields not in counts:
            counts[fields] = self._gauge.ready_count(request)
        if not self.promised:
            return self._gauge.readiness(request)
        # The rest of a sealed partition may be smaller than a batch; that is looked at once every promise is kept.
        return Readiness.READY if counts[fields] - self.promised >= request.batch_size else Readiness.WAIT

    def timeout(self, waiter: Waiter) -> TQError:
        """ClaimTimeout, with how far it was."""
        request = waiter.request
        try:
            ready = self._gauge.ready_count(request)
        except TQError as error:
            return error
        promised = f", {self.promised} of them promised to others," if self.promised else ""
        return ClaimTimeout(
            f"consumer {request.consumer!r} of partition {request.partition_id}: {ready} samples are ready{promised} "
            f"for {list(request.fields) or 'every field'}, and {request.batch_size} were asked for"
        )


class RoomLine(Line):
    """The commits to one partition that wait for room."""

    def shape_of(self, request: Any) -> Shape:
        """All alike: nobody overtakes."""
        return ()

    def serve(self, newcomer: Waiter | None = None) -> Served:
        """Lets the first one in if there is room for it; a newcomer that needs no room goes past the line."""
        served: Served = []
        if newcomer is not None and (len(self) > 1 or self.promised) and not self._needs_room(newcomer):
            # Fields of samples that exist: those who wait may be waiting for the very samples that these complete.
            self.remove(newcomer)
            return [(newcomer, None)]
        while self._shapes and not self.promised:
            head = next(iter(self))
            contended = head is not newcomer
            try:
                if not self._gauge.has_room(head.request):
                    break
                head.promised = self.promised = int(contended)
                served.append((head, None))
            except TQError as error:
                served.append((head, error))
            self.remove(head)
        return served

    def _needs_room(self, waiter: Waiter) -> bool:
        try:
            return self._gauge.needs_room(waiter.request)
        except TQError:
            return False  # it need not wait to be refused

    def timeout(self, waiter: Waiter) -> TQError:
        """BackpressureTimeout."""
        request = waiter.request
        return BackpressureTimeout(
            f"partition {request.partition_id} stayed over its limits: no room for {request.rows} more rows; "
            "wait longer, clear what was consumed, or raise its capacity"
        )


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
        self._dirty: dict[Line, None] = {}

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
        line.add(waiter)
        self._answer(line, line.serve(newcomer=waiter))
        if waiter not in line:
            return  # answered
        if seconds > 0:
            waiter.cancel_deadline = self._schedule(seconds, lambda: self._expire(waiter))
        else:
            self._expire(waiter)

    def _expire(self, waiter: Waiter) -> None:
        line = self._line(waiter)
        if line.remove(waiter):
            waiter.refuse(line.timeout(waiter))
            self._answer(line, line.serve())  # whoever stood behind it may be first now
        self._drop_if_idle(waiter, line)

    def withdraw(self, waiter: Waiter) -> bool:
        """The caller is gone; says whether it was still waiting."""
        line = self._line(waiter)
        waiting = line.remove(waiter)
        waiter.cancel_deadline()
        if waiting:
            self._answer(line, line.serve())  # whoever stands behind it may be first now
        self._drop_if_idle(waiter, line)
        return waiting

    def settled(self, waiter: Waiter) -> None:
        """What was granted took effect or failed; `serve` looks at its line again."""
        line = self._line(waiter)
        line.promised -= waiter.promised
        waiter.promised = 0
        self._dirty[line] = None
        self._drop_if_idle(waiter, line)

    def readiness_changed(self, partition_id: int) -> None:
        """Claims on this partition may have become grantable: `serve` looks at them."""
        self._dirty.update(dict.fromkeys(self._claims.get(partition_id, {}).values()))

    def room_changed(self, partition_id: int) -> None:
        """Commits to this partition may fit now: `serve` looks at them."""
        if partition_id in self._room:
            self._dirty[self._room[partition_id]] = None

    def gone(self, partition_id: int) -> None:
        """A partition was deleted; whoever waits on it is refused."""
        self._refuse_all(
            [*self._claims.get(partition_id, {}).values(), *filter(None, [self._room.get(partition_id)])],
            PartitionNotFound(f"partition {partition_id} was deleted meanwhile"),
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
            line, _ = self._dirty.popitem()
            self._answer(line, line.serve())

    def _answer(self, line: Line, served: Served) -> None:
        for waiter, error in served:
            waiter.cancel_deadline()
            if error is None:
                waiter.grant()
            else:
                waiter.refuse(error)
                self._drop_if_idle(waiter, line)
