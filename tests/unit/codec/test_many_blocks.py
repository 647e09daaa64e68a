"""Many small blocks, as one-row puts leave them, read as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.values import identical
from tqclient.codec import Part, allocate, gather, read_column
from tqclient.errors import CorruptBlock, InvalidArgument

Picks = tuple[list[int], list[tuple[int, list[int]]]]
FIELDS = ("dense", "tokens", "masks", "uid", "raw", "meta", "mm", "shared")


def rows_of(first: int, count: int) -> dict[str, Any]:
    """Rows `first` to `first + count - 1` of what all blocks together hold; each is told from all others."""
    numbers = range(first, first + count)
    return {
        "dense": torch.tensor([[number, -number] for number in numbers]),
        "tokens": [torch.arange(number * 7 % 11) + number for number in numbers],
        "masks": [torch.ones(number % 4, 3, dtype=torch.bool) for number in numbers],
        "uid": [f"row {number} é" * (number % 3) for number in numbers],
        "raw": [b"\0\xff" * (number % 4) for number in numbers],
        "meta": [[number, torch.full((number % 3, 2), float(number)), ("a", None)] for number in numbers],
        "mm": [{"pixels": torch.arange(number % 6), "text": str(number)} for number in numbers],
        "shared": [torch.arange(1000)] * count,
    }


def value_of(field: str, number: int) -> Any:
    return rows_of(number, 1)[field][0]


def large_rows(count: int) -> Block:
    """Rows of 40,000 bytes: of several units each, and beyond what is copied by itself when there are four."""
    return encode({"x": torch.arange(count * 5000).reshape(count, 5000)})


@st.composite
def picks(draw: st.DrawFn) -> Picks:
    """Sizes of blocks; and (block, its rows) in delivery order: whole, in part, shuffled, twice, or not at all."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=2, max_size=8))
    parts: list[tuple[int, list[int]]] = []
    for block in draw(st.permutations(range(len(sizes)))):
        if draw(st.booleans()):
            parts.append((block, list(range(sizes[block]))))
        else:
            parts.append((block, draw(st.lists(st.integers(0, sizes[block] - 1), max_size=4))))
    if draw(st.booleans()):
        parts.append(draw(st.sampled_from(parts)))
    return sizes, parts


@given(picks())
def test_whatever_is_picked_of_many_blocks_comes_in_its_order(drawn: Picks) -> None:
    sizes, picked = drawn
    firsts = np.cumsum([0, *sizes])[:-1].tolist()
    blocks = [encode(rows_of(first, size)) for first, size in zip(firsts, sizes, strict=True)]
    parts = [blocks[block].part(rows) for block, rows in picked]
    gathered = gather(parts)
    numbers = [firsts[block] + row for block, rows in picked for row in rows]
    for field in FIELDS:
        for given_parts in (parts, gathered):
            column = read_column(field, given_parts, copy=True, allocate=allocate)
            assert identical([value_of(field, number) for number in numbers], column.list()), field


def test_a_block_that_is_wanted_whole_is_fetched_by_one_call_a_stream_and_not_looked_at_by_row() -> None:
    asked: list[tuple[int, int]] = []

    def counting(block: Block) -> Part:
        def fetch(offset: int, length: int) -> NDArray[np.uint8]:
            asked.append((offset, length))
            return block.fetch(offset, length)

        return replace(block.part(), fetch=fetch)

    blocks = [encode({"x": [torch.arange(5 + index)], "y": ["text"]}) for index in range(6)]
    parts = gather([counting(block) for block in blocks])
    assert [each.place for each in parts] == list(range(6))
    read_column("x", parts, copy=True, allocate=allocate)
    assert asked == [(block.layout.node("x").streams[0].offset, 40 + 8 * index) for index, block in enumerate(blocks)]


def test_only_all_rows_of_a_block_side_by_side_are_the_whole_of_it() -> None:
    block, other = encode(rows_of(0, 3)), encode(rows_of(3, 1))
    for rows in ([0, 1], [0, 2, 1], [0, 1, 1], [1, 2, 0]):
        assert [each.place for each in gather([other.part(), block.part(rows)])] == [0, -1], rows
    assert [each.place for each in gather([other.part(), block.part()])] == [0, 1]
    assert [each.place for each in gather([block.part([0]), other.part(), block.part([1, 2])])] == [-1, 1]
    with pytest.raises(InvalidArgument, match="rows 3 to 3 of a block that has 3"):
        gather([other.part(), block.part([3])])
    with pytest.raises(InvalidArgument, match="rows -1 to 2 of a block that has 3"):
        gather([other.part(), block.part([-1, 0, 2])])


