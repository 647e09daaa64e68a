"""The groups of a partition; and which are complete, for one view: counted at every change, never by adjacency."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqclient.arrays import begins, spread
from tqserver.controller.core.arrays import counted, distinct, grown
from tqserver.controller.core.bitmap import Bitmap

if TYPE_CHECKING:
    from tqserver.controller.core.samples import SampleTable


class GroupTable:
    """The groups that samples are or were in, numbered in the order in which they came.

    Attributes:
        values: encoded scalars, by index.
        sizes: live members, by index.
    """

    def __init__(self, values: list[bytes], sizes: list[int]) -> None:
        self.values = values
        self.sizes = sizes
        self._index: dict[bytes, int] | None = None  # made on first use

    @property
    def index(self) -> dict[bytes, int]:
        """Group → its index; the empty string, which is no group, has -1."""
        if self._index is None:
            self._index = {b"": -1, **{value: index for index, value in enumerate(self.values)}}
        return self._index

    def numbered(self, groups: Sequence[bytes]) -> NDArray[np.int64]:
        """Returns the indexes of groups; those that are new get the next ones."""
        index = self.index
        for value in dict.fromkeys(groups):
            if value not in index:
                index[value] = len(self.values)
                self.values.append(value)
                self.sizes.append(0)
        return np.fromiter(map(index.__getitem__, groups), dtype=np.int64, count=len(groups))

    def count(self, groups: NDArray[np.int64], sign: int) -> None:
        """One sample for each entry joined that group, or left it (-1); -1 is no group."""
        unique, counts = counted(groups[groups >= 0])
        for index, count in zip(unique.tolist(), counts.tolist(), strict=True):
            self.sizes[index] += sign * count

    def compact(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        """Drops the groups without members; returns what indexes have become, -1 for those that were dropped."""
        used = [index for index, size in enumerate(self.sizes) if size]
        renumbered = np.full(len(self.sizes) + 1, -1, dtype=np.int64)  # the last one answers for -1, no group
        renumbered[used] = np.arange(len(used))
        self.values = [self.values[index] for index in used]
        self.sizes = [self.sizes[index] for index in used]
        self._index = None
        return renumbered[groups]


class GroupIndex:
    """Ready members of every group, and the groups that have enough of them.

    Attributes:
        size: members that make a group complete; None: as many as its members' tag `group_size` says, when all agree.
        complete: indexes of the complete groups, which ascend with the age of the groups' first members.
        rows: members of the complete groups, the surplus left out.
    """

    def __init__(self, samples: SampleTable, ready: NDArray[np.bool_], size: int | None) -> None:
        self._samples = samples
        self.size = size
        self.rows = 0
        count = len(samples.groups.values)
        members = samples.group[: samples.size][ready[: samples.size]]
        self._counts = np.bincount(members[members >= 0], minlength=count).astype(np.int64)
        self._needs = np.zeros(count, dtype=np.int64)  # of complete groups: members that a grant takes
        self.complete = Bitmap(np.zeros(count, dtype=np.bool_))
        self._settle(np.arange(count))

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return self._counts.nbytes + self._needs.nbytes + self.complete.nbytes

    def change(self, slots: Any, delta: NDArray[np.int64]) -> None:
        """Members became ready (+1), are so no longer (-1), or had their tags changed (0)."""
        groups = self._samples.group[slots]
        grouped = groups >= 0
        if not grouped.any():
            return
        groups, delta = groups[grouped], delta[grouped]
        self._reserve(len(self._samples.groups.values))
        np.add.at(self._counts, groups, delta)
        self._settle(distinct(groups))

    def _reserve(self, count: int) -> None:
        if count <= len(self._counts):
            return
        capacity = max(count, 2 * len(self._counts))
        for name in ("_counts", "_needs"):
            setattr(self, name, grown(getattr(self, name), capacity))
        self.complete.resize(capacity)

    def _settle(self, groups: NDArray[np.int64]) -> None:
        """Decides anew which of these groups (each once) are complete."""
        needs = self._wanted(groups)
        whole = (needs > 0) & (self._counts[groups] >= needs)
        needs = np.where(whole, needs, 0)
        self.rows += int(needs.sum()) - int(self._needs[groups].sum())
        self._needs[groups] = needs
        self.complete.assign(groups, whole)

    def _wanted(self, groups: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.size is not None:
            return np.full(len(groups), self.size, dtype=np.int64)
        declared = self._samples.declared
        return np.fromiter((declared.size_of(group) for group in groups.tolist()), dtype=np.int64, count=len(groups))

    def oldest(self, rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the oldest complete groups that together have at most so many rows, and their sizes."""
        if not rows:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        groups = self.complete.first(rows // self.size if self.size else rows)
        sizes = self._needs[groups]
        fitting = int(np.searchsorted(np.cumsum(sizes), rows, side="right"))
        return groups[:fitting], sizes[:fitting]

    def first_size(self) -> int:
        """Returns the size of the oldest complete group; 0: there is none."""
        groups = self.complete.first(1)
        return int(self._needs[groups[0]]) if len(groups) else 0


class Members:
    """Which samples ever were in a group: those that left it, or were cleared, are still named.

    Attributes:
        joined: how often one joined a group later: whoever does so again is named again.

    Args:
        groups: int64 [rows]: group of each sample; -1: none.
        ids: int64 [rows], ascending.
    """

    def __init__(self, groups: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        order = np.argsort(groups, kind="stable")
        self._ids = ids[order]
        self._ends = np.cumsum(np.bincount(groups + 1, minlength=2))  # those without a group come first
        self._later: dict[int, list[int]] = {}
        self.joined = 0

    def add(self, groups: NDArray[np.int64], ids: NDArray[np.int64]) -> None:
        """Samples joined groups."""
        for group, ident in zip(groups.tolist(), ids.tolist(), strict=True):
            self._later.setdefault(group, []).append(ident)
        self.joined += len(ids)

    def of(self, groups: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the ids for groups, each named once: one group after the other, ascending, each id once.

        Returns:
            int64 [n], twice: the ids, and for each of them the place of its group in `groups`.
        """
        known = np.minimum(groups, len(self._ends) - 2)
        starts = self._ends[known]
        counts = np.where(known == groups, self._ends[known + 1] - starts, 0)
        ids, places = self._ids[spread(starts, counts)], np.repeat(np.arange(len(groups)), counts)
        if self._later.keys().isdisjoint(groups.tolist()):
            return ids, places
        later = [self._later.get(group, ()) for group in groups.tolist()]
        counts = np.fromiter(map(len, later), np.int64, len(later))
        joined = np.fromiter(chain.from_iterable(later), np.int64, int(counts.sum()))
        ids, places = np.append(ids, joined), np.append(places, np.repeat(np.arange(len(groups)), counts))
        order = np.lexsort((ids, places))
        ids, places = ids[order], places[order]
        first = begins(ids) | begins(places)
        return ids[first], places[first]


class DeclaredSizes:
    """What the tags of live samples say about the sizes of their groups: group → size → members that say so."""

    def __init__(self) -> None:
        self._said: dict[int, dict[int, int]] = {}

    def add(self, group: int, size: int, members: int) -> None:
        """So many more members (fewer, below 0) say that the group has this size."""
        said = self._said.setdefault(group, {})
        said[size] = said.get(size, 0) + members
        if not said[size]:
            del said[size]
        if not said:
            del self._said[group]

    def size_of(self, group: int) -> int:
        """Returns the size that all members who say one agree on; 0: none says it, or they differ."""
        said = self._said.get(group, {})
        return next(iter(said)) if len(said) == 1 else 0
