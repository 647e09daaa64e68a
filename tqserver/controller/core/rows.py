"""Rows of a claim or a look-up, as they cross the wire."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from tqclient.wire.packing import I64, U32, U64, pack_array, pack_blobs
from tqclient.wire.v1 import common_pb2
from tqserver.controller.core.samples import SampleTable, Slots


def rows_of(
    samples: SampleTable, slots: Slots, fields: tuple[str, ...], attempts: NDArray[Any] | None = None
) -> common_pb2.Rows:
    """Returns samples with their placements; `blocks` is left empty.

    Args:
        samples: the partition's.
        slots: int64 [rows], in delivery order.
        fields: all of them written for all rows.
        attempts: deliveries by row, for a claim.
    """
    rows = common_pb2.Rows(ids=pack_array(samples.ids[slots], I64), placements=_placements(samples, slots, fields))
    chosen = slots.tolist()
    keys = [samples.keys[slot] for slot in chosen]
    if any(keys):
        rows.keys.CopyFrom(pack_blobs([key.encode() for key in keys]))
    group = samples.group[slots]
    if (group >= 0).any():
        values = samples.group_values
        rows.groups.CopyFrom(pack_blobs([values[index] if index >= 0 else b"" for index in group.tolist()]))
    if (samples.version_min[slots] >= 0).any():
        rows.version_min = pack_array(samples.version_min[slots], I64)
        rows.version_max = pack_array(samples.version_max[slots], I64)
    tags = [samples.tags[slot] for slot in chosen]
    if any(tags):
        rows.tags.CopyFrom(pack_blobs(tags))
    if attempts is not None:
        rows.attempts = pack_array(attempts, U32)
    return rows


def _placements(samples: SampleTable, slots: Slots, fields: tuple[str, ...]) -> list[common_pb2.Placement]:
    # Fields of one put have the same block and row for every sample: they share a placement.
    shared: dict[tuple[bytes, bytes], list[str]] = {}
    for name in fields:
        column = samples.columns[name]
        place = (pack_array(column.block[slots], U64), pack_array(column.row[slots], U32))
        shared.setdefault(place, []).append(name)
    return [common_pb2.Placement(fields=names, block=block, row=row) for (block, row), names in shared.items()]


def blocks_of(samples: SampleTable, slots: Slots, fields: tuple[str, ...]) -> list[int]:
    """Returns the ids of the blocks that hold these fields of these samples, each once, ascending."""
    found: set[int] = set()
    for name in fields:
        found.update(samples.columns[name].block[slots].tolist())
    return sorted(found)
