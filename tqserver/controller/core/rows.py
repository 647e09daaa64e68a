"""Rows of a claim or a look-up, as they cross the wire."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, pack_array, pack_blobs
from tqclient.wire.v1 import common_pb2
from tqserver.controller.core.runs import write_attempts, write_ids, write_place
from tqserver.controller.core.samples import Column, SampleTable, Slots, compact_index


def write_rows(
    rows: common_pb2.Rows,
    samples: SampleTable,
    slots: Slots,
    fields: tuple[str, ...],
    attempts: NDArray[Any] | None = None,
    *,
    runs: bool,
) -> None:
    """Writes down samples with their placements; `blocks` is left empty.

    Args:
        rows: empty; of the reply, since a message that is put into another one is copied.
        samples: the partition's.
        slots: int64 [rows], in delivery order.
        fields: all of them written for all rows.
        attempts: deliveries by row, for a claim.
        runs: the caller reads runs.
    """
    where = compact_index(slots)
    write_ids(rows, samples.ids[where], runs=runs)
    _place(rows, samples, where, fields, runs=runs)
    keys = samples.keys_of(slots)
    if any(keys):
        rows.keys.CopyFrom(pack_blobs([key.encode() for key in keys]))
    values = samples.groups.values
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
        write_attempts(rows, attempts, runs=runs)


def _place(
    rows: common_pb2.Rows, samples: SampleTable, where: Slots | slice, fields: tuple[str, ...], *, runs: bool
) -> None:
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
        write_place(rows.placements.add(fields=names), column.block[where], column.row[where], runs=runs)


def blocks_of(samples: SampleTable, slots: Slots, fields: tuple[str, ...]) -> list[int]:
    """Returns the ids of the blocks that hold these fields of these samples, each once, ascending."""
    found: set[int] = set()
    where = compact_index(slots)
    for name in fields:
        block = samples.columns[name].block[where]
        found.update(block[:1].tolist(), block[1:][block[1:] != block[:-1]].tolist())  # one of each run
    return sorted(found)
