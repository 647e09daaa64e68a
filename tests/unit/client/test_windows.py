from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqclient.limits import KIB, MIB
from tqclient.windows import AHEAD_SPOTS_MAX, Fate, Spot, WindowPool, aligned
from tqclient.wire.v1 import storage_pb2

SPOT = Spot(session=1, address="node:1", node="n0", arena=7, incarnation=1, partition_id=3)


def granted(length: int, generation: int = 1, offset: int = 4096) -> storage_pb2.Window:
    return storage_pb2.Window(offset=offset, length=length, generation=generation, incarnation=1)


def test_extents_are_cut_front_to_back_on_aligned_offsets() -> None:
    pool = WindowPool(lambda: 0.0)
    (first,) = pool.add(SPOT, granted(1024), [100], whole=False)
    second = pool.cut(SPOT, 300)
    assert second is not None
    assert (first.extent().offset, first.extent().length) == (4096, 100)
    assert (second.extent().offset, second.extent().length) == (4096 + 256, 300)
    assert (second.place().offset, second.place().generation) == (4096 + 256, 1)
    assert pool.cut(SPOT, 300) is None  # 1024 - 256 - 512 = 256 are left
    assert pool.cut(SPOT, 256) is not None


def test_only_the_same_spot_shares_a_window() -> None:
    pool = WindowPool(lambda: 0.0)
    pool.add(SPOT, granted(1 * MIB), [100], whole=False)
    for other in ({"session": 2}, {"incarnation": 2}, {"partition_id": 4}, {"arena": 8}):
        fields = {name: getattr(SPOT, name) for name in SPOT.__slots__}
        assert pool.cut(Spot(**{**fields, **other}), 100) is None


def test_a_refused_extent_is_cut_again_and_an_unknown_one_never() -> None:
    pool = WindowPool(lambda: 0.0)
    (first,) = pool.add(SPOT, granted(1024), [256], whole=False)
    second, third = pool.cut(SPOT, 256), pool.cut(SPOT, 256)
    assert second is not None
    assert third is not None
    pool.settle([second], "refused")
    again = pool.cut(SPOT, 256)
    assert again is not None
    assert again.offset == second.offset
    pool.settle([again], "unknown")
    pool.settle([third], "refused")
    last = pool.cut(SPOT, 256)
    assert last is not None
    assert last.offset == third.offset
    pool.settle([first], "committed")
    rest = pool.cut(SPOT, 256)
    assert rest is not None
    assert rest.offset == 768


def test_extents_refused_out_of_order_go_back_in_one_piece() -> None:
    pool = WindowPool(lambda: 0.0)
    (first,) = pool.add(SPOT, granted(1024), [256], whole=False)
    second, third = pool.cut(SPOT, 256), pool.cut(SPOT, 256)
    assert second is not None
    assert third is not None
    pool.settle([first], "committed")
    pool.settle([second], "refused")
    pool.settle([third], "refused")
    pool.retire()
    (window,) = pool.take_closing()
    assert window.used == 256


def test_a_whole_window_is_closed_behind_its_put() -> None:
    pool = WindowPool(lambda: 0.0)
    cuts = pool.add(SPOT, granted(4 * MIB), [MIB, 100], whole=True)
    assert pool.cut(SPOT, 100) is None
    assert pool.take_closing() == []
    pool.settle(cuts, "committed")
    (window,) = pool.take_closing()
    assert window.used == MIB + 256
    refused = pool.add(SPOT, granted(4 * MIB), [MIB, 100], whole=True)
    pool.settle(refused, "refused")
    (window,) = pool.take_closing()
    assert window.used == 0  # all of it goes back


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("fate", ["committed", "unknown"])
def test_a_window_that_was_cut_to_its_end_is_not_closed(whole: bool, fate: Fate) -> None:
    pool = WindowPool(lambda: 0.0)
    cuts = pool.add(SPOT, granted(MIB + 256), [MIB, 100], whole=whole)
    pool.settle(cuts, fate)
    pool.retire()
    assert not pool.wants_closing
    assert pool.take_closing() == []


