"""Calls that wait on the server: claims for samples, puts and permits for room. Each is an entry in a line, no task.

Claims stand in one line per (partition, consumer), and in it in one queue per choice of samples (fields, tags, sampler,
rank), strictly in order: while
the first claim of a queue cannot be met, the samples that are ready are kept for it, and those behind it wait, at most
for as long as it does. Overtaken by smaller ones, a large batch would never gather. A claim for more samples than the
partition may hold can only be met when that is sealed; it stands in a queue apart, and holds up nobody. Other choices
wait for other samples, so the queues do not wait for each other.

A granted claim takes effect only once it is journaled; until then its rows are promised, so that no more claims are
granted than there are rows for, however many one put wakes. A rank whose share was made already, by the claim of
another one, takes no rows: all such ranks are granted together. A change costs as much as there are queues in the line
and grants to make, not as there are calls that wait.

A claim that any samples meet need not wait until the put that brings them has taken effect: it is granted when that put
goes to the journal, and lies there right behind it, so that one append makes both durable. When the put then brings
less than it seemed to, the claim's record comes to nothing, and the claim goes back to its place. If it seems to meet
the claim alone and whole, the claim's caller is given a preview of it.

Puts and permits stand in one line per partition, strictly in order: a large put is not overtaken for ever by small
ones. While some wait they are let in one at a time, because each changes how much room the next one finds. One that
waits for a limit is overtaken by those alone that do not draw on that limit: samples of a permit, while others wait for
the version that these will bring about; or samples of a version that is live, while others wait to bring a new one.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count, islice
from typing import Any, Final, NamedTuple, Protocol

from tqclient.errors import BackpressureTimeout, ClaimTimeout, InvalidArgument, Sealed, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Demand, Limit, Readiness, limits
from tqserver.refusal import refusal

GRANTS_MAX: Final = 64
"""Claims of one line that are granted in one go; the next ones follow as soon as one of these took effect."""

QueueKey = tuple[Any, ...]


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

    def is_made(self, request: pb.ClaimRequest) -> bool:
        """Whether it is a rank's, and what it is given next was taken for it already."""

    def rows_wanted(self, request: pb.ClaimRequest) -> int:
        """How many samples must be ready for it, at the least, while nothing changes but how many are."""

    def demand(self, request: pb.CommitRequest | pb.AcquirePermitRequest) -> Demand:
        """Which limits the put or permit draws on, and which of them hold it back."""

    def room_queue(self, request: pb.CommitRequest | pb.AcquirePermitRequest) -> object:
        """What puts and permits have in common that draw on the same limits."""

    def place(self, partition_id: int) -> str:
        """What a partition is called in a message."""

    def rate_note(self, request: pb.ClaimRequest) -> str:
        """How a rate limit holds the claim back, to end a message with."""


class Coming(NamedTuple):
    """What a put will bring that is on its way to the journal.

    Attributes:
        fields: that it writes.
        rows: how many.
        new: whether they are new samples; else they are there already, with other fields.
    """

    fields: frozenset[str]
    rows: int
    new: bool

    @classmethod
    def of(cls, request: pb.CommitRequest) -> Coming:
        """Returns what a put brings at most: rows that exist already count too."""
        return cls(frozenset(field.name for field in request.fields), request.rows, not request.ids)

    def ready_for(self, request: pb.ClaimRequest) -> int:
        """Returns how many samples it seems to make ready for a claim."""
        if request.where:  # by their tags: that is the core's to say
            return 0
        wanted = set(request.fields)
        completes = wanted <= self.fields if self.new else not wanted.isdisjoint(self.fields)
        return self.rows if completes else 0


