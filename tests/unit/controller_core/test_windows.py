"""What is remembered of windows whose last extent went."""

from __future__ import annotations

import tracemalloc

import pytest

from tests.model.driver import Driver, ids
from tqclient.errors import InvalidArgument
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import Core, limits
from tqserver.controller.core.blocks import Extent, Windows

ARENA = (1 << 64) - 1
LENGTH = 20 << 20


def extent(generation: int, offset: int = 0) -> Extent:
    # Numbers of its own, as they are when each came in a message of its own.
    return Extent("node", int(str(ARENA)), (generation << 30) + offset, LENGTH, generation)


def go_round(windows: Windows, generations: range) -> None:
    """Commits and clears one extent of each window, as large puts do."""
    for generation in generations:
        windows.add(extent(generation))
        windows.remove(extent(generation))


def refused(windows: Windows, offered: Extent) -> bool:
    try:
        windows.check([offered])
    except InvalidArgument:
        return True
    return False


def test_windows_that_are_empty_take_little_memory() -> None:
    """A controller takes about 80 MB, and must not be seen to grow: each large put has a window of its own."""
    windows = Windows()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        go_round(windows, range(20_000))
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kept < 2_500_000


def test_the_latest_windows_are_remembered() -> None:
    windows = Windows()
    go_round(windows, range(1, limits.RETIRED_WINDOWS_MAX + 2))
    assert not refused(windows, extent(1))
    assert refused(windows, extent(2))
    assert refused(windows, extent(limits.RETIRED_WINDOWS_MAX + 1))


def test_what_was_committed_is_told_whether_it_lives_or_not() -> None:
    windows = Windows()
    first, next_to_it, apart = extent(1), extent(1, LENGTH), extent(1, 3 * LENGTH)
    for each in (first, next_to_it, apart):
        windows.add(each)
    windows.remove(next_to_it)
    go_round(windows, range(2, 4))
    windows.add(Extent("other", 5, 0, LENGTH, 9))
    merged = [1, first.offset, next_to_it.end], [1, apart.offset, apart.end]
    retired = [[generation, extent(generation).offset, extent(generation).end] for generation in (2, 3)]
    assert windows.committed(ARENA).tolist() == [*merged, *retired]
    assert windows.committed(5).tolist() == [[9, 0, LENGTH]]
    assert windows.committed(6).shape == (0, 3)


@pytest.mark.parametrize("through_snapshot", [False, True])
def test_every_range_of_an_empty_window_is_remembered(through_snapshot: bool) -> None:
    generation = (1 << 64) - 1
    first, second, between, behind = (
        Extent("node", ARENA, offset, 100, generation) for offset in (1 << 61, (1 << 61) + 1024, (1 << 61) + 512, 4096)
    )
    windows = Windows()
    for part in (first, second):
        windows.add(part)
    for part in (first, second):
        windows.remove(part)
    if through_snapshot:
        retired = windows.retired
        windows = Windows.from_tree(windows.to_tree(), retired)
        assert windows.retired == retired
    assert refused(windows, first)
    assert refused(windows, second)
    assert not refused(windows, behind)
    windows.check([between])
    windows.add(between)  # the window has a live extent again, and its other bytes stay committed
    assert refused(windows, second)
    windows.remove(between)
    assert refused(windows, first)


def test_a_snapshot_of_an_earlier_release_is_read() -> None:
    """It listed the windows one by one, and had more of them."""
    count = limits.RETIRED_WINDOWS_MAX + 10
    rows = [[ARENA, generation, [generation << 30], [(generation << 30) + LENGTH], 0] for generation in range(count)]
    windows = Windows.from_tree([[], rows], {})
    assert len(windows.retired) == limits.RETIRED_WINDOWS_MAX
    assert not refused(windows, extent(9))
    assert refused(windows, extent(10))
    assert refused(windows, extent(count - 1))


def test_a_snapshot_costs_nothing_for_windows_that_are_empty() -> None:
    """What is made for it, and let go of, stays with the process, and there is ever more of that."""
    windows = Windows()
    go_round(windows, range(limits.RETIRED_WINDOWS_MAX))
    tracemalloc.start()
    try:
        windows.to_tree()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 10_000


def test_a_controller_that_restarts_from_a_snapshot_remembers_windows(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    driver.core = Core.restore(driver.core.snapshot(), driver.now)
    driver.offset = 0
    with pytest.raises(InvalidArgument, match="committed before"):
        driver.put(session, p, 1)
