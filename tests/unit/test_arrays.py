from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tqclient.arrays import spread


@given(st.lists(st.tuples(st.integers(-5, 2**40), st.integers(0, 4))), st.integers(1, 8))
def test_numbers_are_spread_one_run_after_the_other(runs: list[tuple[int, int]], step: int) -> None:
    starts, counts = (np.array([run[side] for run in runs], np.int64) for side in (0, 1))
    found = spread(starts, counts, step)
    assert found.tolist() == [start + step * index for start, count in runs for index in range(count)]
    assert found.dtype == np.int64