class Waiter:
    """A call that waits for its turn.

    Args:
        request: a ClaimRequest, a CommitRequest or an AcquirePermitRequest.
        grant: called when it is its turn; whoever is granted says `settled` once that took effect, or failed to. It
            raises nothing, as those who were granted with it are still to be told.
        refuse: called when its turn will not come; raises nothing either.

    Attributes:
        choice: of a claim that stands in its line: what decides which samples are ready for it.
        countable: of such a claim: any `batch_size` ready samples meet it.
        foreseen: of such a claim: it was granted once already for a put that was on its way.
        rows_wanted: of such a claim that was looked at: how many samples must be ready, at the least, for another look
            when nothing changed but how many are.
        made: of such a claim: what it is given was taken for it already; it takes nothing of what is ready.
        alone: of such a claim that is granted: nothing is promised to others; of one that is foreseen, too: the rows of
            that put, all of them, are what it seems to meet.
        preview: called when it is granted alone: with the put that it was foreseen for, or None.
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
        self.foreseen = False
        self.rows_wanted = 0
        self.made = False
        self.alone = False
        self.preview: Callable[[pb.CommitRequest | None], None] = lambda _: None
        self.promised = 0
        self.cancel_deadline: Callable[[], object] = lambda: None

    def refusal(self, error: Exception) -> TQError:
        """Returns what it is refused with, it alone, when looking at its request raised this."""
        return refusal(f"{type(self.request).__name__} to partition {self.request.partition_id}", error)


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
    def serve(self, newcomer: Waiter | None = None, *, by_count: bool = False) -> Served:
        """Takes out those whose turn it is.

        Args:
            newcomer: the only one whose queue can have changed.
            by_count: nothing changed but how many samples are ready.
        """

    def settled(self, waiter: Waiter) -> None:
        """What was granted took effect, or failed to."""
        self.promised -= waiter.promised
        waiter.promised = 0

    @abstractmethod
    def timeout(self, waiter: Waiter) -> TQError:
        """Returns what to say to one who waited in vain."""

    def crowded(self, waiter: Waiter) -> TQError | None:
        """Returns why one that was just added may not stay."""
        return None

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

    def __init__(self, gauge: Gauge) -> None:
        super().__init__(gauge)
        self._given: set[QueueKey] = set()  # queues of which one is granted what was made: what comes next is not known

    @property
    def idle(self) -> bool:
        """Nobody waits, and nothing is promised or given."""
        return super().idle and not self._given

    def settled(self, waiter: Waiter) -> None:
        """What was granted took effect, or failed to."""
        super().settled(waiter)
        if waiter.made:
            self._given.discard(waiter.queue_key)

    def add(self, waiter: Waiter) -> None:
        """Puts one in its place. What never changes about it is looked up here, once, and not at every grant."""
        waiter.choice = _choice(waiter.request)
        waiter.countable = self._gauge.countable(waiter.request)
        super().add(waiter)

    def crowded(self, waiter: Waiter) -> TQError | None:
        """Each choice of samples is looked at whenever something changes, and everybody waits for that."""
        if len(self._queues) <= limits.VIEWS_PER_CONSUMER_MAX:
            return None
        choices = len({next(iter(queue)).choice for queue in self._queues.values()})
        if choices <= limits.VIEWS_PER_CONSUMER_MAX:
            return None
        request = waiter.request
        return InvalidArgument(
            f"claims of consumer {request.consumer!r} of {self._gauge.place(request.partition_id)} wait for "
            f"{limits.VIEWS_PER_CONSUMER_MAX} choices of `fields` and `where` already, the most there can be: wait for "
            "fewer at a time, or as another consumer"
        )

    def queue_of(self, request: Any) -> QueueKey:
        """Which samples it waits for, and as whom; and whether it can be met while the partition takes samples."""
        sampler = request.sampler.SerializeToString(deterministic=True)
        topology = request.topology.SerializeToString(deterministic=True)
        return (*_choice(request), sampler, topology, self._gauge.is_outsized(request))

    def serve(self, newcomer: Waiter | None = None, coming: Coming | None = None, *, by_count: bool = False) -> Served:
        """Grants the first claims of the queues while they can be met, in the order of their tickets.

        Args:
            newcomer: the only one whose queue can have changed.
            coming: a put that is on its way to the journal; grants what it seems to bring, once to each claim.
            by_count: nothing changed but how many samples are ready: those that want more are not looked at.
        """
        served: Served = []
        keys = list(self._queues) if newcomer is None else [newcomer.queue_key]
        heads = [(next(iter(self._queues[key])).ticket, key) for key in keys]
        heapq.heapify(heads)
        counts: dict[Any, int] = {}
        grants = 0
        while heads and grants < GRANTS_MAX:
            ticket, key = heapq.heappop(heads)
            head = self._head(key, counts, served, coming, by_count)
            if head is None:
                continue  # promises only grow in here: not this time
            if head.ticket == ticket:
                self._grant(head, counts)
                head.foreseen |= coming is not None
                served.append((head, None))
                grants += 1
            for waiter in islice(self._queues.get(key, ()), 1):
                heapq.heappush(heads, (waiter.ticket, key))
        return served

    def _grant(self, head: Waiter, counts: dict[Any, int]) -> None:
        self.remove(head)
        if head.made:
            self._given.add(head.queue_key)
        else:
            head.promised = self._promise(head, counts)
            self.promised += head.promised

    def _head(
        self, key: QueueKey, counts: dict[Any, int], served: Served, coming: Coming | None, by_count: bool
    ) -> Waiter | None:
        """Returns the first claim of a queue if it can be met; takes out those before it that never will be."""
        while key in self._queues:
            head = next(iter(self._queues[key]))
            try:
                verdict = (
                    self._verdict(head, counts, by_count) if coming is None else self._foresee(head, counts, coming)
                )
            except Exception as error:  # of this one alone: its session ended, say
                served.append((head, head.refusal(error)))
                self.remove(head)
                continue
            if verdict is Readiness.DRAINED:
                sealed = Sealed(
                    f"{self._gauge.place(head.request.partition_id)} is sealed, and consumer {head.request.consumer!r} "
                    "has had all of it"
                )
                served.extend((waiter, sealed) for waiter in self._queues.pop(key))
            return head if verdict is Readiness.READY else None
        return None

    def _promise(self, waiter: Waiter, counts: dict[Any, int]) -> int:
        """Returns how many ready samples a claim may take that is granted now; above 0."""
        count = counts[waiter.choice]
        return max(min(waiter.request.batch_size, count) if waiter.countable else count, 1)

    def _verdict(self, waiter: Waiter, counts: dict[Any, int], by_count: bool) -> Readiness:
        request = waiter.request
        waiter.alone = waiter.countable and not self.promised
        if waiter.choice not in counts:
            counts[waiter.choice] = self._gauge.ready_count(request)
        if waiter.queue_key in self._given or (by_count and counts[waiter.choice] < waiter.rows_wanted):
            return Readiness.WAIT
        waiter.made = self._gauge.is_made(request)
        if waiter.made or not self.promised:
            verdict = self._gauge.readiness(request)
            if verdict is Readiness.WAIT:
                waiter.rows_wanted = self._gauge.rows_wanted(request)
            return verdict
        if not waiter.countable:
            return Readiness.WAIT
        # The rest of a sealed partition may be smaller than a batch; that is looked at once every promise is kept.
        return Readiness.READY if counts[waiter.choice] - self.promised >= request.batch_size else Readiness.WAIT

    def _foresee(self, waiter: Waiter, counts: dict[Any, int], coming: Coming) -> Readiness:
        request = waiter.request
        if not waiter.countable or waiter.foreseen:
            return Readiness.WAIT
        if waiter.choice not in counts:
            counts[waiter.choice] = self._gauge.ready_count(request) + coming.ready_for(request)
        waiter.alone = not self.promised and counts[waiter.choice] == coming.rows == request.batch_size
        return Readiness.READY if counts[waiter.choice] - self.promised >= request.batch_size else Readiness.WAIT

    def timeout(self, waiter: Waiter) -> TQError:
        """ClaimTimeout, with how far it was."""
        request = waiter.request
        try:
            ready, note = self._gauge.ready_count(request), self._gauge.rate_note(request)
        except Exception as error:
            return waiter.refusal(error)
        promised = f", {self.promised} of them promised to others," if self.promised else ""
        first = next(iter(self._queues.get(waiter.queue_key, ())), waiter)
        earlier = f"; a claim for {_amount(first.request)} came first" if first.ticket < waiter.ticket else ""
        return ClaimTimeout(
            f"consumer {request.consumer!r} of {self._gauge.place(request.partition_id)}: {ready} samples are ready"
            f"{promised} for {list(request.fields) or 'every field'}, and "
            f"{_amount(request)} were asked for{earlier}{note}"
        )


class RoomLine(Line):
    """The puts and permits of one partition that wait for room."""

    def queue_of(self, request: Any) -> QueueKey:
        """What limits it draws on."""
        return (self._gauge.room_queue(request),)

    def serve(self, newcomer: Waiter | None = None, *, by_count: bool = False) -> Served:
        """Lets in the first one that has room and draws on no limit that somebody who came before it waits for.

        A newcomer that draws on no limit at all goes past the line: those who wait may be waiting for the very samples
        that it completes. So does one that is refused.
        """
        served = [] if newcomer is None else self._passed(newcomer)
        if served:
            return served
        while not self.promised:
            first = self._first(served)
            if first is None:
                break
            first.promised = self.promised = int(first is not newcomer)
            served.append((first, None))
            self.remove(first)
        return served

    def _passed(self, newcomer: Waiter) -> Served:
        """Takes out a newcomer that need not wait for its turn."""
        if len(self) == 1 and not self.promised:
            return []  # there is no line
        error = None
        try:
            if self._gauge.demand(newcomer.request).draws:
                return []
        except Exception as raised:
            error = newcomer.refusal(raised)
        self.remove(newcomer)
        return [(newcomer, error)]

    def _first(self, served: Served) -> Waiter | None:
        """Returns the one to be let in; takes out those before it that never will be."""
        held: set[Limit] = set()
        heads = [(head.ticket, head) for head in self._heads()]
        while heads:
            _, head = heapq.heappop(heads)
            try:
                demand = self._gauge.demand(head.request)
            except Exception as error:
                served.append((head, head.refusal(error)))
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
            reasons = list(self._gauge.demand(request).lacks.values())
        except Exception as error:
            return waiter.refusal(error)
        for earlier in self._heads():
            if earlier.ticket < waiter.ticket and not reasons:
                with suppress(Exception):  # which it is told itself
                    lacks = self._gauge.demand(earlier.request).lacks
                    reasons += [f"another came first: {why}" for why in lacks.values()]
        what = f"{request.rows} rows" if isinstance(request, pb.CommitRequest) else f"a permit for {request.samples}"
        return BackpressureTimeout(
            f"{self._gauge.place(request.partition_id)} had no room for {what}: "
            f"{'; '.join(reasons) or 'others came first'}. Wait longer, or clear what was consumed"
        )
