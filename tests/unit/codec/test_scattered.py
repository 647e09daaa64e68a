"""Rows of many small blocks that are read as if they were those of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.small_blocks import (
    COUNT,
    DIRECTORIES,
    FIELDS,
    ROWS,
    SHARED_FIELDS,
    encoded,
    numbers_of,
    put_of,
    row_of,
    streams_of,
)
from tests.unit.codec.values import identical
from tqclient.codec import Clip, Layout, Part, allocate, gather, read_column, reading
from tqclient.codec.scattered import Scattered
from tqclient.errors import CorruptBlock, InvalidArgument

WANTED = ([1], [2, 0], [1, 2])


class Arena:
    """One memory with all of the blocks in it."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.origins = (64 * np.cumsum([1, *(block.bytes.size // 64 + 1 for block in blocks)])).tolist()
        self.memory = allocate(self.origins[-1])
        self.memory[:] = 0xA5
        self.fetched = 0
        self._parts = []
        layouts = Layout.parse_many([block.directory for block in blocks])
        for origin, block, layout in zip(self.origins, blocks, layouts, strict=False):
            self.memory[origin : origin + block.bytes.size] = block.bytes
            self._parts.append(self._part(layout or block.layout, origin))

    def _part(self, layout: Layout, origin: int) -> Part:
        def fetch(offset: int, length: int) -> NDArray[np.uint8]:
            self.fetched += 1
            return self.memory[origin + offset : origin + offset + length]

        return Part(layout, np.arange(layout.rows), fetch, memory=self.memory, origin=origin)

    def parts(self, picked: Sequence[int]) -> list[Part]:
        return [self._parts[index] for index in picked]

    def only(self, parts: Sequence[Part], fields: Sequence[str]) -> list[Part]:
        """The same parts over a memory that lacks whatever their layouts do not ask for."""
        memory = np.full_like(self.memory, 0x5A)
        for part in parts:
            for offset, length in part.layout.needed(fields, part.rows, part.clips).tolist():
                start = part.origin + offset
                memory[start : start + length] = self.memory[start : start + length]
        return [replace(part, memory=memory) for part in parts]


ARENAS = {rows: Arena(encoded(rows)) for rows in ROWS}


@given(picked=st.lists(st.integers(0, COUNT + 1), min_size=1, max_size=COUNT + 4), rows=st.sampled_from(ROWS))
def test_whatever_is_picked_comes_in_its_order(picked: list[int], rows: int) -> None:
    """Of a family, and of two blocks that are no members; some of them twice."""
    others = [{**row_of(number), "more": torch.zeros(1)} for number in (5000, 5001)]
    arena = Arena([*encoded(rows), *map(encode, others)])
    numbers = [*(list(numbers_of(block, rows)) for block in range(COUNT)), [5000], [5001]]
    parts = gather(arena.parts(picked))
    for field in FIELDS:
        column = read_column(field, parts, copy=True, allocate=allocate)
        expected = [row_of(number)[field][0] for index in picked for number in numbers[index]]
        assert identical(expected, column.list()), field


PICKS = st.lists(st.tuples(st.integers(0, COUNT - 1), st.lists(st.integers(0, 2), max_size=4)), min_size=1, max_size=8)


@given(picked=PICKS, fields=st.lists(st.sampled_from(FIELDS), min_size=1, unique=True), verify=st.booleans())
def test_whichever_rows_are_picked_come_in_their_order(
    picked: list[tuple[int, list[int]]], fields: list[str], verify: bool
) -> None:
    """Of blocks of three rows some, in any order, twice, or none; with no other bytes at hand than they need."""
    arena = ARENAS[3]
    parts = [replace(arena.parts([block])[0], rows=np.array(rows, np.int64)) for block, rows in picked]
    numbers = [numbers_of(block, 3)[row] for block, rows in picked for row in rows]
    gathered = gather(arena.only(parts, fields))
    assert any(each.picks for each in gathered) == (len({block for block, _ in picked}) > 1)
    for field in fields:
        column = read_column(field, gathered, copy=True, allocate=allocate, verify=verify)
        assert identical([row_of(number)[field][0] for number in numbers], column.list()), field


