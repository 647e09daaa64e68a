"""The allocator of one arena: windows that sessions write into, and sealed extents.

Every byte of the arena is exactly one of: free; reserved (in the window of a live session); quarantined (in the window
of an ended session whose writer may still write, through its mapping or through an engine); sealed (in an extent that
the controller knows).

A window is written through its client's mapping, through one engine, or through the node. The writer of a mapping is
gone when its lock is; that of an engine when it says so itself, or when the engine's process is gone.

Pure: no file, no clock, no socket. What must outlive the process (which runs of bytes somebody may still write to) is
told to a `Ledger`; the rest comes back with the controller's next NodeSync.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Final, NamedTuple, Protocol

from tqclient.errors import InvalidArgument, StorageFull
from tqclient.limits import EXTENT_ALIGN
from tqserver import limits
from tqserver.storage.segments import Segments, align_up


class Extent(NamedTuple):
    """A sealed run of bytes; its footprint ends at the next multiple of EXTENT_ALIGN."""

    offset: int
    length: int
    generation: int
    partition: int

    @property
    def end(self) -> int:
        """Address behind the footprint."""
        return align_up(self.offset + self.length)


class Run(NamedTuple):
    """Bytes of a window that are neither sealed nor given back: somebody may write to them.

    Attributes:
        ticket: by which the session reserved the window; 0 for none.
    """

    generation: int
    session: int
    partition: int
    start: int
    end: int
    mapped: bool
    ticket: int = 0


_START: Final = attrgetter("start")


class Ledger(Protocol):
    """Remembers runs across a death of the process: bytes too many at worst, never too few.

    Bytes too many are of the run's own window, and no other window is opened before they are forgotten.
    """

    def has_room(self) -> bool:
        """Whether another window may be opened."""
        ...

    def next_generation(self) -> int:
        """Returns a number that it never returned before in the life of the arena."""
        ...

    def add(self, run: Run) -> None:
        """Remembers a run, before anybody may write to it."""
        ...

    def replace(self, run: Run, rests: Sequence[Run]) -> None:
        """Remembers in a run's place what is left of it: parts of it, ascending; or none. Never fails for want of room.

        A death in the middle leaves the run, alone or beside some of the rests, or the rests.
        """
        ...


@dataclass(slots=True)
class Window:
    """A reservation of one session.

    Attributes:
        offset: address of its first byte; after a restart, of the first that was left.
        length: bytes, as they were reserved; after a restart, up to the last that was left.
        mapped: the session writes to it through a mapping of its own.
        engine: number of the engine that it is written through; 0 for none, or one of a former life of the node.
        ended: its session has ended, and its writer may not know.
        runs: what is left of it, ascending.
    """

    generation: int
    session: int
    partition: int
    offset: int
    length: int
    mapped: bool
    engine: int = 0
    ended: bool = False
    runs: list[Run] = field(default_factory=list)

    def find(self, start: int, end: int) -> int | None:
        """Returns the index of the run in which all of `[start, end)` lies; None when it lies in none."""
        index = bisect_right(self.runs, start, key=_START) - 1
        return index if index >= 0 and end <= self.runs[index].end else None


@dataclass(frozen=True, slots=True)
class Usage:
    """Bytes by state; the last four add up to the first."""

    capacity: int
    sealed: int
    reserved: int
    quarantined: int
    free: int

    @property
    def used(self) -> int:
        """All that is not free."""
        return self.capacity - self.free


@dataclass(slots=True)
class Outcome:
    """What an order of the controller met that it should not have.

    Attributes:
        late: extents that were sealed although their session had ended before.
        adopted: extents that lay in no window; their bytes were free, so they were sealed.
        conflicts: extents whose bytes belong to something else; they were not sealed.
        kept: extents that the controller does not know, and that stayed sealed all the same.
    """

    late: list[Extent] = field(default_factory=list)
    adopted: list[Extent] = field(default_factory=list)
    conflicts: list[Extent] = field(default_factory=list)
    kept: list[Extent] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Takes in what another part of the same order met."""
        self.late += other.late
        self.adopted += other.adopted
        self.conflicts += other.conflicts
        self.kept += other.kept


