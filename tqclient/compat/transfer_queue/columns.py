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
        InvalidArgument: it is neither, or uses a reserved name.
    """
    from tensordict import LazyStackedTensorDict, TensorDictBase

    if isinstance(fields, LazyStackedTensorDict) and fields.stack_dim == 0:
        rows = fields.tensordicts
        columns: dict[str, Any] = {name: _rows(name, [row.get(name) for row in rows]) for name in rows[0].keys()}  # noqa: SIM118
    elif isinstance(fields, TensorDictBase | Mapping):
        columns = {str(name): _column(fields.get(name)) for name in fields.keys()}  # noqa: SIM118
    else:
        raise InvalidArgument(f"fields must be a TensorDict or a dict, not {type(fields).__qualname__}")
    if MARKER in columns:
        raise InvalidArgument(f"the field name {MARKER!r} is taken")
    return columns


def marked(columns: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """Returns columns with the marker, to be put."""
    return {**columns, MARKER: torch.zeros(rows, dtype=torch.uint8)}


def _column(value: Any) -> Any:
    from tensordict import NonTensorData, TensorDictBase, is_non_tensor

    if isinstance(value, NonTensorData) and _is_array_of_rows(value.data, value.batch_size):
        return Records(list(value.data))
    if is_non_tensor(value):
        return Records(value.tolist())
    if isinstance(value, TensorDictBase | Mapping):
        return to_columns(value)
    if isinstance(value, Records):
        return value
    if not isinstance(value, torch.Tensor):
        return _listed(list(value))
    if value.is_nested:
        return _nested(value)
    return value if value.ndim < 2 else as_jagged(value)


def _is_array_of_rows(value: Any, batch_size: Sequence[int]) -> bool:
    """Whether it is an array of strings or Python values, one per row: a TensorDict keeps it whole, as one value."""
    return isinstance(value, np.ndarray) and value.dtype.kind in "OSU" and value.shape[:1] == tuple(batch_size[:1])


def _rows(name: str, values: list[Any]) -> Any:
    if any(value is None for value in values):
        raise InvalidArgument(f"field {name!r}: some of the stacked rows lack it")
    return _listed([value if isinstance(value, torch.Tensor) else value.data for value in values])


def _listed(rows: list[Any]) -> Any:
    if not rows or not all(isinstance(row, torch.Tensor) for row in rows):
        return Records(rows)
    return rows if rows[0].ndim else torch.stack(rows)


def unbound(column: Any) -> list[Any]:
    """Returns the rows of a column that is no struct, one by one."""
    if isinstance(column, torch.Tensor):
        return list(column.unbind())
    return column.values if isinstance(column, Records) else list(column)


def _nested(value: torch.Tensor) -> Any:
    if value.layout != torch.jagged:
        return list(value.unbind())
    if getattr(value, "_ragged_idx", 1) == 2:  # rows of [size, length], such as position ids of several axes
        return {TURNED: value.transpose(1, 2).contiguous()}
    return value


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


def rows_of(columns: Mapping[str, Any]) -> int:
    """Returns the number of rows that the columns have."""
    for column in columns.values():
        if isinstance(column, Mapping):
            return rows_of(column)
        return int(column.size(0)) if isinstance(column, torch.Tensor) else len(column)
    return 0


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


def parse(fields: Any, parser: Callable[[Any], Any]) -> dict[str, Any]:
    """Has a `data_parser` work on batched values, in place, and checks that it kept to its contract.

    Args:
        fields: as `to_columns` takes them.
        parser: gets a dict: a tensor for a field that is one tensor, a list of its rows for any other.
    """
    plain: dict[str, Any] = {}
    for name, column in to_columns(fields).items():
        original = fields.get(name)
        if isinstance(original, torch.Tensor) and not original.is_nested:
            plain[name] = original
        else:
            plain[name] = unbound(column)
    sizes = {name: len(values) for name, values in plain.items()}
    parser(plain)
    if {name: len(values) for name, values in plain.items()} != sizes:
        raise InvalidArgument("data_parser changed the fields, or how many rows one has; it may change values alone")
    return to_columns(plain)


def to_tensordict(values: Mapping[str, Any], rows: int) -> Any:
    """Returns what was read as a TensorDict, without the marker."""
    from tensordict import TensorDict

    converted = {name: _converted(value, rows) for name, value in values.items() if name != MARKER}
    return TensorDict(converted, batch_size=[rows])


def _converted(value: Any, rows: int) -> Any:
    from tensordict import NonTensorData, NonTensorStack

    if isinstance(value, Mapping):
        turned = TURNED in value
        return _converted(value[TURNED], rows).transpose(1, 2) if turned else to_tensordict(value, rows)
    if isinstance(value, torch.Tensor) and value.is_nested and value.layout == torch.jagged:
        return _jagged(value.values(), value.offsets())  # type: ignore[attr-defined]
    return NonTensorStack(*(NonTensorData(each) for each in value)) if isinstance(value, list) else value


def schema_of(columns: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Describes columns as `BatchMeta.field_schema` does."""
    return {name: _describe(column) for name, column in columns.items() if name != MARKER}


def _describe(column: Any) -> dict[str, Any]:
    if isinstance(column, torch.Tensor) and not column.is_nested:
        return describe(column.dtype, tuple(column.shape[1:]))
    if not isinstance(column, Mapping | Records):
        rows = unbound(column)
        return {**describe(rows[0].dtype, None, nested=True), "per_sample_shapes": [tuple(row.shape) for row in rows]}
    return describe(None, None)


def describe(dtype: torch.dtype | None, shape: tuple[int, ...] | None, *, nested: bool = False) -> dict[str, Any]:
    """Returns the entry of one field."""
    return {"dtype": dtype, "shape": shape, "is_nested": nested, "is_non_tensor": dtype is None}
