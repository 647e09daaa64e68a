"""Checksums over fixed units of a stream, computed and compared while the bytes are warm in the cache.

A unit is a power of two near the mean row, so that a scattered row is verified by reading less than two units more than
itself, and a large stream costs one hash call per 32 KiB or more. See docs/decisions/0001-block-format.md,
0008-shared-values.md and 0011-units-of-huge-rows.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient.arrays import Size
from tqclient.limits import KIB

Numbers = NDArray[np.int64]

UNIT_MIN: Final = 4 * KIB
UNIT_USUAL: Final = 32 * KIB
UNIT_LARGE_ROW: Final = 16 * KIB
LARGE_ROW_BYTES: Final = 512 * KIB
"""From here on a range of a row is likely to be read alone, and over-reads a unit on average: a unit is a 64th of the
mean row, but at least `UNIT_LARGE_ROW`."""
UNIT_MAX: Final = 128 * KIB
PARALLEL_UNIT_MIN: Final = 128 * KIB
"""xxhash keeps the interpreter's lock for smaller units: where nothing is copied in between, threads take turns."""
HUGE_ROW_BYTES: Final = 40 * PARALLEL_UNIT_MIN
"""From here on a unit is a tenth of a quarter of a row, at most, and may be one that threads hash side by side."""
_FEW: Final = 8
"""So many checksums are compared one by one: an array for them takes longer to make."""
PIECE_BYTES: Final = 512 * KIB
"""Copied, then hashed: small enough to be in the cache still, large enough that the interpreter does not show."""

_digest: Final[Callable[[Any], int]] = xxhash.xxh3_64_intdigest  # takes any buffer, arrays included


def unit_bytes(length: int, rows: int) -> int:
    """The checksum unit of a stream of `length` bytes that holds `rows` rows."""
    mean = length // rows if rows else 0
    if mean <= UNIT_MIN:
        return UNIT_MIN
    if mean >= HUGE_ROW_BYTES:
        return UNIT_MAX
    largest = UNIT_USUAL if mean < LARGE_ROW_BYTES else min(max(UNIT_LARGE_ROW, mean // 64), UNIT_MAX)
    return 1 << (min(mean, largest).bit_length() - 1)


def unit_count(length: Size, unit: Size) -> Size:
    """How many checksums a stream of `length` bytes has; the last one may cover less than a unit."""
    return -(-length // unit)


def whole_units(
    starts: Numbers, stops: Numbers, units: Numbers | int, lengths: Numbers | int
) -> tuple[Numbers, Numbers]:
    """Returns the bounds of the units that runs of bytes lie in: a checksum is of all of its unit. Of no bytes, none.

    Args:
        starts: int64, bytes within a stream.
        stops: of them, behind the last byte.
        units: bytes per checksum.
        lengths: of the streams; the last unit ends with it.
    """
    low = starts // units * units
    high = np.minimum(-(-stops // units) * units, lengths)
    return np.where(starts < stops, low, starts), np.where(starts < stops, high, starts)


class Checksums:
    """The checksums of a stream that is being written, in any order and from any thread.

    Attributes:
        stream: uint8, where it is written.
        unit: bytes per checksum.
    """

    def __init__(self, stream: NDArray[np.uint8], unit: int) -> None:
        self.stream = stream
        self.unit = unit
        count = unit_count(stream.size, unit)
        self._digests = np.empty(count, np.dtype("<u8"))
        self._hashed = bytearray(count)

    def hash(self, start: int, stop: int) -> None:
        """Hashes the units that lie wholly within [start, stop), which has just been written."""
        first = -(-start // self.unit)
        last = len(self._digests) if stop == self.stream.size else stop // self.unit
        if first < last:
            self._digests[first:last] = digests(self.stream[first * self.unit : last * self.unit], self.unit)
            self._hashed[first:last] = b"\1" * (last - first)

    def finish(self) -> NDArray[np.uint64]:
        """Hashes the units that no single write covered, and returns all checksums, uint64 [units]."""
        index = self._hashed.find(0)
        while index >= 0:
            self._digests[index] = _digest(self.stream[index * self.unit : (index + 1) * self.unit])
            index = self._hashed.find(0, index + 1)
        return self._digests


def digests(data: NDArray[np.uint8], unit: int) -> NDArray[np.uint64]:
    """Returns the checksums of a run of units, uint64 [units].

    Args:
        data: uint8, contiguous; only its last unit may be a short one.
        unit: bytes.
    """
    return np.fromiter(unit_digests(data, unit), np.dtype("<u8"))


def unit_digests(data: NDArray[np.uint8], unit: int) -> list[int]:
    """Returns what `digests` returns, as numbers: for the few units of a small stream that is no array's worth."""
    if data.size <= unit:
        return [_digest(data)] if data.size else []
    whole = data.size - data.size % unit
    found = list(map(_digest, data[:whole].reshape(-1, unit)))
    if whole < data.size:
        found.append(_digest(data[whole:]))
    return found


def first_mismatch(data: NDArray[np.uint8], unit: int, expected: NDArray[np.uint64]) -> int | None:
    """Compares whole units with their checksums.

    Args:
        data: uint8; begins at a unit's first byte, ends at a unit's or the stream's last.
        unit: bytes.
        expected: uint64, one per unit of `data`.

    Returns:
        The index within `data` of the first unit that differs, or None.
    """
    if len(expected) > _FEW:
        different = np.flatnonzero(digests(data, unit) != expected)
        return int(different[0]) if different.size else None
    for index, digest in enumerate(expected.tolist()):
        if _digest(data[index * unit : (index + 1) * unit]) != digest:
            return index
    return None


def first_mismatch_at(
    data: NDArray[np.uint8], positions: NDArray[np.int64], lengths: NDArray[np.int64], expected: NDArray[np.uint64]
) -> int | None:
    """Compares units that lie anywhere in `data` with their checksums.

    Args:
        data: uint8.
        positions: int64, where each unit begins.
        lengths: int64, bytes of each.
        expected: uint64, the checksum of each.

    Returns:
        The index of the first unit that differs, or None.
    """
    ends = (positions + lengths).tolist()
    digests = [_digest(data[start:stop]) for start, stop in zip(positions.tolist(), ends, strict=True)]
    different = np.flatnonzero(np.array(digests, np.uint64) != expected)
    return int(different[0]) if different.size else None
