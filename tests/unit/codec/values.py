"""An independent idea of "the same value", and of the rows of a column: what the codec is held against."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tqclient.codec import Records, Shared


def identical(a: Any, b: Any) -> bool:
    """Same type, same bits, all the way down."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and _identical_tensors(a, b)
    if isinstance(a, np.ndarray):
        same = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        return same and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if isinstance(a, np.generic):
        return a.dtype == b.dtype and (str(a) == str(b) if isinstance(a, np.str_) else bytes(a.data) == bytes(b.data))
    if isinstance(a, float):
        return struct.pack("<d", a) == struct.pack("<d", b)
    if isinstance(a, complex):
        return struct.pack("<dd", a.real, a.imag) == struct.pack("<dd", b.real, b.imag)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(identical, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(identical(x, y) and identical(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (set, frozenset)):
        return {(type(x), x) for x in a} == {(type(x), x) for x in b}
    return bool(a == b)


def _identical_tensors(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.is_nested or b.is_nested:
        return a.is_nested and b.is_nested and a.layout == b.layout and identical(list(a.unbind()), list(b.unbind()))
    return a.dtype == b.dtype and a.shape == b.shape and not b.requires_grad and bits(a) == bits(b)


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order, as they would be written to a file."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    flat = plain.new_empty(plain.numel()).copy_(plain.reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def rows_of(column: Any) -> list[Any]:
    """One value per row of a column as a user gives it."""
    if isinstance(column, Records):
        return list(column.values)
    if isinstance(column, Shared):
        values = rows_of(column.values)
        return [values[pick] for pick in column.index.tolist()]
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    if isinstance(column, np.ndarray):
        return [np.asarray(column[row]).astype(column.dtype) for row in range(len(column))]
    if isinstance(column, Mapping):
        children = {key: rows_of(child) for key, child in column.items()}
        count = len(next(iter(children.values())))
        return [{key: child[row] for key, child in children.items()} for row in range(count)]
    return list(column)
