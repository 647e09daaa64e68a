"""Dividing weights into parts of equal counts and nearly equal sums."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

SWAPS_PER_PART_MAX: Final = 32


def balanced(weights: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Divides weights into parts.

    The counts differ by one at most, and then the lowest parts have more. The heaviest weights are given out first,
    each to the lightest part that has room (Graham's rule); after that the heaviest and the lightest part swap what
    brings them closest, until nothing does.

    Args:
        weights: int64 [n].
        parts: above 0.

    Returns:
        The part of each weight: int64 [n].
    """
    room = np.full(parts, len(weights) // parts)
    room[: len(weights) % parts] += 1
    filled = np.flatnonzero(room)
    sums = np.zeros(parts, dtype=np.int64)
    part_of = np.empty(len(weights), dtype=np.int64)
    for at in np.argsort(-weights, kind="stable").tolist():
        free = np.flatnonzero(room)
        part = free[np.argmin(sums[free])]
        part_of[at] = part
        sums[part] += weights[at]
        room[part] -= 1
    for _ in range(SWAPS_PER_PART_MAX * parts if len(filled) > 1 else 0):
        high, low = filled[np.argmax(sums[filled])], filled[np.argmin(sums[filled])]
        ours, theirs = np.flatnonzero(part_of == high), np.flatnonzero(part_of == low)
        gap = sums[high] - sums[low]
        left = np.abs(gap - 2 * (weights[ours][:, None] - weights[theirs][None, :]))
        best = int(left.argmin())
        if left.flat[best] >= gap:
            break
        mine, yours = ours[best // len(theirs)], theirs[best % len(theirs)]
        moved = weights[mine] - weights[yours]
        part_of[mine], part_of[yours] = low, high
        sums[high] -= moved
        sums[low] += moved
    return part_of
