"""What changed in a partition lately, for those who watch it: made as commands are applied, in memory alone."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, pack_array, pack_blobs, pack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1.common_pb2 import Packed
from tqserver.controller.core import limits
from tqserver.controller.core.samples import SampleTable, picked

Ids = NDArray[np.int64]
LATE_BYTES: Final = 600
"""Of objects that a change consists of until it is a message, at least."""
REFERENCES_BYTES: Final = 16
"""Of the two lists that its keys and tags are in, for each row."""


@dataclass(frozen=True, slots=True)
class Late:
    """A change that becomes a message when somebody reads it, which is seldom: puts and acks are many, and a message of
    a few bytes takes a kilobyte.

    Attributes:
        make: returns the message.
        size_bytes: about what is kept for it.
    """

    make: Callable[[], pb.Change]
    size_bytes: int


class Changes:
    """The latest changes of one partition, those of one command under one sequence.

    Attributes:
        floor: everything that changed after this sequence is here.
        size_bytes: about what is kept.
    """

    def __init__(self, floor: int) -> None:
        self.floor = floor
        # One entry per command; those before `_start` are forgotten, and cut off once they are half of all.
        self._sequences: list[int] = []
        self._groups: list[list[pb.Change | Late]] = []
        self._sizes: list[int] = []
        self._start = 0
        self.size_bytes = 0
        self._pending: list[pb.Change | Late] = []

    def add(self, *changes: pb.Change | Late) -> None:
        """Takes in changes of the command that is being applied."""
        self._pending += changes

    def settle(self, consumer: str, slots: Ids, samples: SampleTable, *, consumed: bool) -> None:
        """A consumer consumed samples, or they were dropped for it."""
        kind = "consumed" if consumed else "dropped"
        self.add(
            *_of_ids(samples, slots, lambda ids: pb.Change(settled=pb.Change.Settled(consumer=consumer, **{kind: ids})))
        )

    def end_command(self, sequence: int) -> bool:
        """The command was applied; says whether it changed anything here."""
        if not self._pending:
            return False
        size = sum(each.size_bytes if isinstance(each, Late) else each.ByteSize() for each in self._pending)
        self._sequences.append(sequence)
        self._groups.append(self._pending)
        self._sizes.append(size)
        self.size_bytes += size
        self._pending = []
        self._forget()
        return True

    def _forget(self) -> None:
        # The latest stay, whatever their size: whoever is up to date must not need a listing for each large put.
        while (kept := len(self._groups) - self._start) > 1 and (
            kept > limits.CHANGES_MAX or self.size_bytes > limits.CHANGES_BYTES_MAX
        ):
            self.floor = self._sequences[self._start]
            self.size_bytes -= self._sizes[self._start]
            self._groups[self._start] = []
            self._start += 1
        if 2 * self._start > len(self._groups):
            for entries in (self._sequences, self._groups, self._sizes):
                del entries[: self._start]
            self._start = 0

    def forget(self) -> None:
        """Remembers nothing of what changed so far."""
        self.floor = self.latest
        self._sequences, self._groups, self._sizes = [], [], []
        self._start = self.size_bytes = 0

    @property
    def latest(self) -> int:
        """Sequence of the latest change that is remembered, or of the last one that is not."""
        return self._sequences[-1] if self._sequences else self.floor

    def after(self, sequence: int) -> list[pb.Change] | None:
        """Returns the changes after a sequence, of `limits.CHANGES_READ_MAX` commands at most; None: forgotten."""
        if sequence == 0 or sequence < self.floor:
            return None
        first = bisect_right(self._sequences, sequence, lo=self._start)
        return [
            change
            for index in range(first, min(first + limits.CHANGES_READ_MAX, len(self._groups)))
            for change in self._messages(index)
        ]

    def _messages(self, index: int) -> list[pb.Change]:
        group = self._groups[index]
        messages = [each.make() if isinstance(each, Late) else each for each in group]
        for message in messages:
            message.sequence = self._sequences[index]
        messages[-1].last = True
        group[:] = messages  # made once, however many watch
        return messages


def removed(samples: SampleTable, slots: Ids) -> list[Late]:
    """Samples are about to go."""
    return _of_ids(samples, slots, lambda ids: pb.Change(removed=pb.Change.Removed(ids=ids)))


def _of_ids(samples: SampleTable, slots: Ids, message: Callable[[bytes], pb.Change]) -> list[Late]:
    """Returns changes that say nothing of samples but their ids, which are copied now."""
    packed = [pack_array(samples.ids[part], I64) for part in _by_rows(slots)]
    return [Late(partial(message, ids), LATE_BYTES + len(ids)) for ids in packed]


def written(samples: SampleTable, slots: Ids, fields: Iterable[str], *, added: bool) -> list[Late]:
    """Samples were put, or fields of samples that exist."""
    named = list(fields)

    def late(ids: Ids, keys: list[str], tags: list[bytes]) -> Late:
        def make() -> pb.Change:
            change = pb.Change.Written(
                ids=pack_array(ids, I64), keys=_packed_keys(keys), tags=_packed_tags(tags), fields=named, added=added
            )
            return pb.Change(written=change)

        return Late(make, LATE_BYTES + ids.nbytes + REFERENCES_BYTES * len(tags) + _size_bytes(keys, tags))

    return [late(samples.ids[part], keys, tags) for part, keys, tags in _described(samples, slots)]


def tagged(samples: SampleTable, slots: Ids) -> list[Late]:
    """Samples have other tags now."""

    def late(ids: Ids, tags: list[bytes]) -> Late:
        def make() -> pb.Change:
            return pb.Change(tagged=pb.Change.Tagged(ids=pack_array(ids, I64), tags=pack_blobs(tags)))

        return Late(make, LATE_BYTES + ids.nbytes + REFERENCES_BYTES * len(tags) + _size_bytes([], tags))

    return [late(samples.ids[part], tags) for part, _, tags in _described(samples, slots)]


class Retired:
    """What changed in retired partitions: whoever watches one is told of its end, but there are ever more of them."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Changes, int]] = OrderedDict()  # with their bytes
        self._bytes = 0

    def keep(self, partition_id: int, changes: Changes) -> None:
        """Something changed in one: where all of it is too much, those that changed the longest ago forget theirs."""
        self.drop(partition_id)
        self._kept[partition_id] = changes, changes.size_bytes
        self._bytes += changes.size_bytes
        while self._bytes > limits.RETIRED_CHANGES_BYTES_MAX and len(self._kept) > 1:
            oldest, (forgetting, _) = next(iter(self._kept.items()))
            forgetting.forget()
            self.drop(oldest)

    def drop(self, partition_id: int) -> None:
        """A partition is deleted."""
        _, size_bytes = self._kept.pop(partition_id, (None, 0))
        self._bytes -= size_bytes


