"""Ids, places and deliveries of replies, written down as runs where they ascend by one, as those of whole puts do."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, U32, U64, pack_array, unpack_array
from tqclient.wire.v1 import common_pb2, controller_pb2

ROWS_PER_RUN_MIN: Final = 8
"""On average; shorter runs are not worth their three numbers."""


def write_ids(reply: common_pb2.Rows | controller_pb2.CommitReply, ids: NDArray[np.int64], *, runs: bool) -> None:
    """Writes down ids.

    Args:
        reply: without any.
        ids: int64 [rows].
        runs: the caller reads runs, where they are few.
    """
    found = _runs(ids[1:] != ids[:-1] + 1, len(ids)) if runs else None
    if found is None:
        reply.ids = pack_array(ids, I64)
    else:
        starts, counts = found
        reply.id_runs = pack_array(np.array((ids[starts], counts)).T, I64)


def write_place(placement: common_pb2.Placement, block: NDArray[Any], row: NDArray[Any], *, runs: bool) -> None:
    """Writes down where rows lie.

    Args:
        placement: without a place.
        block: uint64 [rows]: block ids.
        row: uint32 [rows]: rows within those blocks.
        runs: the caller reads runs, where they are few.
    """
    found = _runs((block[1:] != block[:-1]) | (row[1:] != row[:-1] + 1), len(block)) if runs else None
    if found is None:
        placement.block, placement.row = pack_array(block, U64), pack_array(row, U32)
    else:
        starts, counts = found
        placement.runs = pack_array(np.array((block[starts], row[starts], counts), dtype=U64).T, U64)


def write_attempts(rows: common_pb2.Rows, attempts: NDArray[Any], *, runs: bool) -> None:
    """Writes down deliveries by row, uint32 [rows]; as one number if the caller reads that and they are all alike."""
    if runs and len(attempts) and (attempts == attempts[0]).all():
        rows.attempt = int(attempts[0])
    else:
        rows.attempts = pack_array(attempts, U32)


def shorten(rows: common_pb2.Rows) -> None:
    """Writes a reply anew with runs that was written down for callers who may not read them."""
    ids, attempts = rows.ids, rows.attempts
    rows.ClearField("ids")
    write_ids(rows, unpack_array(ids, I64, what="ids"), runs=True)
    rows.ClearField("attempts")
    write_attempts(rows, unpack_array(attempts, U32, what="attempts"), runs=True)
    for placement in rows.placements:
        block, row = placement.block, placement.row
        placement.ClearField("block")
        placement.ClearField("row")
        write_place(placement, unpack_array(block, U64, what="block"), unpack_array(row, U32, what="row"), runs=True)


def _runs(breaks: NDArray[np.bool_], rows: int) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Returns where the runs begin, and how many rows each has; None when they are too many."""
    count = 1 + np.count_nonzero(breaks)
    if count * ROWS_PER_RUN_MIN > rows:
        return None
    if count == 1:
        return np.zeros(1, np.int64), np.array([rows])
    starts = np.concatenate((np.zeros(1, np.int64), np.flatnonzero(breaks) + 1))
    return starts, np.diff(starts, append=rows)


def blocks_of(placement: common_pb2.Placement) -> list[int]:
    """Returns the ids of the blocks that a placement points into; one may be there several times."""
    if placement.runs:
        blocks: NDArray[np.uint64] = unpack_array(placement.runs, U64, what="runs", columns=3)[:, 0]
    else:
        blocks = unpack_array(placement.block, U64, what="block")
    ids: list[int] = blocks.tolist()
    return ids
