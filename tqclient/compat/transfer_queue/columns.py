"""TensorDicts as columns, and columns as TensorDicts.

A field of tensors comes back jagged, whatever the lengths of its rows and however they were put; only rows without a
dimension come back as one tensor `[rows]`. Anything else comes back as a NonTensorStack.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from tqclient.codec import Records
from tqclient.codec.buffers import rows_of as array_rows
from tqclient.codec.buffers import tensor_over
from tqclient.errors import InvalidArgument

MARKER: Final = "_row"
"""Field of one byte that every sample has: samples of tags alone exist by it, and any sample is found by it."""
TURNED: Final = "_turned"
"""Child of a field whose rows are ragged in their second dimension: they are stored with that one first."""


def to_columns(fields: Any) -> dict[str, Any]:
    """Returns columns as the service takes them; they share the tensors' memory.

    Args:
        fields: a TensorDict, or a mapping of batched columns.

    Raises:
        InvalidArgument: it is neither, uses a reserved name, or has a field without rows, or one that some rows lack.
    """
    return {name: _column(name, value) for name, value in _entries(fields).items()}


def _entries(fields: Any) -> dict[str, Any]:
    """Returns the values of fields by name; those of a lazy stack as lists of their rows."""
    from tensordict import LazyStackedTensorDict, TensorDictBase

    if isinstance(fields, LazyStackedTensorDict) and fields.stack_dim == 0:
        rows = fields.tensordicts
        names = dict.fromkeys(name for row in rows for name in row.keys())  # noqa: SIM118
        entries = {name: _stacked(name, [row.get(name, None) for row in rows]) for name in names}
    elif isinstance(fields, TensorDictBase | Mapping):
        entries = {str(name): fields.get(name) for name in fields.keys()}  # noqa: SIM118
    else:
        raise InvalidArgument(f"fields must be a TensorDict or a dict, not {type(fields).__qualname__}")
    for reserved in (MARKER, TURNED):
        if reserved in entries:
            raise InvalidArgument(f"the field name {reserved!r} is taken")
    return entries


def _stacked(name: str, rows: list[Any]) -> Any:
    from tensordict import LazyStackedTensorDict

    lacking = [number for number, row in enumerate(rows) if row is None]
    if lacking:
        raise InvalidArgument(f"field {name!r}: rows {lacking} of the stack lack it: give all rows the same fields")
    return LazyStackedTensorDict(*rows, stack_dim=0) if all(_is_struct(row) for row in rows) else rows


def _is_struct(value: Any) -> bool:
    """Whether it is a TensorDict, or a dict, of columns."""
    from tensordict import TensorDictBase, is_non_tensor

    return isinstance(value, TensorDictBase | Mapping) and not is_non_tensor(value)


def marked(columns: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Returns columns with the marker, to be put."""
    return {**columns, MARKER: torch.zeros(rows, dtype=torch.uint8)}


def _column(name: str, value: Any) -> Any:
    from tensordict import NonTensorData, is_non_tensor

    if isinstance(value, NonTensorData) and _is_array_of_rows(value.data, value.batch_size):
        return Records(list(value.data))
    if is_non_tensor(value):
        if not value.batch_size:
            raise InvalidArgument(f"field {name!r}: non-tensor data without a batch dimension: it has no rows")
        return Records(value.tolist())
    if _is_turned(value):
        return value
    if _is_struct(value):
        columns = to_columns(value)
        if not columns:
            raise InvalidArgument(f"field {name!r}: it has no fields itself, and so no rows: leave it out")
        return columns
    if isinstance(value, Records):
        return value
    if isinstance(value, str | bytes) or not _has_rows(value):
        raise InvalidArgument(f"field {name!r} is a {type(value).__qualname__} without rows: give one value per row")
    if not isinstance(value, torch.Tensor):
        return _listed(list(value))
    if value.is_nested:
        return _nested(value)
    return value if value.ndim < 2 else as_jagged(value)


def _has_rows(value: Any) -> bool:
    return value.ndim > 0 if isinstance(value, torch.Tensor | np.ndarray) else hasattr(value, "__len__")


