"""A batch as one run of bytes: what one rank fetched and broadcasts to others as a single tensor.

Two blocks of the codec's format, back to back: one with what is known of the rows, one with the columns. Both have
headers that say how long they are, so the bytes need no other description, and both are checksummed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import ALIGN, Column, Layout, Part, Plan, Records, allocate, measure, read_column, share_offsets
from tqclient.codec.header import Header
from tqclient.codec.kinds.struct import StructColumn
from tqclient.codec.values import measure_value
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.rows import RowSet

_FACTS: Final = "facts"
_ROW_FACTS: Final = ("ids", "keys", "groups", "tags", "weight_versions", "attempts")


def pack(rows: RowSet, columns: Mapping[str, Column], extra: Any) -> torch.Tensor:
    """Returns rows and columns as uint8 [bytes], in memory of its own.

    Raises:
        UnsupportedValue: `extra` holds what the block format cannot carry exactly.
    """
    facts = {"extra": extra, "fields": len(columns), **{name: getattr(rows, name) for name in _ROW_FACTS}}
    plans = [measure_value(_FACTS, facts, "to_buffer")]
    if columns:
        plans.append(measure({name: _again(column) for name, column in columns.items()}, rows=len(rows.ids)))
    target = allocate(sum(plan.size_bytes for plan in plans))
    start = 0
    for plan in plans:
        start = _write(plan, target, start)
    return torch.from_numpy(target)


def _write(plan: Plan, target: NDArray[np.uint8], start: int) -> int:
    stop = start + plan.size_bytes
    plan.write(target[start:stop])
    return stop


def _again(column: Column) -> Any:
    """Returns what makes a column of the same form when it is put again."""
    plain = column.plain()
    if isinstance(plain, StructColumn):
        return {name: _again(child) for name, child in plain.columns.items()}
    if plain.form.kind == "list":
        values = plain.list()
        return values if set(map(type, values)) in ({str}, {bytes}) else Records(values)
    return plain.value


def unpack(buffer: Any) -> tuple[RowSet, dict[str, Column], Any]:
    """Reads what `pack` made; the columns are views of the buffer where it lies in this process' memory.

    Args:
        buffer: uint8 [bytes], on any device; what follows the two blocks is not looked at.

    Returns:
        Rows (without where they lay), columns, and `extra`.

    Raises:
        InvalidArgument: it is no tensor or array of uint8 [bytes].
        CorruptBlock: it is cut or damaged.
    """
    data = _bytes_of(buffer)
    head, rest = _cut(data)
    layout = Layout.open(head)
    if layout.fields != (_FACTS,) or layout.rows != 1:
        raise CorruptBlock("a block, but not of a batch that `to_buffer` made")
    facts = _columns(layout, head, copy=True)[_FACTS].list()[0]
    rows = RowSet(**{name: facts[name] for name in _ROW_FACTS}, runs={}, blocks={})
    columns: dict[str, Column] = {}
    if facts["fields"]:
        body, _ = _cut(rest)
        columns = _columns(Layout.open(body), body, copy=False)
        share_offsets(columns.values())
    return rows, columns, facts["extra"]


def _columns(layout: Layout, block: NDArray[np.uint8], *, copy: bool) -> dict[str, Column]:
    part = Part(layout, np.arange(layout.rows), lambda offset, length: block[offset : offset + length])
    return {name: read_column(name, [part], copy=copy, allocate=allocate) for name in layout.fields}


def _cut(data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Divides bytes into the block that they begin with, and the rest."""
    size = Header.size_of(data)
    if size > data.size:
        raise CorruptBlock(f"a buffer of {data.size} bytes is cut: a block in it has {size}")
    return data[:size], data[size:]


def _bytes_of(buffer: Any) -> NDArray[np.uint8]:
    if isinstance(buffer, torch.Tensor) and buffer.dtype == torch.uint8 and not buffer.is_meta:
        buffer = buffer.detach().cpu().numpy()
    if not isinstance(buffer, np.ndarray) or buffer.dtype != np.uint8 or buffer.ndim != 1:
        raise InvalidArgument("from_buffer: expected a tensor or an array, uint8 [bytes]")
    if buffer.ctypes.data % ALIGN or not buffer.flags.c_contiguous:
        moved = allocate(buffer.size)
        moved[:] = buffer
        return moved
    return buffer
