"""What numpy has no function for."""

from __future__ import annotations

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


def spread(starts: NDArray[np.int64], counts: NDArray[np.int64], step: int = 1) -> NDArray[np.int64]:
    """Returns starts[i], starts[i] + step, and so on, counts[i] numbers of each i, one i after the other: int64."""
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.repeat(starts - step * (ends - counts), counts)
    numbers += step * np.arange(len(numbers))
    return numbers
