"""The allocator against a map of single granules: whatever the history, no two live things share a byte."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.harness.steps import finished
from tqclient.errors import StorageFull
from tqclient.limits import EXTENT_ALIGN
from tqserver import limits
from tqserver.storage.arena import WindowTable
from tqserver.storage.extents import Allocator, Extent, Run
from tqserver.storage.sync import sync

GRANULES = 256
START = 7 * EXTENT_ALIGN
SEGMENT = 4 * 4096  # the unit is then 4 KiB, 16 granules


class MemoryLedger:
    """What the arena file would remember."""

    def __init__(self) -> None:
        self.runs: set[Run] = set()
        self.generation = 0

    def has_room(self) -> bool:
        return True

    def next_generation(self) -> int:
        self.generation += 1
        return self.generation

    def add(self, run: Run) -> None:
        assert run not in self.runs
        self.runs.add(run)

    def replace(self, run: Run, rests: Sequence[Run]) -> None:
        self.runs.remove(run)
        self.runs.update(rests)


class AllocatorAgainstMap(RuleBasedStateMachine):
    """The model holds one word per granule: None, or who has it."""

    ledger: MemoryLedger | WindowTable

    @initialize()
    def start(self) -> None:
        self.ledger = self.new_ledger()
        self.map: list[tuple[str, int] | None] = [None] * (GRANULES // 2)  # (state, generation)
        self.allocator = self.fresh()
        # generation → session, first, granules, and who writes: 0 the node, -1 a mapping, or the number of an engine
        self.windows: dict[int, tuple[int, int, int, int]] = {}
        self.engines: set[int] = set()
        self.next_engine = 1
        self.now = 0.0
        self.ended_at: dict[int, float] = {}  # session → when
        self.partitions: dict[int, int] = {}
        self.live = {1, 2, 3}
        self.next_session = 4
        self.extents: dict[int, Extent] = {}  # first granule → extent

    def new_ledger(self) -> MemoryLedger | WindowTable:
        return MemoryLedger()

    def reopen_ledger(self) -> None:
        """The process died: only what outlives it is left of the ledger."""

    def remembered(self) -> set[Run]:
        """Returns the runs that outlive the process."""
        assert isinstance(self.ledger, MemoryLedger)
        return self.ledger.runs.copy()

    def fresh(self) -> Allocator:
        return Allocator(START, START + len(self.map) * EXTENT_ALIGN, SEGMENT, self.ledger)

    def of_generation(self, generation: int, *states: str) -> list[int]:
        return [i for i, word in enumerate(self.map) if word and word[1] == generation and word[0] in states]

    def generations(self, *states: str) -> list[int]:
        return sorted({word[1] for word in self.map if word and word[0] in states})

    @rule(units=st.integers(1, 3))
    def the_arena_grows(self, units: int) -> None:
        self.map += [None] * min(16 * units, GRANULES - len(self.map))
        self.allocator.extend(START + len(self.map) * EXTENT_ALIGN)

    @rule()
    def an_engine_starts(self) -> None:
        self.allocator.engine_started(self.next_engine)
        self.engines.add(self.next_engine)
        self.next_engine += 1

    @rule(data=st.data())
    def an_engine_ends(self, data: st.DataObject) -> None:
        if not self.engines:
            return
        engine = data.draw(st.sampled_from(sorted(self.engines)))
        self.engines.remove(engine)
        freed = sum(map(self.give_quarantined, [g for g, (*_, writer) in self.windows.items() if writer == engine]))
        assert self.allocator.engine_ended(engine) == freed * EXTENT_ALIGN

    def give_quarantined(self, generation: int) -> int:
        mine = self.of_generation(generation, "quarantined")
        for index in mine:
            self.map[index] = None
        return len(mine)

    @rule(data=st.data(), partition=st.integers(1, 4))
    def reserve(self, data: st.DataObject, partition: int) -> None:
        writer = data.draw(st.sampled_from([0, -1, *sorted(self.engines)]))
        session = data.draw(st.sampled_from(sorted(self.live)))
        length = data.draw(st.one_of(st.integers(1, 20 * EXTENT_ALIGN), st.integers(1, 150 * EXTENT_ALIGN)))
        try:
            window = self.allocator.reserve(
                session, partition, length, mapped=writer == -1, engine=writer if writer > 0 else 0
            )
        except StorageFull:
            if not self.ledger.has_room():
                return
            # Full is allowed only when no run of whole units would hold it.
            units = [all(word is None for word in self.map[i : i + 16]) for i in range(0, len(self.map), 16)]
            longest = max(map(len, "".join(" x"[unit] for unit in units).split()), default=0)
            assert -(-length // 4096) > longest
            return
        assert window.length == -(-length // EXTENT_ALIGN) * EXTENT_ALIGN
        first = (window.offset - START) // EXTENT_ALIGN
        assert (window.offset - START) % EXTENT_ALIGN == 0
        granules = window.length // EXTENT_ALIGN
        for index in range(first, first + granules):
            assert self.map[index] is None
            self.map[index] = ("reserved", window.generation)
        assert window.generation not in self.windows
        self.windows[window.generation] = (session, first, granules, writer)
        self.partitions[window.generation] = partition

    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        if not (generations := self.generations("reserved")):
            return
        generation = data.draw(st.sampled_from(generations))
        mine = self.of_generation(generation, "reserved")
        first = data.draw(st.sampled_from(mine))
        last = first
        while last + 1 in mine and data.draw(st.booleans()):
            last += 1
        waste = data.draw(st.integers(0, EXTENT_ALIGN - 1))
        extent = Extent(
            START + first * EXTENT_ALIGN,
            (last + 1 - first) * EXTENT_ALIGN - waste,
            generation,
            self.partitions[generation],
        )
        for _ in range(2):  # the second time has no effect
            outcome = self.allocator.seal([extent])
            assert not outcome.late + outcome.adopted + outcome.conflicts
        self.extents[first] = extent
        self.map[first : last + 1] = [("sealed", generation)] * (last + 1 - first)

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        if not self.extents:
            return
        chosen = data.draw(st.lists(st.sampled_from(sorted(self.extents)), unique=True, max_size=5))
        extents = [self.extents.pop(first) for first in chosen]
        assert self.allocator.free(extents) == len(extents)
        assert self.allocator.free(extents) == 0
        for first, extent in zip(chosen, extents, strict=True):
            granules = -(-extent.length // EXTENT_ALIGN)
            self.map[first : first + granules] = [None] * granules

    @rule(data=st.data())
    def close_window(self, data: st.DataObject) -> None:
        open_windows = [g for g in self.generations("reserved") if self.windows[g][0] in self.live]
        if not open_windows:
            return
        generation = data.draw(st.sampled_from(open_windows))
        session, first, granules, _ = self.windows[generation]
        end = data.draw(st.integers(0, granules * EXTENT_ALIGN))
        self.allocator.close_window(session, generation, START + first * EXTENT_ALIGN + end)
        for index in self.of_generation(generation, "reserved"):
            if (index - first) * EXTENT_ALIGN >= end:
                self.map[index] = None

    @rule(data=st.data())
    def an_ended_writer_is_done(self, data: st.DataObject) -> None:
        waiting = [g for g in self.generations("quarantined") if self.windows[g][3] > 0]
        if not waiting:
            return
        generation = data.draw(st.sampled_from(waiting))
        session, first, granules, _ = self.windows[generation]
        end = data.draw(st.integers(0, granules))
        self.allocator.close_window(session, generation, START + (first + end) * EXTENT_ALIGN)
        self.give_quarantined(generation)

    @rule(data=st.data())
    def end_session(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted(self.live)))
        self.forget_session(session)
        for _ in range(2):
            self.allocator.end_session(session, now=self.now)

    def forget_session(self, session: int) -> None:
        self.live.remove(session)
        self.live.add(self.next_session)
        self.next_session += 1
        self.now += 1.0
        self.ended_at[session] = self.now
        for generation, (owner, _, _, writer) in self.windows.items():
            if owner == session:
                for index in self.of_generation(generation, "reserved"):
                    self.map[index] = ("quarantined", generation) if writer in {-1, *self.engines} else None

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sessions = sorted({self.windows[g][0] for g in self.generations("quarantined")} | self.live)
        session = data.draw(st.sampled_from(sessions))
        mapped = [g for g, (owner, _, _, writer) in self.windows.items() if (owner, writer) == (session, -1)]
        freed = sum(map(self.give_quarantined, mapped))
        assert self.allocator.release(session) == freed * EXTENT_ALIGN

    @rule(data=st.data())
    def die_and_restart(self, data: st.DataObject) -> None:
        """The ledger survives; meanwhile the controller may have ended a session and sealed or freed extents.

        No engine outlives the node, so nobody writes to what they wrote to.
        """
        self.reopen_ledger()
        self.allocator = self.fresh()
        self.engines.clear()
        for generation, (*window, writer) in self.windows.items():
            self.windows[generation] = (window[0], window[1], window[2], min(writer, 0))
            if writer > 0:
                self.give_quarantined(generation)
        runs = self.remembered()
        self.allocator.restore(runs)
        if data.draw(st.booleans()):
            self.forget_session(data.draw(st.sampled_from(sorted(self.live))))
        for first in data.draw(st.lists(st.sampled_from(sorted(self.extents)), unique=True)) if self.extents else ():
            granules = -(-self.extents.pop(first).length // EXTENT_ALIGN)
            self.map[first : first + granules] = [None] * granules
        self.take_what_was_remembered_too_many(runs)
        truth = data.draw(st.permutations(sorted(self.extents.values())))
        outcome = finished(sync(self.allocator, truth, self.live, now=self.now))
        assert not outcome.conflicts + outcome.late
        assert sorted(outcome.adopted) == sorted(
            extent for extent in truth if not any(run.start <= extent.offset < run.end for run in runs)
        )

    def take_what_was_remembered_too_many(self, runs: set[Run]) -> None:
        """Free bytes of a run belong to its window again: to its writer, if there is one."""
        for run in runs:
            session, _, _, writer = self.windows[run.generation]
            state = "reserved" if session in self.live else "quarantined" if writer == -1 else None
            for index in self.granules(run):
                if self.map[index] is None and state:
                    self.map[index] = (state, run.generation)

    @staticmethod
    def granules(run: Run) -> range:
        return range((run.start - START) // EXTENT_ALIGN, (run.end - START) // EXTENT_ALIGN)

    @invariant()
    def bytes_add_up(self) -> None:
        usage = self.allocator.usage()
        counts = dict.fromkeys(("sealed", "reserved", "quarantined", None), 0)
        for word in self.map:
            counts[word[0] if word else None] += EXTENT_ALIGN
        assert (usage.sealed, usage.reserved, usage.quarantined, usage.free) == tuple(counts.values())
        assert usage.capacity == len(self.map) * EXTENT_ALIGN
        assert usage.used + usage.free == usage.capacity

    @invariant()
    def the_oldest_quarantine_that_an_engine_ends_is_known(self) -> None:
        waiting = [g for g in self.generations("quarantined") if self.windows[g][3] > 0]
        since = min((self.ended_at[self.windows[g][0]] for g in waiting), default=None)
        assert self.allocator.quarantined_since() == since

    @invariant()
    def the_ledger_holds_what_may_be_written(self) -> None:
        held = [0] * len(self.map)
        for run in self.remembered():
            for index in self.granules(run):
                held[index] += 1
                assert self.map[index] in (("reserved", run.generation), ("quarantined", run.generation))
        assert held == [int(word is not None and word[0] != "sealed") for word in self.map]

    @invariant()
    def reads_and_writes_are_bounded(self) -> None:
        for extent in self.extents.values():
            assert self.allocator.may_read(extent.offset, extent.length, extent.generation)
            assert not self.allocator.may_read(extent.offset, extent.length, extent.generation + 1)
            session = self.windows[extent.generation][0]
            assert not self.allocator.may_write(session, extent.generation, extent.offset, 1)
        for index, word in enumerate(self.map):
            if word is None:
                assert not any(
                    self.allocator.may_read(START + index * EXTENT_ALIGN, 1, generation)
                    for generation in list(self.windows)[-4:]
                )

    def teardown(self) -> None:
        """Whatever happened, giving everything back leads to an arena as good as new."""
        if not hasattr(self, "allocator"):
            return
        self.allocator.free(list(self.extents.values()))
        for session in {owner for owner, *_ in self.windows.values()}:
            self.allocator.end_session(session, now=self.now)
            self.allocator.release(session)
        for engine in self.engines:
            self.allocator.engine_ended(engine)
        assert not self.remembered()
        whole = self.allocator.reserve(1, 1, len(self.map) * EXTENT_ALIGN, mapped=False)
        assert (whole.offset, whole.length) == (START, len(self.map) * EXTENT_ALIGN)


class AllocatorWithAFullTable(AllocatorAgainstMap):
    """Its ledger is the table of an arena that has very few rows, so that what is left of windows shares them."""

    def new_ledger(self) -> WindowTable:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "WINDOWS_MAX", 2)
        self.patch.setattr(limits, "WINDOWS_SPARE", 0)
        self.file = np.zeros(16 << 10, np.uint8)
        return WindowTable(self.file)

    def reopen_ledger(self) -> None:
        self.ledger = WindowTable(self.file)

    def remembered(self) -> set[Run]:
        return set(WindowTable(self.file).runs())

    @invariant()
    def the_ledger_holds_what_may_be_written(self) -> None:
        """And more while no row is free; but no byte twice, and none that is another window's by now."""
        assert isinstance(self.ledger, WindowTable)
        held: dict[int, int] = {}
        for run in self.remembered():
            assert held.keys().isdisjoint(self.granules(run))
            held.update(dict.fromkeys(self.granules(run), run.generation))
        writable = {index: word[1] for index, word in enumerate(self.map) if word and word[0] != "sealed"}
        assert held.items() >= writable.items()
        assert held == writable or not self.ledger.has_room()  # room: a row is free
        assert sorted(self.ledger.runs()) == sorted(run for window in self.allocator.windows() for run in window.runs)

    def teardown(self) -> None:
        try:
            super().teardown()
        finally:
            if hasattr(self, "patch"):
                self.patch.undo()


for machine in (AllocatorAgainstMap, AllocatorWithAFullTable):
    machine.TestCase.settings = settings(stateful_step_count=40)
TestAllocatorAgainstMap = AllocatorAgainstMap.TestCase
TestAllocatorWithAFullTable = AllocatorWithAFullTable.TestCase
