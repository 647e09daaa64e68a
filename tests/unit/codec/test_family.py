"""Small blocks that are parsed and read together: never otherwise than one by one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.test_corruption import resealed
from tests.unit.codec.values import identical
from tqclient.codec import Layout, Part, Shared, allocate, gather, read_column
from tqclient.codec.directory import SIZE_AT, Node, Stream
from tqclient.codec.family import FAMILY_MIN, KINDS_MAX, ROWS_MAX, STREAM_BYTES_MAX, families
from tqclient.codec.header import aligned
from tqclient.codec.scattered import Scattered
from tqclient.errors import CorruptBlock, InvalidArgument, UnsupportedVersion

FIELDS = ("dense", "even", "tokens", "wide", "uid", "raw", "meta", "mm", "flag")
COUNT = 12
ROWS = (1, 3)
"""Of a block."""


def row_of(number: int) -> dict[str, Any]:
    """Of a different length in each field; of "wide" in another number of checksums, "long" takes counts of 2 bytes."""
    return {
        "dense": torch.tensor([[number, -number]]),
        "even": torch.full((1, 512), number),  # a unit a row
        "tokens": [torch.arange(200 + number * 37 % 250) + number],
        "wide": [torch.full((100 + 397 * number % 6000, 3), number)],
        "uid": [f"row {number} é" * (1 + number % 3)],
        "raw": [b"\0\xff" * (1 + number % 4)],
        "meta": [[number, torch.full((1 + number % 3, 2), float(number)), ("a", None)]],
        "mm": [{"pixels": torch.arange(1 + number % 6), "text": str(number)}],
        "flag": torch.tensor([number % 2 == 0]),
    }


def numbers_of(block: int, rows: int) -> range:
    """Of the rows of a block."""
    return range(block * rows, (block + 1) * rows)


def encoded(rows: int = 1, count: int = COUNT) -> list[Block]:
    return [encode(put_of([row_of(number) for number in numbers_of(block, rows)])) for block in range(count)]


def put_of(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Joins rows to the values of one put."""
    return {
        field: torch.cat([row[field] for row in rows])
        if isinstance(first, torch.Tensor)
        else [value for row in rows for value in row[field]]
        for field, first in rows[0].items()
    }


def streams_of(node: Node) -> Iterator[Stream]:
    yield from node.streams
    for child in node.children:
        yield from streams_of(child)


def told(stream: Stream) -> tuple[Any, ...]:
    counts = None if stream.counts is None else stream.counts.tolist()
    return stream.offset, stream.length, stream.unit, stream.item_bytes, counts, stream.checksums.tolist()


def assert_parsed_alike(layout: Layout, directory: bytes) -> None:
    """A member of a family says what its directory says, as do the family's numbers."""
    alone = Layout.parse(directory)
    assert alone.family is None
    assert (layout.rows, layout.size_bytes, layout.fields) == (alone.rows, alone.size_bytes, alone.fields)
    assert layout.payload.tolist() == alone.payload.tolist()
    assert layout.family is not None
    family, block = layout.family
    numbers = iter(family.streams)
    for field in alone.fields:
        expected, found = alone.node(field), layout.node(field)
        assert (expected.kind, expected.form, expected.flags) == (found.kind, found.form, found.flags)
        assert family.fields[field].form == expected.form
        for one, other in zip(streams_of(expected), streams_of(found), strict=True):
            assert told(one) == told(other)
            own = next(numbers)
            counts = None if own.counts is None else own.counts[block].tolist()
            checksums = own.checksums[own.firsts[block] : own.firsts[block + 1]].tolist()
            of_family = (own.offsets[block], own.lengths[block], own.units[block], one.item_bytes, counts)
            assert (*of_family, checksums) == told(one)
    assert next(numbers, None) is None


@pytest.mark.parametrize("rows", ROWS)
def test_blocks_that_differ_in_numbers_alone_are_a_family(rows: int) -> None:
    """Whatever sizes their directories have: by the number of checksums, and the bytes that a count takes."""
    blocks = encoded(rows)
    streams = [block.layout.node(field).streams[0] for field in ("wide", "tokens") for block in blocks]
    assert len({len(stream.checksums) for stream in streams[:COUNT]}) > 1
    assert len({block.layout.payload[0, 0] for block in blocks}) > 1
    widths = {stream.counts.itemsize for stream in streams[COUNT:] if stream.counts is not None}
    assert widths == ({1, 2} if rows == 1 else {2})
    layouts = Layout.parse_many([block.directory for block in blocks])
    assert len({id(layout.family[0]) for layout in layouts if layout is not None and layout.family}) == 1
    for layout, block in zip(layouts, blocks, strict=True):
        assert layout is not None
        assert_parsed_alike(layout, block.directory)


