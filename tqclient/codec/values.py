"""One value on its own (partition metadata), and the comparison of rows."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import buffers
from tqclient.codec.kinds import record
from tqclient.codec.kinds.base import Column
from tqclient.codec.layout import Layout
from tqclient.codec.plan import Plan
from tqclient.codec.reading import Part, read_column
from tqclient.codec.refusal import ValuePath
from tqclient.errors import CorruptBlock, InvalidArgument

_FIELD: Final = "value"


def measure_value(name: str, value: Any, path: str, *, allow_pickle: bool = False) -> Plan:
    """Plans a block of one row, with a list column of that name.

    Raises:
        UnsupportedValue: it would not come back as it is; the offender's path begins with `path`.
    """
    return Plan({name: record.encode([value], ValuePath(path), 0, allow_pickle=allow_pickle)}, 1)


def dumps(value: Any, *, path: str = _FIELD, allow_pickle: bool = False) -> bytes:
    """One value as bytes: a block of one row.

    Raises:
        UnsupportedValue: it would not come back as it is; the offender's path begins with `path`.
    """
    plan = measure_value(_FIELD, value, path, allow_pickle=allow_pickle)
    target = buffers.allocate(plan.size_bytes)
    plan.write(target)
    return target.tobytes()


def loads(data: bytes, *, allow_pickle: bool = False) -> Any:
    """The value that `dumps` encoded; its tensors own their memory.

    Raises:
        CorruptBlock: these bytes are none of its, or damaged.
        UnsupportedValue: it was pickled, and `allow_pickle` is off.
    """
    block = np.frombuffer(data, np.uint8)
    layout = Layout.open(block)
    if layout.fields != (_FIELD,) or layout.rows != 1 or layout.form(_FIELD).kind != "list":
        raise CorruptBlock("a block, but not of a single value")
    part = Part(layout, np.zeros(1, np.int64), lambda offset, length: block[offset : offset + length])
    return read_column(_FIELD, [part], copy=True, allocate=buffers.allocate, allow_pickle=allow_pickle).list()[0]


def same_rows(column: Column, other: Column) -> NDArray[np.bool_]:
    """Which rows of two columns carry the same types and bytes (NaN payloads included).

    Args:
        column: [rows].
        other: as many rows.

    Returns:
        bool [rows].

    Raises:
        InvalidArgument: the row counts differ.
    """
    if column.rows != other.rows:
        raise InvalidArgument(f"columns of {column.rows} and {other.rows} rows cannot be compared")
    return column.plain().same_rows(other.plain())
