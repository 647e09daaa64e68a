"""Replies made short: what ascends by one, as ids and rows of whole puts do, is told as runs."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, U32, U64, pack_array, unpack_array
from tqclient.wire.v1 import common_pb2, controller_pb2

ROWS_PER_RUN_MIN: Final = 8
"""On average; shorter runs are not worth their three numbers."""


def shorten(rows: common_pb2.Rows) -> None:
    """Replaces the arrays of a claim's or a look-up's reply by runs, where these are few."""
    shorten_ids(rows)
    attempts = unpack_array(rows.attempts, U32, what="attempts")
    if len(attempts) and bool((attempts == attempts[0]).all()):
        rows.attempt = int(attempts[0])
        rows.ClearField("attempts")
    for placement in rows.placements:
        _shorten(placement)


def shorten_ids(reply: common_pb2.Rows | controller_pb2.CommitReply) -> None:
    """Replaces ids by runs, where these are few."""
    ids = unpack_array(reply.ids, I64, what="ids")
    starts = _starts(ids[1:] != ids[:-1] + 1, len(ids))
    if starts is not None:
        reply.id_runs = pack_array(np.stack((ids[starts], _counts(starts, len(ids))), axis=1), I64)
        reply.ClearField("ids")


def _shorten(placement: common_pb2.Placement) -> None:
    block = unpack_array(placement.block, U64, what="block")
    row = unpack_array(placement.row, U32, what="row")
    starts = _starts((block[1:] != block[:-1]) | (row[1:] != row[:-1] + 1), len(block))
    if starts is not None:
        counts = _counts(starts, len(block)).astype(U64)
        placement.runs = pack_array(np.stack((block[starts], row[starts].astype(U64), counts), axis=1), U64)
        placement.ClearField("block")
        placement.ClearField("row")


def _starts(breaks: NDArray[np.bool_], rows: int) -> NDArray[np.int64] | None:
    """Returns where the runs begin; None when they are too many."""
    if (1 + np.count_nonzero(breaks)) * ROWS_PER_RUN_MIN > rows:
        return None
    return np.concatenate((np.zeros(1, np.int64), np.flatnonzero(breaks) + 1))


def _counts(starts: NDArray[np.int64], rows: int) -> NDArray[np.int64]:
    return np.diff(starts, append=rows)


def blocks_of(placement: common_pb2.Placement) -> list[int]:
    """Returns the ids of the blocks that a placement points into; one may be there several times."""
    if placement.runs:
        blocks: NDArray[np.uint64] = unpack_array(placement.runs, U64, what="runs", columns=3)[:, 0]
    else:
        blocks = unpack_array(placement.block, U64, what="block")
    ids: list[int] = blocks.tolist()
    return ids
