"""The rows of a claim or a look-up, unpacked."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import NO_VERSION
from tqclient.wire.packing import I64, U32, U64, unpack_array, unpack_blobs, unpack_strings
from tqclient.wire.v1 import common_pb2


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
        ids = unpack_array(rows.ids, I64, what="rows.ids").astype(np.int64)
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
            np.stack([_versions(rows.version_min, count), _versions(rows.version_max, count)], axis=1),
            _or_filled(rows.attempts, U32, count, 0),
            {field: runs[field] for field in fields},
            {block.block_id: block for block in rows.blocks},
        )

    def tags_by_row(self) -> list[dict[str, Any]]:
        """Returns a dict for each row, in any case."""
        return [{} for _ in self.ids] if self.tags is None else self.tags


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


def _versions(packed: bytes, count: int) -> NDArray[np.int64]:
    return _or_filled(packed, I64, count, NO_VERSION)


def _or_filled(packed: bytes, dtype: np.dtype[Any], count: int, value: int) -> NDArray[np.int64]:
    if not packed:
        return np.full(count, value, np.int64)
    return unpack_array(packed, dtype, what="rows", rows=count).astype(np.int64)


def _runs(placement: common_pb2.Placement, count: int) -> list[Run]:
    blocks = unpack_array(placement.block, U64, what="placement.block", rows=count)
    rows = unpack_array(placement.row, U32, what="placement.row", rows=count).astype(np.int64)
    bounds = [0, *(np.flatnonzero(blocks[1:] != blocks[:-1]) + 1).tolist(), count]
    return [Run(int(blocks[a]), rows[a:b]) for a, b in itertools.pairwise(bounds) if a < b]
