"""Rows of one dtype and trailing shape, of any length: values back to back, lengths in the directory.

The values are those of a jagged NestedTensor, so that one is made without a copy. A strided NestedTensor of 2-D or
larger rows may vary in each dimension; then a second stream holds each row's shape, int64 [rows, dimensions].
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.arrays import bounds
from tqclient.codec import buffers, dtypes
from tqclient.codec.checksum import Checksums
from tqclient.codec.directory import DENSE, RAGGED, StreamSize
from tqclient.codec.filling import filling
from tqclient.codec.kinds.base import Column, Encoder, stream_size
from tqclient.codec.kinds.dense import DenseColumn
from tqclient.codec.parallel import Later
from tqclient.codec.streams import Group, Reading, Rows, read_rows
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.schema import Form

# At a process's first jagged tensor, torch 2.13 logs advice to authors of its own internals.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not record.getMessage().startswith("is_fx_tracing will return true")
)


def _item_bytes(form: Form) -> int:
    trailing = () if -1 in form.shape else form.shape
    return dtypes.itemsize(form.container, form.dtype) * math.prod(trailing)


class RaggedEncoder(Encoder):
    """A list of tensors or arrays, or the values of a jagged NestedTensor."""

    kind = RAGGED

    def __init__(self, form: Form, pieces: Sequence[Any], counts: NDArray[np.int64], *, joined: bool = False) -> None:
        """Args: `joined`: `pieces` is the one tensor of all rows' values, rather than one tensor per row."""
        self.form = form
        self.rows = len(counts)
        self._pieces = pieces
        self._counts = counts
        self._joined = joined
        self._varying = -1 in form.shape

    def streams(self) -> list[StreamSize]:
        items = int(self._counts.sum())
        values = stream_size(items * _item_bytes(self.form), self.rows, self._counts)
        return [values, stream_size(self._shape_bytes() * self.rows, self.rows)] if self._varying else [values]

    def _shape_bytes(self) -> int:
        return 8 * (len(self.form.shape) + 1) if self._varying else 0

    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        pieces = [piece.reshape(-1) for piece in self._pieces] if self._varying else self._pieces
        if len(pieces) == 1:
            buffers.write_one(pieces[0], streams[0], later)
        else:
            buffers.write_all(pieces, self._counts * _item_bytes(self.form), streams[0], later)
        if self._varying:
            shapes = np.array([piece.shape for piece in self._pieces], "<i8")
            buffers.write_bytes(shapes.tobytes(), streams[1])

    def over(self, streams: Iterator[NDArray[np.uint8]]) -> Encoder:
        if self._varying:
            return super().over(streams)
        column = RaggedColumn(self.form, next(streams), self._counts, is_view=True)
        return RaggedEncoder(self.form, [column.values()], self._counts, joined=True)

    def tensors(self) -> Any:
        return list(torch.split(self._pieces[0], self._counts.tolist()))

    def row_bytes(self) -> NDArray[np.int64]:
        return self._counts * _item_bytes(self.form) + self._shape_bytes()

    def lengths(self) -> NDArray[np.int64]:
        if self._varying:
            return np.fromiter((len(piece) for piece in self._pieces), np.int64, self.rows)
        return self._counts

    def slice(self, start: int, stop: int) -> RaggedEncoder:
        if self._joined:
            low, high = int(self._counts[:start].sum()), int(self._counts[:stop].sum())
            pieces: Sequence[Any] = [self._pieces[0][low:high]]
        else:
            pieces = self._pieces[start:stop]
        return RaggedEncoder(self.form, pieces, self._counts[start:stop], joined=self._joined)

    def take(self, rows: NDArray[np.int64]) -> RaggedEncoder:
        pieces = self._pieces
        if self._joined:
            ends = bounds(self._counts).tolist()
            pieces = [self._pieces[0][start:stop] for start, stop in itertools.pairwise(ends)]
        return RaggedEncoder(self.form, [pieces[row] for row in rows.tolist()], self._counts[rows])


