"""Rows of a claim or a look-up, as they cross the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, U32, U64, pack_array, pack_blobs
from tqclient.wire.v1 import common_pb2
from tqserver.controller.core.samples import SampleTable, Slots, picked


def write_rows(
    rows: common_pb2.Rows,
    samples: SampleTable,
    slots: Slots,
    fields: tuple[str, ...],
    attempts: NDArray[Any] | None = None,
) -> None:
    """Writes down samples with their placements; `blocks` is left empty.

    Args:
        rows: empty; of the reply, since a message that is put into another one is copied.
        samples: the partition's.
        slots: int64 [rows], in delivery order.
        fields: all of them written for all rows.
        attempts: deliveries by row, for a claim.
    """
    rows.ids = pack_array(samples.ids[slots], I64)
    _place(rows, samples, slots, fields)
    keys = picked(samples.keys, slots)
    if any(keys):
        rows.keys.CopyFrom(pack_blobs([key.encode() for key in keys]))
    values = samples.group_values
    group = samples.group[slots]
    if values and (group >= 0).any():
        rows.groups.CopyFrom(pack_blobs([values[index] if index >= 0 else b"" for index in group.tolist()]))
    if np.count_nonzero(samples.version_min[slots] >= 0):
        rows.version_min = pack_array(samples.version_min[slots], I64)
        rows.version_max = pack_array(samples.version_max[slots], I64)
    tags = picked(samples.tags, slots)
    if any(tags):
        rows.tags.CopyFrom(pack_blobs(tags))
    if attempts is not None:
        rows.attempts = pack_array(attempts, U32)


def _place(rows: common_pb2.Rows, samples: SampleTable, slots: Slots, fields: tuple[str, ...]) -> None:
    # Fields of one put have the same block and row for every sample: they share a placement.
    shared: dict[tuple[bytes, bytes], list[str]] = {}
    for name in fields:
        column = samples.columns[name]
        place = (pack_array(column.block[slots], U64), pack_array(column.row[slots], U32))
        shared.setdefault(place, []).append(name)
    for (block, row), names in shared.items():
        rows.placements.add(fields=names, block=block, row=row)


def blocks_of(samples: SampleTable, slots: Slots, fields: tuple[str, ...]) -> list[int]:
    """Returns the ids of the blocks that hold these fields of these samples, each once, ascending."""
    found: set[int] = set()
    for name in fields:
        block = samples.columns[name].block[slots]
        found.update(block[:1].tolist(), block[1:][block[1:] != block[:-1]].tolist())  # one of each run
    return sorted(found)
