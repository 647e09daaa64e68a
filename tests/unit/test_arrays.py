from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tqclient.arrays import begins, bounds, spread, told_apart


@given(st.lists(st.tuples(st.integers(-5, 2**40), st.integers(0, 4))), st.integers(1, 8))
def test_numbers_are_spread_one_run_after_the_other(runs: list[tuple[int, int]], step: int) -> None:
    starts, counts = (np.array([run[side] for run in runs], np.int64) for side in (0, 1))
    found = spread(starts, counts, step)
    assert found.tolist() == [start + step * index for start, count in runs for index in range(count)]
    assert found.dtype == np.int64


@given(st.lists(st.lists(st.integers(0, 255), min_size=3, max_size=3), min_size=1, max_size=4), st.sampled_from("BHq"))
def test_bounds_are_the_sums_of_what_lies_before(rows: list[list[int]], dtype: str) -> None:
    expected = [[sum(row[:index]) for index in range(len(row) + 1)] for row in rows]
    assert bounds(np.array(rows, dtype)).tolist() == expected
    assert bounds(np.array(rows[0], dtype)).tolist() == expected[0]
    assert bounds(np.array(rows, dtype)).dtype == np.int64
    assert bounds(np.array([], dtype)).tolist() == [0]


@given(st.lists(st.lists(st.integers(-2, 2), min_size=2, max_size=2)), st.integers(1, 2))
def test_rows_of_a_table_are_told_apart(rows: list[list[int]], columns: int) -> None:
    kept = [tuple(row[:columns]) for row in rows]
    first, which = told_apart(list(np.array(kept, np.int64).reshape(-1, columns).T))
    kinds = sorted(set(kept))
    assert [kinds[kind] for kind in which.tolist()] == kept
    assert first.tolist() == [kept.index(kind) for kind in kinds]


@given(st.lists(st.integers(0, 2)))
def test_a_run_begins_where_the_value_is_another_one(values: list[int]) -> None:
    found = begins(np.array(values, np.int64))
    assert found.tolist() == [not place or value != values[place - 1] for place, value in enumerate(values)]