class RaggedColumn(Column):
    """Values [items, *shape] and offsets: a jagged or strided NestedTensor, or a list of arrays."""

    def __init__(
        self,
        form: Form,
        data: NDArray[np.uint8],
        counts: NDArray[np.int64],
        *,
        is_view: bool = False,
        shapes: NDArray[np.int64] | None = None,
    ) -> None:
        self.form = form
        self.rows = len(counts)
        self.is_view = is_view
        self.data = data
        self.counts = counts
        self._shapes = shapes
        self._offsets: dict[bytes, torch.Tensor] = {}  # by the bytes of lengths; see `share_offsets`
        self._jagged: torch.Tensor | None = None

    def values(self) -> Any:
        """All rows' values, [items, *shape]."""
        shape = (int(self.counts.sum()), *(() if self._shapes is not None else self.form.shape))
        if self.form.container == "numpy":
            return buffers.as_array(self.data, dtypes.numpy_dtype(self.form.dtype), shape)
        return buffers.as_tensor(self.data, dtypes.torch_dtype(self.form.dtype), shape)

    @property
    def item_bytes(self) -> int:
        """Bytes of one item; rows whose shapes vary count their elements."""
        return _item_bytes(self.form)

    def taken(self, rows: NDArray[np.int64], data: NDArray[np.uint8]) -> RaggedColumn:
        """The same with other rows of it, whose values are `data`."""
        shapes = None if self._shapes is None else self._shapes[rows]
        return RaggedColumn(self.form, data, self.counts[rows], shapes=shapes)

    def offsets(self) -> NDArray[np.int64]:
        """int64 [rows + 1]: row i is values[offsets[i]:offsets[i + 1]]."""
        return bounds(self.counts)

    @property
    def value(self) -> Any:
        if self.form.container == "numpy":
            return self.list()
        if self.form.container == "nested":
            return torch.nested.as_nested_tensor(self.list(), layout=torch.strided)
        self.prepare()
        return self._jagged

    def prepare(self) -> None:
        """Makes the jagged tensor that `value` is, if it is one."""
        if self.form.container != "torch" or self._jagged is not None:
            return
        lengths = self.counts.tobytes()
        offsets = self._offsets.get(lengths)
        if offsets is None:
            offsets = self._offsets.setdefault(lengths, torch.from_numpy(self.offsets()))
        # Without the longest row, `to_padded_tensor` would be as wide as all rows together.
        least, most = (int(self.counts.min()), int(self.counts.max())) if self.rows else (0, 0)
        self._jagged = _constructor()(self.values(), offsets, least, most)

    def list(self) -> list[Any]:
        values = self.values()
        if isinstance(values, torch.Tensor):
            rows = list(torch.split(values, self.counts.tolist())) if self.rows else []
            if self._shapes is None:
                return rows
            return [row.view(shape) for row, shape in zip(rows, self._shapes.tolist(), strict=True)]
        offsets = self.offsets().tolist()
        return [values[start:stop] for start, stop in itertools.pairwise(offsets)]

    def padded(self, value: Any = 0) -> Any:
        if self._shapes is not None:
            raise InvalidArgument(f"only rows of one trailing shape can be padded; this column is {self.form}")
        values = self.values()
        longest = int(self.counts.max(initial=0))
        shape = (self.rows, longest, *self.form.shape)
        mask = np.arange(longest) < self.counts[:, None]
        if isinstance(values, torch.Tensor):
            target = torch.empty(shape, dtype=values.dtype).fill_(filling(value, values.dtype))
            buffers.elements_of(target)[mask] = buffers.elements_of(values)  # a fifth of what torch takes
            return target
        array = np.full(shape, filling(value, values.dtype), values.dtype)
        array[mask] = values
        return array

    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        if isinstance(other, DenseColumn):
            other = from_dense(self.form, other)
        if (
            not isinstance(other, RaggedColumn)
            or self.form.dtype != other.form.dtype
            or self.form.shape != other.form.shape
        ):
            return np.zeros(self.rows, bool)
        same: NDArray[np.bool_] = self.counts == other.counts
        if self._shapes is not None and other._shapes is not None:
            same &= (self._shapes == other._shapes).all(axis=1)
        width = _item_bytes(self.form)
        mine, theirs = self.offsets() * width, other.offsets() * width
        for row in np.flatnonzero(same).tolist():
            a, b = self.data[mine[row] : mine[row + 1]], other.data[theirs[row] : theirs[row + 1]]
            same[row] = np.array_equal(a, b)
        return same