@pytest.mark.parametrize("field", ["dense", "tokens", "uid", "raw", "meta", "mm.pixels", "mm.text", "shared"])
def test_damage_names_the_row_that_has_it(field: str) -> None:
    blocks = [encode(rows_of(first, 2)) for first in range(1, 9, 2)]
    damaged = blocks[2]
    node = damaged.layout.node(field).inner
    damaged.bytes[node.streams[0].offset] ^= 1
    for parts, place in (
        ([block.part() for block in blocks], 4),
        ([blocks[3].part([1]), damaged.part([0]), blocks[0].part()], 1),
    ):
        with pytest.raises(CorruptBlock, match="checksum") as caught:
            read_column(field.split(".", maxsplit=1)[0], parts, copy=True, allocate=allocate)
        assert caught.value.rows == (place,)


def test_damage_in_any_unit_of_a_large_row_is_found() -> None:
    for count in (1, 4):
        block, other = large_rows(count), large_rows(1)
        stream = block.layout.node("x").streams[0]
        for position in range(0, stream.length, stream.unit):
            block.bytes[stream.offset + position] ^= 0x10
            with pytest.raises(CorruptBlock) as caught:
                read_column("x", [other.part(), block.part()], copy=True, allocate=allocate)
            assert caught.value.rows == (1 + position // 40_000,)
            block.bytes[stream.offset + position] ^= 0x10
        values = read_column("x", [other.part(), block.part()], copy=True, allocate=allocate).value
        assert torch.equal(values[1:], torch.arange(count * 5000).reshape(count, 5000))


def test_values_that_are_none_name_the_row() -> None:
    """Bytes that pass their checksum, and yet are no text and no value."""
    good, bad = encode({"x": ["ab"]}), encode({"x": [b"\xff\xfe"]})
    text_of_bytes = with_kind(bad, good)
    with pytest.raises(CorruptBlock, match="not UTF-8") as caught:
        read_column("x", [good.part(), text_of_bytes, good.part()], copy=True, allocate=allocate)
    assert caught.value.rows == (1,)
    plain, cut = encode({"x": [(1, 2)]}), encode({"x": [b"\x92\x01"]})
    with pytest.raises(CorruptBlock, match="row 0 of its block") as caught:
        read_column("x", [plain.part(), plain.part(), with_kind(cut, plain)], copy=True, allocate=allocate)
    assert caught.value.rows == (2,)


def with_kind(block: Block, like: Block) -> Part:
    """The block's bytes, under a layout that takes them for what `like` holds."""
    layout = block.layout
    node = layout.node("x")
    other = like.layout.node("x")
    nothing = {"length": 0, "counts": np.zeros(1, np.uint8), "checksums": np.empty(0, np.uint64)}
    empty = [replace(stream, **nothing) for stream in other.streams[1:]]  # type: ignore[arg-type]
    object.__setattr__(node, "kind", other.kind)
    object.__setattr__(node, "streams", (node.streams[0], *empty))
    return block.part()


def test_a_damaged_list_among_others_of_other_kinds_is_named_by_its_place() -> None:
    texts, records, raw = (encode({"x": column}) for column in (["a", "b"], [1, (2,)], [b"c", b"d"]))
    records.bytes[records.layout.node("x").streams[0].offset] ^= 1
    parts: Sequence[Part] = [texts.part(), raw.part(), records.part(), texts.part([0])]
    with pytest.raises(CorruptBlock) as caught:
        read_column("x", parts, copy=True, allocate=allocate)
    assert caught.value.rows == (4,)


def test_rows_without_bytes_have_their_lengths() -> None:
    """Whose number no bytes tell: a trailing size of 0."""
    blocks = [encode({"x": [torch.zeros(length, 0)]}) for length in (2, 0, 5)]
    column = read_column("x", [block.part() for block in blocks], copy=True, allocate=allocate)
    assert [tuple(row.shape) for row in column.list()] == [(2, 0), (0, 0), (5, 0)]
