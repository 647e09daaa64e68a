"""What the shell has to do after a command was applied: tell storage nodes, wake waiters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """Extents became sealed.

    Attributes:
        node: the node's configured name.
        arena: the arena file's identity.
        extents: uint64 [n, 4]: offset, length, generation, partition_id.
    """

    node: str
    arena: int
    extents: NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class Freed:
    """Extents that nobody can read any more; attributes as in `Sealed`."""

    node: str
    arena: int
    extents: NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class SessionOpened:
    """A session began."""

    session: int


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """A session ended: by its client, by its lease, or because its process died."""

    session: int


@dataclass(frozen=True, slots=True)
class ReadinessChanged:
    """Claims that wait on this partition may be grantable now, or never again.

    Attributes:
        partition_id: of the partition.
        by_count: nothing changed but how many samples are ready: those alone that so many can meet.
    """

    partition_id: int
    by_count: bool = False


@dataclass(frozen=True, slots=True)
class RoomChanged:
    """Commits that wait for room in this partition may fit now."""

    partition_id: int


@dataclass(frozen=True, slots=True)
class PartitionGone:
    """A partition was deleted: whoever waits on it gets PartitionNotFound."""

    partition_id: int
    name: str


@dataclass(frozen=True, slots=True)
class NodeAttached:
    """A storage node said hello; it is owed a NodeSync."""

    node: str


@dataclass(frozen=True, slots=True)
class Changed:
    """Something changed in a partition: its watchers are owed that."""

    partition_id: int


Effect = (
    Changed
    | Sealed
    | Freed
    | SessionOpened
    | SessionEnded
    | ReadinessChanged
    | RoomChanged
    | PartitionGone
    | NodeAttached
)
