from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import workloads
from benchmarks.statistics import Spread

ROWS = {"multimodal": 64, "small": 8192, "regular": 256, "jagged": 512}


@pytest.mark.parametrize("name", ["small", "jagged"])
def test_a_seed_says_what_is_in_it(name: str) -> None:
    first, again, other = (workloads.digest(workloads.build(name, seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", ["small", "regular", "jagged"])
def test_every_column_has_the_rows_that_the_name_stands_for(name: str) -> None:
    assert {len(column) for column in workloads.build(name, 0).values()} == {ROWS[name]}


def test_the_digest_sees_every_row_and_column() -> None:
    columns = {"a": torch.arange(6).view(2, 3), "b": [{"x": torch.tensor([1.0])}, {"x": torch.tensor([2.0])}]}
    changed = {**columns, "b": [{"x": torch.tensor([1.0])}, {"x": torch.tensor([3.0])}]}
    listed = {**columns, "a": list(columns["a"])}
    assert workloads.digest(columns) == workloads.digest(listed)
    assert workloads.digest(columns) != workloads.digest(changed)
    assert workloads.size_bytes(columns) == 6 * 8 + 2 * 4


def test_spread_in_milliseconds() -> None:
    spread = Spread.of([0.001, 0.003, 0.002])
    assert (spread.median_ms, spread.min_ms, spread.max_ms, spread.count) == (2.0, 1.0, 3.0, 3)
    assert spread.p99_ms == pytest.approx(np.percentile([1, 2, 3], 99))
