"""Which transfers a read is made of: every wanted byte once, few items, bounded pieces."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqclient.limits import KIB, MIB
from tqclient.transport.mooncake.coalesce import (
    PORT,
    STREAM,
    GatherCost,
    bridge,
    gather_is_cheaper,
    pieces,
    split,
    together_is_cheaper,
)

Runs = list[tuple[int, int]]


@st.composite
def ascending_runs(draw: st.DrawFn) -> Runs:
    steps = draw(st.lists(st.tuples(st.integers(1, 300), st.integers(1, 300)), min_size=1, max_size=40))
    runs, position = [], 0
    for gap, length in steps:
        runs.append((position + gap, position + gap + length))
        position += gap + length
    return runs


@given(ascending_runs(), st.integers(0, 300), st.integers(1, 500))
def test_every_wanted_byte_is_fetched_once_and_in_order(runs: Runs, gap_max: int, piece_max: int) -> None:
    cut = list(pieces(bridge(runs, gap_max), piece_max))
    fetched = [byte for piece in cut for start, stop in piece.wanted for byte in range(start, stop)]
    assert fetched == [byte for start, stop in runs for byte in range(start, stop)]
    for piece in cut:
        assert 0 < piece.stop - piece.start <= piece_max
        assert (piece.start, piece.stop) == (piece.wanted[0][0], piece.wanted[-1][1])
        assert all(before[1] <= after[0] for before, after in pairwise(piece.wanted))
    assert all(before.stop <= after.start for before, after in pairwise(cut))


@given(ascending_runs(), st.integers(0, 300))
def test_gaps_are_read_over_when_they_are_short_and_only_then(runs: Runs, gap_max: int) -> None:
    groups = bridge(runs, gap_max)
    assert [run for group in groups for run in group] == runs
    assert all(after[0] - before[1] <= gap_max for group in groups for before, after in pairwise(group))
    assert all(after[0][0] - before[-1][1] > gap_max for before, after in pairwise(groups))


def scattered(count: int, length: int, stride: int) -> Runs:
    return [(i * stride, i * stride + length) for i in range(count)]


@pytest.mark.parametrize(
    ("runs", "gathers"),
    [
        (scattered(1, 256 * MIB, 256 * MIB), False),
        ([], False),
        (scattered(1, 64, 64), False),
        (scattered(1000, 4 * KIB, 8 * KIB), False),  # 8 MiB in one sweep
        (scattered(1000, 4 * KIB, MIB), True),  # 1000 transfers, or a gigabyte
        (scattered(20, 4 * KIB, MIB), False),
        (scattered(1000, MIB, 2 * MIB), False),  # the bytes decide, not the items
    ],
)
def test_the_node_gathers_what_would_be_many_small_transfers(runs: Runs, gathers: bool) -> None:
    assert gather_is_cheaper(np.array(runs, np.int64).reshape(-1, 2)) is gathers


@pytest.mark.parametrize(
    ("length", "lengths"),
    [
        (1, [1]),
        (MIB, [MIB]),
        (MIB + 1, [MIB, 1]),
        (16 * MIB, [4 * MIB] * 4),
        (40 * MIB, [8 * MIB] * 5),
        (0, []),
    ],
)
def test_contiguous_bytes_fill_the_lanes(length: int, lengths: list[int]) -> None:
    assert [stop - start for start, stop in split(length, 8 * MIB)] == lengths


@pytest.mark.parametrize(
    ("reads", "cost", "together"),
    [
        ([], PORT, False),
        ([1], PORT, False),  # a call is a call
        ([100, 100], PORT, True),
        ([20_000] * 512, PORT, True),
        ([20_000] * 512, STREAM, True),
        ([100] * 3, STREAM, False),  # a Read takes as long as three
        ([MIB] * 4, STREAM, False),
    ],
)
def test_the_node_sends_small_extents_together(reads: list[int], cost: GatherCost, together: bool) -> None:
    wanted = [np.array([(0, size)], np.uint64) for size in reads]
    assert together_is_cheaper(wanted, cost) is together
