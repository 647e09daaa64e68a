"""Byte ranges of an extent: checked, merged, and laid out in a receive buffer. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument

ALIGN: Final = 64
"""Bytes; an address in a receive buffer is congruent to the offset in the extent modulo this, as it is in the arena."""


def merge_ranges(ranges: NDArray[np.uint64], extent_bytes: int) -> list[tuple[int, int]]:
    """Checks ranges and merges those that touch or overlap.

    Args:
        ranges: uint64 `[n, 2]`: offset, length; any order.
        extent_bytes: length of the extent that they must lie in.

    Returns:
        (start, stop) runs, ascending, none empty, with a gap between each two.

    Raises:
        InvalidArgument: a range is out of bounds, or the array is not `[n, 2]`.
    """
    if ranges.ndim != 2 or ranges.shape[1] != 2 or ranges.dtype != np.uint64:
        raise InvalidArgument(f"ranges are uint64 [n, 2], not {ranges.dtype} {list(ranges.shape)}")
    starts, lengths = ranges[:, 0], ranges[:, 1]
    size = np.uint64(extent_bytes)
    # Compared so that no sum can wrap.
    outside = (starts > size) | (lengths > size - np.minimum(starts, size))
    if outside.any():
        offset, length = ranges[int(outside.argmax())].tolist()
        raise InvalidArgument(f"a range of {length} bytes at {offset} of an extent of {extent_bytes} bytes")
    if len(ranges) == 1:
        offset, length = ranges[0].tolist()
        return [(offset, offset + length)] if length else []
    kept = ranges[lengths > 0]
    if len(kept) == 0:
        return []
    starts = kept[:, 0]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    stops = np.maximum.accumulate(starts + kept[order, 1])
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > stops[:-1])))
    last = np.concatenate((first[1:] - 1, [len(starts) - 1]))
    return list(zip(starts[first].tolist(), stops[last].tolist(), strict=True))


class Runs:
    """Where the runs of an extent lie in a buffer that holds them one after another.

    Attributes:
        buffer_bytes: of the buffer that holds them all.
    """

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        """Lays the runs out; they are as `merge_ranges` returns them."""
        self._starts = [start for start, _ in runs]
        self._stops = [stop for _, stop in runs]
        self.positions: list[int] = []
        """Where each run begins in the buffer."""
        position = 0
        for start, stop in runs:
            position += (start - position) % ALIGN
            self.positions.append(position)
            position += stop - start
        self.buffer_bytes = position

    def locate(self, offset: int, length: int) -> int:
        """Returns where `length` bytes from `offset` of the extent lie in the buffer; for no bytes, anywhere in it.

        Raises:
            InvalidArgument: they are not all within one run.
        """
        if length == 0:
            return 0
        run = bisect_right(self._starts, offset) - 1
        if run < 0 or length < 0 or offset + length > self._stops[run]:
            raise InvalidArgument(f"{length} bytes at {offset} of the extent were not fetched")
        return self.positions[run] + offset - self._starts[run]