class Listing:
    """Every sample that was live at one sequence, in messages made one by one: what changes meanwhile is not in it.

    Only references are copied when it is made, since keys and tags are replaced and never altered.

    Attributes:
        sequence: that it describes.
    """

    def __init__(self, samples: SampleTable, sequence: int) -> None:
        self.sequence = sequence
        self._slots = samples.slots()
        self._ids = samples.ids[: samples.size].copy()
        self._keys = samples.keys.copy()
        self._tags = samples.tags.copy()

    def __iter__(self) -> Iterator[pb.Change]:
        """Yields the messages, the last of them with `complete`; there is one at least."""
        left = len(self._slots)
        if not left:
            yield pb.Change(sequence=self.sequence, last=True, listing=pb.Change.Listing(complete=True))
        for part, keys, tags in _by_size(self._keys, self._tags, self._slots):
            left -= len(part)
            ids = pack_array(self._ids[part], I64)
            named = pb.Change.Listing(ids=ids, keys=_packed_keys(keys), tags=_packed_tags(tags), complete=not left)
            yield pb.Change(sequence=self.sequence, last=not left, listing=named)


def _described(samples: SampleTable, slots: Ids) -> Iterable[tuple[Ids, list[str], list[bytes]]]:
    """Cuts samples into parts that fit a message each, with their keys and tags; none where no sample has any."""
    if not samples.keyed and not samples.tagged:
        return ((rows, [], []) for rows in _by_rows(slots))
    return _by_size(samples.keys, samples.tags, slots)


def _by_rows(slots: Ids) -> Iterator[Ids]:
    for at in range(0, len(slots), limits.CHANGE_ROWS_MAX):
        yield slots[at : at + limits.CHANGE_ROWS_MAX]


def _by_size(keys: list[str], tags: list[bytes], slots: Ids) -> Iterator[tuple[Ids, list[str], list[bytes]]]:
    """Cuts samples into parts that fit a message each, with their keys and tags."""
    for rows in _by_rows(slots):
        named, tagged = picked(keys, rows), picked(tags, rows)
        if _size_bytes(named, tagged) <= limits.CHANGE_BYTES_MAX:  # as good as always
            yield rows, named, tagged
            continue
        sizes = np.fromiter((4 * len(key) + len(tag) for key, tag in zip(named, tagged, strict=True)), np.int64)
        ends = np.cumsum(sizes)  # a character has 4 bytes at most
        start = 0
        while start < len(rows):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + limits.CHANGE_BYTES_MAX, side="right")))
            yield rows[start:stop], named[start:stop], tagged[start:stop]
            start = stop


def _size_bytes(keys: list[str], tags: list[bytes]) -> int:
    """At most; a character has 4 bytes at most."""
    return 4 * len("".join(keys)) + len(b"".join(tags))


def _packed_keys(keys: list[str]) -> Packed | None:
    return pack_strings(keys) if any(keys) else None


def _packed_tags(tags: list[bytes]) -> Packed | None:
    return pack_blobs(tags) if any(tags) else None
