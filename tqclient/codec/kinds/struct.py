"""Dicts with the same keys in every row: one column per key, recursively."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.codec.checksum import Checksums
from tqclient.codec.directory import STRUCT, StreamSize
from tqclient.codec.kinds.base import Column, Encoder
from tqclient.codec.parallel import Later
from tqclient.codec.streams import Group, Reading
from tqclient.schema import Form


class StructEncoder(Encoder):
    """Columns side by side."""

    kind = STRUCT

    def __init__(self, columns: dict[str, Encoder], rows: int) -> None:
        self.form = Form("struct", children=tuple((key, column.form) for key, column in columns.items()))
        self.rows = rows
        self._columns = columns

    def children(self) -> list[tuple[str, Encoder]]:
        return list(self._columns.items())

    def streams(self) -> list[StreamSize]:
        return []

    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        """It has no streams of its own."""

    def over(self, streams: Iterator[NDArray[np.uint8]]) -> Encoder:
        return StructEncoder({key: column.over(streams) for key, column in self._columns.items()}, self.rows)

    def tensors(self) -> Any:
        return {key: column.tensors() for key, column in self._columns.items()}

    def row_bytes(self) -> NDArray[np.int64]:
        return sum((column.row_bytes() for column in self._columns.values()), np.zeros(self.rows, np.int64))

    def slice(self, start: int, stop: int) -> StructEncoder:
        return StructEncoder({key: column.slice(start, stop) for key, column in self._columns.items()}, stop - start)

    def take(self, rows: NDArray[np.int64]) -> StructEncoder:
        return StructEncoder({key: column.take(rows) for key, column in self._columns.items()}, len(rows))


class StructColumn(Column):
    """A dict of columns."""

    def __init__(self, form: Form, columns: dict[str, Column], rows: int) -> None:
        self.form = form
        self.rows = rows
        self.columns = columns
        self.is_view = any(column.is_view for column in columns.values())

    def parts(self) -> Iterator[Column]:
        for column in self.columns.values():
            yield from column.parts()

    @property
    def value(self) -> dict[str, Any]:
        return {key: column.value for key, column in self.columns.items()}

    def list(self) -> list[Any]:
        keys = list(self.columns)
        rows = zip(*(column.list() for column in self.columns.values()), strict=True)
        return [dict(zip(keys, row, strict=True)) for row in rows]

    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        if not isinstance(other, StructColumn) or self.columns.keys() != other.columns.keys():
            return np.zeros(self.rows, bool)
        same = np.ones(self.rows, bool)
        for key, column in self.columns.items():
            same &= column.plain().same_rows(other.columns[key].plain())
        return same


ReadColumn = Callable[[Sequence[Group], Form, Reading], Column]


def read(groups: Sequence[Group], form: Form, reading: Reading, read_column: ReadColumn) -> StructColumn:
    """Reads a struct: `read_column` reads each child."""
    columns = {}
    children = [{child.name: child for child in group.node.children} for group in groups]
    for key, child_form in form.children:
        parts = [group._replace(node=nodes[key]) for group, nodes in zip(groups, children, strict=True)]
        columns[key] = read_column(parts, child_form, reading.child(key))
    read_form = Form("struct", children=tuple((key, column.form) for key, column in columns.items()))
    return StructColumn(read_form, columns, sum(len(group.rows) for group in groups))
