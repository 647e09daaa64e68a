"""The rows of a claim or a look-up, unpacked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import NO_VERSION
from tqclient.arrays import spread
from tqclient.errors import InvalidArgument
from tqclient.limits import MESSAGE_BYTES_MAX
from tqclient.wire.packing import I64, U32, U64, unpack_array, unpack_blobs, unpack_strings
from tqclient.wire.v1 import common_pb2, controller_pb2

ROWS_MAX: Final = MESSAGE_BYTES_MAX // 8
"""Of one reply, each with an id of its own."""
_FIRST_MAX: Final = 1 << 62
"""Far above any id or row, and far below where int64 ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a batch that lie in one block.

    Attributes:
        block_id: of the block.
        rows: int64: row numbers within the block.
    """

    block_id: int
    rows: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows, with where their fields lie.

    Attributes:
        ids: int64 [rows].
        keys: str or None per row.
        groups: str, int, bytes or None per row.
        tags: a dict per row; None where no row has any: thousands of empty ones take a millisecond to make.
        weight_versions: int64 [rows, 2]: min and max; -1 where a row has no version.
        attempts: int64 [rows]: 1 at the first delivery; 0 in a look-up.
        runs: per field, its rows in order.
        blocks: by block id; their directories are empty where this client was sent them before.
    """

    ids: NDArray[np.int64]
    keys: list[str | None]
    groups: list[Any]
    tags: list[dict[str, Any]] | None
    weight_versions: NDArray[np.int64]
    attempts: NDArray[np.int64]
    runs: dict[str, list[Run]]
    blocks: dict[int, common_pb2.Block]

    @classmethod
    def from_wire(cls, rows: common_pb2.Rows, fields: Sequence[str]) -> RowSet:
        """Unpacks what the controller sent.

        Args:
            rows: of the reply.
            fields: of the reply, in the order in which the user sees them.

        Raises:
            InvalidArgument: the arrays do not fit each other.
        """
        ids = ids_of(rows)
        count = len(ids)
        runs: dict[str, list[Run]] = {}
        for placement in rows.placements:
            placed = _runs(placement, count)
            runs.update(dict.fromkeys(placement.fields, placed))
        return cls(
            ids,
            _keys(rows, count),
            _groups(rows, count),
            _tags(rows, count),
            _versions(rows, count),
            _or_filled(rows.attempts, U32, count, rows.attempt),
            {field: runs[field] for field in fields},
            {block.block_id: block for block in rows.blocks},
        )

    def tags_by_row(self) -> list[dict[str, Any]]:
        """Returns a dict for each row, in any case."""
        return [{} for _ in self.ids] if self.tags is None else self.tags


def ids_of(message: common_pb2.Rows | controller_pb2.CommitReply, rows: int | None = None) -> NDArray[np.int64]:
    """Returns the ids of a reply, int64 [rows], in full or as runs.

    Raises:
        InvalidArgument: there are not as many as there must be, or too many.
    """
    if not message.id_runs:
        return unpack_array(message.ids, I64, what="ids", rows=rows).astype(np.int64)
    runs = unpack_array(message.id_runs, I64, what="id_runs", columns=2)
    ids = _ascending(runs[:, 0], runs[:, 1], what="id_runs")
    if rows is not None and len(ids) != rows:
        raise InvalidArgument(f"id_runs: {len(ids)} ids, expected {rows}")
    return ids


def _ascending(first: NDArray[Any], counts: NDArray[Any], *, what: str) -> NDArray[np.int64]:
    """Returns what runs stand for: `counts[i]` numbers that ascend from `first[i]` by one, after each other."""
    if len(first) == 1:
        return _one_run(int(first[0]), int(counts[0]), what=what)
    first, counts = first.astype(np.int64), counts.astype(np.int64)
    rows = int(counts.sum()) if counts.min(initial=0) >= 0 and counts.max(initial=0) <= ROWS_MAX else -1
    if not 0 <= rows <= ROWS_MAX:
        raise _too_many(counts[:8].tolist(), what)
    return spread(first, counts)


def _one_run(first: int, count: int, *, what: str) -> NDArray[np.int64]:
    """The same for one run, which a put is that is claimed whole: few calls, most of which meet cold caches."""
    if not 0 <= count <= ROWS_MAX:
        raise _too_many([count], what)
    if abs(first) > _FIRST_MAX:
        raise InvalidArgument(f"{what}: a run of {count} rows from {first} on")
    return np.arange(first, first + count)


def _too_many(counts: list[int], what: str) -> InvalidArgument:
    return InvalidArgument(f"{what}: runs of {counts} rows; expected {ROWS_MAX} in all, at most")


# What no row has is not sent: most rows have few of these.


def _keys(rows: common_pb2.Rows, count: int) -> list[str | None]:
    if not rows.HasField("keys"):
        return [None] * count
    return [key or None for key in unpack_strings(rows.keys, what="rows.keys", rows=count)]


def _groups(rows: common_pb2.Rows, count: int) -> list[Any]:
    if not rows.HasField("groups"):
        return [None] * count
    groups = unpack_blobs(rows.groups, what="rows.groups", rows=count)
    return [msgpack.unpackb(group) if group else None for group in groups]


def _tags(rows: common_pb2.Rows, count: int) -> list[dict[str, Any]] | None:
    if not rows.HasField("tags"):
        return None
    return [msgpack.unpackb(tags) if tags else {} for tags in unpack_blobs(rows.tags, what="rows.tags", rows=count)]


def _versions(rows: common_pb2.Rows, count: int) -> NDArray[np.int64]:
    if not rows.version_min and not rows.version_max:
        return np.full((count, 2), NO_VERSION)
    return np.stack([_or_filled(each, I64, count, NO_VERSION) for each in (rows.version_min, rows.version_max)], axis=1)


def _or_filled(packed: bytes, dtype: np.dtype[Any], count: int, value: int) -> NDArray[np.int64]:
    if not packed:
        return np.full(count, value, np.int64)
    return unpack_array(packed, dtype, what="rows", rows=count).astype(np.int64)


def _runs(placement: common_pb2.Placement, count: int) -> list[Run]:
    if placement.runs:
        what = "placement.runs"
        runs = unpack_array(placement.runs, U64, what=what, columns=3)
        blocks, first, counts = runs.T
        rows = _ascending(first, counts, what=what)
        if len(rows) != count:
            raise InvalidArgument(f"{what}: {len(rows)} rows, expected {count}")
        if len(runs) == 1:
            return [Run(int(blocks[0]), rows)] if count else []
        counts = counts.astype(np.int64)
        starts = np.cumsum(counts) - counts
    else:
        blocks = unpack_array(placement.block, U64, what="placement.block", rows=count)
        rows = unpack_array(placement.row, U32, what="placement.row", rows=count).astype(np.int64)
        starts = np.arange(count)
    if not count:
        return []
    changes = np.flatnonzero(blocks[1:] != blocks[:-1]) + 1
    bounds = [0, *starts[changes].tolist(), count]
    heads = blocks[np.concatenate((np.zeros(1, np.int64), changes))].tolist()
    return [Run(block, rows[a:b]) for block, (a, b) in zip(heads, itertools.pairwise(bounds), strict=True) if a < b]
