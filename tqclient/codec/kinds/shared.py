"""Values that rows share: each is stored, fetched and verified once; the directory says which value each row has.

The values are a column of any other kind, with as many rows as there are values. A reader of the partition sees no
difference: the form is that of the values, and shared and plain blocks of one field read as one column.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.arrays import bounds, told_apart
from tqclient.codec.checksum import Checksums
from tqclient.codec.clips import ends_of
from tqclient.codec.directory import SHARED, NodePlan, StreamSize
from tqclient.codec.kinds.base import Column, Encoder, stream_size
from tqclient.codec.kinds.dense import DenseColumn
from tqclient.codec.kinds.ragged import RaggedColumn
from tqclient.codec.kinds.record import ListColumn
from tqclient.codec.kinds.struct import StructColumn
from tqclient.codec.parallel import Later
from tqclient.codec.streams import Allocate, Group, Reading, move
from tqclient.errors import CorruptBlock
from tqclient.schema import Form


class SharedEncoder(Encoder):
    """A column of values, and which of them each row has; values that no row has are left out."""

    kind = SHARED

    def __init__(self, values: Encoder, index: NDArray[np.int64]) -> None:
        """Args: `index`: int64 [rows], each from 0 to `values.rows - 1`."""
        used, picks = np.unique(index, return_inverse=True)
        self.form = values.form
        self.rows = len(index)
        self._values = values if len(used) == values.rows else values.take(used)
        self._picks: NDArray[np.int64] = picks.astype(np.int64)

    def children(self) -> list[tuple[str, Encoder]]:
        return [("", self._values)]

    def node(self, name: str) -> NodePlan:
        values = Form("list", shape=(self._values.rows,))  # the directory has a place for a shape
        return NodePlan(name, self.kind, values, self.flags, self.streams(), [self._values.node("")])

    def streams(self) -> list[StreamSize]:
        return [stream_size(0, self.rows, self._picks)]

    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        """Its one stream has no bytes."""

    def row_bytes(self) -> NDArray[np.int64]:
        """A value counts with the first row that has it."""
        row_bytes = np.zeros(self.rows, np.int64)
        used, first = np.unique(self._picks, return_index=True)
        row_bytes[first] = self._values.row_bytes()[used]
        return row_bytes

    def slice(self, start: int, stop: int) -> SharedEncoder:
        return SharedEncoder(self._values, self._picks[start:stop])

    def take(self, rows: NDArray[np.int64]) -> SharedEncoder:
        return SharedEncoder(self._values, self._picks[rows])

    def row_lengths(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        for path, lengths in self._values.row_lengths():
            yield path, lengths[self._picks]


class SharedColumn(Column):
    """Rows that have values in common.

    `list()` copies nothing: rows that share a value share its memory, so that writing to one writes to the others.
    `value` and `padded()` give each row memory of its own; only the values of a list column stay shared, being Python
    objects.

    Attributes:
        values: a dense, ragged or list column, each value once.
        picks: int64 [rows]: which of the values each row has.
    """

    def __init__(self, values: Column, picks: NDArray[np.int64], allocate: Allocate) -> None:
        """Made by `read`: row i has row `picks[i]` of `values`."""
        self.form = values.form
        self.rows = len(picks)
        self.is_view = values.is_view
        self.values = values
        self.picks = picks
        self._allocate = allocate

    @cached_property
    def _plain(self) -> Column:
        return _take(self.values, self.picks, self._allocate)

    def plain(self) -> Column:
        return self._plain

    @property
    def value(self) -> Any:
        return self._plain.value

    def list(self) -> list[Any]:
        values = self.values.list()
        return [values[pick] for pick in self.picks.tolist()]

    def padded(self, value: Any = 0) -> Any:
        return self.values.padded(value)[self.picks]

    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        return self._plain.same_rows(other.plain())


def _take(column: Column, rows: NDArray[np.int64], allocate: Allocate) -> Column:
    """Rows of a column, repeats allowed, each in memory of its own."""
    if isinstance(column, DenseColumn):
        ends = np.arange(column.rows + 1) * (column.data.size // max(1, column.rows))
        data = _gather(column.data, ends, rows, allocate)
        return DenseColumn(column.form, data, len(rows), is_view=False)
    if isinstance(column, RaggedColumn):
        return column.taken(rows, _gather(column.data, column.offsets() * column.item_bytes, rows, allocate))
    values = column.list()
    return ListColumn([values[row] for row in rows.tolist()], column.is_view)


def _gather(
    data: NDArray[np.uint8], ends: NDArray[np.int64], rows: NDArray[np.int64], allocate: Allocate
) -> NDArray[np.uint8]:
    """Joins rows that lie back to back in `data`, row i from `ends[i]` to `ends[i + 1]`."""
    sizes = ends[rows + 1] - ends[rows]
    places = bounds(sizes)
    target = allocate(int(places[-1]))
    if target.size:
        move(data, ends[rows], target, places[:-1], sizes)
    return target


ReadColumn = Callable[[Sequence[Group], Form, Reading], Column]


def read(groups: Sequence[Group], form: Form, reading: Reading, read_column: ReadColumn) -> Column:
    """Reads a column of which some blocks hold shared values; `read_column` reads the values."""
    picks = np.zeros(sum(len(group.rows) for group in groups), np.int64)
    inner: list[Group] = []
    count = 0
    for group in groups:
        wanted, inverse = _distinct(group)
        inner.append(wanted._replace(at=count + np.arange(len(wanted.rows)), place=-1))
        picks[group.at] = count + inverse
        count += len(wanted.rows)
    try:
        values = read_column(inner, form, replace(reading, later=None))  # which of the rows failed is told here
    except CorruptBlock as error:
        rows = [int(row) for value in error.rows for row in np.flatnonzero(picks == value)[:1]]
        raise CorruptBlock(error.message, rows=rows) from None
    if np.array_equal(picks, np.arange(count)):
        return values
    return _share(values, picks, reading.allocate)


def _share(values: Column, picks: NDArray[np.int64], allocate: Allocate) -> Column:
    """Rows that have these values; a struct's rows share its children's, and not the dicts."""
    if isinstance(values, StructColumn):
        children = {key: _share(child, picks, allocate) for key, child in values.columns.items()}
        return StructColumn(values.form, children, len(picks))
    if isinstance(values, SharedColumn):
        return SharedColumn(values.values, values.picks[picks], allocate)
    return SharedColumn(values, picks, allocate)


def _distinct(group: Group) -> tuple[Group, NDArray[np.int64]]:
    """What a group's rows need, each thing once, and which of them each row has."""
    if group.node.kind != SHARED:
        return group, np.arange(len(group.rows))
    rows = group.node.picks(group.rows)
    # Rows that share a value may still want different ranges of it.
    first, which = told_apart([rows, *ends_of(group.clips)])
    clips = tuple(clip.take(first) for clip in group.clips)
    return group._replace(node=group.node.children[0], rows=rows[first], clips=clips), which
