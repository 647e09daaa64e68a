"""Arrays of ids, slots and groups, of up to a million entries, within what other callers can wait."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient.arrays import begins

Number = TypeVar("Number", bound=np.integer[Any])


def grown(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    """Returns a copy of an array with zeros behind it, up to `capacity`."""
    target = np.zeros(capacity, dtype=array.dtype)
    target[: len(array)] = array
    return target


def distinct(values: NDArray[Number]) -> NDArray[Number]:
    """Returns what an array holds, each value once, ascending; the array itself where it is so already.

    `numpy.unique` hashes integers since 2.3, which takes 14 times as long as sorting them when a million differ.
    """
    if _ascends(values):
        return values
    values = np.sort(values)
    return values[begins(values)]


def are_distinct(values: NDArray[Number]) -> bool:
    """Says whether no value is there twice."""
    return len(distinct(values)) == len(values)


def counted(values: NDArray[Number]) -> tuple[NDArray[Number], NDArray[np.int64]]:
    """Returns what an array holds, each value once, ascending, and how often: runs of equal values cost one look."""
    starts = np.flatnonzero(begins(values))
    runs, lengths = values[starts], np.diff(starts, append=len(values))
    if _ascends(runs):
        return runs, lengths
    order = np.argsort(runs, kind="stable")
    runs, lengths = runs[order], lengths[order]
    first = np.flatnonzero(begins(runs))
    return runs[first], np.add.reduceat(lengths, first)


def _ascends(values: NDArray[Any]) -> bool:
    return bool((values[1:] > values[:-1]).all())
