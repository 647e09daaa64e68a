from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.transport.fake_node import ranges
from tqclient.errors import InvalidArgument
from tqclient.transport.ranges import Runs, merge_ranges

EXTENT_BYTES = 300


@st.composite
def inside(draw: st.DrawFn) -> tuple[int, int]:
    start = draw(st.integers(0, EXTENT_BYTES))
    return start, draw(st.integers(0, EXTENT_BYTES - start))


@given(pairs=st.lists(inside(), max_size=12))
def test_runs_cover_exactly_what_the_ranges_cover(pairs: list[tuple[int, int]]) -> None:
    covered = np.zeros(EXTENT_BYTES + 2, dtype=bool)
    for start, length in pairs:
        covered[start : start + length] = True
    edges = np.flatnonzero(np.diff(np.concatenate(([False], covered)).astype(int))).tolist()
    runs = merge_ranges(ranges(*pairs), EXTENT_BYTES)
    assert runs.dtype == np.int64
    assert runs.shape[1:] == (2,)
    assert runs.ravel().tolist() == edges


@given(pairs=st.lists(inside(), min_size=1, max_size=12), gaps=st.booleans(), data=st.data())
def test_buffer_shows_every_fetched_byte_at_a_congruent_address(
    pairs: list[tuple[int, int]], gaps: bool, data: st.DataObject
) -> None:
    content = np.arange(EXTENT_BYTES) % 251
    merged = merge_ranges(ranges(*pairs), EXTENT_BYTES)
    runs = Runs(merged, gaps=gaps)
    buffer = np.full(runs.buffer_bytes, 255)
    for position, (start, stop) in zip(runs.positions, merged, strict=True):
        buffer[position : position + stop - start] = content[start:stop]
    start, length = data.draw(st.sampled_from(pairs))
    position = runs.locate(start, length)
    assert buffer[position : position + length].tolist() == content[start : start + length].tolist()
    assert length == 0 or (position - start) % 64 == 0
    filled = np.array([pair for pair in pairs if pair[1]], np.int64).reshape(-1, 2)
    assert runs.locate_all(filled[:, 0], filled[:, 1]).tolist() == [runs.locate(*pair) for pair in filled.tolist()]
    if len(merged) == 1 or (gaps and len(merged)):
        assert runs.lead is not None
        assert (runs.positions - merged[:, 0]).tolist() == [runs.lead] * len(merged)
        assert runs.buffer_bytes <= merged[-1, 1] - merged[0, 0] + 63
    else:
        assert runs.lead is None
        assert runs.buffer_bytes <= sum(stop - start + 63 for start, stop in merged)


@given(pairs=st.lists(inside(), max_size=6), offset=st.integers(0, 400), length=st.integers(1, 400))
def test_what_was_not_fetched_is_refused(pairs: list[tuple[int, int]], offset: int, length: int) -> None:
    merged = merge_ranges(ranges(*pairs), EXTENT_BYTES)
    if any(start <= offset and offset + length <= stop for start, stop in merged):
        Runs(merged).locate(offset, length)
    else:
        with pytest.raises(InvalidArgument, match="were not fetched"):
            Runs(merged).locate(offset, length)
        fetched = [(start, stop - start) for start, stop in merged.tolist()]
        offsets, lengths = np.array([*fetched, (offset, length)], np.int64).T
        with pytest.raises(InvalidArgument, match=f"{length} bytes at {offset} of the extent were not fetched"):
            Runs(merged).locate_all(offsets, lengths)


@pytest.mark.parametrize(
    "pair",
    [(301, 0), (0, 301), (300, 1), (2**64 - 1, 2), (2**64 - 200, 250), (1, 2**64 - 1), (2**63, 2**63)],
    ids=str,
)
def test_out_of_bounds_is_refused_and_never_wraps(pair: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match=f"{pair[1]} bytes at {pair[0]} of an extent of 300"):
        merge_ranges(ranges((0, 10), pair), EXTENT_BYTES)


@pytest.mark.parametrize("array", [np.zeros(4, np.uint64), np.zeros((2, 3), np.uint64), np.zeros((2, 2), np.int64)])
def test_another_shape_or_dtype_is_refused(array: np.ndarray) -> None:
    with pytest.raises(InvalidArgument, match=r"uint64 \[n, 2\]"):
        merge_ranges(array, EXTENT_BYTES)
