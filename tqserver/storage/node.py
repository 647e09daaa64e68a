"""What one storage node knows: its arena, its allocator, and which sessions the controller calls live."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, LeaseExpired, SampleNotFound, Unavailable
from tqclient.wire.packing import U64, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver import limits, logs
from tqserver.storage.arena import Arena
from tqserver.storage.extents import Allocator, Extent, Outcome, Usage, Window
from tqserver.storage.sync import sync
from tqserver.storage.tickets import Tickets
from tqserver.waiting import within

_log = logs.get("storage.node")


def _parts(rows: NDArray[np.uint64]) -> Iterator[list[Extent]]:
    for start in range(0, len(rows), limits.EXTENTS_PER_STEP):
        yield [Extent(*row) for row in rows[start : start + limits.EXTENTS_PER_STEP].tolist()]


async def _by_turns(data: bytes) -> AsyncIterator[list[Extent]]:
    """Yields some extents of an order at a time, and lets others go on in between."""
    for number, part in enumerate(_parts(unpack_array(data, U64, what="extents", columns=4))):
        if number:
            await asyncio.sleep(0)
        yield part


async def _finished(steps: Generator[None, None, Outcome]) -> Outcome:
    """Takes steps, and lets others go on after each."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome
        await asyncio.sleep(0)