def test_rows_that_others_come_between_are_no_run() -> None:
    """The second block is no member: without it, rows 1 and 2 of the first would lie side by side."""
    arena = Arena([*encoded(3), encode({**row_of(5000), "more": torch.zeros(1)})])
    first, other, between = arena.parts([0, 1, COUNT])
    picked = [replace(first, rows=np.array([0, 1])), between, replace(first, rows=np.array([2])), other]
    for field in FIELDS:
        column = read_column(field, gather(picked), copy=True, allocate=allocate)
        assert identical([row_of(number)[field][0] for number in (0, 1, 5000, 2, 3, 4, 5)], column.list()), field


@given(
    block=st.integers(0, COUNT - 1),
    rows=st.lists(st.integers(0, 2), max_size=4),
    fields=st.lists(st.sampled_from(FIELDS), min_size=1, unique=True),
)
def test_rows_of_a_member_need_what_they_need_of_a_block_by_itself(
    block: int, rows: list[int], fields: list[str]
) -> None:
    asked = []
    layout = ARENAS[3].parts([block])[0].layout
    assert layout.family
    for each in (layout, Layout.parse(DIRECTORIES[3][block])):
        ranges = each.needed(fields, np.array(rows, np.int64)).tolist()
        asked.append({byte for offset, length in ranges for byte in range(offset, offset + length)})
        assert all(length > 0 for _, length in ranges)
    extra = asked[0] ^ asked[1]  # padding between two streams may be asked for, or not
    streams = [stream for field in FIELDS for stream in streams_of(layout.node(field))]
    assert not any(byte in extra for s in streams for byte in range(s.offset, s.offset + s.length))
    with pytest.raises(InvalidArgument, match="rows 3 to 3 of a block that has 3"):
        layout.needed(fields, np.array([3]))


def test_rows_out_of_bounds_are_refused() -> None:
    first, second = ARENAS[3].parts([0, 1])
    for rows in ([3], [0, -1]):
        with pytest.raises(InvalidArgument, match="of a block that has 3"):
            gather([first, replace(second, rows=np.array(rows))])


CLIPPED = ("dense", "even", "tokens", "wide", "mm.pixels", "image", "scene.pixels")


def value_of(number: int, path: str) -> torch.Tensor:
    field, _, key = path.partition(".")
    value = row_of(number)[field][0]
    tensor: torch.Tensor = value[key] if key else value
    return tensor


def clipped(part: Part, rows: list[int], numbers: Sequence[int], path: str, shares: Sequence[float]) -> Part:
    """A part of which between two shares of each row are wanted."""
    wanted = np.array(rows, np.int64)
    lengths = part.layout.lengths(path, wanted)
    assert lengths.tolist() == [len(value_of(numbers[row], path)) for row in rows]
    starts, stops = (np.floor(lengths * share).astype(np.int64) for share in sorted(shares))
    return replace(part, rows=wanted, clips=(Clip(part.layout.column(path).inner, starts, stops, uniform=False),))


@given(
    picked=PICKS,
    path=st.sampled_from(CLIPPED),
    shares=st.tuples(*[st.sampled_from([0, 0.1, 0.25, 0.5, 0.9, 1])] * 2),
    verify=st.booleans(),
)
def test_ranges_of_rows_are_read_from_no_more_bytes_than_they_need(
    picked: list[tuple[int, list[int]]], path: str, shares: tuple[float, float], verify: bool
) -> None:
    arena, field = ARENAS[3], path.partition(".")[0]
    parts = [clipped(arena.parts([b])[0], rows, numbers_of(b, 3), path, shares) for b, rows in picked]
    gathered = gather(arena.only(parts, [field]))
    assert any(each.picks for each in gathered) == (len({block for block, _ in picked}) > 1)
    numbers = [numbers_of(block, 3)[row] for block, rows in picked for row in rows]
    ranges = [range(*(int(len(value_of(number, path)) * share) for share in sorted(shares))) for number in numbers]
    expected = [value_of(number, path)[wanted] for number, wanted in zip(numbers, ranges, strict=True)]
    column = read_column(field, gathered, copy=True, allocate=allocate, verify=verify)
    found = column.list()
    assert identical(expected, [row["pixels"] for row in found] if "." in path else found)


@pytest.mark.parametrize("path", CLIPPED)
def test_a_range_of_a_member_needs_what_it_needs_of_a_block_by_itself(path: str) -> None:
    for rows in ([0], [2, 1], [0, 1, 2]):
        part = clipped(ARENAS[3].parts([4])[0], rows, numbers_of(4, 3), path, (0.25, 0.5))
        alone = Layout.parse(DIRECTORIES[3][4])
        clips = tuple(replace(clip, node=alone.node(path).inner) for clip in part.clips)
        fields = [path.partition(".")[0]]
        asked = [part.layout.needed(fields, part.rows, part.clips), alone.needed(fields, part.rows, clips)]
        assert asked[0].tolist() == asked[1].tolist()
        assert alone.lengths(path, part.rows).tolist() == part.layout.lengths(path, part.rows).tolist()


