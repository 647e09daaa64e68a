"""Whether the rows of a column are alike, told in a few passes of C functions: the interpreter takes longer for a row.

Each says None where rows differ, or where it takes a closer look at each to tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec.buffers import CAT_ITEMS_MAX, batches

SMALL_ROW_BYTES: Final = 256
"""Rows of up to so many bytes in the mean are joined while they are looked at: less than a tensor takes by itself."""

_dtype, _layout, _is_meta = attrgetter("dtype"), attrgetter("layout"), attrgetter("is_meta")
_shape = attrgetter("shape")


def tensor_lengths(rows: Sequence[torch.Tensor]) -> NDArray[np.int64] | None:
    """The leading dimensions of dense tensors of one dtype and trailing shape, int64 [rows]; zeros if 0-dim."""
    if len(set(map(_dtype, rows))) > 1 or set(map(_layout, rows)) != {torch.strided} or any(map(_is_meta, rows)):
        return None
    try:
        return _lengths(rows)
    except RuntimeError:  # a NestedTensor has no shape
        return None


def array_lengths(rows: Sequence[NDArray[Any]]) -> NDArray[np.int64] | None:
    """The leading dimensions of arrays of one dtype and trailing shape, int64 [rows]; zeros if 0-dim."""
    first = rows[0].dtype
    if any(dtype is not first and dtype != first for dtype in map(_dtype, rows)):
        return None
    return _lengths(rows)


def _lengths(rows: Sequence[Any]) -> NDArray[np.int64] | None:
    found = list(map(_shape, rows))
    dimensions = len(found[0])
    if set(map(len, found)) != {dimensions}:
        return None
    if not dimensions:
        return np.zeros(len(rows), np.int64)
    sizes = np.fromiter(chain.from_iterable(found), np.int64, len(rows) * dimensions)
    shapes = sizes.reshape(len(rows), dimensions)
    lengths: NDArray[np.int64] = shapes[:, 0].copy()
    return lengths if dimensions == 1 or (shapes[:, 1:] == shapes[0, 1:]).all() else None


def join_small(rows: Sequence[torch.Tensor]) -> tuple[torch.Tensor, NDArray[np.int64]] | None:
    """Small tensors of one dtype and trailing shape, in the host's memory: their values, and the length of each.

    Joining them tells layouts, devices and dimensions apart, which costs as much again for each row otherwise.
    """
    first = rows[0]
    if len(rows) < 2 or not first.is_cpu or not first.ndim or first.is_nested or first.layout != torch.strided:
        return None
    if min(first.numel(), rows[len(rows) // 2].numel(), rows[-1].numel()) * first.element_size() > SMALL_ROW_BYTES:
        return None  # most likely all are large: not worth a pass
    trailing = first.shape[1:]
    item = trailing.numel()
    counts = np.fromiter(map(torch.Tensor.numel, rows), np.int64, len(rows))
    total = int(counts.sum())
    if not item or total * first.element_size() > SMALL_ROW_BYTES * len(rows):
        return None
    if len(set(map(_dtype, rows))) > 1:
        return None
    # torch.cat passes over empty rows, whatever their other dimensions are.
    if first.ndim > 1 and any(rows[row].shape[1:] != trailing for row in np.flatnonzero(counts == 0).tolist()):
        return None
    join: Any = torch.cat  # takes any sequence, whatever its annotations say
    try:
        with torch.no_grad():
            if total <= CAT_ITEMS_MAX:
                joined = [join(rows)]
            else:
                joined = [
                    join(rows[low:high]) for low, high in batches([0, *np.cumsum(counts).tolist()], CAT_ITEMS_MAX)
                ]
            if any(part.shape[1:] != trailing or not part.is_cpu for part in joined):
                return None
            return (joined[0] if len(joined) == 1 else join(joined)), counts // item
    except RuntimeError:
        return None
