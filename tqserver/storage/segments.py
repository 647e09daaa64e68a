"""Which partition may place bytes where: the arena cut into segments.

A partition owns segments, so that its blocks lie together and retiring it frees whole runs. Its first segment is
small and each further one as big as what it owns already, up to `segment_bytes`: a thousand tiny partitions take a
thousand small segments. Small segments are taken from the arena's front and full ones from its end, so that the small
ones do not cut up the room for runs longer than a segment. A segment that is wholly free goes back to the pool at once;
when the pool runs dry, the free parts of every segment do.

Pure: addresses in, addresses out.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import Final

from tqclient.errors import StorageFull
from tqclient.limits import EXTENT_ALIGN
from tqserver import limits
from tqserver.storage.ranges import Ranges


def align_up(value: int, step: int = EXTENT_ALIGN) -> int:
    """Rounds up to a multiple of `step`."""
    return -(-value // step) * step


class Segment:
    """A run of the arena that one partition places its bytes in."""

    __slots__ = ("end", "free", "partition", "start")

    def __init__(self, partition: int, start: int, end: int, *, free: bool) -> None:
        self.partition = partition
        self.start = start
        self.end = end
        self.free = Ranges()
        if free:
            self.free.add(start, end)


class Segments:
    """The arena's bytes, each either in the pool or in one segment, and there either free or taken.

    Args:
        start: address of the first byte.
        end: address behind the last one.
        segment_bytes: size of a full segment.
    """

    def __init__(self, start: int, end: int, segment_bytes: int) -> None:
        self._start: Final = start
        self._segment_bytes: Final = segment_bytes
        self._unit: Final = max(limits.SEGMENT_BYTES_MIN, segment_bytes // limits.SEGMENTS_PER_SEGMENT)
        self.capacity = self.usable(end)
        if segment_bytes % self._unit or self.capacity <= 0:
            raise ValueError(
                f"{end - start} bytes cannot be cut into segments of {segment_bytes}, in steps of {self._unit}"
            )
        self._pool = Ranges()
        self._pool.add(start, start + self.capacity)
        self._starts: list[int] = []  # of every segment, ascending
        self._segments: dict[int, Segment] = {}  # by start
        self._owned: dict[int, list[int]] = {}  # partition → its segments' starts, ascending
        self._owned_bytes: dict[int, int] = {}
        self.free_bytes = self.capacity

    def usable(self, end: int) -> int:
        """Returns the bytes in front of `end` that make whole units."""
        return (end - self._start) // self._unit * self._unit

    def extend(self, end: int) -> None:
        """Takes in the bytes up to a new end."""
        added = self.usable(end) - self.capacity
        if added <= 0:
            return
        first = self._start + self.capacity
        self._pool.add(first, first + added)
        self.capacity += added
        self.free_bytes += added

    @property
    def pool_bytes(self) -> int:
        """Bytes that no partition owns."""
        return self._pool.total

    def owned_bytes(self, partition: int) -> int:
        """Bytes of the partition's segments."""
        return self._owned_bytes.get(partition, 0)

    def is_free(self, start: int, end: int) -> bool:
        """Whether all of these bytes are free, in the pool or in segments."""
        if start < self._start or end > self._start + self.capacity:
            return False
        at = start
        for segment in self._overlapping(start, end):
            if at < segment.start and not self._pool.covers(at, segment.start):
                return False
            stop = min(end, segment.end)
            if not segment.free.covers(max(at, segment.start), stop):
                return False
            at = stop
        return at >= end or self._pool.covers(at, end)

    def take(self, partition: int, length: int) -> int:
        """Takes free bytes for a partition, in one piece.

        Args:
            partition: who owns the segment that they will lie in.
            length: bytes; a multiple of EXTENT_ALIGN.

        Returns:
            The address of the first one.

        Raises:
            StorageFull: nowhere do so many lie in one piece.
        """
        for start in self._owned.get(partition, ()):
            address = self._segments[start].free.take_first(length)
            if address is not None:
                self.free_bytes -= length
                return address
        segment = self._grow(partition, length)
        if segment is None:
            self._give_back_free_parts()
            segment = self._grow(partition, length)
        if segment is None:
            raise StorageFull(
                f"{length} bytes do not fit: {self.free_bytes} of {self.capacity} bytes are free, "
                f"{self._pool.widest()} of them in one piece"
            )
        segment.free.remove(segment.start, segment.start + length)
        self.free_bytes -= length
        return segment.start

    def take_at(self, partition: int, start: int, end: int) -> None:
        """Takes given bytes, which must be free; what the pool still has of them becomes the partition's."""
        first = start - (start - self._start) % self._unit
        last = self._start + align_up(end - self._start, self._unit)
        at = first
        for segment in [*self._overlapping(first, last), None]:
            stop = segment.start if segment is not None else last
            if at < stop:
                self._pool.remove(at, stop)
                self._own_or_extend(partition, at, stop)
            if segment is not None:
                at = segment.end
        for segment in self._overlapping(start, end):
            segment.free.remove(max(start, segment.start), min(end, segment.end))
        self.free_bytes -= end - start

    def give(self, start: int, end: int) -> None:
        """Frees taken bytes; segments that are wholly free go back to the pool."""
        for segment in list(self._overlapping(start, end)):
            segment.free.add(max(start, segment.start), min(end, segment.end))
            if segment.free.total == segment.end - segment.start:
                self._disown(segment)
                self._pool.add(segment.start, segment.end)
        self.free_bytes += end - start

    def _grow(self, partition: int, length: int) -> Segment | None:
        """Gives the partition another segment with room for `length`; None when the pool has no such run."""
        needed = align_up(length, self._unit)
        owned = self._owned_bytes.get(partition, 0)
        wanted = max(needed, min(self._segment_bytes, align_up(owned, self._unit)))
        for size in (wanted, needed):
            take = self._pool.take_last if size >= self._segment_bytes else self._pool.take_first
            start = take(size)
            if start is not None:
                segment = Segment(partition, start, start + size, free=True)
                self._own(segment)
                return segment
        return None

    def _give_back_free_parts(self) -> None:
        """Moves every whole unit that is free in a segment to the pool; what is left of the segment becomes several."""
        for segment in list(self._segments.values()):
            parts = []
            for start, end in segment.free:
                first = self._start + align_up(start - self._start, self._unit)
                last = end - (end - self._start) % self._unit
                if first < last:
                    parts.append((first, last))
            if parts:
                self._cut_up(segment, parts)

    def _cut_up(self, segment: Segment, parts: list[tuple[int, int]]) -> None:
        """Replaces a segment by what lies around `parts`, which go to the pool."""
        self._disown(segment)
        at = segment.start
        for start, end in [*parts, (segment.end, segment.end)]:
            if at < start:
                self._own(Segment(segment.partition, at, start, free=False))
            if start < end:
                self._pool.add(start, end)
            at = end
        for start, end in segment.free:
            for rest in self._overlapping(start, end):
                rest.free.add(max(start, rest.start), min(end, rest.end))

    def _own_or_extend(self, partition: int, start: int, end: int) -> None:
        """Gives free bytes to a partition: to its segment right in front of them, or else as a new one."""
        index = bisect_right(self._starts, start) - 1
        before = self._segments[self._starts[index]] if index >= 0 else None
        joins = before is not None and (before.partition, before.end) == (partition, start)
        if before is None or not joins or end - before.start > self._segment_bytes:
            self._own(Segment(partition, start, end, free=True))
        else:
            before.end = end
            before.free.add(start, end)
            self._owned_bytes[partition] += end - start

    def _own(self, segment: Segment) -> None:
        self._segments[segment.start] = segment
        self._starts.insert(bisect_left(self._starts, segment.start), segment.start)
        owned = self._owned.setdefault(segment.partition, [])
        owned.insert(bisect_left(owned, segment.start), segment.start)
        size = segment.end - segment.start
        self._owned_bytes[segment.partition] = self._owned_bytes.get(segment.partition, 0) + size

    def _disown(self, segment: Segment) -> None:
        del self._segments[segment.start]
        del self._starts[bisect_left(self._starts, segment.start)]
        owned = self._owned[segment.partition]
        del owned[bisect_left(owned, segment.start)]
        self._owned_bytes[segment.partition] -= segment.end - segment.start
        if not owned:
            del self._owned[segment.partition], self._owned_bytes[segment.partition]

    def _overlapping(self, start: int, end: int) -> Iterator[Segment]:
        """Yields the segments that share a byte with `[start, end)`, ascending; none may come or go meanwhile."""
        index = max(bisect_right(self._starts, start) - 1, 0)
        while index < len(self._starts) and self._starts[index] < end:
            segment = self._segments[self._starts[index]]
            if segment.end > start:
                yield segment
            index += 1