def test_rows_that_have_no_length_have_none_in_a_family() -> None:
    layout = ARENAS[3].parts([0])[0].layout
    for field in ("uid", "meta", "mm", "prompt"):
        with pytest.raises(InvalidArgument, match="its rows have no length"):
            layout.lengths(field, np.array([0]))
    with pytest.raises(InvalidArgument, match="no field 'y'"):
        layout.lengths("y", np.array([0]))
    strided = torch.nested.as_nested_tensor([torch.zeros(2, 3), torch.zeros(1, 4)], layout=torch.strided)
    varying = Layout.parse_many([encode({"x": strided}).directory] * COUNT)[0]
    assert varying is not None
    with pytest.raises(InvalidArgument, match="its rows have no length"):
        varying.lengths("x", np.array([0]))


def test_rows_of_a_family_that_share_a_value_may_want_different_ranges_of_it() -> None:
    """Rows 0 and 1, 6 and 7, 10 and 11 have an image in common."""
    ends = {0: [(5, 9), (0, 3), (0, 1)], 2: [(1, 2), (2, 4), (7, 7)], 3: [(1, 2), (3, 8), (0, 0)]}
    parts = []
    for block, wanted in ends.items():
        (part,) = ARENAS[3].parts([block])
        starts, stops = np.array(wanted).T
        parts.append(replace(part, clips=(Clip(part.layout.column("image").inner, starts, stops, uniform=False),)))
    (gathered,) = gather(ARENAS[3].only(parts, ["image"]))
    found = read_column("image", [gathered], copy=True, allocate=allocate).list()
    wanted_rows = [(3 * block + row, pair) for block, pairs in ends.items() for row, pair in enumerate(pairs)]
    assert identical([value_of(number, "image")[start:stop] for number, (start, stop) in wanted_rows], found)


def test_one_range_of_all_rows_leaves_a_dense_column_dense() -> None:
    parts = []
    for part in ARENAS[3].parts([4, 2]):
        ends = np.full(3, 1), np.full(3, 2)
        parts.append(replace(part, clips=(Clip(part.layout.column("dense"), *ends, uniform=True),)))
    (gathered,) = gather(parts)
    column = read_column("dense", [gathered], copy=True, allocate=allocate)
    assert column.form.kind == "dense"
    assert column.value.tolist() == [[-number] for block in (4, 2) for number in numbers_of(block, 3)]


@pytest.mark.parametrize("path", ["wide", "even", "scene.pixels", "image"])
def test_damage_of_a_range_names_its_row(path: str) -> None:
    """And damage outside of what a range needs does no harm."""
    blocks, field = encoded(3), path.partition(".")[0]
    arena = Arena(blocks)
    shares = [(0, 0.3), (0.2, 0.4), (0.5, 1)]
    parts = [
        clipped(arena.parts([b])[0], [2, 1], numbers_of(b, 3), path, s) for b, s in zip([2, 5, 7], shares, strict=True)
    ]
    needed = np.zeros(blocks[5].bytes.size, bool)
    for offset, length in parts[1].layout.needed([field], parts[1].rows, parts[1].clips).tolist():
        needed[offset : offset + length] = True
    stream = blocks[5].layout.node(path).inner.streams[0]
    for position in range(stream.offset, stream.offset + stream.length, 256):
        arena.memory[arena.origins[5] + position] ^= 1
        if needed[position]:
            with pytest.raises(CorruptBlock, match="of its block") as caught:
                read_column(field, gather(parts), copy=True, allocate=allocate)
            assert caught.value.rows[0] in (2, 3)
        else:
            read_column(field, gather(parts), copy=True, allocate=allocate)
        arena.memory[arena.origins[5] + position] ^= 1


def test_of_one_block_there_is_a_view() -> None:
    for rows in ([0, 1, 2], [1, 2]):
        part = replace(ARENAS[3].parts([4])[0], rows=np.array(rows))
        column = read_column("tokens", [part], copy=False, allocate=allocate)
        assert column.is_view
        assert identical([row_of(numbers_of(4, 3)[row])["tokens"][0] for row in rows], column.list())