class Node:
    """The state behind the Storage service and the node link. Lives on one event loop.

    Args:
        arena: open; its windows table is restored here.

    Attributes:
        incarnation: drawn at random for this life of the process.
        attached: the link to the controller is open and has brought its NodeSync.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.incarnation = secrets.randbits(63) | 1
        self.attached = False
        header = arena.header
        self._allocator = Allocator(header.data_offset, arena.allocated_bytes, header.segment_bytes, arena.table)
        self._allocator.restore(arena.table.runs())
        self._live: set[int] = set()
        self._tickets = Tickets()
        for run in arena.table.runs():
            if run.ticket:  # whoever was told of the window is done with the ticket, or will be by its next one
                self._tickets.grant(run.session, run.ticket, run.generation)
        self._newest_session = 0
        self._synced = False
        self._changed = asyncio.Event()  # replaced at every change of what calls wait for
        self._reported_gone: set[int] = set()
        self._freeing: asyncio.TimerHandle | None = None  # of what the controller forgot in a restart
        self._engine = 0  # number of the one that new windows are written through; 0 for none
        self._segment = ""  # under which peers open it

    def usage(self) -> Usage:
        """Returns how many bytes are in which state."""
        return self._allocator.usage()

    @property
    def capacity_bytes(self) -> int:
        """What the arena will hold once all of it is allocated."""
        return self._allocator.capacity_up_to(self.arena.header.file_bytes)

    def extend(self, allocated_bytes: int) -> None:
        """Another part of the arena file is allocated."""
        self._allocator.extend(allocated_bytes)

    # The transfer engine.

    def engine_started(self, engine: int, segment: str) -> None:
        """From now on, one-sided windows are given for this engine alone."""
        self._allocator.engine_started(engine)
        self._engine, self._segment = engine, segment

    def engine_ended(self, engine: int) -> None:
        """An engine's process is gone: nothing is written through it any more."""
        if engine == self._engine:
            self._engine, self._segment = 0, ""
        freed = self._allocator.engine_ended(engine)
        if freed:
            _log.info("quarantine ended with the engine", engine=engine, bytes=freed)

    def quarantined_since(self) -> float | None:
        """Returns when, on the loop's clock, the oldest window came into quarantine that an engine's end would free."""
        return self._allocator.quarantined_since()

    # Orders of the controller.

    async def apply(self, order: pb.NodeOrder) -> None:
        """Carries out one order; orders come in the order in which the controller applied its changes.

        One about many extents is carried out by and by, and calls are answered meanwhile; the next one has to wait.

        Raises:
            InvalidArgument: it does not parse.
        """
        kind = order.WhichOneof("order")
        if kind == "sync":
            await self._sync(order.sync, order.sequence)
            return
        if kind == "sealed":
            async for part in _by_turns(order.sealed.extents):
                self._log_outcome(self._allocator.seal(part))
        elif kind == "freed":
            async for part in _by_turns(order.freed.extents):
                self._allocator.free(part)
        elif kind == "sessions":
            self._open_sessions(unpack_array(order.sessions.opened, U64, what="opened").tolist())
            for session in unpack_array(order.sessions.ended, U64, what="ended").tolist():
                self._newest_session = max(self._newest_session, session)
                self._end_session(session)
        self.arena.saw_sequence(order.sequence)

    async def _sync(self, order: pb.NodeSync, sequence: int) -> None:
        sessions = unpack_array(order.sessions, U64, what="sessions").tolist()
        keep = self._synced and order.grace_ms > 0  # a node that was just started has sealed nothing itself
        committed = unpack_array(order.committed, U64, what="committed", columns=3).tolist()
        rows: NDArray[np.uint64] = unpack_array(order.extents, U64, what="extents", columns=4)
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        if self._freeing is not None:
            self._freeing.cancel()  # what it was to free is freed now, or is kept for longer
            self._freeing = None
        steps = sync(
            self._allocator, chain.from_iterable(_parts(rows)), sessions, committed, now=self._now(), keep=keep
        )
        outcome = await _finished(steps)
        if keep:
            loop = asyncio.get_running_loop()
            self._freeing = loop.call_later(order.grace_ms / 1000, self._allocator.free, outcome.kept)
        if not self._synced:
            outcome.adopted.clear()  # a node that was just started learns of its extents this way
        self._log_outcome(outcome)
        self._synced = self.attached = True
        self._live.clear()
        self._newest_session = 0
        self._reported_gone.clear()
        self._open_sessions(sessions)
        self._tickets.keep(self._live)
        self._release_quarantined()
        self.arena.controller_sequence = sequence
        usage = self.usage()
        _log.info("synchronised", sequence=sequence, sealed_bytes=usage.sealed, reserved_bytes=usage.reserved)

    def _log_outcome(self, outcome: Outcome) -> None:
        """The orders of one link cannot contradict each other, so each of these is a fault of controller or client."""
        for what, extents in (
            ("sealed after its session had ended", outcome.late),
            ("sealed outside of any window", outcome.adopted),
            ("not sealed: its bytes belong to something else", outcome.conflicts),
        ):
            for extent in extents:
                _log.error(what, **extent._asdict())

    def _open_sessions(self, sessions: list[int]) -> None:
        self._live.update(sessions)
        self._newest_session = max([self._newest_session, *sessions])
        self._changed.set()
        self._changed = asyncio.Event()

    def _end_session(self, session: int) -> None:
        self._live.discard(session)
        self._tickets.forget(session)
        self._allocator.end_session(session, now=self._now())
        self._release_quarantined()

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def detached(self) -> None:
        """The link broke: what is known stays in force until the next NodeSync."""
        self.attached = False

    # Writers that are gone.

    def look_at_writers(self) -> list[int]:
        """Frees what quarantine no longer protects, and returns the live sessions whose writer is gone.

        A session is returned once per NodeSync: the controller's answer is to end it.
        """
        self._release_quarantined()
        gone = [
            session
            for session, ended in self._allocator.mapped_sessions().items()
            if not ended and session not in self._reported_gone and not self.arena.writer_lock_held(session)
        ]
        if not self.attached:
            return []
        self._reported_gone.update(gone)
        return gone

    def _release_quarantined(self) -> None:
        for session, ended in self._allocator.mapped_sessions().items():
            if ended and not self.arena.writer_lock_held(session):
                freed = self._allocator.release(session)
                _log.info("quarantine released", session=session, bytes=freed)

    # Calls of clients.

    async def reserve(
        self,
        session: int,
        partition: int,
        length: int,
        *,
        mapped: bool,
        segment: str = "",
        ticket: int = 0,
        tickets_below: int = 0,
    ) -> Window:
        """Opens a window for a live session; waits up to `limits.SESSION_WAIT` to hear of one that is new.

        Args:
            session: who asks.
            partition: whose segments it is to lie in.
            length: at least this many bytes.
            mapped: the client writes through a mapping of its own.
            segment: of the engine that the client writes through; empty for none.
            ticket: the client's number of this reservation; a repeat gets the same window. 0: none.
            tickets_below: every ticket of the session below is done with.

        Raises:
            LeaseExpired: the session has ended, or the controller knows none of that number.
            Unavailable: the controller has not been heard of, or the engine was replaced.
            InvalidArgument: `mapped` without the writer lock or beside a segment, `length` is 0, or a closed ticket.
            StorageFull: no room.
        """
        if mapped and segment:
            raise InvalidArgument("a window is written through a mapping or through an engine, not through both")
        await self._wait_for_session(session)
        if segment and segment != self._segment:
            raise Unavailable(f"engine {segment} was replaced; ask the node for the present one")
        if mapped and not self.arena.writer_lock_held(session):
            raise InvalidArgument(f"session {session} holds no writer lock on {self.arena.path}; take it, then reserve")
        engine = self._engine if segment else 0
        granted = self._tickets.granted(session, ticket, tickets_below) if ticket else None
        window = self._allocator.window(granted) if granted else None
        if window is None:
            window = self._allocator.reserve(session, partition, length, mapped=mapped, engine=engine, ticket=ticket)
            if ticket:
                self._tickets.grant(session, ticket, window.generation)
        return window

    async def _wait_for_session(self, session: int) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.SESSION_WAIT
        while session not in self._live:
            # Numbers of sessions ascend, so one below a number that was seen has ended.
            if self._synced and session <= self._newest_session:
                raise LeaseExpired(f"session {session} has ended")
            try:
                await within(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                if not self.attached:
                    raise Unavailable("this node has no link to the controller at present") from None
                raise LeaseExpired(f"session {session} is not known to the controller") from None

    async def wait_until_synced(self) -> None:
        """Waits for the first NodeSync: until then a node that was restarted does not know its own extents.

        Raises:
            Unavailable: it did not come within `limits.SESSION_WAIT`.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limits.SESSION_WAIT
        while not self._synced:
            try:
                await within(self._changed.wait(), deadline - loop.time())
            except asyncio.TimeoutError:
                raise Unavailable("this node was restarted and has not reached the controller yet") from None

    def close_window(self, session: int, generation: int, end: int) -> None:
        """Frees what lies behind `end`; see `Allocator.close_window`."""
        self._allocator.close_window(session, generation, end)

    async def close_tickets(self, session: int, tickets: Sequence[int]) -> None:
        """Frees the windows that tickets were granted, of which nothing was used; they are granted none any more.

        Like Reserve, which one of them may still be on its way with, it waits to hear of a session that is new.

        Raises:
            Unavailable: the controller has not been heard of: the session may be one that it knows by now.
        """
        try:
            await self._wait_for_session(session)
        except LeaseExpired:
            return  # the windows went with their session, or are quarantined
        for ticket in tickets:
            self._allocator.close_window(session, self._tickets.close(session, ticket), 0)

    def writable(self, session: int, generation: int, incarnation: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Views the bytes that a session may write; check again before every piece.

        Raises:
            LeaseExpired: the window is gone, or it was reserved from another life of this node.
            InvalidArgument: the bytes are not all in what is left of the window.
        """
        if incarnation != self.incarnation:
            raise LeaseExpired(f"window {generation} was reserved before this node restarted; reserve and write again")
        if not self._allocator.has_window(session, generation):
            raise LeaseExpired(f"session {session} has no window {generation} any more; reserve and write again")
        if not self._allocator.may_write(session, generation, offset, length):
            raise InvalidArgument(f"{length} bytes at {offset} are not all in what is left of window {generation}")
        return self.arena.data[offset : offset + length]

    def readable(self, offset: int, length: int, generation: int) -> NDArray[np.uint8]:
        """Views the bytes of an extent; check again before every piece.

        Raises:
            SampleNotFound: they do not all lie in an extent of that generation.
        """
        if not self._allocator.may_read(offset, length, generation):
            raise SampleNotFound(
                f"{length} bytes at {offset} lie in no extent of generation {generation}; it was freed"
            )
        return self.arena.data[offset : offset + length]
