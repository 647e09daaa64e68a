"""The shapes in which a batch may be given, brought to one: columns by field name."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient import limits
from tqclient.errors import InvalidArgument

_NAMED_KEYS_MAX: Final = 20
"""Keys that an error lists."""


class Records:
    """Marks a column as a list: it is read back as a list, whatever its values are.

    Without it, a list of tensors becomes a jagged column and a list of like dicts a struct, and every later put must
    match.

    Args:
        values: one per row.
    """

    __slots__ = ("values",)

    def __init__(self, values: Sequence[Any]) -> None:
        """Makes a list of the values.

        Raises:
            InvalidArgument: they are not several.
        """
        several = isinstance(values, Iterable) and not isinstance(values, str | bytes | Mapping)
        if not several or getattr(values, "ndim", 1) == 0:
            raise InvalidArgument(f"Records: expected one value per row, not {values!r:.80}")
        self.values = list(values)

    def __len__(self) -> int:
        return len(self.values)

    def __repr__(self) -> str:
        return f"Records({len(self.values)} rows)"


class Shared:
    """A column whose rows have values in common: each value is stored, and fetched, once.

        part.put({"images": tq.Shared(images, index=[0] * 16 + [1] * 16), "response": responses})

    Everybody reads it like the column that `[values[i] for i in index]` would have made, and puts of either kind may
    alternate. In a batch, `batch[field]` gives each row memory of its own; `batch.list(field)` copies nothing: rows
    that share a value share its memory. Values that no row has are not stored.

    Args:
        values: a column of any kind: a list with one value per row, a tensor, an array, `Records`, a dict of columns.
        index: int [rows]: which of the values each row has, from 0 on.
    """

    __slots__ = ("index", "values")

    def __init__(self, values: Any, index: Any) -> None:
        """Checks the index; the values are looked at when they are put.

        Raises:
            InvalidArgument: the index is not one-dimensional, or not of integers from 0 on.
        """
        try:
            chosen = np.asarray(index.cpu() if isinstance(index, torch.Tensor) else index)
        except (TypeError, ValueError, RuntimeError) as error:  # what numpy and torch say of what is no array
            raise InvalidArgument(f"Shared: index is int [rows], not {index!r:.80}: {error!s:.80}") from None
        if chosen.size == 0 and chosen.dtype.kind == "f" and isinstance(index, (list, tuple)):
            chosen = chosen.astype(np.int64)
        if chosen.ndim != 1 or chosen.dtype.kind not in "iu":
            raise InvalidArgument(f"Shared: index is int [rows], not {chosen.dtype} with shape {chosen.shape}")
        wrong = np.flatnonzero((chosen < 0) | (chosen >= limits.ROWS_PER_PUT_MAX))
        if wrong.size:
            row = int(wrong[0])
            raise InvalidArgument(f"Shared: index[{row}]={chosen[row]}: values are counted from 0 on", rows=[row])
        if isinstance(values, Shared):
            raise InvalidArgument("Shared: values that are shared already; give one index for both")
        self.values = values
        self.index: NDArray[np.int64] = chosen.astype(np.int64)

    def __len__(self) -> int:
        return len(self.index)

    def __repr__(self) -> str:
        return f"Shared({len(self.index)} rows)"


@dataclass(frozen=True, slots=True)
class Joined:
    """A ragged column whose rows are joined already; not for users, to whom that is a NestedTensor.

    Attributes:
        values: of all rows, [sum of lengths, *shape].
        lengths: of the rows.
    """

    values: torch.Tensor
    lengths: Sequence[int]


def normalise(values: Any) -> dict[str, Any]:
    """Columns by field name.

    Args:
        values: a mapping of columns, a list of sample dicts with the same keys, or a TensorDict.

    Returns:
        A new dict; its columns are the caller's own objects. TensorDicts within become dicts, their non-tensor data
        lists.

    Raises:
        InvalidArgument: it is neither, or the samples differ in keys; names the row and the keys.
    """
    if _is_tensordict(values):
        return _tensordict_columns(values)
    if isinstance(values, Mapping):
        columns = {key: _column(column) for key, column in values.items()}
    elif isinstance(values, (list, tuple)):
        columns = _transpose(values)
    else:
        raise InvalidArgument(f"values must be a dict of columns, a list of dicts or a TensorDict, not {_type(values)}")
    for key in columns:
        check_name(key)
    return columns


def check_name(name: Any) -> None:
    """Checks a field name.

    Raises:
        InvalidArgument: it is no string, empty, or too long.
    """
    if type(name) is not str or not name:
        raise InvalidArgument(f"a field name must be a non-empty str, not {name!r:.80}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise InvalidArgument(f"the field name {name!r:.80} has a lone surrogate") from None
    if size > limits.NAME_BYTES_MAX:
        raise InvalidArgument(
            f"the field name {name!r:.80} has {size} bytes; at most {limits.NAME_BYTES_MAX} are allowed"
        )


def _transpose(samples: Sequence[Any]) -> dict[str, Any]:
    """Columns of sample dicts."""
    rows = [_tensordict_row(sample) if _is_tensordict(sample) else sample for sample in samples]
    if not rows:
        raise InvalidArgument("an empty list of samples has no fields; put a dict of empty columns")
    first = rows[0]
    for row, sample in enumerate(rows):
        if not isinstance(sample, Mapping):
            raise InvalidArgument(f"sample {row} is a {_type(sample)}, not a dict")
        if sample.keys() != first.keys():
            missing, extra = _differences(first.keys(), sample.keys())
            raise InvalidArgument(f"sample {row} has other keys than sample 0: it lacks {missing} and adds {extra}")
    return {key: [sample[key] for sample in rows] for key in first}


def _differences(known: Any, new: Any) -> tuple[str, str]:
    missing = sorted(map(repr, known - new))[:_NAMED_KEYS_MAX]
    extra = sorted(map(repr, new - known))[:_NAMED_KEYS_MAX]
    return ", ".join(missing) or "none", ", ".join(extra) or "none"


def _column(column: Any) -> Any:
    if isinstance(column, Shared):
        return Shared(_column(column.values), column.index)
    if _is_non_tensor(column):  # first: a NonTensorStack is a TensorDict as well
        return _non_tensor_rows(column)
    return _tensordict_columns(column) if _is_tensordict(column) else column


def _type(value: Any) -> str:
    return type(value).__qualname__


# A user without tensordict never pays for its import: an instance exists only where it was imported.


def _is_tensordict(value: Any) -> bool:
    module = sys.modules.get("tensordict")
    return module is not None and isinstance(value, module.TensorDictBase)


def _is_non_tensor(value: Any) -> bool:
    module = sys.modules.get("tensordict")
    return module is not None and bool(module.is_non_tensor(value))


def _non_tensor_rows(value: Any) -> list[Any]:
    """One value per row; data that stands for the whole batch is repeated."""
    if not value.batch_size:
        raise InvalidArgument("non-tensor data without a batch dimension is no column")
    return list(value.tolist())


def _tensordict_columns(values: Any) -> dict[str, Any]:
    if not values.batch_size:
        raise InvalidArgument("a TensorDict needs a batch dimension: its rows are the samples")
    module = sys.modules["tensordict"]
    if isinstance(values, module.LazyStackedTensorDict) and values.stack_dim == 0:
        return _transpose(values.tensordicts)
    return {key: _column(values.get(key)) for key in values.keys()}  # noqa: SIM118


def _tensordict_row(sample: Any) -> dict[str, Any]:
    row = {}
    for key in sample.keys():  # noqa: SIM118
        value = sample.get(key)
        if _is_non_tensor(value):
            value = value.tolist() if value.batch_size else value.data
        row[key] = _tensordict_row(value) if _is_tensordict(value) else value
    return row


def is_column(value: Any) -> bool:
    """Whether a value can be a column at all."""
    return isinstance(value, (Records, Shared, torch.Tensor, np.ndarray, Mapping, list, tuple))