@pytest.mark.parametrize("shares", [False, True])
def test_what_is_large_is_read_by_itself(monkeypatch: pytest.MonkeyPatch, shares: bool) -> None:
    """A row of many may need all that they share, however large that is."""
    rows = [[row_of(number) for number in numbers_of(block, 3)] for block in range(COUNT)]
    arena = Arena([encode({f: put_of(own)[f] for f in FIELDS if shares or f not in SHARED_FIELDS}) for own in rows])
    sizes = [part.layout.size_bytes for part in arena.parts(range(COUNT))]
    monkeypatch.setattr(reading, "JOINED_BYTES_MAX", sorted(sizes)[COUNT // 2])
    gathered = gather(arena.parts(range(COUNT)))
    assert [each.picks is None for each in gathered] == [False] + [True] * (COUNT - COUNT // 2 - 1)
    one_row_of_each = [replace(part, rows=np.array([1])) for part in arena.parts(range(COUNT))]
    apart = len(gathered) - 1 if shares else 0
    assert [len(each.rows) for each in gather(one_row_of_each)] == [COUNT - apart, *[1] * apart]
    for parts in (gathered, gather(one_row_of_each)):
        column = read_column("tokens", parts, copy=True, allocate=allocate)
        whole = parts is gathered
        numbers = [n for block in range(COUNT) for n in (numbers_of(block, 3) if whole else [3 * block + 1])]
        assert identical([row_of(number)["tokens"][0] for number in numbers], column.list())


@pytest.mark.parametrize("rows", ROWS)
def test_a_family_is_read_as_one_block_without_asking_for_each(rows: int) -> None:
    arena = Arena(encoded(rows))
    order = [*range(COUNT - 1, 0, -2), *range(0, COUNT, 2)]
    numbers = [number for index in order for number in numbers_of(index, rows)]
    (gathered,) = gather(arena.parts(order))
    assert all(isinstance(stream, Scattered) for stream in gathered.group("tokens").node.streams)
    for field in FIELDS:
        column = read_column(field, [gathered], copy=False, allocate=allocate)
        assert identical([row_of(number)[field][0] for number in numbers], column.list()), field
        assert not column.is_view
    assert read_column("mm.text", [gathered], copy=True, allocate=allocate).list() == list(map(str, numbers))
    assert arena.fetched == 0
    with pytest.raises(InvalidArgument, match="no field 'y'"):
        read_column("y", [gathered], copy=True, allocate=allocate)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("field", ["dense", "even", "tokens", "wide", "uid", "raw", "meta", "mm.pixels", "mm.text"])
def test_damage_names_the_row_that_has_it(field: str, rows: int) -> None:
    """The first row, that is, of those that share the damaged unit."""
    blocks = encoded(rows)
    arena = Arena(blocks)
    parts = gather(arena.parts([3, 9, 5, 7]))
    name = field.split(".", maxsplit=1)[0]
    for stream in blocks[5].layout.node(field).streams:
        for position in (0, stream.length - 1):
            unit_start = position // stream.unit * stream.unit
            row = next(row for row in range(rows) if stream.bounds()[row + 1] > unit_start)
            arena.memory[arena.origins[5] + stream.offset + position] ^= 0x20
            with pytest.raises(CorruptBlock, match=rf"field '{field}', row {row} of its block.*checksum") as caught:
                read_column(name, parts, copy=True, allocate=allocate)
            assert caught.value.rows == (2 * rows + row,)
            if field == "dense":
                read_column(field, parts, copy=True, allocate=allocate, verify=False)
            arena.memory[arena.origins[5] + stream.offset + position] ^= 0x20
    expected = [row_of(number)[name][0] for number in numbers_of(5, rows)]
    assert identical(expected, read_column(name, parts, copy=True, allocate=allocate).list()[2 * rows : 3 * rows])


@pytest.mark.parametrize("field", ["meta", "prompt"])
def test_records_that_make_no_sense_name_their_row(field: str) -> None:
    """Where checksums are right, or not looked at."""
    blocks = encoded(3)
    arena = Arena(blocks)
    parts = gather([replace(part, rows=np.array([2, 1])) for part in arena.parts([3, 6, 5])])
    node = blocks[6].layout.node(field)
    skeletons = node.inner.streams[0]
    number = int(node.picks()[1]) if field in SHARED_FIELDS else 1
    start = arena.origins[6] + skeletons.offset + int(skeletons.bounds()[number])
    arena.memory[start] = 0xC1  # which msgpack never uses
    with pytest.raises(CorruptBlock, match=rf"'{field}', row {number} of its block") as caught:
        read_column(field, parts, copy=True, allocate=allocate, verify=False)
    assert caught.value.rows == (3,)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("field", ["image", "scene.pixels", "scene.text", "prompt"])
def test_damage_of_a_shared_value_names_the_first_row_that_has_it(field: str, rows: int) -> None:
    blocks = encoded(rows)
    arena = Arena(blocks)
    parts = gather(arena.parts([3, 9, 5, 7]))
    name = field.split(".", maxsplit=1)[0]
    index = blocks[5].layout.node(name).picks().tolist()
    for stream in blocks[5].layout.node(field).inner.streams:
        for position in {*range(0, stream.length, 61), *range(stream.length)[-1:]}:
            unit_start = position // stream.unit * stream.unit
            value = next(value for value in range(stream.rows) if stream.bounds()[value + 1] > unit_start)
            row = next(place for place, number in enumerate(index) if number == value)
            arena.memory[arena.origins[5] + stream.offset + position] ^= 0x20
            with pytest.raises(CorruptBlock, match=rf"field '{field}', row {value} of its block.*checksum") as caught:
                read_column(name, parts, copy=True, allocate=allocate)
            assert caught.value.rows == (2 * rows + row,)
            arena.memory[arena.origins[5] + stream.offset + position] ^= 0x20


@pytest.mark.parametrize("field", ["dense", "even", "tokens", "wide", "uid"])
def test_damage_beside_the_rows_that_are_wanted_names_the_first_of_them_in_its_unit(field: str) -> None:
    """What is wanted is not told from what lies in the same unit; what lies in other units does no harm."""
    blocks = encoded(3)
    arena = Arena(blocks)
    parts = [replace(part, rows=np.array(rows)) for part, rows in zip(arena.parts([2, 5, 7]), WANTED, strict=True)]
    for place, rows, block in ((1, WANTED[1], 5), (3, WANTED[2], 7)):
        (stream,) = streams_of(blocks[block].layout.node(field))
        bounds = stream.bounds()
        for position in range(0, stream.length, 1024):
            start = position // stream.unit * stream.unit
            inside = [row for row in rows if bounds[row] < start + stream.unit and bounds[row + 1] > start]
            arena.memory[arena.origins[block] + stream.offset + position] ^= 1
            if not inside:
                read_column(field, parts, copy=True, allocate=allocate)
            else:
                with pytest.raises(CorruptBlock, match=f"row {inside[0]} of its block") as caught:
                    read_column(field, parts, copy=True, allocate=allocate)
                assert caught.value.rows == (place + rows.index(inside[0]),)
            arena.memory[arena.origins[block] + stream.offset + position] ^= 1


def test_members_in_different_memories_are_not_read_as_one() -> None:
    blocks = encoded()
    one, other = Arena(blocks), Arena(blocks)
    mixed = [*one.parts([0, 1]), *other.parts([2]), replace(one.parts([3])[0], memory=None)]
    values = read_column("dense", gather(mixed), copy=True, allocate=allocate).value
    assert values[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("fields", [["dense"], ["tokens", "wide"], ["dense", "uid", "meta"], ["mm"], list(FIELDS)])
def test_the_bytes_of_some_fields_are_all_that_is_asked_for(fields: list[str]) -> None:
    blocks = encoded()
    for block, layout in zip(blocks, Layout.parse_many([block.directory for block in blocks]), strict=True):
        assert layout is not None
        ranges = layout.whole(fields).tolist()
        asked = np.zeros(block.bytes.size, bool)
        for offset, length in ranges:
            assert not asked[offset : offset + length].any()
            asked[offset : offset + length] = True
        assert ranges == sorted(ranges)
        assert len(ranges) == (3 if len(fields) == 3 else 1)  # neighbours, with the padding between them, are one
        for name in FIELDS:
            for stream in streams_of(block.layout.node(name)):
                part = asked[stream.offset : stream.offset + stream.length]
                assert part.all() if name in fields else not part.any()
    layout = Layout.parse_many([block.directory for block in blocks])[0]
    assert layout is not None
    with pytest.raises(InvalidArgument, match="no field 'y'"):
        layout.whole([*fields, "y"])
