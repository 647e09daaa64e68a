"""The table of an arena whose rows are all taken, and deaths between any two writes to it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.harness.steps import finished
from tqclient.errors import StorageFull
from tqclient.limits import EXTENT_ALIGN
from tqserver import limits
from tqserver.storage.arena import TableFull, WindowTable
from tqserver.storage.extents import Allocator, Extent, Run, Window
from tqserver.storage.sync import sync

FILE_BYTES = 16 << 10
START = 1 << 20
SIZE = 16 * 4096
SEGMENT = 4 * 4096
MAPPED, OTHER, NEXT = 1, 2, 3  # sessions
GRANULES = 6  # of the window that is cut into pieces

Bytes = set[int]  # addresses of granules


class Watched(np.ndarray[Any, Any]):
    """Rows that call `written` after every write."""

    written: Callable[[], None] = staticmethod(lambda: None)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        Watched.written()


def few_rows(patch: pytest.MonkeyPatch, rows: int, spare: int = 0) -> None:
    patch.setattr(limits, "WINDOWS_MAX", rows)
    patch.setattr(limits, "WINDOWS_SPARE", spare)


def opened(file: NDArray[np.uint8], states: list[bytes] | None = None) -> Allocator:
    """Starts a node on a file; `states` gets what a death after each of its writes would leave."""
    table = WindowTable(file)
    if states is not None:
        table._rows = table._rows.view(Watched)
        Watched.written = staticmethod(lambda: states.append(file.tobytes()))
    allocator = Allocator(START, START + SIZE, SEGMENT, table)
    allocator.restore(table.runs())
    return allocator


def granules(pieces: Iterable[Run | Window]) -> Bytes:
    return {
        address
        for piece in pieces
        for address in (
            range(piece.start, piece.end, EXTENT_ALIGN)
            if isinstance(piece, Run)
            else range(piece.offset, piece.offset + piece.length, EXTENT_ALIGN)
        )
    }


def left(allocator: Allocator) -> Bytes:
    """Returns what somebody may write to."""
    return granules(run for window in allocator.windows() for run in window.runs)


def test_what_is_left_of_a_run_shares_its_row_until_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows(monkeypatch, 3, spare=1)
    file = np.zeros(FILE_BYTES, np.uint8)
    table = WindowTable(file)

    def rows() -> list[tuple[int, int]]:
        return sorted((run.start, run.end) for run in WindowTable(file).runs())

    def part(start: int, end: int) -> Run:
        return Run(1, 1, 1, start, end, False)

    other = Run(2, 1, 1, 500, 600, False)
    table.add(part(0, 90))
    table.add(other)
    assert not table.has_room()
    table.replace(part(0, 90), [part(0, 10), part(20, 90)])  # that was the last row
    table.replace(part(20, 90), [part(20, 30), part(40, 90)])
    table.replace(part(40, 90), [part(40, 50), part(60, 90)])
    assert rows() == [(0, 10), (20, 90), (500, 600)]
    assert len(table.runs()) == 5
    with pytest.raises(TableFull):
        table.add(part(1000, 1010))

    table.replace(part(60, 90), [part(60, 70)])
    assert rows() == [(0, 10), (20, 70), (500, 600)]
    table.replace(other, ())  # its row goes to the last of them
    assert rows() == [(0, 10), (20, 50), (60, 70)]
    assert not table.has_room()
    table.replace(part(20, 30), ())  # the first one of two that share
    assert rows() == [(0, 10), (40, 50), (60, 70)]
    table.replace(part(0, 10), ())
    table.replace(part(60, 70), ())
    assert rows() == [(40, 50)]
    assert table.runs() == [part(40, 50)]
    assert table.has_room()


def test_a_full_table_refuses_windows_and_keeps_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows(monkeypatch, 4, spare=1)
    file = np.zeros(FILE_BYTES, np.uint8)
    node = opened(file)
    other = node.reserve(OTHER, 1, 2 * EXTENT_ALIGN)
    window = node.reserve(MAPPED, 1, 32 * EXTENT_ALIGN, mapped=True)
    kept = Extent(other.offset, 200, other.generation, 1)
    pieces = [Extent(window.offset + i * EXTENT_ALIGN, 100, window.generation, 1) for i in range(1, 32, 2)]
    outcome = node.seal([kept, *pieces])
    assert not outcome.late + outcome.adopted + outcome.conflicts
    assert node.usage().sealed == 17 * EXTENT_ALIGN
    assert node.usage().reserved == 17 * EXTENT_ALIGN
    with pytest.raises(StorageFull, match="2 windows are open, and the arena's table holds no more"):
        node.reserve(OTHER, 1, 1)

    for _ in range(3):  # and again at every later start
        node = opened(file)
        outcome = finished(sync(node, [kept, *pieces], [MAPPED], now=0))
        assert not outcome.late + outcome.conflicts
        assert (node.usage().sealed, node.usage().reserved) == (17 * EXTENT_ALIGN, 16 * EXTENT_ALIGN)
        assert all(node.may_read(extent.offset, 100, extent.generation) for extent in (kept, *pieces))
    node.end_session(MAPPED, now=0)
    assert node.usage().quarantined == 16 * EXTENT_ALIGN
    assert node.release(MAPPED) == 16 * EXTENT_ALIGN
    assert WindowTable(file).runs() == []
    assert node.reserve(NEXT, 1, 1).length == EXTENT_ALIGN


def test_bytes_remembered_too_many_are_the_windows_until_its_session_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    few_rows(monkeypatch, 1)
    file = np.zeros(FILE_BYTES, np.uint8)
    node = opened(file)
    window = node.reserve(OTHER, 1, 8 * EXTENT_ALIGN)
    kept, freed = (Extent(window.offset + i * EXTENT_ALIGN, 256, window.generation, 1) for i in (2, 5))
    node.seal([kept, freed])
    node.free([freed])
    assert node.usage().reserved == 6 * EXTENT_ALIGN
    assert node.usage().free == SIZE - 7 * EXTENT_ALIGN
    with pytest.raises(StorageFull):  # the freed bytes are nobody else's as long as the table calls them the window's
        node.reserve(NEXT, 1, 1)

    node = opened(file)
    finished(sync(node, [kept], [OTHER], now=0))
    assert (node.usage().sealed, node.usage().reserved) == (EXTENT_ALIGN, 7 * EXTENT_ALIGN)
    finished(sync(node, [kept], [], now=0))
    assert (node.usage().sealed, node.usage().reserved, node.usage().quarantined) == (EXTENT_ALIGN, 0, 0)
    assert node.reserve(NEXT, 1, 1).length == EXTENT_ALIGN


def deaths(file: NDArray[np.uint8], step: Callable[[], object]) -> list[bytes]:
    """Returns every state of the file that a death in the middle of `step` could leave."""
    states = [file.tobytes()]
    Watched.written = staticmethod(lambda: states.append(file.tobytes()))
    step()
    return list(dict.fromkeys(states))


def restarted(state: bytes, truth: list[Extent], may_write: Bytes, most: Bytes, *, deep: bool) -> None:
    """Starts a node on a file; and another one on what a death at any moment of that start would leave."""
    file = np.frombuffer(state, np.uint8).copy()
    states: list[bytes] = []
    node = opened(file, states)
    assert may_write <= left(node) <= most
    outcome = finished(sync(node, truth, [MAPPED, OTHER], now=0))
    assert not outcome.late + outcome.conflicts
    sealed = {extent.offset for extent in truth}
    while_starting = len(states)
    assert may_write <= left(node) | sealed
    assert left(node) == granules(WindowTable(file).runs()) - sealed
    usage = node.usage()
    assert (usage.sealed, usage.reserved) == (len(sealed) * EXTENT_ALIGN, len(left(node)) * EXTENT_ALIGN)
    assert all(node.may_read(extent.offset, extent.length, extent.generation) for extent in truth)
    for session in (MAPPED, OTHER):
        node.end_session(session, now=0)
        node.release(session)
    assert node.usage().used == node.usage().sealed
    assert WindowTable(file).runs() == []
    if deep:
        for later in dict.fromkeys(states[:while_starting]):
            restarted(later, truth, may_write - sealed, most, deep=False)
        for later in dict.fromkeys(states[while_starting:]):
            restarted(later, truth, set(), most, deep=False)


@pytest.mark.parametrize("rows", [2, 3, 4, 8])
@pytest.mark.parametrize("order", list(itertools.permutations(["seal 1", "seal 3", "seal 5", "close other"])))
def test_a_death_between_any_two_writes(order: list[str], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A later start finds every block, and whatever somebody may still write to; and so does the one after that."""
    few_rows(monkeypatch, rows)
    monkeypatch.setattr(Watched, "written", Watched.written)
    file = np.zeros(FILE_BYTES, np.uint8)
    node = opened(file, [])
    window = node.reserve(MAPPED, 1, GRANULES * EXTENT_ALIGN, mapped=True)
    other = node.reserve(OTHER, 1, 3 * EXTENT_ALIGN)
    most = granules([window, other])
    truth: list[Extent] = []
    for step in (*order, "close behind 4", "end"):
        before = left(node)
        match step.split():
            case "seal", slot:  # in the truth first: the controller tells of what it has committed
                truth.append(Extent(window.offset + int(slot) * EXTENT_ALIGN, 99, window.generation, 1))
                states = deaths(file, lambda: node.seal(truth[-1:]))
            case "close", "other":
                states = deaths(file, lambda: node.close_window(OTHER, other.generation, other.offset))
            case "close", *_:
                end = window.offset + 4 * EXTENT_ALIGN
                states = deaths(file, lambda end=end: node.close_window(MAPPED, window.generation, end))
            case _:
                node.end_session(MAPPED, now=0)
                states = deaths(file, lambda: node.release(MAPPED))
        assert len(states) > 1 or rows < 4  # a run that is cut in two within its row writes nothing
        for state in states:
            restarted(state, truth, before & left(node), most, deep=True)
