from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tqserver.controller.core.arrays import are_distinct, counted, distinct, grown

DTYPES = st.sampled_from([np.int64, np.uint64, np.int32])


@st.composite
def arrays(draw: st.DrawFn) -> NDArray[np.integer]:
    """Short runs of few values, ascending or not."""
    values = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 3)), max_size=12))
    if draw(st.booleans()):
        values.sort()
    return np.repeat([value for value, _ in values], [count for _, count in values]).astype(draw(DTYPES))


@given(arrays())
def test_values_are_told_apart_and_counted_as_by_hand(values: NDArray[np.integer]) -> None:
    by_hand = {value: values.tolist().count(value) for value in sorted(set(values.tolist()))}
    found, counts = counted(values)
    assert dict(zip(found.tolist(), counts.tolist(), strict=True)) == by_hand
    assert found.tolist() == distinct(values).tolist() == list(by_hand)
    assert found.dtype == distinct(values).dtype == values.dtype
    assert are_distinct(values) is (len(by_hand) == len(values))


@pytest.mark.parametrize("values", [[], [5], [-3, 0, 2**62]])
def test_what_ascends_is_left_as_it_is(values: list[int]) -> None:
    array = np.array(values, np.int64)
    assert distinct(array) is array


def test_what_grows_has_zeros_behind_it_and_is_another_array() -> None:
    array = np.array([7, 8], np.uint16)
    larger = grown(array, 4)
    array[0] = 1
    assert (larger.tolist(), larger.dtype) == ([7, 8, 0, 0], np.uint16)
