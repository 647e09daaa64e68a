"""Calls that wait on the server: claims for samples, puts and permits for room. Each is an entry in a line, no task.

Claims stand in one line per (partition, consumer), and in it in one queue per choice of samples (fields, tags, sampler,
rank), strictly in order: while
the first claim of a queue cannot be met, the samples that are ready are kept for it, and those behind it wait, at most
for as long as it does. Overtaken by smaller ones, a large batch would never gather. A claim for more samples than the
partition may hold can only be met when that is sealed; it stands in a queue apart, and holds up nobody. Other choices
wait for other samples, so the queues do not wait for each other.

A granted claim takes effect only once it is journaled; until then its rows are promised, so that no more claims are
granted than there are rows for, however many one put wakes. A change costs as much as there are queues in the line and
grants to make, not as there are calls that wait.

Puts and permits stand in one line per partition, strictly in order: a large put is not overtaken for ever by small
ones. While some wait they are let in one at a time, because each changes how much room the next one finds. One that
waits for a limit is overtaken by those alone that do not draw on that limit: samples of a permit, while others wait for
the version that these will bring about; or samples of a version that is live, while others wait to bring a new one.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, Final, Protocol

from tqclient.errors import BackpressureTimeout, ClaimTimeout, PartitionNotFound, Sealed, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Demand, Limit, Readiness

GRANTS_MAX: Final = 64
"""Claims of one line that are granted in one go; the next ones follow as soon as one of these took effect."""

QueueKey = tuple[Any, ...]
Schedule = Callable[[float, Callable[[], None]], Callable[[], object]]
"""(seconds, callback) → what cancels it."""


class Gauge(Protocol):
    """What the core knows of waiting requests."""

    def readiness(self, request: pb.ClaimRequest) -> Readiness:
        """Whether the claim could be granted now, later, or never."""

    def ready_count(self, request: pb.ClaimRequest) -> int:
        """How many samples are ready for its consumer and fields."""

    def countable(self, request: pb.ClaimRequest) -> bool:
        """Whether any `batch_size` ready samples meet the claim."""

    def is_outsized(self, request: pb.ClaimRequest) -> bool:
        """Whether it asks for more samples than its partition may hold."""

    def demand(self, request: pb.CommitRequest | pb.AcquirePermitRequest) -> Demand:
        """Which limits the put or permit draws on, and which of them hold it back."""

    def room_queue(self, request: pb.CommitRequest | pb.AcquirePermitRequest) -> object:
        """What puts and permits have in common that draw on the same limits."""

    def rate_note(self, request: pb.ClaimRequest) -> str:
        """How a rate limit holds the claim back, to end a message with."""


class Waiter:
    """A call that waits for its turn.

    Args:
        request: a ClaimRequest, a CommitRequest or an AcquirePermitRequest.
        grant: called when it is its turn; whoever is granted says `settled` once that took effect, or failed to.
        refuse: called when its turn will not come.

    Attributes:
        choice: of a claim that stands in its line: what decides which samples are ready for it.
        countable: of such a claim: any `batch_size` ready samples meet it.
    """

    _tickets = count(1)

    def __init__(self, request: Any, grant: Callable[[], None], refuse: Callable[[TQError], None]) -> None:
        self.request = request
        self.grant = grant
        self.refuse = refuse
        self.ticket = next(self._tickets)
        self.queue_key: QueueKey = ()
        self.choice: QueueKey = ()
        self.countable = False
        self.promised = 0
        self.cancel_deadline: Callable[[], object] = lambda: None


Served = list[tuple[Waiter, TQError | None]]
"""Who left the line, and what for it is refused."""


class Line(ABC):
    """Those who wait for one thing, in queues, each in the order of its tickets.

    Attributes:
        promised: what was granted and has not taken effect yet.
    """

    def __init__(self, gauge: Gauge) -> None:
        self._gauge = gauge
        self._queues: dict[QueueKey, dict[Waiter, None]] = {}
        self.promised = 0

    def __iter__(self) -> Iterator[Waiter]:
        return (waiter for queue in self._queues.values() for waiter in queue)

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __contains__(self, waiter: Waiter) -> bool:
        return waiter in self._queues.get(waiter.queue_key, ())

    @property
    def idle(self) -> bool:
        """Nobody waits, and nothing is promised."""
        return not self._queues and not self.promised

    @abstractmethod
    def queue_of(self, request: Any) -> QueueKey:
        """Returns what a request has in common with those whose turn comes after its own."""

    @abstractmethod
    def serve(self, newcomer: Waiter | None = None) -> Served:
        """Takes out those whose turn it is; with a newcomer, only its own queue can have changed."""

    @abstractmethod
    def timeout(self, waiter: Waiter) -> TQError:
        """Returns what to say to one who waited in vain."""

    def add(self, waiter: Waiter) -> None:
        """Puts one in its place: at the end, or further up if it was granted and came back."""
        key = waiter.queue_key = self.queue_of(waiter.request)
        queue = self._queues.setdefault(key, {})
        came_back = bool(queue) and next(reversed(queue)).ticket > waiter.ticket
        queue[waiter] = None
        if came_back:
            self._queues[key] = dict.fromkeys(sorted(queue, key=lambda each: each.ticket))

    def remove(self, waiter: Waiter) -> bool:
        """Takes one out; says whether it was there."""
        queue = self._queues.get(waiter.queue_key, {})
        if waiter not in queue:
            return False
        del queue[waiter]
        if not queue:
            del self._queues[waiter.queue_key]
        return True


def _choice(request: pb.ClaimRequest) -> tuple[Any, ...]:
    """Returns what decides which samples are ready for a claim."""
    return tuple(sorted(request.fields)), request.where


def _amount(request: pb.ClaimRequest) -> str:
    return str(request.batch_size) if request.batch_size else f"{request.max_tokens} tokens"


class ClaimLine(Line):
    """The claims of one consumer of one partition."""

    def add(self, waiter: Waiter) -> None:
        """Puts one in its place. What never changes about it is looked up here, once, and not at every grant."""
        waiter.choice = _choice(waiter.request)
        waiter.countable = self._gauge.countable(waiter.request)
        super().add(waiter)

    def queue_of(self, request: Any) -> QueueKey:
        """Which samples it waits for, and as whom; and whether it can be met while the partition takes samples."""
        sampler = request.sampler.SerializeToString(deterministic=True)
        topology = request.topology.SerializeToString(deterministic=True)
        return (*_choice(request), sampler, topology, self._gauge.is_outsized(request))

    def serve(self, newcomer: Waiter | None = None) -> Served:
        """Grants the first claims of the queues while they can be met, in the order of their tickets."""
        served: Served = []
        keys = list(self._queues) if newcomer is None else [newcomer.queue_key]
        counts: dict[Any, int] = {}
        grants = 0
        while keys and grants < GRANTS_MAX:
            first: Waiter | None = None
            for key in tuple(keys):
                head = self._head(key, counts, served)
                if head is None:
                    keys.remove(key)  # promises only grow in here: not this time
                elif first is None or head.ticket < first.ticket:
                    first = head
            if first is None:
                break
            first.promised = self._promise(first, counts)
            self.promised += first.promised
            served.append((first, None))
            self.remove(first)
            grants += 1
        return served

    def _head(self, key: QueueKey, counts: dict[Any, int], served: Served) -> Waiter | None:
        """Returns the first claim of a queue if it can be met; takes out those before it that never will be."""
        while key in self._queues:
            head = next(iter(self._queues[key]))
            try:
                verdict = self._verdict(head, counts)
            except TQError as error:  # of this one alone: its session ended, say
                served.append((head, error))
                self.remove(head)
                continue
            if verdict is Readiness.DRAINED:
                sealed = Sealed(
                    f"partition {head.request.partition_id} is sealed, and consumer {head.request.consumer!r} "
                    "has had all of it"
                )
                served.extend((waiter, sealed) for waiter in self._queues.pop(key))
            return head if verdict is Readiness.READY else None
        return None

    def _promise(self, waiter: Waiter, counts: dict[Any, int]) -> int:
        """Returns how many ready samples a claim may take that is granted now; above 0."""
        count = counts[waiter.choice]
        return max(min(waiter.request.batch_size, count) if waiter.countable else count, 1)

    def _verdict(self, waiter: Waiter, counts: dict[Any, int]) -> Readiness:
        request = waiter.request
        if waiter.choice not in counts:
            counts[waiter.choice] = self._gauge.ready_count(request)
        if not self.promised:
            return self._gauge.readiness(request)
        if not waiter.countable:
            return Readiness.WAIT
        # The rest of a sealed partition may be smaller than a batch; that is looked at once every promise is kept.
        return Readiness.READY if counts[waiter.choice] - self.promised >= request.batch_size else Readiness.WAIT

    def timeout(self, waiter: Waiter) -> TQError:
        """ClaimTimeout, with how far it was."""
        request = waiter.request
        try:
            ready, note = self._gauge.ready_count(request), self._gauge.rate_note(request)
        except TQError as error:
            return error
        promised = f", {self.promised} of them promised to others," if self.promised else ""
        first = next(iter(self._queues.get(waiter.queue_key, ())), waiter)
        earlier = f"; a claim for {_amount(first.request)} came first" if first.ticket < waiter.ticket else ""
        return ClaimTimeout(
            f"consumer {request.consumer!r} of partition {request.partition_id}: {ready} samples are ready{promised} "
            f"for {list(request.fields) or 'every field'}, and "
            f"{_amount(request)} were asked for{earlier}{note}"
        )


class RoomLine(Line):
    """The puts and permits of one partition that wait for room."""

    def queue_of(self, request: Any) -> QueueKey:
        """What limits it draws on."""
        return (self._gauge.room_queue(request),)

    def serve(self, newcomer: Waiter | None = None) -> Served:
        """Lets in the first one that has room and draws on no limit that somebody who came before it waits for.

        A newcomer that draws on no limit at all goes past the line: those who wait may be waiting for the very samples
        that it completes.
        """
        served: Served = []
        if newcomer is not None and self._passes(newcomer):
            self.remove(newcomer)
            return [(newcomer, None)]
        while not self.promised:
            first = self._first(served)
            if first is None:
                break
            first.promised = self.promised = int(first is not newcomer)
            served.append((first, None))
            self.remove(first)
        return served

    def _passes(self, newcomer: Waiter) -> bool:
        if len(self) == 1 and not self.promised:
            return False  # there is no line
        try:
            return not self._gauge.demand(newcomer.request).draws
        except TQError:
            return True  # it need not wait to be refused

    def _first(self, served: Served) -> Waiter | None:
        """Returns the one to be let in; takes out those before it that never will be."""
        held: set[Limit] = set()
        heads = [(head.ticket, head) for head in self._heads()]
        while heads:
            _, head = heapq.heappop(heads)
            try:
                demand = self._gauge.demand(head.request)
            except TQError as error:
                served.append((head, error))
                self.remove(head)
                for after in islice(self._queues.get(head.queue_key, ()), 1):
                    heapq.heappush(heads, (after.ticket, after))
                continue
            if not demand.lacks and not demand.draws & held:
                return head
            held |= demand.lacks.keys()
        return None

    def _heads(self) -> list[Waiter]:
        return sorted((next(iter(queue)) for queue in self._queues.values()), key=lambda head: head.ticket)

    def timeout(self, waiter: Waiter) -> TQError:
        """BackpressureTimeout, naming the limits that hold it back."""
        request = waiter.request
        try:
            demand = self._gauge.demand(request)
            reasons = list(demand.lacks.values())
            for earlier in self._heads():
                if earlier.ticket < waiter.ticket and not reasons:
                    lacks = self._gauge.demand(earlier.request).lacks
                    reasons += [f"another came first: {why}" for why in lacks.values()]
        except TQError as error:
            return error
        what = f"{request.rows} rows" if isinstance(request, pb.CommitRequest) else f"a permit for {request.samples}"
        return BackpressureTimeout(
            f"partition {request.partition_id} had no room for {what}: {'; '.join(reasons) or 'others came first'}. "
            "Wait longer, or clear what was consumed"
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

    def session_ended(self) -> None:
        """Whoever waits for a session that is gone is refused, and holds up nobody: `serve` looks at all lines."""
        for lines in self._claims.values():
            self._dirty.update(dict.fromkeys(lines.values()))
        self._dirty.update(dict.fromkeys(self._room.values()))

    def room_changed(self, partition_id: int) -> None:
        """Puts and permits of this partition may fit now: `serve` looks at them."""
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
