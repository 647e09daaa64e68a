from __future__ import annotations

import numpy as np
import pytest
import torch

from benchmarks import workloads
from benchmarks.statistics import Spread

ROWS = {"tiny-jagged": 4096, "multimodal": 64, "small": 8192, "regular": 256, "jagged": 512}


@pytest.mark.parametrize("name", ["small", "jagged"])
def test_a_seed_says_what_is_in_it(name: str) -> None:
    first, again, other = (workloads.digest(workloads.build(name, seed)) for seed in (1, 1, 2))
    assert first == again != other


@pytest.mark.parametrize("name", ["small", "regular", "jagged", "tiny-jagged"])
def test_every_column_has_the_rows_that_the_name_stands_for(name: str) -> None:
    assert {len(column) for column in workloads.build(name, 0).values()} == {ROWS[name]}


@pytest.mark.parametrize(
    ("name", "rows", "fields"), [("fields-1", 256, 1), ("fields-32", 256, 32), ("fields-8", 16, 8)]
)
def test_fields_are_the_same_bytes_however_many_there_are(name: str, rows: int, fields: int) -> None:
    columns = workloads.build(name, 0, "small" if rows == 16 else "full")
    assert {tuple(column.shape) for column in columns.values()} == {(rows, 262144 // fields)}
    assert len(columns) == fields


def test_tiny_jagged_is_a_megabyte_in_65536_pieces() -> None:
    columns = workloads.build("tiny-jagged", 0)
    assert len(workloads.pieces(columns)) == 4096 * 16
    assert workloads.size_bytes(columns) == pytest.approx(1 << 20, rel=0.02)


def test_a_stamp_changes_every_column_of_numbers() -> None:
    columns = workloads.build("rollout", 0, "small")
    before = {name: workloads.digest({name: column}) for name, column in columns.items()}
    workloads.stamp(columns, 25_001)
    changed = {name for name, column in columns.items() if workloads.digest({name: column}) != before[name]}
    text = {"prompt", "label", "metadata"}
    assert changed | {"truncated"} == columns.keys() - text | {"truncated"}


def test_the_digest_takes_arrays_for_tensors() -> None:
    columns = {"a": torch.arange(6).view(2, 3), "b": [torch.ones(2), torch.zeros(1)], "c": torch.tensor([1.5, 2.5])}
    arrays = {
        "a": columns["a"].numpy(),
        "b": [value.numpy() for value in columns["b"]],
        "c": np.array([1.5, 2.5], "f4"),
    }
    assert workloads.digest(columns) == workloads.digest(arrays)


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
