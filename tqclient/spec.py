"""What `Partition.allocate` is told of its fields: dtypes and shapes, without values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch

from tqclient import limits
from tqclient.codec.dtypes import UnknownDtype, torch_dtype, torch_name
from tqclient.codec.normalise import Joined
from tqclient.errors import InvalidArgument

Shape: TypeAlias = Sequence[int]
Spec: TypeAlias = "Mapping[str, tuple[str | torch.dtype, Shape | Sequence[Shape]] | Spec]"
"""Field → (dtype, shape of every row), (dtype, one shape per row), or a mapping of the same for a struct."""


def placeholders(spec: Spec, rows: int) -> dict[str, Any]:
    """Returns columns of the dtypes and shapes that a spec gives, which take no memory.

    Args:
        spec: see `Spec`.
        rows: how many, at least 1.

    Raises:
        InvalidArgument: names the field, and the row.
    """
    if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
        raise InvalidArgument(f"rows={rows!r}: expected an int of at least 1")
    return _columns(spec, rows, "")


def _columns(spec: Any, rows: int, prefix: str) -> dict[str, Any]:
    if not isinstance(spec, Mapping) or not spec:
        raise InvalidArgument(f"spec{prefix and ' of ' + prefix[:-1]}: expected a mapping of fields, not {spec!r:.80}")
    columns: dict[str, Any] = {}
    for name, wanted in spec.items():
        path = f"{prefix}{name}"
        if isinstance(wanted, Mapping):
            columns[name] = _columns(wanted, rows, f"{path}.")
        elif isinstance(wanted, tuple | list) and len(wanted) == 2:
            columns[name] = _column(path, wanted[0], wanted[1], rows)
        else:
            raise InvalidArgument(f"field {path!r}: expected (dtype, shape) or a mapping of fields, not {wanted!r:.80}")
    return columns


def _column(path: str, dtype: Any, shapes: Any, rows: int) -> Any:
    try:
        kind = torch_dtype(torch_name(dtype) if isinstance(dtype, torch.dtype) else dtype)
    except (UnknownDtype, TypeError):
        raise InvalidArgument(
            f"field {path!r}: {dtype!r:.80} is no dtype of torch that can be carried; say 'float32', for one"
        ) from None
    if not isinstance(shapes, Sequence) or isinstance(shapes, str | bytes):
        raise InvalidArgument(f"field {path!r}: expected a shape, or one for each row, not {shapes!r:.80}")
    if not shapes or not isinstance(shapes[0], Sequence):
        return _blank(path, kind, (rows, *_shape(path, shapes)))
    if len(shapes) != rows:
        raise InvalidArgument(f"field {path!r}: {len(shapes)} shapes for {rows} rows")
    listed = _shapes(path, shapes)
    for row, shape in enumerate(listed):
        if not shape or shape[1:] != listed[0][1:]:
            raise InvalidArgument(
                f"field {path!r}, row {row}: shape {list(shape)}, but rows of one field may differ in their first "
                f"dimension alone, and row 0 is {list(listed[0])}",
                rows=[row],
            )
    lengths = [shape[0] for shape in listed]
    return Joined(_blank(path, kind, (sum(lengths), *listed[0][1:])), lengths)


def _shapes(path: str, shapes: Sequence[Any]) -> list[tuple[int, ...]]:
    # In passes of C functions, as long as nothing is odd: the interpreter takes longer to look at one shape.
    if {*map(type, shapes)} <= {list, tuple}:
        sizes = list(chain.from_iterable(shapes))
        if {*map(type, sizes)} <= {int} and min(sizes, default=0) >= 0:
            return list(map(tuple, shapes))
    return [_shape(f"{path}[{row}]", shape) for row, shape in enumerate(shapes)]


def _shape(path: str, shape: Any) -> tuple[int, ...]:
    if (
        not isinstance(shape, Sequence)
        or isinstance(shape, str | bytes)
        or any(isinstance(size, bool) or not isinstance(size, int) or size < 0 for size in shape)
    ):
        raise InvalidArgument(f"field {path!r}: {shape!r:.80} is no shape: expected ints of at least 0")
    return tuple(shape)


def _blank(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    size_bytes = math.prod(shape) * dtype.itemsize
    if max(size_bytes, *shape) > limits.BLOCK_BYTES_MAX:
        raise InvalidArgument(
            f"field {path!r}: {list(shape)} values of all rows in one allocation are more than one block may have, "
            f"{limits.BLOCK_BYTES_MAX} bytes: allocate fewer rows at once, several times"
        )
    return torch.empty(1, dtype=dtype).as_strided(shape, (0,) * len(shape))
