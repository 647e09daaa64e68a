"""What a watcher of a partition is told: one class per kind of change."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tqclient.info import PartitionInfo

Ids: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, eq=False, kw_only=True)
class _Told:
    """What every change has.

    Attributes:
        sequence: of the command that made it; it only grows. Several changes may have one.
        last: no other change of this sequence follows: `watch(from_seq=sequence)` goes on exactly behind it.
    """

    sequence: int
    last: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Listed(_Told):
    """Samples that were live at `sequence`: a piece of a listing of all of them.

    Attributes:
        ids: of samples, int64 [n].
        keys: by sample; None where it has none.
        tags: by sample.
        first: a listing begins: forget what you knew.
        complete: it ends; what follows changed after `sequence`.
    """

    ids: Ids
    keys: list[str | None] = field(repr=False)
    tags: list[dict[str, Any]] = field(repr=False)
    first: bool
    complete: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Written(_Told):
    """Samples were put, or fields of samples that exist.

    Attributes:
        ids: of samples, int64 [n].
        keys: by sample; None where it has none.
        tags: by sample, as they are now.
        fields: that were written.
        added: the samples are new.
    """

    ids: Ids
    keys: list[str | None] = field(repr=False)
    tags: list[dict[str, Any]] = field(repr=False)
    fields: tuple[str, ...]
    added: bool


@dataclass(frozen=True, eq=False, kw_only=True)
class Removed(_Told):
    """Samples were cleared, or went as the partition retired: their ids, int64 [n]."""

    ids: Ids


@dataclass(frozen=True, eq=False, kw_only=True)
class Tagged(_Told):
    """Samples have other tags.

    Attributes:
        ids: of samples, int64 [n].
        tags: by sample, all that it has now.
    """

    ids: Ids
    tags: list[dict[str, Any]] = field(repr=False)


@dataclass(frozen=True, eq=False, kw_only=True)
class Settled(_Told):
    """A consumer is done with samples.

    Attributes:
        consumer: its name.
        consumed: ids of those that it acked, int64 [n].
        dropped: ids of those that it will not be given: dead, stale, or one too many for their group; int64 [n].
    """

    consumer: str
    consumed: Ids
    dropped: Ids


@dataclass(frozen=True, eq=False, kw_only=True)
class Changed(_Told):
    """The partition was sealed, retired, or has another version or other metadata: how it is now."""

    info: PartitionInfo = field(repr=False)


Change: TypeAlias = "Listed | Written | Removed | Tagged | Settled | Changed"
