"""Ranges of rows: the values of Python's own slices, from no more bytes than the layout asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.codec import strategies
from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.values import identical, rows_of
from tqclient.codec import Clip, Column, Part, Shared, allocate, measure, read_column
from tqclient.errors import CorruptBlock, InvalidArgument

Pairs = list[tuple[int, int]]


def clipped_part(block: Block, field: str, path: str, rows: list[int], pairs: Pairs, uniform: bool = False) -> Part:
    """A part whose fetch has the ranges that the layout names for these clips, and fails on any other byte."""
    chosen, ends = np.array(rows, np.int64), np.array(pairs, np.int64).reshape(-1, 2)
    clips = (Clip(block.layout.node(path).inner, ends[:, 0], ends[:, 1], uniform),)
    ranges = [tuple(map(int, entry)) for entry in block.layout.ranges(field, chosen, clips)]

    def fetch(offset: int, length: int) -> Any:
        assert any(start <= offset and offset + length <= start + size for start, size in ranges)
        return block.fetch(offset, length)

    return Part(block.layout, chosen, fetch, clips=clips)


def read(block: Block, field: str, rows: list[int], pairs: Pairs, uniform: bool = False, **options: Any) -> Column:
    path = options.pop("path", field)
    part = clipped_part(block, field, path, rows, pairs, uniform)
    return read_column(field, [part], copy=options.pop("copy", True), allocate=allocate, **options)


def _sliceable(rows: int) -> st.SearchStrategy[Any]:
    ragged = strategies._ragged(rows, strategies.tensors, strategies.TORCH_DTYPES)
    arrays = strategies._ragged(rows, strategies.arrays, strategies.NUMPY_DTYPES)
    dense = st.lists(st.integers(0, 3), min_size=1, max_size=3).flatmap(
        lambda shape: strategies.tensors(shape=(rows, *shape))
    )
    return st.one_of(ragged, arrays, dense)


def _indexes(rows: int, count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, count - 1), min_size=rows, max_size=rows)


@st.composite
def _columns(draw: st.DrawFn, rows: int) -> Any:
    if draw(st.booleans()):
        return draw(_sliceable(rows))
    count = draw(st.integers(1, 3))
    return Shared(draw(_sliceable(count)), draw(_indexes(rows, count)))


@st.composite
def _structs(draw: st.DrawFn) -> Any:
    """Of one column, "x", with the values of its rows. The rows may share the column's values, or the struct's."""
    rows, count = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    column = draw(_columns(rows))
    if draw(st.booleans()):
        return {"x": column}, rows_of(column)
    shared, index = draw(_columns(count)), draw(_indexes(rows, count))
    values = rows_of(shared)
    return Shared({"x": shared}, index), [values[place] for place in index]


@given(_structs(), st.data())
def test_ranges_are_slices(struct: Any, data: st.DataObject) -> None:
    expected, parts = [], []
    column, values = struct
    blocks = [Block(plan) for plan in measure({"s": column}).split(data.draw(st.integers(1, 2048)))]
    places = [(block, row) for block in blocks for row in range(block.layout.rows)]
    for _ in range(data.draw(st.integers(1, 8))):
        index = data.draw(st.integers(0, len(places) - 1))
        block, row = places[index]
        (length,) = block.layout.lengths("s.x", np.array([row])).tolist()
        assert length == len(values[index])
        start, stop = sorted(data.draw(st.tuples(st.integers(0, length), st.integers(0, length))))
        expected.append(values[index][start:stop])
        parts.append(clipped_part(block, "s", "s.x", [row], [(start, stop)]))
    copy = data.draw(st.booleans())
    read_back = read_column("s", parts, copy=copy, allocate=allocate).list()
    assert identical([{"x": each} for each in expected], read_back)


@pytest.mark.parametrize("copy", [True, False])
def test_one_range_of_a_dense_column_is_dense_and_several_are_ragged(copy: bool) -> None:
    values = torch.arange(3 * 5 * 2).view(3, 5, 2)
    block = encode({"x": values})
    one = read(block, "x", [0, 1, 2], [(1, 3)] * 3, uniform=True, copy=copy)
    assert torch.equal(one.value, values[:, 1:3])
    assert str(one.form) == "torch dense int64[rows, 2, 2]"
    each = read(block, "x", [0, 1, 2], [(1, 3)] * 3, copy=copy)  # alike, yet not by the way they were asked for
    assert str(each.form) == "torch ragged int64[rows, *, 2]"
    assert torch.equal(each.value[2], values[2, 1:3])
    assert each.padded().shape == (3, 2, 2)


def test_a_dense_block_of_a_ragged_field_gives_ragged_ranges() -> None:
    ragged, dense = encode({"x": [torch.arange(9)]}), encode({"x": torch.arange(8).view(2, 4)})
    parts = [
        clipped_part(ragged, "x", "x", [0], [(2, 4)], uniform=True),
        clipped_part(dense, "x", "x", [1, 0], [(2, 4)] * 2, uniform=True),
    ]
    column = read_column("x", parts, copy=True, allocate=allocate)
    assert [row.tolist() for row in column.list()] == [[2, 3], [6, 7], [2, 3]]


def test_other_children_of_a_struct_are_read_whole() -> None:
    block = encode({"s": {"x": [torch.arange(5), torch.arange(4)], "x.y": [torch.arange(3), torch.arange(2)]}})
    column = read(block, "s", [1, 0], [(1, 2), (0, 5)], path="s.x")
    assert [row["x"].tolist() for row in column.list()] == [[1], [0, 1, 2, 3, 4]]
    assert [len(row["x.y"]) for row in column.list()] == [2, 3]


def test_rows_that_share_a_value_may_want_different_ranges_of_it() -> None:
    block = encode({"x": Shared([torch.arange(4), torch.arange(10, 16)], [1, 0, 1, 1])})
    column = read(block, "x", [0, 1, 2, 3], [(0, 2), (0, 2), (3, 6), (0, 2)])
    assert [row.tolist() for row in column.list()] == [[10, 11], [0, 1], [13, 14, 15], [10, 11]]
    assert column.list()[0].data_ptr() == column.list()[3].data_ptr()


def test_a_child_of_a_shared_struct_has_a_row_for_each_row_of_the_block() -> None:
    block = encode({"s": Shared({"x": [torch.arange(4), torch.arange(6)], "y": ["a", "b"]}, [1, 0, 1, 1])})
    assert block.layout.lengths("s.x", np.arange(4)).tolist() == [6, 4, 6, 6]
    assert block.layout.row_lengths("s.x").tolist() == [6, 4, 6, 6]
    assert [len(row) for row in block.read("s.x", rows=[3, 1]).list()] == [6, 4]
    assert block.read("s.y", rows=[1, 2]).list() == ["a", "b"]
    column = read(block, "s", [0, 1, 2, 3], [(4, 6), (0, 2), (5, 6), (0, 0)], path="s.x")
    assert [row["x"].tolist() for row in column.list()] == [[4, 5], [0, 1], [5], []]
    assert [row["y"] for row in column.list()] == ["b", "a", "b", "b"]


def test_a_child_of_a_shared_struct_in_another_has_a_row_for_each_row_of_the_block() -> None:
    inner = {"y": [torch.arange(length) for length in (1, 2, 3)]}
    block = encode({"s": Shared({"x": Shared(inner, [2, 0, 1, 2])}, [3, 1, 1, 0, 2])})
    assert block.layout.lengths("s.x.y", np.arange(5)).tolist() == [3, 1, 1, 3, 2]
    assert [len(row) for row in block.read("s.x.y").list()] == [3, 1, 1, 3, 2]


def test_few_bytes_are_asked_for() -> None:
    """Rows of 1 MB have units of 16 KiB: a range of 300,000 bytes lies in at most 20 of them."""
    block = encode({"x": [torch.zeros(1000, 1000, dtype=torch.uint8) for _ in range(3)]})
    node, rows = block.layout.node("x"), np.array([1])
    assert node.streams[0].unit == 16384
    ranges = block.layout.ranges("x", rows, [Clip(node, np.array([500]), np.array([800]), True)])
    assert len(ranges) == 1
    assert 300_000 <= ranges[0, 1] <= 20 * 16384
    nothing = block.layout.ranges("x", rows, [Clip(node, np.array([500]), np.array([500]), True)])
    assert nothing.size == 0


def test_a_damaged_byte_within_the_range_names_its_row_and_one_outside_is_not_seen() -> None:
    block = encode({"x": torch.arange(4 * 32768, dtype=torch.int32).view(4, 32768)})  # four units of 32 KiB a row
    stream = block.layout.node("x").streams[0]
    block.bytes[stream.offset + 2 * 131072 + 65536] ^= 1  # row 2, item 16384
    assert read(block, "x", [1, 2], [(0, 8192)] * 2, uniform=True).value[1, 5].item() == 2 * 32768 + 5
    with pytest.raises(CorruptBlock, match="'x', row 2 ") as caught:
        read(block, "x", [1, 2], [(16300, 16400)] * 2, uniform=True)
    assert list(caught.value.rows) == [1]


@pytest.mark.parametrize("column", [torch.arange(2), ["a", "b"], [1, 2], {"y": torch.arange(2)}])
def test_rows_without_a_leading_dimension(column: Any) -> None:
    block = encode({"x": column})
    with pytest.raises(InvalidArgument, match="no length"):
        block.layout.lengths("x", np.array([0]))