@functools.cache
def _constructor() -> Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]:
    """Returns what makes a jagged tensor of values [items, ...], offsets int64 [rows + 1], shortest and longest row.

    It is the constructor that makes what torch's own operations return, and what it unpickles: by the public function,
    whose result is a view, it is called through two dispatches, which take three times as long as the rest.
    """
    try:
        from torch.nested._internal.nested_tensor import NestedTensor, _store_val_in_tensor
    except ImportError:  # of a later torch: these names are not public
        return lambda values, offsets, least, most: torch.nested.nested_tensor_from_jagged(
            values, offsets, min_seqlen=least, max_seqlen=most
        )
    return lambda values, offsets, least, most: NestedTensor(
        values,
        offsets,
        _metadata_cache={"min_seqlen": _store_val_in_tensor(least), "max_seqlen": _store_val_in_tensor(most)},
    )


def load_jagged(forms: Iterable[Form]) -> None:
    """Has torch load what it makes jagged tensors with, if columns of these forms are any: a second and more.

    Whoever has no lease yet waits for that better than who has one.
    """
    if any(map(_holds_jagged, forms)):
        _constructor()(torch.zeros(1), torch.tensor([0, 1]), 1, 1)


def _holds_jagged(form: Form) -> bool:
    return (form.kind, form.container) == ("ragged", "torch") or any(_holds_jagged(child) for _, child in form.children)


def share_offsets(columns: Iterable[Column]) -> None:
    """Gives jagged tensors of equal lengths the same offsets: torch adds or multiplies only such as have that."""
    offsets: dict[bytes, torch.Tensor] = {}
    for column in _ragged(columns):
        column._offsets = offsets


def make_jagged(columns: Iterable[Column]) -> None:
    """Makes the jagged tensors of columns now; else they are made when they are first asked for."""
    for column in _ragged(columns):
        column.prepare()


def _ragged(columns: Iterable[Column]) -> Iterator[RaggedColumn]:
    for column in columns:
        yield from (part for part in column.parts() if isinstance(part, RaggedColumn))


def from_dense(form: Form, column: DenseColumn) -> Column:
    """A dense column as the ragged one that its rows may join; itself where they may not."""
    if column.form.shape[1:] != form.shape or not column.form.shape or column.form.dtype != form.dtype:
        return column
    counts = np.full(column.rows, column.form.shape[0], np.int64)
    return RaggedColumn(form, column.data, counts, is_view=column.is_view)


def _counts(groups: Sequence[Group], rows: Rows, form: Form) -> NDArray[np.int64]:
    """Items of each row, int64 [rows]."""
    if len(groups) == 1:
        return _counts_of(groups[0])
    if item_bytes := _item_bytes(form):
        return np.diff(rows.bounds) // item_bytes
    counts = np.zeros(len(rows.bounds) - 1, np.int64)
    for group in groups:
        counts[group.at] = _counts_of(group)
    return counts


def _counts_of(group: Group) -> NDArray[np.int64]:
    if group.clip is not None:
        return group.clip.counts
    if group.node.kind == DENSE:
        return np.full(len(group.rows), group.node.form.shape[0], np.int64)
    return group.node.streams[0].row_counts(group.rows)


def read(groups: Sequence[Group], form: Form, reading: Reading) -> RaggedColumn:
    """Reads a ragged column; rows of a dense one join."""
    rows = read_rows(groups, 0, reading, view=not reading.copy, later=reading.later)
    counts = _counts(groups, rows, form)
    if -1 not in form.shape:
        return RaggedColumn(form, rows.data, counts, is_view=rows.is_view)
    shapes = read_rows(groups, 1, reading, view=False).data.view("<i8").reshape(-1, len(form.shape) + 1)
    for row, (shape, count) in enumerate(zip(shapes, counts, strict=True)):
        if (shape < 0).any() or np.prod(shape, dtype=object) != count:
            raise CorruptBlock(f"field {reading.path!r}: a row's shape does not fit its length", rows=[row])
    return RaggedColumn(form, rows.data, counts, is_view=rows.is_view, shapes=shapes)
