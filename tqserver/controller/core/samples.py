"""The samples of one partition, one slot each: ids, keys, groups, versions, tags, and where their fields lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument
from tqclient.schema import Form
from tqserver.controller.core import limits
from tqserver.controller.core.consumer import grown

Slots = NDArray[np.int64]


@dataclass(slots=True)
class Column:
    """One field.

    Attributes:
        form: that every put must join.
        form_bytes: the same, encoded.
        block: uint64 [capacity]: block id by slot; 0: not written.
        row: uint32 [capacity]: row within the block.
        written: slots that have it.
    """

    form: Form
    form_bytes: bytes
    block: NDArray[np.uint64]
    row: NDArray[np.uint32]
    written: int = 0


class SampleTable:
    """Slots ascend with ids, so an id is found by bisection. Cleared slots stay behind until `compact`.

    Attributes:
        size: slots in use, cleared ones included.
        live: samples.
        ids: int64 [capacity].
        version_min: int64 [capacity]; -1: none.
        version_max: int64 [capacity].
        group: int64 [capacity]: index into `group_values`; -1: none.
        alive: bool [capacity].
        keys: by slot; an empty string is no key.
        tags: encoded map by slot; an empty string is {}.
        group_values: encoded scalars.
        group_sizes: live members of each group.
        columns: field name → column, in the order of their first put.
    """

    def __init__(self) -> None:
        capacity = limits.ROWS_FIRST
        self.size = 0
        self.live = 0
        self.ids = np.zeros(capacity, dtype=np.int64)
        self.version_min = np.zeros(capacity, dtype=np.int64)
        self.version_max = np.zeros(capacity, dtype=np.int64)
        self.group = np.zeros(capacity, dtype=np.int64)
        self.alive = np.zeros(capacity, dtype=np.bool_)
        self.keys: list[str] = []
        self.tags: list[bytes] = []
        self.group_values: list[bytes] = []
        self.group_sizes: list[int] = []
        self.columns: dict[str, Column] = {}
        # Made on first use: a restored controller serves before it has indexed every key.
        self._key_ids: dict[str, int] | None = None
        self._group_index: dict[bytes, int] | None = None

    @property
    def capacity(self) -> int:
        """Slots that the arrays hold."""
        return len(self.ids)

    @property
    def key_ids(self) -> dict[str, int]:
        """Key → id, of live samples. Not the slot, which a compaction changes."""
        if self._key_ids is None:
            self._key_ids = dict(zip(self.keys, self.ids[: self.size].tolist(), strict=True))
            self._key_ids.pop("", None)
        return self._key_ids

    @property
    def group_index(self) -> dict[bytes, int]:
        """Group → its index; the empty string, which is no group, has -1."""
        if self._group_index is None:
            self._group_index = {b"": -1, **{value: index for index, value in enumerate(self.group_values)}}
        return self._group_index

    def find(self, ids: NDArray[np.int64]) -> Slots:
        """Returns the slots of samples; -1 where there is none of that id."""
        slots = np.searchsorted(self.ids[: self.size], ids)
        inside = np.minimum(slots, max(self.size - 1, 0))
        found = (slots < self.size) & (self.ids[inside] == ids) & self.alive[inside]
        return np.where(found, slots, -1)

    def find_keys(self, keys: Sequence[str]) -> Slots:
        """Returns the slots of samples; -1 where none has that key."""
        known = self.key_ids
        if known.keys().isdisjoint(keys):  # as a rule: the keys of a put are new
            return np.full(len(keys), -1, dtype=np.int64)
        return self.find(np.fromiter((known.get(key, 0) for key in keys), dtype=np.int64, count=len(keys)))

    def written(self, fields: tuple[str, ...], slots: Any) -> NDArray[np.bool_]:
        """Returns where all of the fields are written: bool, by entry of `slots`."""
        mask: NDArray[np.bool_] = self.alive[slots].copy()
        for name in fields:
            column = self.columns.get(name)
            if column is None:
                mask[:] = False
                return mask
            if column.written < self.live:  # else every sample has it: large partitions are looked through fast
                mask &= column.block[slots] != 0
        return mask

    def reserve(self, rows: int) -> bool:
        """Makes room for more slots; says whether the arrays grew."""
        if self.size + rows <= self.capacity:
            return False
        self._resize(max(self.capacity * 2, self.size + rows))
        return True

    def _resize(self, capacity: int) -> None:
        for name in ("ids", "version_min", "version_max", "group", "alive"):
            setattr(self, name, grown(getattr(self, name), capacity))
        for column in self.columns.values():
            column.block, column.row = grown(column.block, capacity), grown(column.row, capacity)

    def append(self, ids: NDArray[np.int64], keys: Iterable[str] | None) -> range:
        """Takes in new samples, without groups, versions, tags or fields; `reserve` was called. Returns their slots."""
        self.tags.extend([b""] * len(ids))
        start, stop = self.size, self.size + len(ids)
        self.ids[start:stop] = ids
        self.version_min[start:stop] = self.version_max[start:stop] = self.group[start:stop] = -1
        self.alive[start:stop] = True
        for column in self.columns.values():
            column.block[start:stop] = 0
        if keys is None:
            self.keys.extend([""] * len(ids))
        else:
            key_ids = self.key_ids
            self.keys.extend(keys)
            key_ids.update(zip(self.keys[start:], ids.tolist(), strict=True))
            key_ids.pop("", None)
        self.size = stop
        self.live += len(ids)
        return range(start, stop)

    def set_groups(self, slots: Slots, groups: Sequence[bytes]) -> None:
        """Sets the groups of samples; an empty string leaves a sample as it is."""
        index = self.group_index
        for value in dict.fromkeys(groups):
            if value not in index:
                index[value] = len(self.group_values)
                self.group_values.append(value)
                self.group_sizes.append(0)
        chosen = np.fromiter(map(index.__getitem__, groups), dtype=np.int64, count=len(slots))
        given = chosen >= 0
        slots, chosen = slots[given], chosen[given]
        self._count_groups(self.group[slots], -1)
        self.group[slots] = chosen
        self._count_groups(chosen, 1)

    def _count_groups(self, groups: NDArray[np.int64], sign: int) -> None:
        unique, counts = np.unique(groups[groups >= 0], return_counts=True)
        for index, count in zip(unique.tolist(), counts.tolist(), strict=True):
            self.group_sizes[index] += sign * count

    def merged_tags(self, slots: Slots, tags: Sequence[bytes], rows: NDArray[np.int64]) -> list[bytes]:
        """Returns what samples' own tags become when encoded maps are merged into them; a null value deletes.

        Args:
            slots: int64 [n], each once; -1: a new sample, which has no tags of its own.
            tags: of a whole request, by row; an empty string is {}.
            rows: int64 [n]: that the samples have in the request.

        Raises:
            InvalidArgument: a sample would have more than `TAGS_BYTES_MAX`.
        """
        merged: dict[bytes, dict[bytes, bytes]] = {}  # most samples of a put have the same tags, and none before it
        results: list[bytes] = []
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            new = tags[row]
            before = self.tags[slot] if slot >= 0 else b""
            known = merged.get(before)
            if known is None:
                known = merged[before] = {}
            result = known.get(new)
            if result is None:
                result = known[new] = _merge(before, new)
            if len(result) > wire_limits.TAGS_BYTES_MAX:
                sample = [int(self.ids[slot])] if slot >= 0 else []
                raise InvalidArgument(
                    f"tags: {f'sample {sample[0]}' if sample else f'the sample of row {row}'} would have {len(result)} "
                    f"bytes of them, at most {wire_limits.TAGS_BYTES_MAX}; a null value deletes a tag",
                    ids=sample,
                    rows=[row],
                )
            results.append(result)
        return results

    def set_tags(self, slots: Slots, tags: Sequence[bytes]) -> None:
        """Sets the tags of samples, as `merged_tags` returned them."""
        own = self.tags
        for slot, value in zip(slots.tolist(), tags, strict=True):
            own[slot] = value

    def add_column(self, name: str, form: Form, form_bytes: bytes) -> None:
        """Adds a field that no sample has yet."""
        block, row = np.zeros(self.capacity, dtype=np.uint64), np.zeros(self.capacity, dtype=np.uint32)
        self.columns[name] = Column(form, form_bytes, block, row)

    def write(self, name: str, slots: Slots, block: NDArray[Any], row: NDArray[Any]) -> NDArray[np.uint64]:
        """Points a field of samples to rows of blocks; returns the blocks that it pointed to before."""
        column = self.columns[name]
        before: NDArray[np.uint64] = column.block[slots]
        before = before[before != 0]
        column.block[slots], column.row[slots] = block, row
        column.written += len(slots) - len(before)
        return before

    def remove(self, slots: Slots) -> NDArray[np.uint64]:
        """Removes samples, each named once; returns the blocks that their fields pointed to, one entry per field."""
        blocks = []
        for column in self.columns.values():
            before = column.block[slots]
            before = before[before != 0]
            column.written -= len(before)
            column.block[slots] = 0
            blocks.append(before)
        self.alive[slots] = False
        self._count_groups(self.group[slots], -1)
        keys, key_ids = self.keys, self.key_ids
        for slot in slots.tolist():
            self.tags[slot] = b""
            if keys[slot]:
                del key_ids[keys[slot]]
                keys[slot] = ""
        self.live -= len(slots)
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.uint64)

    def slots(self) -> Slots:
        """Returns the slots of all samples, ascending."""
        return np.flatnonzero(self.alive[: self.size])

    def in_groups(self, groups: Iterable[bytes]) -> Slots:
        """Returns the samples of these groups."""
        wanted = [index for group in groups if (index := self.group_index.get(group, -1)) >= 0]
        chosen = np.isin(self.group[: self.size], wanted) & self.alive[: self.size]
        return np.flatnonzero(chosen)

    def with_tags(self, wanted: dict[Any, Any]) -> Slots:
        """Returns the samples that have all of these tags, with these values."""
        matching = {tags for tags in set(self.tags) if tags and _has_all(tags, wanted)}
        return np.array([slot for slot, tags in enumerate(self.tags) if tags in matching], dtype=np.int64)

    def with_prefix(self, prefix: str) -> Slots:
        """Returns the samples whose key begins so."""
        return np.array([slot for slot, key in enumerate(self.keys) if key and key.startswith(prefix)], dtype=np.int64)

    def wants_compaction(self) -> bool:
        """Whether more than half of the slots are cleared ones, and enough for it to be worth while."""
        cleared = self.size - self.live
        return cleared >= limits.COMPACT_ROWS_MIN and cleared > self.size // 2

    def compact(self) -> Slots:
        """Drops cleared slots; returns the old slots of those that stay."""
        kept = self.slots()
        capacity = max(limits.ROWS_FIRST, 1 << (len(kept) - 1).bit_length() if len(kept) else 0)
        for name in ("ids", "version_min", "version_max", "group", "alive"):
            setattr(self, name, grown(getattr(self, name)[kept], capacity))
        for column in self.columns.values():
            column.block, column.row = grown(column.block[kept], capacity), grown(column.row[kept], capacity)
        slots = kept.tolist()
        self.keys = [self.keys[slot] for slot in slots]
        self.tags = [self.tags[slot] for slot in slots]
        self.size = len(kept)
        self._compact_groups()
        return kept

    def _compact_groups(self) -> None:
        used = [index for index, size in enumerate(self.group_sizes) if size]
        renumbered = np.full(len(self.group_sizes) + 1, -1, dtype=np.int64)  # the last one answers for -1, no group
        renumbered[used] = np.arange(len(used))
        self.group[: self.size] = renumbered[self.group[: self.size]]
        self.group_values = [self.group_values[index] for index in used]
        self.group_sizes = [self.group_sizes[index] for index in used]
        self._group_index = None


def _merge(own: bytes, new: bytes) -> bytes:
    if not new:
        return own
    tags = msgpack.unpackb(own) if own else {}
    tags.update(msgpack.unpackb(new))
    left = {key: value for key, value in tags.items() if value is not None}
    return bytes(msgpack.packb(left)) if left else b""


def _has_all(tags: bytes, wanted: dict[Any, Any]) -> bool:
    own = msgpack.unpackb(tags)
    return all(key in own and _same(own[key], value) for key, value in wanted.items())


def _same(left: Any, right: Any) -> bool:
    return bool(type(left) is type(right) and left == right)  # 1, 1.0 and True are different tags
