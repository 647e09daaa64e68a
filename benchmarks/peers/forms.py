"""A batch in the forms that peers hold it in, and back; without a copy where there can be none."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final

import numpy as np
import torch

from benchmarks.workloads import Columns, is_list_of_tensors

Array = np.ndarray[Any, Any]
JOINED_BELOW_BYTES: Final = 4096
"""Ragged rows that are smaller on average are joined into one array: one object each would cost more than it holds."""
_TENSOR: Final = 1

# A peer that hands out bytes hands out memory that may not be written; the batches are only read.
warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writ")


def jagged(columns: Columns) -> Columns:
    """Returns the columns with a jagged tensor for each list of tensors."""
    return {
        name: torch.nested.as_nested_tensor(column, layout=torch.jagged) if is_list_of_tensors(column) else column
        for name, column in columns.items()
    }


def samples(columns: Columns) -> list[dict[str, Any]]:
    """Returns one dict per sample, tensors as numpy views."""
    names = list(columns)
    return [
        dict(zip(names, values, strict=True))
        for values in zip(*[_numpy_rows(column) for column in columns.values()], strict=True)
    ]


def from_samples(rows: list[dict[str, Any]]) -> Columns:
    """Returns name → rows of per-sample dicts."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def numpy_columns(columns: Columns) -> Columns:
    """Returns the columns with arrays for tensors; a ragged column of small rows as (values, offsets)."""
    return {name: _join(column) for name, column in columns.items()}


def from_numpy_columns(columns: Columns) -> Columns:
    """Reverses `numpy_columns`: joined columns become rows again, as views."""
    return {
        name: [column[0][begin:end] for begin, end in pairwise(column[1].tolist())]
        if isinstance(column, tuple)
        else column
        for name, column in columns.items()
    }


def _join(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return column.numpy()
    if not isinstance(column[0], torch.Tensor):
        return [_numpy(value) for value in column]
    arrays = [value.numpy() for value in column]
    if sum(array.nbytes for array in arrays) >= JOINED_BELOW_BYTES * len(arrays):
        return arrays
    return np.concatenate(arrays), np.cumsum([0, *[len(array) for array in arrays]])


def _numpy_rows(column: Any) -> Any:
    if isinstance(column, torch.Tensor):
        return column.numpy()
    if isinstance(column[0], torch.Tensor):
        return [value.numpy() for value in column]
    return [_numpy(value) for value in column]


def _numpy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.numpy()
    if isinstance(value, Mapping):
        return {key: _numpy(part) for key, part in value.items()}
    return value


def split(value: Any, arrays: list[Array]) -> Any:
    """Moves the arrays out of a value, in order; returns what is left, each array's dtype and shape in its place.

    Args:
        value: of dicts, lists, tuples, arrays and plain values.
        arrays: to which those of the value are appended.
    """
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return _Slot(value.dtype.str, value.shape)
    if isinstance(value, Mapping):
        return {key: split(part, arrays) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([split(part, arrays) for part in value])
    return value


def fill(skeleton: Any, arrays: Iterable[Array]) -> Any:
    """Reverses `split`.

    Args:
        skeleton: what `split` returned.
        arrays: one for each that was moved out, in the same order.
    """
    return _fill(skeleton, iter(arrays))


def _fill(skeleton: Any, arrays: Iterator[Array]) -> Any:
    if isinstance(skeleton, _Slot):
        return next(arrays)
    if isinstance(skeleton, Mapping):
        return {key: _fill(part, arrays) for key, part in skeleton.items()}
    if isinstance(skeleton, (list, tuple)):
        return type(skeleton)([_fill(part, arrays) for part in skeleton])
    return skeleton


class _Slot:
    """Where an array was."""

    __slots__ = ("dtype", "shape")

    def __init__(self, dtype: str, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape = dtype, shape

    def __reduce__(self) -> Any:
        return _Slot, (self.dtype, self.shape)


def slots(skeleton: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yields dtype and shape of each array of a skeleton, in order."""
    if isinstance(skeleton, _Slot):
        yield skeleton.dtype, skeleton.shape
    elif isinstance(skeleton, Mapping):
        for part in skeleton.values():
            yield from slots(part)
    elif isinstance(skeleton, (list, tuple)):
        for part in skeleton:
            yield from slots(part)


def msgpack_default(value: Any) -> Any:
    """Says an array to msgpack; its bytes are not copied before."""
    return {
        "dtype": value.dtype.str,
        "shape": value.shape,
        "data": np.ascontiguousarray(value).reshape(-1).view("u1").data,
    }


def msgpack_hook(value: dict[str, Any]) -> Any:
    """Reverses `msgpack_default`; the array is a view of the bytes that were unpacked."""
    if value.keys() != {"dtype", "shape", "data"}:
        return value
    return np.frombuffer(value["data"], value["dtype"]).reshape(value["shape"])
