"""One tensor or array for all rows: `[rows, *shape]` in one stream."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import buffers, dtypes
from tqclient.codec.checksum import Checksums
from tqclient.codec.directory import DENSE, StreamSize
from tqclient.codec.kinds.base import Column, Encoder, stream_size
from tqclient.codec.parallel import Later
from tqclient.codec.streams import Group, Reading, read_rows
from tqclient.schema import Form


class DenseEncoder(Encoder):
    """A tensor or array, or a list of 0-dim ones, which together are one of shape [rows]."""

    kind = DENSE

    def __init__(self, form: Form, pieces: Sequence[Any], rows: int) -> None:
        self.form = form
        self.rows = rows
        self._pieces = pieces
        self._row_bytes = dtypes.itemsize(form.container, form.dtype) * math.prod(form.shape)

    def streams(self) -> list[StreamSize]:
        return [stream_size(self.rows * self._row_bytes, self.rows)]

    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        if len(self._pieces) == 1:
            buffers.write_one(self._pieces[0], streams[0], later)
        else:
            sizes = np.full(len(self._pieces), self._row_bytes, np.int64)
            buffers.write_all(self._pieces, sizes, streams[0], later)

    def over(self, streams: Iterator[NDArray[np.uint8]]) -> Encoder:
        return DenseEncoder(
            self.form, [DenseColumn(self.form, next(streams), self.rows, is_view=True).value], self.rows
        )

    def tensors(self) -> Any:
        return self._pieces[0]

    def row_bytes(self) -> NDArray[np.int64]:
        return np.full(self.rows, self._row_bytes, np.int64)

    def slice(self, start: int, stop: int) -> DenseEncoder:
        whole = len(self._pieces) == 1 and self._pieces[0].ndim > 0
        pieces = [self._pieces[0][start:stop]] if whole else self._pieces[start:stop]
        return DenseEncoder(self.form, pieces, stop - start)

    def take(self, rows: NDArray[np.int64]) -> DenseEncoder:
        whole = len(self._pieces) == 1 and self._pieces[0].ndim > 0
        chosen = rows.tolist()
        pieces = [self._pieces[0][row : row + 1] if whole else self._pieces[row] for row in chosen]
        return DenseEncoder(self.form, pieces, len(chosen))


class DenseColumn(Column):
    """A tensor or array, [rows, *shape]."""

    def __init__(self, form: Form, data: NDArray[np.uint8], rows: int, is_view: bool) -> None:
        self.form = form
        self.rows = rows
        self.is_view = is_view
        self.data = data

    @property
    def value(self) -> Any:
        shape = (self.rows, *self.form.shape)
        if self.form.container == "numpy":
            return buffers.as_array(self.data, dtypes.numpy_dtype(self.form.dtype), shape)
        return buffers.as_tensor(self.data, dtypes.torch_dtype(self.form.dtype), shape)

    def list(self) -> list[Any]:
        value = self.value
        return list(value.unbind(0)) if isinstance(value, torch.Tensor) else buffers.rows_of(value)

    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        if not isinstance(other, DenseColumn):
            return other.same_rows(self)
        if self.form != other.form:
            return np.zeros(self.rows, bool)
        if not self.data.size:
            return np.ones(self.rows, bool)
        same: NDArray[np.bool_] = (self.data.reshape(self.rows, -1) == other.data.reshape(self.rows, -1)).all(axis=1)
        return same


def read(groups: Sequence[Group], form: Form, reading: Reading) -> DenseColumn:
    """Reads a dense column."""
    rows = read_rows(groups, 0, reading, view=not reading.copy, later=reading.later)
    return DenseColumn(form, rows.data, len(rows.bounds) - 1, rows.is_view)
