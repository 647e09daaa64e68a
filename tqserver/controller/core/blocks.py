"""Blocks, and what keeps their extents from being freed: rows, claims and read pins."""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqclient.limits import EXTENT_ALIGN
from tqserver.controller.core import effects, limits
from tqserver.controller.core.arrays import counted

NO_GRACE: Final = float("-inf")
_KEY: Final = struct.Struct("<QQ")  # of a window: arena, generation


class Extent(NamedTuple):
    """Where a run of bytes lies; as in `common.proto`."""

    node: str
    arena: int
    offset: int
    length: int
    generation: int

    @property
    def end(self) -> int:
        """Where the next extent of its window may begin."""
        return self.offset + -(-self.length // EXTENT_ALIGN) * EXTENT_ALIGN


@dataclass(slots=True)
class BlockRecord:
    """What the controller knows of a block.

    Attributes:
        block_id: never reused.
        partition_id: of the partition that it was committed to.
        rows: rows within the block.
        extents: replicas.
        directory: opaque bytes of the codec.
        references: live (sample, field) pairs that lie in it.
        claims: claims that cover it.
        pins: read pins that cover it; volatile.
    """

    block_id: int
    partition_id: int
    rows: int
    extents: tuple[Extent, ...]
    directory: bytes
    references: int = 0
    claims: int = 0
    pins: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its extents, replicas included."""
        return sum(extent.length for extent in self.extents)


@dataclass(slots=True)
class _Window:
    # Committed byte ranges [start, end), ascending and merged: clients cut extents front to back, so there are few.
    starts: list[int]
    ends: list[int]
    live: int = 0

    def packed(self) -> bytes:
        """Returns the ranges of a window without live extents."""
        return struct.pack(f"<{2 * len(self.starts)}Q", *self.starts, *self.ends)

    @classmethod
    def unpacked(cls, packed: bytes) -> _Window:
        """Returns the window again."""
        count = len(packed) // 16
        values = struct.unpack(f"<{2 * count}Q", packed)
        return cls(list(values[:count]), list(values[count:]))


class Windows:
    """Which bytes of which windows were ever committed: an extent is sealed once.

    A window whose last extent went is remembered for a while, because the node may still have to hear of it.

    Attributes:
        retired: such windows, the oldest first: arena and generation → ranges, both packed, and put into a snapshot as
            they are. Each large put leaves one: as objects they would take half a kilobyte each.
    """

    def __init__(self) -> None:
        self._live: dict[tuple[int, int], _Window] = {}
        self.retired: OrderedDict[bytes, bytes] = OrderedDict()

    def check(self, extents: Iterable[Extent]) -> None:
        """Raises InvalidArgument when an extent overlaps a committed one or another of the same request."""
        fresh: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for extent in extents:
            fresh.setdefault((extent.arena, extent.generation), []).append((extent.offset, extent.end))
        for key, ranges in fresh.items():
            ranges.sort()
            window = self._live.get(key) or self._retired_window(key)
            committed = any(window is not None and _overlaps(window, start, end) for start, end in ranges)
            if committed or any(left[1] > right[0] for left, right in pairwise(ranges)):
                raise InvalidArgument(
                    f"an extent of window {key[1]} was committed before; reserve another window and write again"
                )

    def _retired_window(self, key: tuple[int, int]) -> _Window | None:
        packed = self.retired.get(_KEY.pack(*key))
        return None if packed is None else _Window.unpacked(packed)

    def _retire(self, key: bytes, packed: bytes) -> None:
        self.retired[key] = packed
        if len(self.retired) > limits.RETIRED_WINDOWS_MAX:
            self.retired.popitem(last=False)

    def add(self, extent: Extent) -> None:
        """Marks an extent as committed; `check` has passed."""
        key = (extent.arena, extent.generation)
        window = self._live.get(key)
        if window is None:
            window = self._live[key] = self._retired_window(key) or _Window([], [])
            self.retired.pop(_KEY.pack(*key), None)
        window.live += 1
        start, end = extent.offset, extent.end
        at = bisect_left(window.starts, start)
        if at < len(window.starts) and window.starts[at] == end:
            end = window.ends[at]
            del window.starts[at], window.ends[at]
        if at and window.ends[at - 1] == start:
            window.ends[at - 1] = end
        else:
            window.starts.insert(at, start)
            window.ends.insert(at, end)

    def remove(self, extent: Extent) -> None:
        """An extent went; its bytes stay marked."""
        key = (extent.arena, extent.generation)
        window = self._live[key]
        window.live -= 1
        if window.live == 0:
            self._retire(_KEY.pack(*key), self._live.pop(key).packed())

    def committed(self, arena: int) -> NDArray[np.uint64]:
        """Returns uint64 [n, 3] (generation, start, end): what was committed in an arena and is remembered."""
        rows: list[int] = []
        for (of, generation), window in self._live.items():
            if of == arena:
                for start, end in zip(window.starts, window.ends, strict=True):
                    rows += (generation, start, end)
        for key, packed in self.retired.items():
            of, generation = _KEY.unpack(key)
            if of == arena:
                values = struct.unpack(f"<{len(packed) // 8}Q", packed)
                half = len(values) // 2
                for start, end in zip(values[:half], values[half:], strict=True):
                    rows += (generation, start, end)
        return np.array(rows, np.uint64).reshape(-1, 3)

    def to_tree(self) -> list[Any]:
        """Returns what a snapshot keeps beside `retired`."""
        live = [[*key, list(window.starts), list(window.ends), window.live] for key, window in self._live.items()]
        return [live, []]

    @classmethod
    def from_tree(cls, tree: list[Any], retired: Mapping[bytes, bytes]) -> Windows:
        """Rebuilds the windows from what `to_tree` returned, and `retired`.

        An earlier release had the retired ones in the tree, and more of them.
        """
        windows = cls()
        live, listed = tree
        for arena, generation, starts, ends, count in live:
            windows._live[arena, generation] = _Window(starts, ends, count)
        for arena, generation, starts, ends, _ in listed:
            windows._retire(_KEY.pack(arena, generation), _Window(starts, ends).packed())
        for key, packed in retired.items():
            windows._retire(key, packed)
        return windows


def _overlaps(window: _Window, start: int, end: int) -> bool:
    at = bisect_left(window.starts, end)  # ranges from `at` on begin behind `end`
    return at > 0 and window.ends[at - 1] > start


class BlockTable:
    """All blocks. Rows and claims are durable; pins, and the grace after a start, are volatile.

    A block without rows and claims has left the durable state. Its extents are freed at once, or, while it lingers,
    when its last pin is dropped and the grace period (readers may hold pins of before the start) is over.
    """

    def __init__(self) -> None:
        self.live: dict[int, BlockRecord] = {}
        self.lingering: dict[int, BlockRecord] = {}
        self.windows = Windows()
        self.grace_until = NO_GRACE

    def get(self, block_id: int) -> BlockRecord | None:
        """Returns a block whose bytes are still there."""
        return self.live.get(block_id) or self.lingering.get(block_id)

    def add(self, record: BlockRecord) -> None:
        """Takes in a block that was just committed, with its references."""
        self.live[record.block_id] = record
        for extent in record.extents:
            self.windows.add(extent)

    def drop_references(self, block_ids: NDArray[Any]) -> list[BlockRecord]:
        """Takes one reference from the block of each entry; returns the blocks that have no row left."""
        emptied: list[BlockRecord] = []
        if not len(block_ids):  # new samples had no blocks before
            return emptied
        unique, counts = counted(block_ids)
        for block_id, count in zip(unique.tolist(), counts.tolist(), strict=True):
            record = self.live[block_id]
            record.references -= count
            if record.references < 0:
                raise AssertionError(f"block {block_id} has {record.references} references")
            if record.references == 0:
                emptied.append(record)
        return emptied

    def claim(self, block_ids: Iterable[int]) -> None:
        """Keeps blocks for one more claim."""
        for block_id in block_ids:
            self.live[block_id].claims += 1

    def unclaim(self, block_ids: Iterable[int]) -> list[BlockRecord]:
        """Takes back `claim`; returns the blocks."""
        records = [self.live[block_id] for block_id in block_ids]
        for record in records:
            record.claims -= 1
        return records

    def retire(self, records: Iterable[BlockRecord], now: float) -> list[effects.Effect]:
        """Removes those of the blocks that neither rows nor claims cover; returns what is freed already."""
        freed = []
        for record in records:
            if record.references or record.claims or self.live.pop(record.block_id, None) is None:
                continue
            for extent in record.extents:
                self.windows.remove(extent)
            if record.pins or now < self.grace_until:
                self.lingering[record.block_id] = record
            else:
                freed.append(record)
        return freed_effects(freed)

    def pin(self, block_ids: Iterable[int]) -> None:
        """Keeps blocks whose bytes are still there for a reader."""
        for block_id in block_ids:
            (self.live.get(block_id) or self.lingering[block_id]).pins += 1

    def unpin(self, block_ids: Iterable[int], now: float) -> list[effects.Effect]:
        """Takes back `pin`; returns what is freed."""
        freed = []
        for block_id in block_ids:
            record = self.get(block_id)
            if record is None:
                raise AssertionError(f"pinned block {block_id} is gone")
            record.pins -= 1
            if not record.pins and now >= self.grace_until and self.lingering.pop(block_id, None) is not None:
                freed.append(record)
        return freed_effects(freed)

    def collect(self, now: float) -> list[effects.Effect]:
        """Frees what only the grace period kept. Once that is over, nothing lingers but what is pinned."""
        if self.grace_until == NO_GRACE or now < self.grace_until:
            return []
        self.grace_until = NO_GRACE
        freed = [record for record in self.lingering.values() if not record.pins]
        for record in freed:
            del self.lingering[record.block_id]
        return freed_effects(freed)

    def grace_left(self, now: float) -> float:
        """Returns the seconds for which readers may hold pins of before the start."""
        return max(0.0, self.grace_until - now)

    def collect_deadline(self) -> float | None:
        """Returns when `collect` may have something to free, if ever. This is asked after every few commands."""
        return self.grace_until if self.lingering and self.grace_until != NO_GRACE else None

    def start(self, grace_until: float) -> None:
        """Forgets pins: they died with the controller that gave them. What it had freed, or was about to, is gone here.

        Nodes that live on keep such bytes for the grace period, see `NodeSync.grace_ms`.
        """
        self.lingering.clear()
        for record in self.live.values():
            record.pins = 0
        self.grace_until = grace_until

    def extents_of(self, node: str, arena: int) -> Iterator[NDArray[np.uint64]]:
        """Returns every extent whose bytes must stay now, some at a time.

        Of a million blocks only references are taken here: nothing of a block that is told ever changes.

        Returns:
            Arrays of uint64 [n, 4] (offset, length, generation, partition_id), each made when it is asked for.
        """
        return _extents_in([*self.live.values(), *self.lingering.values()], node, arena)

    def lies_in(self, arena: int) -> bool:
        """Whether any block has bytes in an arena."""
        return any(extent.arena == arena for record in self.live.values() for extent in record.extents)


def _extents_in(records: list[BlockRecord], node: str, arena: int) -> Iterator[NDArray[np.uint64]]:
    for start in range(0, len(records), limits.BLOCKS_TOLD_AT_ONCE):
        rows = [
            number
            for record in records[start : start + limits.BLOCKS_TOLD_AT_ONCE]
            for extent in record.extents
            if extent.arena == arena and extent.node == node
            for number in (*extent[2:], record.partition_id)
        ]
        yield np.array(rows, dtype=np.uint64).reshape(-1, 4)


def _by_arena(records: Iterable[BlockRecord]) -> dict[tuple[str, int], NDArray[np.uint64]]:
    rows: dict[tuple[str, int], list[int]] = {}
    for record in records:
        partition_id = record.partition_id
        for node, arena, offset, length, generation in record.extents:
            row = rows.setdefault((node, arena), [])
            row += (offset, length, generation, partition_id)
    return {key: np.fromiter(row, np.uint64, len(row)).reshape(-1, 4) for key, row in rows.items()}


def sealed_effects(records: Sequence[BlockRecord]) -> list[effects.Effect]:
    """Returns one Sealed per arena."""
    return [effects.Sealed(node, arena, extents) for (node, arena), extents in _by_arena(records).items()]


def freed_effects(records: Sequence[BlockRecord]) -> list[effects.Effect]:
    """Returns one Freed per arena."""
    return [effects.Freed(node, arena, extents) for (node, arena), extents in _by_arena(records).items()]
