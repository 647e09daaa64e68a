"""Dividing weights into parts of equal counts and nearly equal sums."""

from __future__ import annotations

import heapq
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
    part_of = _dealt(weights, parts)
    filled = min(parts, len(weights))
    members = divided(np.arange(len(weights)), part_of, filled)
    sums = np.zeros(filled, dtype=np.int64)
    np.add.at(sums, part_of, weights)
    for _ in range(SWAPS_PER_PART_MAX * filled if filled > 1 else 0):
        high, low = int(np.argmax(sums)), int(np.argmin(sums))
        ours, theirs, gap = members[high], members[low], sums[high] - sums[low]
        mine, yours, left = _best_swap(weights[ours], weights[theirs], gap)
        if left >= gap:
            break
        moved = weights[ours[mine]] - weights[theirs[yours]]
        part_of[ours[mine]], part_of[theirs[yours]] = low, high
        ours[mine], theirs[yours] = theirs[yours], ours[mine]
        ours.sort(kind="stable")  # linear: all but one are in order
        theirs.sort(kind="stable")
        sums[high] -= moved
        sums[low] += moved
    return part_of


def divided(items: NDArray[np.int64], part_of: NDArray[np.int64], parts: int) -> list[NDArray[np.int64]]:
    """Returns the items of each part, in their order.

    Args:
        items: int64 [n, ...].
        part_of: of each item: int64 [n], below `parts`.
        parts: how many.
    """
    sorted_items = items[np.argsort(part_of, kind="stable")]
    ends = np.cumsum(np.bincount(part_of, minlength=parts)).tolist()
    return [sorted_items[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _dealt(weights: NDArray[np.int64], parts: int) -> NDArray[np.int64]:
    """Gives each weight, the heaviest first, to the lightest part that has room; of equal ones, the first."""
    least, more = divmod(len(weights), parts)
    room = [least + (part < more) for part in range(min(parts, len(weights)))]
    lightest = [(0, part) for part in range(len(room))]
    order, dealt = np.argsort(-weights, kind="stable"), []
    for weight in weights[order].tolist():
        total, part = lightest[0]
        dealt.append(part)
        room[part] -= 1
        if room[part]:
            heapq.heapreplace(lightest, (total + weight, part))
        else:
            heapq.heappop(lightest)
    part_of = np.empty(len(weights), dtype=np.int64)
    part_of[order] = dealt
    return part_of


def _best_swap(ours: NDArray[np.int64], theirs: NDArray[np.int64], gap: np.int64) -> tuple[np.intp, np.intp, np.int64]:
    """Finds the swap that leaves the least of the gap between two sums; of equal ones, the first of ours, then theirs.

    Returns:
        Which of ours goes, which of theirs comes, and the gap that is left.
    """
    values, first = np.unique(theirs, return_index=True)
    wanted = 2 * ours - gap  # twice the weight that would close it
    above = np.minimum(np.searchsorted(2 * values, wanted), len(values) - 1)
    below = np.maximum(above - 1, 0)
    over, under = np.abs(2 * values[above] - wanted), np.abs(2 * values[below] - wanted)
    left = np.minimum(over, under)
    mine = left.argmin()
    found = [first[side[mine]] for side, off in ((below, under), (above, over)) if off[mine] == left[mine]]
    return mine, min(found), left[mine]