def _is_array_of_rows(value: Any, batch_size: Sequence[int]) -> bool:
    """Whether it is an array of strings or Python values, one per row: a TensorDict keeps it whole, as one value."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "OSU" and value.shape[:1] == tuple(batch_size[:1])


def _listed(rows: list[Any]) -> Any:
    from tensordict import is_non_tensor

    rows = [row.tolist() if is_non_tensor(row) else row for row in rows]
    if not rows or not all(isinstance(row, torch.Tensor) for row in rows):
        return Records(rows)
    return rows if rows[0].ndim else torch.stack(rows)


def unbound(column: Any) -> list[Any]:
    """Returns the rows of a column one by one; those of a struct are dicts."""
    if _is_turned(column):
        return [row.transpose(0, 1) for row in unbound(column[TURNED])]
    if isinstance(column, Mapping):
        rows = zip(*(unbound(child) for child in column.values()), strict=True)
        return [dict(zip(column, row, strict=True)) for row in rows]
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return column.values if isinstance(column, Records) else list(column)


def _is_turned(column: Any) -> bool:
    return isinstance(column, dict) and TURNED in column


def _nested(value: torch.Tensor) -> Any:
    if value.layout != torch.jagged:
        return list(value.unbind())
    if _ragged_in_second(value):
        return {TURNED: value.transpose(1, 2).contiguous()}
    return value


def _ragged_in_second(value: Any) -> bool:
    """Whether its rows are [size, length], such as position ids of several axes."""
    return getattr(value, "_ragged_idx", 1) == 2


def as_jagged(value: torch.Tensor) -> torch.Tensor:
    """Returns a dense tensor `[rows, length, *]` as a jagged one over the same memory, where that is contiguous."""
    rows, length = value.shape[:2]
    return _jagged(value.detach().flatten(0, 1), torch.arange(rows + 1, device=value.device) * length)


def _jagged(values: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Makes a jagged tensor that knows its longest row: else `to_padded_tensor` is as wide as all rows together."""
    lengths = offsets.diff()
    least, most = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, min_seqlen=least, max_seqlen=most)
    return made


def rows_of(columns: Mapping[str, Any], fields: Any = None) -> int | None:
    """Returns the number of rows that columns have; None where there is no column to tell.

    Args:
        columns: as `to_columns` returns them.
        fields: what they were made of: a TensorDict says its rows, even where it has no field.

    Raises:
        InvalidArgument: they have different numbers of rows.
    """
    batch_size = getattr(fields, "batch_size", None)
    if batch_size:
        return int(batch_size[0])
    rows: dict[str, int] = {}
    for name, column in columns.items():
        own = rows_of(column) if isinstance(column, Mapping) else _length(column)
        if own is not None:
            rows[name] = own
    if len(set(rows.values())) > 1:
        raise InvalidArgument(f"the fields have different numbers of rows: {rows}")
    return next(iter(rows.values()), None)


def _length(column: Any) -> int:
    return int(column.size(0)) if isinstance(column, torch.Tensor) else len(column)


def select_rows(columns: Mapping[str, Any], positions: Sequence[int]) -> dict[str, Any]:
    """Returns some rows of columns."""

    def select(column: Any) -> Any:
        if isinstance(column, Mapping):
            return select_rows(column, positions)
        if isinstance(column, torch.Tensor) and not column.is_nested:
            return column[list(positions)]
        rows = unbound(column)
        chosen = [rows[at] for at in positions]
        return Records(chosen) if isinstance(column, Records) else chosen

    return {name: select(column) for name, column in columns.items()}


def joined(parts: Sequence[tuple[Sequence[int], Mapping[str, Any]]], rows: int) -> dict[str, Any]:
    """Returns columns that were read in parts as one.

    Args:
        parts: for each, which of the rows its columns hold, and these.
        rows: of all parts together.

    Raises:
        InvalidArgument: the rows of a field have different dtypes or dimensions, so that one tensor cannot hold them.
    """
    names = parts[0][1]
    return {name: _join(name, [(own, columns[name]) for own, columns in parts], rows) for name in names}


def _join(name: str, parts: Sequence[tuple[Sequence[int], Any]], rows: int) -> Any:
    columns = [column for _, column in parts]
    if all(isinstance(column, Mapping) and column.keys() == columns[0].keys() for column in columns):
        return joined(parts, rows)
    values: list[Any] = [None] * rows
    for own, column in parts:
        for row, value in zip(own, unbound(column), strict=True):
            values[row] = value
    if not all(isinstance(column, torch.Tensor) for column in columns):
        return values
    forms = {(str(value.dtype), value.ndim, tuple(value.shape[1:])) for value in values}
    if len(forms) > 1:
        raise InvalidArgument(
            f"field {name!r} has rows of different dtypes or dimensions in these partitions, {sorted(forms)}: read "
            "them partition by partition (BatchMeta.chunk_by_partition)"
        )
    dense = all(not column.is_nested and column.shape[1:] == columns[0].shape[1:] for column in columns)
    return torch.stack(values) if dense else torch.nested.as_nested_tensor(values, layout=torch.jagged)


