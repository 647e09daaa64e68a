"""Rows of a claim or a look-up, as they cross the wire."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, U32, U64, pack_array, pack_blobs
from tqclient.wire.v1 import common_pb2
from tqserver.controller.core.samples import Column, SampleTable, Slots, compact_index


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
    where = compact_index(slots)
    rows.ids = pack_array(samples.ids[where], I64)
    _place(rows, samples, where, fields)
    keys = samples.keys_of(slots)
    if any(keys):
        rows.keys.CopyFrom(pack_blobs([key.encode() for key in keys]))
    values = samples.group_values
    group = samples.group[where]
    if values and (group >= 0).any():
        rows.groups.CopyFrom(pack_blobs([values[index] if index >= 0 else b"" for index in group.tolist()]))
    if np.count_nonzero(samples.version_min[where] >= 0):
        rows.version_min = pack_array(samples.version_min[where], I64)
        rows.version_max = pack_array(samples.version_max[where], I64)
    tags = samples.tags_of(slots)
    if any(tags):
        rows.tags.CopyFrom(pack_blobs(tags))
    if attempts is not None:
        rows.attempts = pack_array(attempts, U32)


def _place(rows: common_pb2.Rows, samples: SampleTable, where: Slots | slice, fields: tuple[str, ...]) -> None:
    # Fields of one put have the same block and row for every sample: they share a placement.
    shared: dict[tuple[int, ...], list[tuple[Column, list[str]]]] = {}
    for name in fields:
        column = samples.columns[name]
        block, row = column.block[where], column.row[where]
        ends = (int(block[0]), int(row[0]), int(block[-1]), int(row[-1])) if len(row) else ()
        alike = shared.setdefault(ends, [])
        for other, names in alike:
            if np.array_equal(other.block[where], block) and np.array_equal(other.row[where], row):
                names.append(name)
                break
        else:
            alike.append((column, [name]))
    for column, names in itertools.chain.from_iterable(shared.values()):
        packed = pack_array(column.block[where], U64), pack_array(column.row[where], U32)
        rows.placements.add(fields=names, block=packed[0], row=packed[1])


def blocks_of(samples: SampleTable, slots: Slots, fields: tuple[str, ...]) -> list[int]:
    """Returns the ids of the blocks that hold these fields of these samples, each once, ascending."""
    found: set[int] = set()
    where = compact_index(slots)
    for name in fields:
        block = samples.columns[name].block[where]
        found.update(block[:1].tolist(), block[1:][block[1:] != block[:-1]].tolist())  # one of each run
    return sorted(found)
