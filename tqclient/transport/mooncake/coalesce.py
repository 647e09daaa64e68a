"""Turns the byte runs that a read wants into few transfers, or says that the node should gather them. Pure.

The figures are of the transfer engine over TCP on loopback; see decisions 0006 and 0007 in docs/decisions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.limits import MIB

Run = tuple[int, int]
"""(start, stop)."""

ITEM_SECONDS: Final = 40e-6
"""What one transfer costs, however short."""
READ_SECONDS: Final = 0.3e-3
"""What one read of an extent costs, with its transfers, however short."""
BYTES_PER_SECOND: Final = 2.5e9
"""Of one-sided transfers."""
GAP_BYTES_MAX: Final = int(ITEM_SECONDS * BYTES_PER_SECOND)
"""A gap that is not longer costs less to read than a transfer of its own does."""
SPLIT_BYTES_MIN: Final = 1 * MIB
"""A shorter piece does not fill a lane."""
LANES: Final = 4
"""Connections that an engine keeps to a peer: as many pieces move at the same time."""


@dataclass(frozen=True, slots=True)
class GatherCost:
    """What it costs to have the node send runs one after another.

    Attributes:
        call_seconds: however little is asked for.
        run_seconds: for each run.
        bytes_per_second: of the runs.
    """

    call_seconds: float
    run_seconds: float
    bytes_per_second: float


STREAM: Final = GatherCost(1e-3, 1e-6, 0.4e9)
"""With a Read call of the node."""
PORT: Final = GatherCost(0.3e-3, 1e-6, 2.5e9)
"""Over the port beside the engine."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer of a read.

    Attributes:
        start: of the bytes to move, in the extent.
        stop: their end.
        wanted: the runs among them that somebody asked for, ascending, none empty.
    """

    start: int
    stop: int
    wanted: list[Run]


def bridge(runs: Sequence[Run], gap_bytes_max: int = GAP_BYTES_MAX) -> list[list[Run]]:
    """Groups ascending runs, so that one transfer from the first to the last of a group is cheaper than several."""
    groups: list[list[Run]] = []
    for run in runs:
        if groups and run[0] - groups[-1][-1][1] <= gap_bytes_max:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def pieces(groups: Sequence[Sequence[Run]], piece_bytes_max: int) -> Iterator[Piece]:
    """Cuts groups of runs into transfers of bounded length; each begins and ends with wanted bytes.

    Args:
        groups: as `bridge` returns them.
        piece_bytes_max: at least 1.
    """
    for group in groups:
        wanted: list[Run] = []
        for run_start, stop in group:
            start = run_start
            while start < stop:
                if wanted and start - wanted[0][0] >= piece_bytes_max:
                    yield Piece(wanted[0][0], wanted[-1][1], wanted)
                    wanted = []
                first = wanted[0][0] if wanted else start
                end = min(stop, first + piece_bytes_max)
                wanted.append((start, end))
                start = end
        yield Piece(wanted[0][0], wanted[-1][1], wanted)


def gather_is_cheaper(runs: NDArray[np.int64], cost: GatherCost = STREAM) -> bool:
    """Whether the node, which sends nothing but the runs, is expected to be faster than the transfers.

    Args:
        runs: int64 `[n, 2]`: start, stop; ascending.
        cost: of the way in which the node sends them.
    """
    if not len(runs):
        return False
    gaps = runs[1:, 0] - runs[:-1, 1]
    bridged = gaps <= GAP_BYTES_MAX
    asked = int((runs[:, 1] - runs[:, 0]).sum())
    transfers = len(runs) - int(bridged.sum())
    one_sided = transfers * ITEM_SECONDS + (asked + int(gaps[bridged].sum())) / BYTES_PER_SECOND
    gathered = cost.call_seconds + len(runs) * cost.run_seconds + asked / cost.bytes_per_second
    return gathered < one_sided


def together_is_cheaper(reads: Sequence[NDArray[np.uint64]], cost: GatherCost) -> bool:
    """Whether the node is expected to send what is wanted of several extents faster than one transfer for each.

    Args:
        reads: uint64 `[n, 2]` of each extent: offset, length.
        cost: of the way in which the node sends them.
    """
    asked = sum(int(ranges[:, 1].sum()) for ranges in reads)
    runs = sum(map(len, reads))
    each = len(reads) * READ_SECONDS + asked / BYTES_PER_SECOND
    return cost.call_seconds + runs * cost.run_seconds + asked / cost.bytes_per_second < each


def piece_bytes(length: int, piece_bytes_max: int) -> int:
    """How long the transfers of `length` bytes are: as many as there are lanes, when that fills these.

    Args:
        length: bytes.
        piece_bytes_max: at least 1.
    """
    return min(piece_bytes_max, max(SPLIT_BYTES_MIN, -(-length // LANES)))


def split(length: int, piece_bytes_max: int) -> list[Run]:
    """Cuts contiguous bytes into transfers of `piece_bytes`."""
    piece = piece_bytes(length, piece_bytes_max)
    return [(start, min(start + piece, length)) for start in range(0, length, piece)]
