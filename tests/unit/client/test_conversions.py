"""Batches as other containers, in which nothing becomes something else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.client.fakes import FakeService
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.errors import InvalidArgument
from tqclient.info import PartitionRef
from tqclient.operations.put import put
from tqclient.operations.read import get

NO_TENSORS = {
    "text": np.array(["a", "bb", "c"]),
    "bytes": np.array([b"x", b"yy", b"z"]),
    "date": np.array(["2020-01-01", "2021-01-01", "NaT"], "M8[D]"),
    "span": np.array([1, 2, 3], "m8[s]"),
    "long": np.array([1, 2, 3], np.longdouble) / 3,
    "long complex": np.array([1, 2, 3], np.clongdouble) / 3j,
    "swapped": np.array([1, 2, 3], ">f8"),
    "void": np.array([b"abc", b"def", b"ghi"], "V3"),
    "structure": np.array([(1, 2.5), (3, 4.5), (5, 6.5)], [("a", "i4"), ("b", "f8")]),
    "texts": np.array([["a", "b"], ["c", "d"], ["e", "f"]]),
    "nothing": np.zeros((3, 0), "U4"),
    "inside": {"text": np.array(["q", "r", "s"])},
}


def batch_of(service: FakeService, ref: PartitionRef, values: dict[str, Any], *, copy: bool = True) -> BatchData:
    ids = service.run(put(service.state, ref, values, RowArguments(), None))
    return BatchData(service.state, service.run(get(service.state, ref, ids, None, list(values), copy, 5.0)))


def identical(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(identical(one[key], other[key]) for key in one)
    return (type(one), one.dtype, one.shape) == (type(other), other.dtype, other.shape) and (
        one.tobytes() == other.tobytes()
    )


@pytest.mark.parametrize("field", sorted(NO_TENSORS))
def test_arrays_that_are_no_tensors_go_into_a_tensordict_row_by_row(
    service: FakeService, ref: PartitionRef, field: str
) -> None:
    batch = batch_of(service, ref, {"x": NO_TENSORS[field]})
    values = batch.to_tensordict()
    assert values.batch_size == torch.Size([3])
    for row, expected in enumerate(batch.list("x")):
        found = values[row]["x"]
        assert identical(expected, {key: found[key] for key in expected} if isinstance(expected, dict) else found)
    again = batch_of(service, ref, {"again": values.get("x")})
    assert all(map(identical, batch.list("x"), again.list("again")))


@pytest.mark.parametrize("dtype", ["?", "u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8", "c8", "c16"])
@pytest.mark.parametrize("copy", [True, False])
def test_arrays_of_torchs_dtypes_become_tensors_over_the_same_memory(
    service: FakeService, ref: PartitionRef, dtype: str, copy: bool
) -> None:
    batch = batch_of(service, ref, {"x": np.array([[1, 0], [0, 1], [1, 1]], dtype)}, copy=copy)
    tensor = batch.to_tensordict()["x"]
    assert tensor.numpy().dtype == dtype
    assert tensor.tolist() == batch["x"].tolist()
    assert tensor.data_ptr() == batch["x"].ctypes.data


def test_a_field_that_cannot_be_padded_is_named(service: FakeService, ref: PartitionRef) -> None:
    batch = batch_of(service, ref, {"tokens": [torch.arange(2), torch.arange(1)], "text": ["a", "b"]})
    assert batch.padded("tokens", -100).tolist() == [[0, 1], [0, -100]]
    with pytest.raises(InvalidArgument, match=r"field 'tokens': padded\(value=0.5\): int64 has no such value"):
        batch.padded("tokens", 0.5)
    with pytest.raises(InvalidArgument, match="field 'text': only a ragged column can be padded"):
        batch.padded("text")