def parse(fields: Any, parser: Callable[[Any], Any]) -> dict[str, Any]:
    """Has a `data_parser` work on batched values, and checks that it kept to its contract.

    Args:
        fields: as `to_columns` takes them.
        parser: gets a dict: a tensor for a field that is one tensor, a dict of the same kind for a nested TensorDict, a
            list of its rows for any other. What it returns is put; None: the dict that it was given.

    Raises:
        InvalidArgument: it returned no dict, or changed the fields or the number of rows.
    """
    plain = _batched(fields)
    sizes = _sizes(plain)
    returned = parser(plain)
    parsed = plain if returned is None else returned
    if not isinstance(parsed, dict):
        raise InvalidArgument(
            f"data_parser returned a {type(parsed).__qualname__}: expected a dict of all fields, or None from one that "
            "works in place"
        )
    if _sizes(parsed) != sizes:
        raise InvalidArgument("data_parser changed the fields, or how many rows one has; it may change values alone")
    return _parsed(parsed, fields)


def _batched(fields: Any) -> dict[str, Any]:
    return {name: _plain(name, value) for name, value in _entries(fields).items()}


def _plain(name: str, value: Any) -> Any:
    if _is_struct(value):
        return _batched(value)
    if isinstance(value, torch.Tensor):
        return list(value.unbind()) if value.is_nested else value
    return unbound(_column(name, value))


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the number of rows by field; None for what has none."""
    return {
        name: _sizes(value) if isinstance(value, dict) else len(value) if _has_rows(value) else None
        for name, value in values.items()
    }


def _parsed(values: Mapping[str, Any], fields: Any) -> dict[str, Any]:
    """Returns parsed values as columns of the forms that they have without a parser."""
    columns: dict[str, Any] = {}
    for name, original in _entries(fields).items():
        value = values[name]
        if _is_struct(original):
            columns[name] = _parsed(value, original)
            continue
        column = _column(name, value)
        if _ragged_in_second(original) and isinstance(column, list) and all(row.ndim > 1 for row in column):
            column = {TURNED: [row.transpose(0, 1) for row in column]}
        columns[name] = column
    return columns


def to_tensordict(values: Mapping[str, Any], rows: int) -> Any:
    """Returns what was read as a TensorDict, without the marker."""
    from tensordict import TensorDict

    converted = {name: _converted(value, rows) for name, value in values.items() if name != MARKER}
    return TensorDict(converted, batch_size=[rows])


def _converted(value: Any, rows: int) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(value, Mapping):
        return _converted(value[TURNED], rows).transpose(1, 2) if _is_turned(value) else to_tensordict(value, rows)
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged:
        return _jagged(value.values(), value.offsets())  # type: ignore[attr-defined]
    if isinstance(value, np.ndarray):  # put by another client; a TensorDict keeps one that is no tensor as one value
        tensor = tensor_over(value)
        value = array_rows(value) if tensor is None else tensor
    return NonTensorStack(*(NonTensorData(each) for each in value)) if isinstance(value, list) else value


def schema_of(columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Describes columns as `BatchMeta.field_schema` does."""
    return {name: _describe(column) for name, column in columns.items() if name != MARKER}


def _describe(column: Any) -> dict[str, Any]:
    if isinstance(column, torch.Tensor) and not column.is_nested:
        return describe(column.dtype, tuple(column.shape[1:]))
    if _is_turned(column) or not isinstance(column, Mapping | Records):
        rows = unbound(column)
        return {**describe(rows[0].dtype, None, nested=True), "per_sample_shapes": [tuple(row.shape) for row in rows]}
    return describe(None, None)


def describe(dtype: torch.dtype | None, shape: tuple[int, ...] | None, *, nested: bool = False) -> dict[str, Any]:
    """Returns the entry of one field."""
    return {"dtype": dtype, "shape": shape, "is_nested": nested, "is_non_tensor": dtype is None}
