"""Byte ranges of an extent: checked, merged, and laid out in a receive buffer. Pure."""

from __future__ import annotations

from bisect import bisect_right
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument

_start: Final = itemgetter(0)
ALIGN: Final = 64
"""Bytes; an address in a receive buffer is congruent to the offset in the extent modulo this, as it is in the arena."""


def merge_ranges(ranges: NDArray[np.uint64], extent_bytes: int) -> NDArray[np.int64]:
    """Checks ranges and merges those that touch or overlap.

    Args:
        ranges: uint64 `[n, 2]`: offset, length; any order.
        extent_bytes: length of the extent that they must lie in.

    Returns:
        int64 `[runs, 2]`: start, stop; ascending, none empty, with a gap between each two.

    Raises:
        InvalidArgument: a range is out of bounds, or the array is not `[n, 2]`.
    """
    if ranges.ndim != 2 or ranges.shape[1] != 2 or ranges.dtype != np.uint64:
        raise InvalidArgument(f"ranges are uint64 [n, 2], not {ranges.dtype} {list(ranges.shape)}")
    if len(ranges) == 1:  # a block that is read whole, as each of a thousand may be
        offset, length = ranges[0].tolist()
        if offset > extent_bytes or length > extent_bytes - offset:
            raise _outside(offset, length, extent_bytes)
        return np.array([(offset, offset + length)] if length else [], np.int64).reshape(-1, 2)
    starts, lengths = ranges[:, 0], ranges[:, 1]
    size = np.uint64(extent_bytes)
    # Compared so that no sum can wrap.
    outside = (starts > size) | (lengths > size - np.minimum(starts, size))
    if outside.any():
        offset, length = ranges[int(outside.argmax())].tolist()
        raise _outside(offset, length, extent_bytes)
    kept = ranges[lengths > 0]
    if len(kept) == 0:
        return np.empty((0, 2), np.int64)
    starts = kept[:, 0]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    stops = np.maximum.accumulate(starts + kept[order, 1])
    first = np.flatnonzero(np.concatenate(([True], starts[1:] > stops[:-1])))
    last = np.concatenate((first[1:] - 1, [len(starts) - 1]))
    return np.stack((starts[first], stops[last]), axis=1).astype(np.int64)


def _outside(offset: int, length: int, extent_bytes: int) -> InvalidArgument:
    return InvalidArgument(f"a range of {length} bytes at {offset} of an extent of {extent_bytes} bytes")


class Runs:
    """Where the runs of an extent lie in a buffer that holds them one after another.

    Attributes:
        buffer_bytes: of the buffer that holds them all.
        lead: what is added to a place in the extent to get the one in the buffer; None: it is not the same for all.
    """

    __slots__ = ("_places", "_runs", "buffer_bytes", "lead")

    def __init__(self, runs: NDArray[np.int64], *, gaps: bool = False) -> None:
        """Lays the runs out.

        Args:
            runs: as `merge_ranges` returns them.
            gaps: keep as much room between them as there is in the extent.
        """
        self._runs = runs
        self.lead: int | None = None
        if len(runs) == 1 or (gaps and len(runs)):
            first, end = int(runs[0, 0]), int(runs[-1, 1])
            lead = self.lead = first % ALIGN - first
            self.buffer_bytes = end + lead
            self._places = [(start, stop, start + lead) for start, stop in runs.tolist()]
            return
        starts, stops = runs[:, 0], runs[:, 1]
        # Each begins at the next place that is congruent to its start; the end of the one before is to its stop.
        steps = starts.copy()
        steps[:1] %= ALIGN
        steps[1:] = stops[:-1] - starts[:-1] + (starts[1:] - stops[:-1]) % ALIGN
        positions = np.cumsum(steps)
        self.buffer_bytes = int(positions[-1] + stops[-1] - starts[-1]) if len(runs) else 0
        self._places = list(zip(starts.tolist(), stops.tolist(), positions.tolist(), strict=True))

    @property
    def positions(self) -> NDArray[np.int64]:
        """int64 [runs], where each run begins in the buffer."""
        return np.array([position for _, _, position in self._places], np.int64)

    def locate(self, offset: int, length: int) -> int:
        """Returns where `length` bytes from `offset` of the extent lie in the buffer; for no bytes, anywhere in it.

        Raises:
            InvalidArgument: they are not all within one run.
        """
        if length == 0:
            return 0
        run = bisect_right(self._places, offset, key=_start) - 1
        if run >= 0 and length >= 0:
            start, stop, position = self._places[run]
            if offset + length <= stop:
                place: int = position + offset - start
                return place
        raise InvalidArgument(f"{length} bytes at {offset} of the extent were not fetched")

    def locate_all(self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns where each of many stretches lies in the buffer; none of them may be empty.

        Raises:
            InvalidArgument: one is not all within one run.
        """
        run = np.searchsorted(self._runs[:, 0], offsets, side="right") - 1
        outside = (run < 0) | (lengths < 1)
        if not outside.any():
            outside = offsets + lengths > self._runs[run, 1]
        if outside.any():
            first = int(outside.argmax())
            raise InvalidArgument(f"{lengths[first]} bytes at {offsets[first]} of the extent were not fetched")
        return offsets + (self.positions - self._runs[:, 0])[run]