DIRECTORIES = {rows: [block.directory for block in encoded(rows)] for rows in ROWS}


def numbers_in(directory: bytes) -> list[int]:
    """Where members may differ, and a few places where they may not."""
    layout = Layout.parse(directory)
    streams = [stream for field in FIELDS for stream in streams_of(layout.node(field))]
    return [position for stream in streams for position in range(stream.entry, stream.entry_end)]


@given(st.data())
def test_what_parse_refuses_is_in_no_family_and_spares_the_others(data: st.DataObject) -> None:
    """A hostile writer's checksum is right."""
    directories = list(DIRECTORIES[data.draw(st.sampled_from(ROWS))])
    victim = data.draw(st.integers(0, COUNT - 1))
    numbers = numbers_in(directories[victim])
    changed = bytearray(directories[victim])
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.one_of(st.integers(0, len(changed) - 9), st.sampled_from(numbers)))
        changed[position] = data.draw(st.sampled_from([0, 1, 12, 127, 128, 255, changed[position] ^ 1]))
    cut = data.draw(st.one_of(st.just(len(changed)), st.integers(0, len(changed))))
    directories[victim] = resealed(bytes(changed[:cut])) if data.draw(st.booleans()) else bytes(changed[:cut])
    layouts = Layout.parse_many(directories)
    for index, (layout, directory) in enumerate(zip(layouts, directories, strict=True)):
        if index != victim:
            assert layout is not None
            assert_parsed_alike(layout, directory)
        elif layout is not None:
            assert_parsed_alike(layout, directory)  # raises where it must not have been taken in
        else:
            try:
                Layout.parse(directory)
            except (CorruptBlock, UnsupportedVersion):
                continue


