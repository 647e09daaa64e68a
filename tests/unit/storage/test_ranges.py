from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqserver.storage.ranges import Ranges


def of(*runs: tuple[int, int]) -> Ranges:
    ranges = Ranges()
    for start, end in runs:
        ranges.add(start, end)
    return ranges


@pytest.mark.parametrize(
    ("added", "result"),
    [
        ((20, 30), [(0, 10), (20, 30), (40, 50)]),
        ((10, 30), [(0, 30), (40, 50)]),
        ((20, 40), [(0, 10), (20, 50)]),
        ((10, 40), [(0, 50)]),
        ((50, 60), [(0, 10), (40, 60)]),
    ],
)
def test_neighbours_coalesce(added: tuple[int, int], result: list[tuple[int, int]]) -> None:
    ranges = of((0, 10), (40, 50))
    ranges.add(*added)
    assert list(ranges) == result
    assert ranges.total == sum(end - start for start, end in result)
    assert ranges.widest() == max(end - start for start, end in result)


@pytest.mark.parametrize("overlapping", [(0, 1), (9, 11), (5, 45), (39, 41), (49, 60)])
def test_what_is_in_the_set_cannot_be_added(overlapping: tuple[int, int]) -> None:
    ranges = of((0, 10), (40, 50))
    with pytest.raises(ValueError, match="overlaps"):
        ranges.add(*overlapping)
    assert list(ranges) == [(0, 10), (40, 50)]


@pytest.mark.parametrize(
    ("removed", "result"),
    [
        ((0, 10), [(40, 50)]),
        ((0, 4), [(4, 10), (40, 50)]),
        ((4, 10), [(0, 4), (40, 50)]),
        ((4, 6), [(0, 4), (6, 10), (40, 50)]),
    ],
)
def test_removal_cuts_a_run(removed: tuple[int, int], result: list[tuple[int, int]]) -> None:
    ranges = of((0, 10), (40, 50))
    ranges.remove(*removed)
    assert list(ranges) == result


@pytest.mark.parametrize("missing", [(10, 20), (5, 15), (0, 50), (39, 41), (50, 51)])
def test_what_is_not_in_the_set_cannot_be_removed(missing: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="not within"):
        of((0, 10), (40, 50)).remove(*missing)


def test_first_fit_and_last_fit() -> None:
    ranges = of((0, 10), (20, 40), (50, 75), (80, 85))
    assert ranges.take_first(15) == 20
    assert ranges.take_last(15) == 60
    assert ranges.take_first(11) is None
    assert ranges.take_last(11) is None
    assert list(ranges) == [(0, 10), (35, 40), (50, 60), (80, 85)]
    assert ranges.take_last(10) == 50
    assert ranges.take_first(10) == 0
    ranges.add(40, 60)
    assert ranges.take_first(25) == 35  # a run that grew is found again after a search that failed


@given(st.lists(st.tuples(st.integers(0, 63), st.integers(1, 16)), max_size=40))
def test_it_is_a_set_of_addresses(steps: list[tuple[int, int]]) -> None:
    ranges, model = Ranges(), set[int]()
    for start, length in steps:
        run = set(range(start, start + length))
        if not run & model:
            ranges.add(start, start + length)
            model |= run
        elif run <= model:
            ranges.remove(start, start + length)
            model -= run
        assert {address for low, high in ranges for address in range(low, high)} == model
        assert ranges.total == len(model)
        assert ranges.covers(start, start + length) == (run <= model)
