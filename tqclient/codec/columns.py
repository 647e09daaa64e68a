"""Picks the kind of each column from what was given.

The kind depends on types, dtypes and dimensions alone, never on values or lengths: a list of tensors is ragged even
when all of them happen to be equally long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import alike, dtypes
from tqclient.codec.kinds import record, text
from tqclient.codec.kinds.base import Encoder
from tqclient.codec.kinds.dense import DenseEncoder
from tqclient.codec.kinds.ragged import RaggedEncoder
from tqclient.codec.kinds.shared import SharedEncoder
from tqclient.codec.kinds.struct import StructEncoder
from tqclient.codec.normalise import Joined, Records, Shared, check_name
from tqclient.codec.refusal import Refused, RowPath, check_array, check_nested, check_tensor, step
from tqclient.codec.skeleton import NESTING_MAX
from tqclient.errors import InvalidArgument, UnsupportedValue
from tqclient.schema import Form

_TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})
_ARRAYS = frozenset({np.ndarray, np.memmap})


def encode_column(path: str, column: Any, depth: int, *, allow_pickle: bool) -> Encoder:
    """Measures a column.

    Args:
        path: of the column, for errors.
        column: a tensor, an array, a list with one value per row, `Records`, `Shared`, or a mapping of columns.
        depth: structs around it.
        allow_pickle: accept arbitrary classes in list columns.

    Raises:
        UnsupportedValue: a value that would not come back as it is, with its path.
        InvalidArgument: it is no column, or columns of a struct have different row counts.
    """
    if isinstance(column, Records):
        return record.encode(column.values, RowPath(path), depth, allow_pickle=allow_pickle)
    if isinstance(column, Shared):
        return _encode_shared(path, column, depth, allow_pickle)
    if isinstance(column, torch.Tensor):
        return _encode_tensor(path, column)
    if isinstance(column, Joined):
        _check(column.values, path)
        lengths = np.array(column.lengths, np.int64)
        return RaggedEncoder(_form_of(column.values), [column.values], lengths, joined=True)
    if isinstance(column, np.ndarray):
        return _encode_array(path, column)
    if isinstance(column, Mapping):
        return _encode_columns(path, column, depth, allow_pickle)
    if type(column) in (list, tuple):
        return encode_rows(column, RowPath(path), depth, allow_pickle=allow_pickle)
    raise InvalidArgument(
        f"field {path!r}: a column is a tensor, an array, a list with one value per row, or a dict of columns, "
        f"not {type(column).__qualname__}"
    )


def _encode_tensor(path: str, tensor: torch.Tensor) -> Encoder:
    try:
        if tensor.is_nested:
            return _encode_nested(tensor)
        check_tensor(tensor)
    except Refused as refused:
        raise refused.at(path) from None
    if tensor.dim() == 0:
        raise InvalidArgument(f"field {path!r}: a 0-dim tensor has no rows; give a list with one value per row")
    form = Form("dense", "torch", dtypes.torch_name(tensor.dtype), tuple(tensor.shape[1:]))
    return DenseEncoder(form, [tensor], len(tensor))


def _encode_nested(tensor: torch.Tensor) -> Encoder:
    check_nested(tensor)
    if tensor.layout == torch.jagged:
        return _encode_jagged(tensor)
    rows = list(tensor.unbind())
    if tensor.dim() < 2:
        raise Refused("a strided NestedTensor of 0-dim rows cannot be carried; stack them")
    form = Form("ragged", "nested", dtypes.torch_name(tensor.dtype), (-1,) * (tensor.dim() - 2))
    counts = np.fromiter((row.numel() for row in rows), np.int64, len(rows))
    return RaggedEncoder(form, rows, counts)


def _encode_jagged(jagged: Any) -> Encoder:
    if jagged._ragged_idx != 1:
        raise Refused("a NestedTensor whose jagged dimension is not its second cannot be carried; transpose it")
    values: torch.Tensor = jagged._values  # what `values()` returns, which takes the dispatcher 20 µs
    form = _form_of(values)
    if jagged.lengths() is not None:  # there are gaps between its rows
        rows = list(jagged.unbind())
        return RaggedEncoder(form, rows, np.fromiter(map(len, rows), np.int64, len(rows)))
    offsets = jagged.offsets().detach().cpu().numpy().astype(np.int64)
    return RaggedEncoder(form, [values[int(offsets[0]) : int(offsets[-1])]], np.diff(offsets), joined=True)


def _encode_array(path: str, array: NDArray[Any]) -> Encoder:
    try:
        check_array(array)
    except Refused as refused:
        raise refused.at(path) from None
    if array.ndim == 0:
        raise InvalidArgument(f"field {path!r}: a 0-dim array has no rows; give a list with one value per row")
    form = Form("dense", "numpy", dtypes.numpy_name(array.dtype), array.shape[1:])
    return DenseEncoder(form, [array], len(array))


def _encode_columns(path: str, columns: Mapping[Any, Any], depth: int, allow_pickle: bool) -> Encoder:
    if depth >= NESTING_MAX:
        raise UnsupportedValue(f"{path}: containers nest deeper than {NESTING_MAX}; flatten the value")
    if not columns:
        raise InvalidArgument(f"field {path!r}: a dict of columns without columns has no rows")
    encoders = {}
    for key, column in columns.items():
        check_name(key)
        encoders[key] = encode_column(path + step(key), column, depth + 1, allow_pickle=allow_pickle)
    check_row_counts({path + step(key): encoder.rows for key, encoder in encoders.items()})
    return StructEncoder(encoders, next(iter(encoders.values())).rows)


def _encode_shared(path: str, column: Shared, depth: int, allow_pickle: bool) -> Encoder:
    if depth >= NESTING_MAX:
        raise UnsupportedValue(f"{path}: containers nest deeper than {NESTING_MAX}; flatten the value")
    values = encode_column(path, column.values, depth + 1, allow_pickle=allow_pickle)
    beyond = np.flatnonzero(column.index >= values.rows)
    if beyond.size:
        row = int(beyond[0])
        raise InvalidArgument(
            f"field {path!r}: index[{row}]={column.index[row]}, but there are {values.rows} values to share", rows=[row]
        )
    return SharedEncoder(values, column.index)


def check_row_counts(counts: Mapping[str, int]) -> None:
    """Checks that columns are equally long.

    Raises:
        InvalidArgument: names two that are not.
    """
    first, rows = next(iter(counts.items()))
    for name, count in counts.items():
        if count != rows:
            raise InvalidArgument(f"field {name!r} has {count} rows, but field {first!r} has {rows}")


def encode_rows(rows: Sequence[Any], path: RowPath, depth: int, *, allow_pickle: bool) -> Encoder:
    """Measures a column that was given as one value per row."""
    types = set(map(type, rows))
    encoder: Encoder | None = None
    if types == {str}:
        try:
            return text.encode_text(rows)
        except UnicodeEncodeError:
            encoder = None  # the record encoder names the row
    elif types == {bytes}:
        return text.encode_bytes(rows)
    elif types == {dict}:
        encoder = _encode_dicts(rows, path, depth, allow_pickle)
    elif types and types <= _TENSORS:
        encoder = _encode_tensors(rows, path)
    elif types and types <= _ARRAYS:
        encoder = _encode_arrays(rows, path)
    return encoder or record.encode(rows, path, depth, allow_pickle=allow_pickle)


def _encode_dicts(rows: Sequence[dict[Any, Any]], path: RowPath, depth: int, allow_pickle: bool) -> Encoder | None:
    keys = rows[0].keys()
    if not keys or set(map(type, keys)) != {str} or set(map(len, rows)) != {len(keys)}:
        return None
    try:
        values = {key: list(map(itemgetter(key), rows)) for key in keys}
    except KeyError:
        return None
    if depth >= NESTING_MAX:
        raise UnsupportedValue(f"{path.at(0)}: containers nest deeper than {NESTING_MAX}; flatten the value")
    columns = {}
    for key in keys:
        check_name_of_key(key, path)
        columns[key] = encode_rows(values[key], path.child(key), depth + 1, allow_pickle=allow_pickle)
    return StructEncoder(columns, len(rows))


def check_name_of_key(key: str, path: RowPath) -> None:
    """Checks that a dict's key can be a column's name.

    Raises:
        UnsupportedValue: it has a lone surrogate.
    """
    try:
        key.encode()
    except UnicodeEncodeError:
        raise UnsupportedValue(f"{path.at(0)}: the key {key!r:.80} has a lone surrogate") from None


def _encode_tensors(rows: Sequence[torch.Tensor], path: RowPath) -> Encoder | None:
    """Ragged, or for 0-dim tensors dense; None where dtypes or dimensions differ."""
    joined = alike.join_small(rows)
    if joined is not None:
        _check(joined[0], path.at(0))
        return RaggedEncoder(_form_of(rows[0]), [joined[0]], joined[1], joined=True)
    counts = alike.tensor_lengths(rows)
    if counts is None:
        if not rows[0].is_nested:
            _check_layouts(rows, path)
        return None
    _check(rows[0], path.at(0))
    if not rows[0].dim():
        return DenseEncoder(Form("dense", "torch", dtypes.torch_name(rows[0].dtype)), rows, len(rows))
    return RaggedEncoder(_form_of(rows[0]), rows, counts)


def _form_of(first: torch.Tensor) -> Form:
    return Form("ragged", "torch", dtypes.torch_name(first.dtype), tuple(first.shape[1:]))


def _check_layouts(rows: Sequence[torch.Tensor], path: RowPath) -> None:
    """Names the first row that can be no tensor of a column, unless NestedTensors make it a list."""
    for row, tensor in enumerate(rows):
        if tensor.is_nested:
            return
        if tensor.layout is not torch.strided or tensor.is_meta:
            _check(tensor, path.at(row))


def _check(tensor: torch.Tensor, path: str) -> None:
    try:
        check_tensor(tensor)
    except Refused as refused:
        raise refused.at(path) from None


def _encode_arrays(rows: Sequence[NDArray[Any]], path: RowPath) -> Encoder | None:
    first = rows[0]
    counts = alike.array_lengths(rows)
    if counts is None:
        return None
    try:
        check_array(first)
    except Refused as refused:
        raise refused.at(path.at(0)) from None
    if not first.ndim:
        return DenseEncoder(Form("dense", "numpy", dtypes.numpy_name(first.dtype)), rows, len(rows))
    return RaggedEncoder(Form("ragged", "numpy", dtypes.numpy_name(first.dtype), first.shape[1:]), rows, counts)
