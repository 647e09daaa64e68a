"""Lines whose time and core are the test's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tqclient.errors import LeaseExpired, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Demand, Limit, Readiness
from tqserver.controller.lines import Waiter
from tqserver.controller.waiters import Waiters


class Clock:
    """Calls scheduled callbacks when told that time passed."""

    def __init__(self) -> None:
        self.now = 0.0
        self._pending: dict[int, tuple[float, Callable[[], None]]] = {}

    def schedule(self, seconds: float, callback: Callable[[], None]) -> Callable[[], object]:
        key = len(self._pending) + 1_000 * int(self.now * 1000)
        while key in self._pending:
            key += 1
        self._pending[key] = (self.now + seconds, callback)
        return lambda: self._pending.pop(key, None)

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for key, (when, callback) in sorted(self._pending.items(), key=lambda item: item[1][0]):
            if when <= self.now and self._pending.pop(key, None):
                callback()

    @property
    def scheduled(self) -> int:
        return len(self._pending)


class FakeCore:
    """Ready samples, room and a seal, set by the test."""

    def __init__(self) -> None:
        self.ready = 0
        self.room = 0
        self.sealed = False
        self.leased = 0
        self.capacity = 1_000_000
        self.dead_sessions: set[int] = set()
        self.made: set[tuple[int, int]] = set()
        """DP ranks and members for whom a share was made."""
        self.looks = 0
        self.broken: set[int] = set()
        """Rows of the requests that it fails to look at."""
        self.unplaced: set[int] = set()
        """Rows of the requests that it fails to find a queue for."""

    def ready_count(self, request: pb.ClaimRequest) -> int:
        self.looks += 1
        if request.batch_size in self.broken:
            raise OverflowError("a bug")
        if request.mutation.session in self.dead_sessions:
            raise LeaseExpired("session has ended")
        return self.ready

    def readiness(self, request: pb.ClaimRequest) -> Readiness:
        if self.ready_count(request) >= request.batch_size or (self.sealed and self.ready):
            return Readiness.READY
        return Readiness.DRAINED if self.sealed and not self.leased else Readiness.WAIT

    def is_outsized(self, request: pb.ClaimRequest) -> bool:
        return request.batch_size > self.capacity

    def is_made(self, request: pb.ClaimRequest) -> bool:
        return (request.topology.dp_rank, request.topology.member) in self.made

    def rows_wanted(self, request: pb.ClaimRequest) -> int:
        return request.batch_size

    def countable(self, request: pb.ClaimRequest) -> bool:
        if request.batch_size in self.unplaced:
            raise OverflowError("a bug")
        return request.sampler.name != "group"

    def place(self, partition_id: int) -> str:
        return f"partition 'p{partition_id}'"

    def rate_note(self, request: pb.ClaimRequest) -> str:
        return ""

    def room_queue(self, request: Any) -> object:
        if request.rows in self.unplaced:
            raise OverflowError("a bug")
        return ""

    def demand(self, request: Any) -> Demand:
        if request.rows in self.broken:
            raise OverflowError("a bug")
        if request.ids:
            return Demand()
        return Demand(frozenset({Limit.SAMPLES}), {Limit.SAMPLES: "full"} if request.rows > self.room else {})


class Bench:
    """Waiters, and what became of each call."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.clock = Clock()
        self.waiters = Waiters(self.core, self.clock.schedule)
        self.granted: list[str] = []
        self.refused: dict[str, TQError] = {}
        self.previewed: list[str] = []

    def waiter(self, name: str, request: Any) -> Waiter:
        waiter = Waiter(request, lambda: self.granted.append(name), lambda error: self.refused.__setitem__(name, error))
        waiter.preview = lambda coming: self.previewed.append(f"{name} of {coming.rows if coming else 'what is there'}")
        return waiter

    def claim(self, name: str, batch_size: int, seconds: float = 10.0, *, session: int = 1, **fields: Any) -> Waiter:
        request = pb.ClaimRequest(partition_id=1, consumer="c", batch_size=batch_size, **fields)
        request.mutation.session = session
        waiter = self.waiter(name, request)
        self.waiters.wait(waiter, seconds)
        return waiter

    def commit(self, name: str, rows: int, seconds: float = 10.0) -> Waiter:
        waiter = self.waiter(name, pb.CommitRequest(partition_id=1, rows=rows))
        self.waiters.wait(waiter, seconds)
        return waiter

    def applied(self, waiter: Waiter, rows: int) -> None:
        """The grant took effect."""
        self.core.ready -= rows
        self.core.leased += rows
        self.waiters.settled(waiter)

    def ready(self, rows: int) -> None:
        """Samples became ready."""
        self.core.ready += rows
        self.waiters.readiness_changed(1)
        self.waiters.serve()

    def coming(self, rows: int, *fields: str, ids: bytes = b"") -> None:
        """A put went to the journal."""
        written = [pb.Field(name=name) for name in fields or ("a",)]
        self.waiters.coming(pb.CommitRequest(partition_id=1, rows=rows, fields=written, ids=ids))
