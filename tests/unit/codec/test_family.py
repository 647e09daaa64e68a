"""One-row blocks that are parsed and read together: never otherwise than one by one."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.values import identical
from tqclient.codec import Layout, Part, allocate, gather, read_column
from tqclient.codec.directory import SIZE_AT, Node, Stream
from tqclient.codec.family import FAMILY_MIN, KINDS_MAX, STREAM_BYTES_MAX, Scattered, families
from tqclient.codec.header import aligned
from tqclient.errors import CorruptBlock, InvalidArgument, UnsupportedVersion

FIELDS = ("dense", "tokens", "wide", "uid", "raw", "meta", "mm", "flag")
COUNT = 12


def row_of(number: int) -> dict[str, Any]:
    """Of a different length in each field, but of as many checksums."""
    return {
        "dense": torch.tensor([[number, -number]]),
        "tokens": [torch.arange(256 + number * 37 % 250) + number],
        "wide": [torch.full((600 + number, 3), number)],  # of several units
        "uid": [f"row {number} é" * (1 + number % 3)],
        "raw": [b"\0\xff" * (1 + number % 4)],
        "meta": [[number, torch.full((1 + number % 3, 2), float(number)), ("a", None)]],
        "mm": [{"pixels": torch.arange(1 + number % 6), "text": str(number)}],
        "flag": torch.tensor([number % 2 == 0]),
    }


def encoded(numbers: Sequence[int] = range(1, COUNT + 1)) -> list[Block]:
    return [encode(row_of(number)) for number in numbers]


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
            counts = None if own.counts is None else [int(own.counts[block])]
            of_family = (own.offsets[block], own.lengths[block], own.units[block], one.item_bytes, counts)
            assert (*of_family, own.checksums[block].tolist()) == told(one)
    assert next(numbers, None) is None


def test_blocks_that_differ_in_numbers_alone_are_a_family() -> None:
    blocks = encoded()
    by_size: dict[int, int] = {}
    for block in blocks:
        by_size[len(block.directory)] = by_size.get(len(block.directory), 0) + 1
    assert by_size == {len(blocks[0].directory): COUNT}
    layouts = Layout.parse_many([block.directory for block in blocks])
    assert len({id(layout.family[0]) for layout in layouts if layout is not None and layout.family}) == 1
    for layout, block in zip(layouts, blocks, strict=True):
        assert layout is not None
        assert_parsed_alike(layout, block.directory)


def resealed(directory: bytes) -> bytes:
    return directory[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(directory[:-8]))


DIRECTORIES = [block.directory for block in encoded()]
NUMBERS = [
    position
    for field in FIELDS
    for stream in streams_of(Layout.parse(DIRECTORIES[0]).node(field))
    for position in range(stream.entry, stream.entry_end)
]
"""Where members may differ, and a few places where they may not."""


@given(st.data())
def test_what_parse_refuses_is_in_no_family_and_spares_the_others(data: st.DataObject) -> None:
    """A hostile writer's checksum is right."""
    directories = list(DIRECTORIES)
    victim = data.draw(st.integers(0, COUNT - 1))
    changed = bytearray(directories[victim])
    for _ in range(data.draw(st.integers(1, 3))):
        position = data.draw(st.one_of(st.integers(0, len(changed) - 9), st.sampled_from(NUMBERS)))
        changed[position] = data.draw(st.sampled_from([0, 1, 12, 127, 128, 255, changed[position] ^ 1]))
    directories[victim] = resealed(bytes(changed)) if data.draw(st.booleans()) else bytes(changed)
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


def outside_of_a_family(directory: bytes) -> None:
    """Asserts that a directory is refused, and that a family does not take it for one of its own."""
    layouts = Layout.parse_many([*DIRECTORIES, resealed(directory)])
    assert layouts[-1] is None
    assert all(layout is not None for layout in layouts[:-1])
    with pytest.raises(CorruptBlock):
        Layout.parse(resealed(directory))


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
        (17, "<B", lambda unit: unit - 1 if unit == 12 else 12 - 1),
        (17, "<B", lambda unit: unit + 1 if unit > 12 else 18),  # one checksum where there are two
        (17, "<B", lambda _: 18),
        (17, "<B", lambda _: 255),
        (24, "<B", lambda count: count ^ 1),
        (24, "<B", lambda count: count ^ 128),
    ],
)
def test_a_number_that_cannot_be_is_in_no_family(field: str, at: int, form: str, change: Any) -> None:
    directory = bytearray(DIRECTORIES[2])
    for stream in streams_of(Layout.parse(DIRECTORIES[2]).node(field)):
        if at == 24 and stream.counts is None:
            continue
        (before,) = struct.unpack_from(form, directory, stream.entry + at)
        struct.pack_into(form, directory, stream.entry + at, change(before))
        outside_of_a_family(bytes(directory))
        struct.pack_into(form, directory, stream.entry + at, before)