class Allocator:
    """Hands out, seals and frees the bytes of one arena.

    Args:
        start: address of the first byte; a multiple of EXTENT_ALIGN.
        end: address behind the last one.
        segment_bytes: size of a full segment.
        ledger: what outlives the process.
    """

    def __init__(self, start: int, end: int, segment_bytes: int, ledger: Ledger) -> None:
        self._segments = Segments(start, end, segment_bytes)
        self._ledger = ledger
        self._windows: dict[int, Window] = {}  # by generation
        self._by_session: dict[int, set[int]] = {}  # session → generations
        self._extents: dict[int, Extent] = {}  # by offset
        self._by_generation: dict[int, list[int]] = {}  # generation → extents' offsets, ascending
        self._engines: set[int] = set()  # numbers of those that run
        self._one_sided: dict[int, float] = {}  # generation of a window that waits for its engine's end → since when
        self._sealed = 0
        self._quarantined = 0
        self._reserved = 0

    def usage(self) -> Usage:
        """Returns how many bytes are in which state."""
        segments = self._segments
        return Usage(segments.capacity, self._sealed, self._reserved, self._quarantined, segments.free_bytes)

    def extend(self, end: int) -> None:
        """Takes in the bytes up to a new end of the arena."""
        self._segments.extend(end)

    def capacity_up_to(self, end: int) -> int:
        """Returns how many bytes could be handed out if the arena ended there."""
        return self._segments.usable(end)

    def extents(self) -> Iterable[Extent]:
        """Returns every sealed extent; a live view."""
        return self._extents.values()

    def windows(self) -> Iterable[Window]:
        """Returns every window that has bytes left; a live view."""
        return self._windows.values()

    def mapped_sessions(self) -> dict[int, bool]:
        """Returns the sessions that have mapped windows → whether they have ended."""
        return {window.session: window.ended for window in self._windows.values() if window.mapped}

    def quarantined_since(self) -> float | None:
        """Returns when the oldest window came into quarantine that an engine's end would free; None without one."""
        return next(iter(self._one_sided.values()), None)

    def engine_started(self, engine: int) -> None:
        """An engine runs from now on, so that windows may be written through it.

        Args:
            engine: a number that no engine had before in the life of this allocator, and not 0.
        """
        self._engines.add(engine)

    def engine_ended(self, engine: int) -> int:
        """An engine's process is gone, and with it every write through it: frees what waited for that.

        Returns:
            How many bytes.
        """
        self._engines.discard(engine)
        before = self._segments.free_bytes
        for generation in list(self._one_sided):
            if self._windows[generation].engine == engine:
                self._give(self._windows[generation])
        return self._segments.free_bytes - before

    def reserve(
        self, session: int, partition: int, length: int, *, mapped: bool = False, engine: int = 0, ticket: int = 0
    ) -> Window:
        """Opens a window.

        Args:
            session: a live session.
            partition: whose segments it is to lie in.
            length: at least this many bytes, in one piece.
            mapped: the session writes through a mapping of its own.
            engine: the session writes through this engine, which runs; 0 for none.
            ticket: the session's number of this reservation, for the ledger; 0 for none.

        Raises:
            InvalidArgument: `length` is not positive, or no such engine runs.
            StorageFull: no room, in the arena or in the ledger; or the session has too many windows.
        """
        if length <= 0:
            raise InvalidArgument(f"length {length}: reserve one byte at least")
        if engine and engine not in self._engines:
            raise InvalidArgument(f"engine {engine} does not run")
        held = len(self._by_session.get(session, ()))
        if held >= limits.WINDOWS_PER_SESSION_MAX:
            raise StorageFull(
                f"session {session} has {held} windows open here, the most that one client may have: commit or abort "
                "what it has allocated, or close the client and connect again"
            )
        if not self._ledger.has_room():
            raise StorageFull(
                f"{len(self._windows)} windows are open, and the arena's table holds no more of what is left of them; "
                "close some, or end the session that cut one into many pieces"
            )
        size = align_up(length)
        offset = self._segments.take(partition, size)
        generation = self._ledger.next_generation()
        window = Window(generation, session, partition, offset, size, mapped, engine)
        run = Run(generation, session, partition, offset, offset + size, mapped, ticket)
        self._ledger.add(run)
        self._open(window, run)
        return window

    def close_window(self, session: int, generation: int, end: int) -> None:
        """Frees what lies behind `end` in a window; a window that is gone already is passed over.

        Of a window that waits for its engine's end, everything is freed: the writer says that it is done.
        An `end` behind the window frees nothing: where the window ended is not known after a restart of the node.

        Raises:
            InvalidArgument: the window is another session's.
        """
        window = self._windows.get(generation)
        if window is None:
            return
        if window.session != session:
            raise InvalidArgument(f"window {generation} belongs to session {window.session}, not to {session}")
        self._give(window, behind=align_up(end) if generation not in self._one_sided else 0)

    def window(self, generation: int) -> Window | None:
        """Returns a window that has something left."""
        return self._windows.get(generation)

    def has_window(self, session: int, generation: int) -> bool:
        """Whether a live session has something left of that window."""
        window = self._windows.get(generation)
        return window is not None and window.session == session and not window.ended

    def may_write(self, session: int, generation: int, offset: int, length: int) -> bool:
        """Whether all of these bytes lie in a live session's window, none of them sealed."""
        if not self.has_window(session, generation):
            return False
        return self._windows[generation].find(offset, offset + length) is not None

    def may_read(self, offset: int, length: int, generation: int) -> bool:
        """Whether all of these bytes lie in one extent of that generation, or in what is left of its window.

        The window counts because a commit's reader can be faster than the order that seals it.
        """
        offsets = self._by_generation.get(generation, ())
        index = bisect_right(offsets, offset) - 1
        if index >= 0:
            extent = self._extents[offsets[index]]
            if offset + length <= extent.offset + extent.length:
                return True
        window = self._windows.get(generation)
        return window is not None and window.find(offset, offset + length) is not None

    def seal(self, extents: Iterable[Extent]) -> Outcome:
        """Makes extents immutable; those that are sealed already are passed over."""
        outcome = Outcome()
        for extent in extents:
            if self._extents.get(extent.offset) == extent:
                continue
            window = self._windows.get(extent.generation)
            index = window.find(extent.offset, extent.end) if window is not None else None
            valid = extent.length > 0 and extent.offset % EXTENT_ALIGN == 0
            if window is not None and index is not None and valid:
                self._cut(window, index, extent.offset, extent.end)
                if window.ended:
                    outcome.late.append(extent)
            elif valid and self._segments.is_free(extent.offset, extent.end):
                self._segments.take_at(extent.partition, extent.offset, extent.end)
                outcome.adopted.append(extent)
            else:
                outcome.conflicts.append(extent)
                continue
            self._extents[extent.offset] = extent
            insort(self._by_generation.setdefault(extent.generation, []), extent.offset)
            self._sealed += extent.end - extent.offset
        return outcome

    def free(self, extents: Iterable[Extent]) -> int:
        """Frees sealed extents; those that are not sealed are passed over. Returns how many were freed."""
        count = 0
        for extent in extents:
            if self._extents.get(extent.offset) != extent:
                continue
            del self._extents[extent.offset]
            offsets = self._by_generation[extent.generation]
            del offsets[bisect_left(offsets, extent.offset)]
            if not offsets:
                del self._by_generation[extent.generation]
            self._sealed -= extent.end - extent.offset
            self._segments.give(extent.offset, extent.end)
            count += 1
        return count

    def end_session(self, session: int, *, now: float) -> None:
        """Frees what the session reserved and did not commit, once nobody can write to it any more.

        Its mapped windows are quarantined until `release`; those of an engine that runs, until `close_window` or
        `engine_ended`.

        Args:
            session: ends.
            now: on the clock of `quarantined_since`; never less than before.
        """
        for generation in list(self._by_session.get(session, ())):
            window = self._windows[generation]
            if window.ended:
                continue
            if not window.mapped and window.engine not in self._engines:
                self._give(window)
                continue
            size = sum(run.end - run.start for run in window.runs)
            self._reserved -= size
            self._quarantined += size
            window.ended = True
            if not window.mapped:
                self._one_sided[generation] = now

    def release(self, session: int) -> int:
        """Frees an ended session's mapped windows: their writer is gone. Returns how many bytes."""
        before = self._segments.free_bytes
        for generation in list(self._by_session.get(session, ())):
            window = self._windows[generation]
            if window.ended and window.mapped:
                self._give(window)
        return self._segments.free_bytes - before

    def restore(self, runs: Iterable[Run]) -> None:
        """Reserves again what the ledger remembered, before anything else is asked of a new allocator.

        A run and its rests are remembered both when the process died in the middle of a `replace`: then the whole of it
        is reserved. So nothing is added to the ledger here, which may have room for nothing more.
        """
        for run in sorted(runs, key=lambda run: (run.start, -run.end)):  # a run comes before its rests
            window = self._windows.get(run.generation)
            if window is not None and run.end <= window.runs[-1].end:
                self._ledger.replace(run, ())
                continue
            self._segments.take_at(run.partition, run.start, run.end)
            if window is None:
                window = Window(run.generation, run.session, run.partition, run.start, 0, run.mapped)
            window.length = run.end - window.offset
            self._open(window, run)

    def end_others(self, live: Iterable[int], *, now: float) -> None:
        """Ends every session that is not among the live ones; `now` as for `end_session`."""
        kept = set(live)
        for session in [session for session in self._by_session if session not in kept]:
            self.end_session(session, now=now)

    def unheard(self, committed: Iterable[tuple[int, int, int]]) -> list[Extent]:
        """Returns what was committed and lies in windows yet: the orders that it was sealed and freed were lost.

        Args:
            committed: generation, start and end of bytes that were ever committed, live or not.
        """
        found = []
        for generation, start, end in committed:
            window = self._windows.get(generation)
            for run in window.runs if window is not None else ():
                first, last = max(start, run.start), min(end, run.end)
                if first < last:
                    found.append(Extent(first, last - first, generation, run.partition))
        return found

    def _open(self, window: Window, run: Run) -> None:
        """Takes in the next run of a window, which the ledger remembers."""
        window.runs.append(run)
        self._windows[window.generation] = window
        self._by_session.setdefault(window.session, set()).add(window.generation)
        self._reserved += run.end - run.start

    def _cut(self, window: Window, index: int, start: int, end: int) -> None:
        """Takes `[start, end)` out of a run, which is told by its index; the bytes are the caller's then."""
        run = window.runs[index]
        rests = [run._replace(end=start), run._replace(start=end)]
        window.runs[index : index + 1] = rests = [rest for rest in rests if rest.start < rest.end]
        self._ledger.replace(run, rests)
        if window.ended:
            self._quarantined -= end - start
        else:
            self._reserved -= end - start
        if not window.runs:
            del self._windows[window.generation]
            self._one_sided.pop(window.generation, None)
            generations = self._by_session[window.session]
            generations.discard(window.generation)
            if not generations:
                del self._by_session[window.session]

    def _give(self, window: Window, *, behind: int = 0) -> None:
        """Frees what is left of a window behind an address."""
        freed = []
        while window.runs and window.runs[-1].end > behind:  # the last run first: then no other has to move up
            run = window.runs[-1]
            freed.append((max(behind, run.start), run.end))
            self._cut(window, len(window.runs) - 1, *freed[-1])
        for start, end in reversed(freed):
            self._segments.give(start, end)