def outside_of_a_family(directory: bytes, rows: int) -> None:
    """Asserts that a directory is refused, and that a family does not take it for one of its own."""
    layouts = Layout.parse_many([*DIRECTORIES[rows], resealed(directory)])
    assert layouts[-1] is None
    assert all(layout is not None for layout in layouts[:-1])
    with pytest.raises(CorruptBlock):
        Layout.parse(resealed(directory))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize(
    ("at", "form", "change"),
    [
        (0, "<Q", lambda offset: offset + 64),
        (0, "<Q", lambda offset: offset + 2**63),
        (8, "<Q", lambda length: length + 1),
        (8, "<Q", lambda length: length - 1),
        (8, "<Q", lambda length: length + 2**40),
        (8, "<Q", lambda length: length + 2**63),
        (16, "<B", lambda width: width + 1),
        (16, "<B", lambda width: 8 if width else 1),
        (16, "<B", lambda _: 255),
        (17, "<B", lambda _: 11),
        (17, "<B", lambda _: 18),
        (17, "<B", lambda _: 255),
        (24, "<B", lambda count: count ^ 1),
        (24, "<B", lambda count: count ^ 128),
    ],
)
def test_a_number_that_cannot_be_is_in_no_family(field: str, at: int, form: str, change: Any, rows: int) -> None:
    whole = DIRECTORIES[rows][2]
    directory = bytearray(whole)
    for stream in streams_of(Layout.parse(whole).node(field)):
        if at == 24 and stream.counts is None:
            continue
        (before,) = struct.unpack_from(form, directory, stream.entry + at)
        struct.pack_into(form, directory, stream.entry + at, change(before))
        outside_of_a_family(bytes(directory), rows)
        struct.pack_into(form, directory, stream.entry + at, before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("change", [-1, 1])
def test_a_unit_of_which_there_are_not_as_many_is_in_no_family(change: int, rows: int) -> None:
    directory = bytearray(DIRECTORIES[rows][2])
    (stream,) = streams_of(Layout.parse(DIRECTORIES[rows][2]).node("wide"))
    directory[stream.entry + 17] += change
    outside_of_a_family(bytes(directory), rows)


@pytest.mark.parametrize("field", ["tokens", "uid", "dense", "meta"])
def test_lengths_that_fit_each_other_and_not_the_block_are_in_no_family(field: str) -> None:
    """A count and a length that agree, in as many units; what follows lies where it would, or does not."""
    whole = DIRECTORIES[1][2]
    stream = Layout.parse(whole).node(field).streams[0]
    for items in (1, 64):
        directory = bytearray(whole)
        if stream.counts is not None:
            form = "<H" if stream.counts.itemsize == 2 else "<B"
            struct.pack_into(form, directory, stream.entry + 24, int(stream.counts[0]) + items)
        struct.pack_into("<Q", directory, stream.entry + 8, stream.length + items * stream.item_bytes)
        if aligned(stream.length) != aligned(stream.length + items * stream.item_bytes) or field == "dense":
            outside_of_a_family(bytes(directory), 1)
    for size in (-64, 64, 2**50):
        directory = bytearray(whole)
        (before,) = struct.unpack_from("<Q", directory, SIZE_AT)
        struct.pack_into("<Q", directory, SIZE_AT, before + size)
        outside_of_a_family(bytes(directory), 1)


def test_no_product_of_a_hostile_count_wraps() -> None:
    """2^62 items of 4 bytes are no bytes at all, modulo 2^64; of a width of 8, which only a hostile writer has here."""
    values = {"x": [torch.zeros(0)]}
    block = encode(values)
    stream = block.layout.node("x").streams[0]
    wide = bytearray(block.directory[: stream.entry + 24] + bytes(8) + block.directory[stream.entry + 25 :])
    wide[stream.entry + 16] = 8
    size = -(-(64 + len(wide)) // 64) * 64
    struct.pack_into("<Q", wide, stream.entry, size)
    struct.pack_into("<Q", wide, SIZE_AT, size)
    fine = resealed(bytes(wide))
    assert Layout.parse(fine).row_lengths("x").tolist() == [0]
    struct.pack_into("<Q", wide, stream.entry + 24, 2**62)
    hostile = resealed(bytes(wide))
    with pytest.raises(CorruptBlock, match="longer than any block"):
        Layout.parse(hostile)
    found = families([fine] * FAMILY_MIN + [hostile])
    assert [each is not None for each in found] == [True] * FAMILY_MIN + [False]


def of_one_stream(block: Block, length: int, width: int, counts: Sequence[int]) -> bytes:
    """The block's directory, with other numbers for its one stream; the checksum is right."""
    entry, unit = block.layout.node("x").streams[0].entry, 4096
    told = b"".join(count.to_bytes(width, "little") for count in counts) + bytes(8 * -(-length // unit))
    size = aligned(64 + entry + 24 + len(told) + 8)
    parts = [block.directory[:SIZE_AT], struct.pack("<Q", aligned(size + length)), block.directory[SIZE_AT + 8 : entry]]
    parts += [struct.pack("<QQBBHI", size, length, width, 12, 0, 0), told]
    return resealed(b"".join(parts) + bytes(8))


def taken_in(like: bytes, directory: bytes) -> bool:
    """Whether a family takes a directory in, as it must exactly where `parse` does."""
    *others, last = families([like] * FAMILY_MIN + [directory])
    assert None not in others
    try:
        Layout.parse(directory)
    except CorruptBlock:
        assert last is None
    return last is not None


@pytest.mark.parametrize(
    ("length", "width", "counts", "right"),
    [
        (12, 1, [12, 0, 0, 0], True),
        (12, 8, [3, 3, 3, 3], True),
        (12, 1, [12, 12, 0, 0], False),
        (12, 1, [12] * 4, False),
        (12, 1, [2, 3, 3, 3], False),
        (12, 8, [2**63, 2**63, 12, 0], False),  # 12, modulo 2^64
        (0, 3, [0] * 4, False),
        (0, 0, [0] * 4, False),
        (0, 1, [0] * 4, True),
        (STREAM_BYTES_MAX, 8, [STREAM_BYTES_MAX, 0, 0, 0], False),
    ],
)
def test_counts_are_those_of_the_stream(length: int, width: int, counts: list[int], right: bool) -> None:
    block = encode({"x": [torch.zeros(3, dtype=torch.uint8)] * 4})
    assert taken_in(block.directory, of_one_stream(block, length, width, counts)) == right


def test_no_product_of_hostile_counts_wraps() -> None:
    """Counts below the stream's length, so many of so large items that their bytes are its length, modulo 2^64."""
    counts, length = [300_015] * 4, 379_424
    item_bytes, left = divmod(2**64 + length, sum(counts))
    assert not left
    assert max(counts) <= length < STREAM_BYTES_MAX
    block = encode({"x": [torch.zeros(0, item_bytes, dtype=torch.uint8)] * 4})
    assert taken_in(block.directory, of_one_stream(block, 0, 1, [0] * 4))
    assert not taken_in(block.directory, of_one_stream(block, length, 8, counts))


def test_a_directory_that_is_too_short_for_what_it_tells_is_in_no_family() -> None:
    """It tells of 128 checksums, and is the last one: nothing lies behind it."""
    block = encode({"x": [torch.zeros(1, 512)], "y": torch.zeros(1)})
    directory = bytearray(block.directory)
    entry = block.layout.node("x").streams[0].entry
    struct.pack_into("<Q", directory, entry + 8, 255 * 2048)
    struct.pack_into("<B", directory, entry + 17, 12)
    struct.pack_into("<B", directory, entry + 24, 255)
    assert not taken_in(block.directory, resealed(bytes(directory)))


def test_a_directory_that_is_damaged_or_tells_less_than_it_has_is_in_no_family() -> None:
    block = encode({"x": torch.zeros(1)})
    longer = resealed(block.directory + b"x")
    assert aligned(64 + len(longer)) == aligned(64 + len(block.directory))
    assert not taken_in(block.directory, longer)
    for position in range(len(block.directory) - 8, len(block.directory)):
        damaged = bytearray(block.directory)
        damaged[position] ^= 1
        assert not taken_in(block.directory, bytes(damaged))


def test_a_damaged_first_one_leaves_a_family_to_the_others() -> None:
    directories = [DIRECTORIES[1][0][:-1] + b"\0", *DIRECTORIES[1][1:]]
    layouts = Layout.parse_many(directories)
    assert layouts[0] is None
    assert all(layout is not None for layout in layouts[1:])


def test_few_blocks_and_those_of_many_rows_or_shared_or_large_values_are_parsed_by_themselves() -> None:
    def found(values: list[dict[str, Any]]) -> list[bool]:
        return [each is not None for each in families([encode(value).directory for value in values])]

    assert found([{"x": torch.zeros(1)}] * (FAMILY_MIN - 1)) == [False] * (FAMILY_MIN - 1)
    assert found([{"x": torch.zeros(1)}] * FAMILY_MIN) == [True] * FAMILY_MIN
    assert found([{"x": torch.zeros(ROWS_MAX)}] * FAMILY_MIN) == [True] * FAMILY_MIN
    assert found([{"x": torch.zeros(ROWS_MAX + 1)}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert found([{"x": torch.zeros(0)}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert found([{"x": Shared([torch.arange(9)], [0, 0])}] * FAMILY_MIN) == [False] * FAMILY_MIN
    large = [{"x": [torch.zeros(STREAM_BYTES_MAX - length, dtype=torch.uint8)]} for length in range(1, FAMILY_MIN + 1)]
    assert found(large) == [True] * FAMILY_MIN
    assert found([{"x": [torch.zeros(STREAM_BYTES_MAX, dtype=torch.uint8)]}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert families([]) == []


def test_families_of_other_columns_are_told_apart() -> None:
    kinds = [[{name: torch.zeros(1)}] * FAMILY_MIN for name in "abcdef"]
    shuffled = [kind[index] for index in range(FAMILY_MIN) for kind in kinds]
    found = families([encode(values).directory for values in shuffled])
    names = [None if each is None else next(iter(each[0].fields)) for each in found]
    expected = [name if index < KINDS_MAX else None for index, name in enumerate("abcdef")]
    assert names == expected * FAMILY_MIN


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


ARENAS = {rows: Arena(encoded(rows)) for rows in ROWS}
ROW_COUNTS = st.sampled_from(ROWS)


@given(picked=st.lists(st.integers(0, COUNT + 1), min_size=1, max_size=COUNT + 4), alike=st.booleans(), rows=ROW_COUNTS)
def test_whatever_is_picked_comes_in_its_order(picked: list[int], alike: bool, rows: int) -> None:
    """Of a family, and of two blocks that are no members; some of them twice."""
    others = [{**row_of(number), "more": torch.zeros(1)} for number in (5000, 5001)]
    arena = ARENAS[rows] if alike else Arena([*encoded(rows), *map(encode, others)])
    numbers = [*(list(numbers_of(block, rows)) for block in range(COUNT)), [5000], [5001]]
    picked = [index for index in picked if not alike or index < COUNT] or [0]
    parts = gather(arena.parts(picked))
    for field in FIELDS:
        column = read_column(field, parts, copy=True, allocate=allocate)
        expected = [row_of(number)[field][0] for index in picked for number in numbers[index]]
        assert identical(expected, column.list()), field


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


def test_rows_of_a_member_in_another_order_are_read_by_themselves() -> None:
    arena = Arena(encoded(3))
    parts = arena.parts([0, 1, 2, 3])
    parts[1] = replace(parts[1], rows=np.array([2, 0]))
    parts[2] = replace(parts[2], rows=np.array([1]))
    numbers = [0, 1, 2, 5, 3, 7, 9, 10, 11]
    for field in FIELDS:
        column = read_column(field, parts, copy=True, allocate=allocate)
        assert identical([row_of(number)[field][0] for number in numbers], column.list()), field


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