@pytest.mark.parametrize("field", ["tokens", "uid", "dense", "meta"])
def test_lengths_that_fit_each_other_and_not_the_block_are_in_no_family(field: str) -> None:
    """A count and a length that agree, in as many units; what follows lies where it would, or does not."""
    stream = Layout.parse(DIRECTORIES[2]).node(field).streams[0]
    for items in (1, 64):
        directory = bytearray(DIRECTORIES[2])
        if stream.counts is not None:
            form = "<H" if stream.counts.itemsize == 2 else "<B"
            struct.pack_into(form, directory, stream.entry + 24, int(stream.counts[0]) + items)
        struct.pack_into("<Q", directory, stream.entry + 8, stream.length + items * stream.item_bytes)
        if aligned(stream.length) != aligned(stream.length + items * stream.item_bytes) or field == "dense":
            outside_of_a_family(bytes(directory))
    for size in (-64, 64, 2**50):
        directory = bytearray(DIRECTORIES[2])
        (before,) = struct.unpack_from("<Q", directory, SIZE_AT)
        struct.pack_into("<Q", directory, SIZE_AT, before + size)
        outside_of_a_family(bytes(directory))


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


def test_a_damaged_first_one_leaves_a_family_to_the_others() -> None:
    directories = [DIRECTORIES[0][:-1] + b"\0", *DIRECTORIES[1:]]
    layouts = Layout.parse_many(directories)
    assert layouts[0] is None
    assert all(layout is not None for layout in layouts[1:])


def test_few_blocks_and_those_of_several_rows_or_shared_or_large_values_are_parsed_by_themselves() -> None:
    def found(values: list[dict[str, Any]]) -> list[bool]:
        return [each is not None for each in families([encode(value).directory for value in values])]

    assert found([{"x": torch.zeros(1)}] * (FAMILY_MIN - 1)) == [False] * (FAMILY_MIN - 1)
    assert found([{"x": torch.zeros(1)}] * FAMILY_MIN) == [True] * FAMILY_MIN
    assert found([{"x": torch.zeros(2)}] * FAMILY_MIN) == [False] * FAMILY_MIN
    large = [{"x": [torch.zeros(STREAM_BYTES_MAX - length, dtype=torch.uint8)]} for length in range(1, FAMILY_MIN + 1)]
    assert found(large) == [True] * FAMILY_MIN
    assert found([{"x": [torch.zeros(STREAM_BYTES_MAX, dtype=torch.uint8)]}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert families([]) == []


def test_families_of_one_size_are_told_apart() -> None:
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

        return Part(layout, np.zeros(1, np.int64), fetch, memory=self.memory, origin=origin)

    def parts(self, picked: Sequence[int]) -> list[Part]:
        return [self._parts[index] for index in picked]


@given(picked=st.lists(st.integers(0, COUNT + 1), min_size=1, max_size=COUNT + 4), alike=st.booleans())
def test_whatever_is_picked_comes_in_its_order(picked: list[int], alike: bool) -> None:
    """Of a family, and of two blocks that are no members; some of them twice."""
    others = [{**row_of(number), "more": torch.zeros(1)} for number in (50, 51)]
    arena = Arena([*encoded(), *([] if alike else map(encode, others))])
    numbers = [*range(1, COUNT + 1), 50, 51]
    picked = [index for index in picked if not alike or index < COUNT] or [0]
    parts = gather(arena.parts(picked))
    for field in FIELDS:
        column = read_column(field, parts, copy=True, allocate=allocate)
        assert identical([row_of(numbers[index])[field][0] for index in picked], column.list()), field


def test_a_family_is_read_as_one_block_without_asking_for_each() -> None:
    arena = Arena(encoded())
    order = [*range(COUNT - 1, 0, -2), *range(0, COUNT, 2)]
    (gathered,) = gather(arena.parts(order))
    assert all(isinstance(stream, Scattered) for stream in gathered.group("tokens").node.streams)
    for field in FIELDS:
        column = read_column(field, [gathered], copy=False, allocate=allocate)
        assert identical([row_of(1 + index)[field][0] for index in order], column.list()), field
        assert not column.is_view
    assert read_column("mm.text", [gathered], copy=True, allocate=allocate).list() == [
        str(1 + index) for index in order
    ]
    assert arena.fetched == 0
    with pytest.raises(InvalidArgument, match="no field 'y'"):
        read_column("y", [gathered], copy=True, allocate=allocate)


@pytest.mark.parametrize("field", ["dense", "tokens", "wide", "uid", "raw", "meta", "mm.pixels", "mm.text"])
def test_damage_names_the_row_that_has_it(field: str) -> None:
    blocks = encoded()
    arena = Arena(blocks)
    parts = gather(arena.parts([3, 9, 5, 7]))
    for stream in blocks[5].layout.node(field).streams:
        for position in (0, stream.length - 1):
            arena.memory[arena.origins[5] + stream.offset + position] ^= 0x20
            with pytest.raises(CorruptBlock, match=rf"field '{field}', row 0 of its block.*checksum") as caught:
                read_column(field.split(".", maxsplit=1)[0], parts, copy=True, allocate=allocate)
            assert caught.value.rows == (2,)
            if field == "dense":
                read_column(field, parts, copy=True, allocate=allocate, verify=False)
            arena.memory[arena.origins[5] + stream.offset + position] ^= 0x20
    name = field.split(".", maxsplit=1)[0]
    assert identical(row_of(6)[name][0], read_column(name, parts, copy=True, allocate=allocate).list()[2])


def test_members_in_different_memories_are_not_read_as_one() -> None:
    blocks = encoded()
    one, other = Arena(blocks), Arena(blocks)
    mixed = [*one.parts([0, 1]), *other.parts([2]), replace(one.parts([3])[0], memory=None)]
    values = read_column("dense", gather(mixed), copy=True, allocate=allocate).value
    assert values[:, 0].tolist() == [1, 2, 3, 4]


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
