"""What numpy has no function for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Size = TypeVar("Size", int, NDArray[np.int64])


def bounds(sizes: NDArray[Any]) -> NDArray[np.int64]:
    """Returns where what has these sizes, [..., n], begins and ends side by side: int64 [..., n + 1], from 0 on."""
    found = np.zeros((*sizes.shape[:-1], sizes.shape[-1] + 1), np.int64)
    np.cumsum(sizes, axis=-1, dtype=np.int64, out=found[..., 1:])
    return found


def begins(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Returns where a run of equal values begins: bool, by entry."""
    return np.concatenate((np.ones(min(len(values), 1), np.bool_), values[1:] != values[:-1]))


def told_apart(columns: Sequence[NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Tells rows of a table apart, of which each column is given, int64 [rows].

    Returns:
        The first row of each kind, kinds in the order of their numbers, and which kind each row is of: int64 each.
    """
    table, axis = (columns[0], None) if len(columns) == 1 else (np.stack(columns), 1)
    _, first, which = np.unique(table, axis=axis, return_index=True, return_inverse=True)
    return first, which.reshape(-1)


def spread(starts: NDArray[np.int64], counts: NDArray[np.int64], step: int = 1) -> NDArray[np.int64]:
    """Returns starts[i], starts[i] + step, and so on, counts[i] numbers of each i, one i after the other: int64."""
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.repeat(starts - step * (ends - counts), counts)
    numbers += step * np.arange(len(numbers))
    return numbers