def test_a_window_that_is_written_one_sided_is_always_closed() -> None:
    pool = WindowPool(lambda: 0.0)
    spot = replace(SPOT, segment="engine-1")
    cuts = pool.add(spot, granted(MIB), [MIB], whole=True)
    pool.settle(cuts, "committed")
    assert pool.wants_closing
    assert [window.used for window in pool.take_closing()] == [MIB]


def test_an_idle_window_is_closed_and_a_pending_one_is_not() -> None:
    now = [0.0]
    pool = WindowPool(lambda: now[0])
    (cut,) = pool.add(SPOT, granted(1024), [100], whole=False)
    now[0] = 10.0
    pool.retire(idle_since=5.0)
    assert pool.take_closing() == []
    pool.settle([cut], "committed")
    pool.retire(idle_since=5.0)
    assert [window.used for window in pool.take_closing()] == [256]
    assert pool.cut(SPOT, 100) is None


def test_a_window_that_is_retired_under_a_put_is_closed_after_it() -> None:
    pool = WindowPool(lambda: 0.0)
    (cut,) = pool.add(SPOT, granted(1024), [100], whole=False)
    pool.retire(partition_id=99)
    assert pool.cut(SPOT, 100) is not None
    pool.retire(partition_id=3)
    assert pool.take_closing() == []
    assert pool.cut(SPOT, 100) is None
    pool.settle([cut], "committed")
    assert pool.take_closing() == []  # the second cut is pending


def test_the_windows_of_an_ended_session_are_forgotten() -> None:
    pool = WindowPool(lambda: 0.0)
    cuts = pool.add(SPOT, granted(1024), [100], whole=False)
    pool.settle(cuts, "committed")
    pool.forget(1)
    assert pool.cut(SPOT, 100) is None
    pool.retire()
    assert pool.take_closing() == []


def test_reserving_ahead_doubles_up_to_a_bound() -> None:
    pool = WindowPool(lambda: 0.0)
    assert [pool.ahead_bytes(SPOT, 100) // KIB for _ in range(7)] == [256, 512, 1024, 2048, 4096, 8192, 8192]
    assert pool.ahead_bytes(SPOT, 9 * MIB) == 9 * MIB


def test_reserving_ahead_begins_anew_where_nothing_was_reserved_for_long() -> None:
    pool = WindowPool(lambda: 0.0)
    spots = [replace(SPOT, partition_id=number) for number in range(AHEAD_SPOTS_MAX + 1)]
    assert [pool.ahead_bytes(spot, 100) // KIB for spot in spots[:-1]] == [256] * AHEAD_SPOTS_MAX
    assert pool.ahead_bytes(spots[0], 100) == 512 * KIB
    assert pool.ahead_bytes(spots[-1], 100) == 256 * KIB  # which takes the place of the second
    assert [pool.ahead_bytes(spot, 100) // KIB for spot in (spots[0], spots[2], spots[1])] == [1024, 512, 256]


@given(st.lists(st.tuples(st.integers(1, 700), st.sampled_from(["committed", "refused", "unknown", None]))))
def test_extents_never_overlap_what_may_be_committed(steps: list[tuple[int, str | None]]) -> None:
    pool = WindowPool(lambda: 0.0)
    taken = np.zeros(8192, np.int32)
    pool.settle(pool.add(SPOT, granted(8192, offset=0), [1], whole=False), "refused")
    for length, fate in steps:
        cut = pool.cut(SPOT, length)
        if cut is None:
            continue
        extent = cut.extent()
        assert extent.offset % 256 == 0
        assert extent.offset + extent.length <= 8192
        bytes_of_it = slice(extent.offset, extent.offset + aligned(length))
        assert not taken[bytes_of_it].any()
        if fate != "refused":
            taken[bytes_of_it] = 1
        if fate is not None:
            pool.settle([cut], fate)  # type: ignore[arg-type]
