"""The samples of one partition, one slot each: ids, keys, groups, versions, tags, and where their fields lie."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.errors import InvalidArgument
from tqclient.schema import Form
from tqserver.controller.core import limits, tags
from tqserver.controller.core.arrays import distinct, grown
from tqserver.controller.core.groups import DeclaredSizes, GroupTable, Members
from tqserver.controller.core.shards import Shards
from tqserver.controller.core.tagcolumns import TagColumns

Slots = NDArray[np.int64]
LENGTH_UNKNOWN: Final = (1 << 32) - 1

T = TypeVar("T")


def picked(values: list[T], slots: Slots) -> list[T]:
    """Returns the entries of some slots. Samples that were put together lie side by side: those are one slice."""
    span = _span(slots)
    return values[span] if span is not None else [values[slot] for slot in slots.tolist()]


def compact_index(slots: Slots) -> Slots | slice:
    """Returns what selects some slots of an array fastest: a slice where they lie side by side."""
    span = _span(slots)
    return slots if span is None else span


def _fill(values: list[T], slots: Slots, value: T) -> None:
    """Sets the entries of some slots to one value."""
    span = _span(slots)
    if span is not None:
        values[span] = [value] * len(slots)
        return
    for slot in slots.tolist():
        values[slot] = value


def _span(slots: Slots) -> slice | None:
    """Returns the slots as a slice, where they follow each other."""
    if not len(slots):
        return slice(0, 0)
    first, last = int(slots[0]), int(slots[-1])
    if last - first + 1 != len(slots) or (last > first and not bool((slots[1:] > slots[:-1]).all())):
        return None
    return slice(first, last + 1)


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
        group: int64 [capacity]: index into `groups`; -1: none.
        alive: bool [capacity].
        keys: by slot; an empty string is no key.
        tags: encoded map by slot; an empty string is {}.
        keyed, tagged: whether a sample ever had a key, or tags; where not, nobody looks through thousands of them.
        groups: that they are in.
        columns: field name → column, in the order of their first put.
        lengths: path of a ragged field → uint32 [capacity]: leading dimension by slot; LENGTH_UNKNOWN where a put did
            not say it.
        length_ranges: path of a ragged field → the least and the greatest of all lengths ever put.
        shards: that their tags name.
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
        self.keyed = self.tagged = False
        self.groups = GroupTable([], [])
        self.columns: dict[str, Column] = {}
        self.lengths: dict[str, NDArray[np.uint32]] = {}
        # Caches, each made on first use: what they say follows from the groups and tags of live samples.
        self.length_ranges: dict[str, tuple[int, int]] = {}
        self.shards = Shards()
        self._declared: DeclaredSizes | None = None
        self._members: Members | None = None
        self._by_tag = TagColumns()
        # Made on first use: a restored controller serves before it has indexed every key.
        self._key_ids: dict[str, int] | None = None

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
    def declared(self) -> DeclaredSizes:
        """What tags say about the sizes of groups."""
        if self._declared is None:
            self._declared = DeclaredSizes()
            self._declare(self.slots(), 1)
        return self._declared

    def _declare(self, slots: Slots, members: int) -> None:
        if self._declared is None:
            return
        groups = self.group[slots].tolist()
        for slot, group in zip(slots.tolist(), groups, strict=True):
            size = tags.group_size(self.tags[slot]) if group >= 0 else None
            if size is not None:
                self._declared.add(group, size, members)

    def members(self, groups: NDArray[np.int64]) -> Slots:
        """Returns the slots of the live members of groups, each named once: group after group, the oldest first."""
        if self._members is None:
            self._members = Members(self.group[: self.size], self.ids[: self.size])
        ids, places = self._members.of(groups)
        slots = self.find(ids)
        found: Slots = slots[(slots >= 0) & (self.group[slots] == groups[places])]
        return found

    def numbers(self, tag: str) -> NDArray[np.float64]:
        """Returns the number under a tag by slot (float64 [capacity]); minus infinity where a sample has none."""
        return self._by_tag.numbers(tag, self.tags if self.tagged else (), self.capacity)

    def prepare(self, values: Iterable[str | bytes], numbers: str | None) -> bool:
        """Looks at some more samples for a first look at all of them by tags, as `matching` and `numbers` take it.

        Args:
            values: tags of which a filter wants plain values.
            numbers: the tag whose numbers are wanted.

        Returns:
            Whether some are left.
        """
        rows = tags.CHUNK_ROWS
        return self.tagged and self._by_tag.prepare(values, numbers, self.tags, self.capacity, rows)

    def matching(self, passes: tags.TagFilter, slots: Any) -> NDArray[np.bool_]:
        """Returns which samples a filter lets pass: bool, by entry of `slots`."""
        if not self.tagged:
            return np.full(len(self.alive[slots]), passes(b""))
        plain = self._by_tag.having(passes.plain, self.tags, slots, self.capacity) if passes.plain else None
        if plain is not None and not passes.unaborted:
            return plain
        own = self.tags[slots] if isinstance(slots, slice) else picked(self.tags, slots)
        return passes.of(own) if plain is None else plain & tags.UNABORTED.of(own)

    def length_fields(self) -> list[str]:
        """Returns the fields whose rows have a length."""
        dense = [name for name, column in self.columns.items() if column.form.row_length is not None]
        return sorted({*self.lengths, *dense})

    def lengths_of(self, field: str, slots: Slots) -> NDArray[np.int64]:
        """Returns the leading dimension of a field for samples that have it: int64 [n].

        Raises:
            InvalidArgument: the field has none, or a put did not say it.
        """
        stored = self.lengths.get(field)
        if stored is not None:
            lengths = stored[slots].astype(np.int64)
            unknown = np.flatnonzero(lengths == LENGTH_UNKNOWN)
            if len(unknown):
                ids = self.ids[slots[unknown[: limits.LISTED_MAX]]].tolist()
                raise InvalidArgument(f"field {field!r}: samples {ids} were put without their lengths", ids=ids)
            return lengths
        column = self.columns.get(field)
        length = None if column is None else column.form.row_length
        if length is None:
            known = ", ".join(self.length_fields()) or "none yet"
            raise InvalidArgument(f"the rows of field {field!r} have no length; fields that have them: {known}")
        return np.full(len(slots), length, dtype=np.int64)

    def set_lengths(self, field: str, slots: Slots | slice, lengths: Any) -> None:
        """Says how long a ragged field is in these samples: an array of as many, or one length for all."""
        stored = self.lengths.get(field)
        if stored is None:
            stored = self.lengths[field] = np.full(self.capacity, LENGTH_UNKNOWN, dtype=np.uint32)
        stored[slots] = lengths
        known = np.atleast_1d(np.asarray(lengths, dtype=np.int64))
        known = known[known != LENGTH_UNKNOWN]
        if len(known) and stored[slots].size:
            low, high = self.length_ranges.get(field, (LENGTH_UNKNOWN, 0))
            self.length_ranges[field] = min(low, int(known.min())), max(high, int(known.max()))

    def length_range(self, field: str) -> tuple[int, int] | None:
        """Returns the least and the greatest length of a field's rows; None where they have none."""
        length = self.columns[field].form.row_length
        return self.length_ranges.get(field) if length is None else (length, length)

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
        self.lengths = {name: grown(array, capacity) for name, array in self.lengths.items()}
        self._by_tag.move(slice(None), capacity)
        self.shards.move(slice(None), capacity)

    def append(self, ids: NDArray[np.int64], keys: Iterable[str] | None) -> range:
        """Takes in new samples, without groups, versions, tags or fields; `reserve` was called. Returns their slots."""
        self.tags.extend([b""] * len(ids))
        start, stop = self.size, self.size + len(ids)
        self.ids[start:stop] = ids
        self.version_min[start:stop] = self.version_max[start:stop] = self.group[start:stop] = -1
        self.alive[start:stop] = True
        for column in self.columns.values():
            column.block[start:stop] = 0
        for lengths in self.lengths.values():
            lengths[start:stop] = LENGTH_UNKNOWN
        self._by_tag.append(slice(start, stop))
        if keys is None:
            self.keys.extend([""] * len(ids))
        else:
            self.keyed = True
            key_ids = self.key_ids
            self.keys.extend(keys)
            key_ids.update(zip(self.keys[start:], ids.tolist(), strict=True))
            key_ids.pop("", None)
        self.size = stop
        self.live += len(ids)
        return range(start, stop)

    def set_groups(self, slots: Slots, groups: Sequence[bytes]) -> tuple[Slots, NDArray[np.int64]]:
        """Sets the groups of samples; an empty string leaves a sample as it is.

        Returns:
            The samples that are in another group now, and the indexes of the groups that they left, each once.
        """
        chosen = self.groups.numbered(groups)
        moved = (chosen >= 0) & (chosen != self.group[slots])
        slots, chosen = slots[moved], chosen[moved]
        left = self.group[slots]
        self._declare(slots, -1)
        self.groups.count(left, -1)
        self.group[slots] = chosen
        self.groups.count(chosen, 1)
        if self._members is not None:
            self._members.add(chosen, self.ids[slots])
            if self._members.joined > max(self.size, limits.COMPACT_ROWS_MIN):  # upserts, and not new samples alone
                self._members = None
        self._declare(slots, 1)
        return slots, distinct(left[left >= 0])

    def merged_tags(self, slots: Slots, added: Sequence[bytes], rows: NDArray[np.int64]) -> list[bytes]:
        """Returns what samples' own tags become when encoded maps are merged into them; a null value deletes.

        Args:
            slots: int64 [n], each once; -1: a new sample, which has no tags of its own.
            added: tags of a whole request, by row; an empty string is {}.
            rows: int64 [n]: that the samples have in the request.

        Raises:
            InvalidArgument: a sample would have more than `TAGS_BYTES_MAX`.
        """
        merged: dict[bytes, dict[bytes, bytes]] = {}  # most samples of a put have the same tags, and none before it
        results: list[bytes] = []
        for slot, row in zip(slots.tolist(), rows.tolist(), strict=True):
            new = added[row]
            before = self.tags[slot] if slot >= 0 else b""
            known = merged.get(before)
            if known is None:
                known = merged[before] = {}
            result = known.get(new)
            if result is None:
                result = known[new] = tags.merge(before, new)
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

    def set_tags(self, slots: Slots, values: Sequence[bytes]) -> None:
        """Sets the tags of samples, as `merged_tags` returned them."""
        self.tagged = True
        self._declare(slots, -1)
        own = self.tags
        for slot, value in zip(slots.tolist(), values, strict=True):
            own[slot] = value
        self.shards.set(slots, values, self.capacity)
        self._declare(slots, 1)
        self._by_tag.set(slots, values)

    def add_column(self, name: str, form: Form, form_bytes: bytes) -> None:
        """Adds a field that no sample has yet."""
        block, row = np.zeros(self.capacity, dtype=np.uint64), np.zeros(self.capacity, dtype=np.uint32)
        self.columns[name] = Column(form, form_bytes, block, row)

    def write(self, name: str, slots: Slots | slice, block: NDArray[Any], row: NDArray[Any]) -> NDArray[np.uint64]:
        """Points a field of samples to rows of blocks; returns the blocks that it pointed to before."""
        column = self.columns[name]
        before: NDArray[np.uint64] = column.block[slots]
        before = before[before != 0]
        column.block[slots], column.row[slots] = block, row
        column.written += len(row) - len(before)
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
        self._declare(slots, -1)
        self.shards.remove(slots)
        self.alive[slots] = False
        self.groups.count(self.group[slots], -1)
        self._forget_names(slots)
        self.live -= len(slots)
        return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.uint64)

    def _forget_names(self, slots: Slots) -> None:
        """Drops the keys and tags of samples."""
        if self.keyed:
            if len(slots) == self.live:
                self._key_ids = {}
            else:
                known = self.key_ids
                for key in picked(self.keys, slots):
                    if key:
                        del known[key]
            _fill(self.keys, slots, "")
        if self.tagged:
            _fill(self.tags, slots, b"")

    def keys_of(self, slots: Slots) -> list[str]:
        """Returns the keys of samples; none at all where no sample ever had one."""
        return picked(self.keys, slots) if self.keyed else []

    def tags_of(self, slots: Slots) -> list[bytes]:
        """Returns the tags of samples; none at all where no sample ever had any."""
        return picked(self.tags, slots) if self.tagged else []

    def slots(self) -> Slots:
        """Returns the slots of all samples, ascending."""
        return np.flatnonzero(self.alive[: self.size])

    def in_groups(self, groups: Iterable[bytes]) -> Slots:
        """Returns the samples of these groups."""
        wanted = [index for group in groups if (index := self.groups.index.get(group, -1)) >= 0]
        chosen = np.isin(self.group[: self.size], wanted) & self.alive[: self.size]
        return np.flatnonzero(chosen)

    def with_tags(self, wanted: bytes) -> Slots:
        """Returns the samples that have all of these tags, with these values: an encoded map that is not empty."""
        if not self.tagged:
            return np.empty(0, dtype=np.int64)
        matching = self.matching(tags.TagFilter(wanted, False), slice(0, self.size))
        return np.flatnonzero(matching & self.alive[: self.size])

    def with_prefix(self, prefix: str) -> Slots:
        """Returns the samples whose key begins so."""
        return np.array([slot for slot, key in enumerate(self.keys) if key and key.startswith(prefix)], dtype=np.int64)

    def wants_compaction(self) -> bool:
        """Whether more than half of the slots are cleared ones, and enough for it to be worth while."""
        cleared = self.size - self.live
        return cleared >= limits.COMPACT_ROWS_MIN and cleared > self.size // 2

    def wants_group_compaction(self) -> bool:
        """Whether more than half of the groups have no members, and enough: the others have a sample each, or more."""
        return len(self.groups.values) > limits.COMPACT_ROWS_MIN + 2 * self.live

    def compact(self, capacity: int = 0) -> Slots:
        """Drops cleared slots; returns the old slots of those that stay. Half of the room is kept, unless told."""
        kept = self.slots()
        fitting = 1 << (len(kept) - 1).bit_length() if len(kept) else 0
        capacity = capacity or max(limits.ROWS_FIRST, fitting, self.capacity // 2)
        for name in ("ids", "version_min", "version_max", "group", "alive"):
            setattr(self, name, grown(getattr(self, name)[kept], capacity))
        for column in self.columns.values():
            column.block, column.row = grown(column.block[kept], capacity), grown(column.row[kept], capacity)
        self.lengths = {name: grown(array[kept], capacity) for name, array in self.lengths.items()}
        self._by_tag.move(kept, capacity)
        self.shards.move(kept, capacity)
        slots = kept.tolist()
        self.keys = [self.keys[slot] for slot in slots]
        self.tags = [self.tags[slot] for slot in slots]
        self.size = len(kept)
        self.compact_groups()
        return kept

    def compact_groups(self) -> None:
        """Drops groups without members; the others are numbered anew."""
        self.group[: self.size] = self.groups.compact(self.group[: self.size])
        self._declared = self._members = None
