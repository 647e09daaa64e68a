"""Small blocks that are parsed side by side: never otherwise than one by one."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.small_blocks import (
    COUNT,
    DIRECTORIES,
    FIELDS,
    ROWS,
    SHARED_FIELDS,
    encoded,
    streams_of,
)
from tests.unit.codec.test_corruption import resealed
from tqclient.codec import Layout, Shared
from tqclient.codec.directory import SIZE_AT, Stream
from tqclient.codec.family import FAMILY_MIN, KINDS_MAX, ROWS_MAX, STREAM_BYTES_MAX, families
from tqclient.codec.header import aligned
from tqclient.errors import CorruptBlock, UnsupportedVersion


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
    numbers = iter(family.streams.values())
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
        if at == 24 and (stream.counts is None or not stream.item_bytes):
            continue
        (before,) = struct.unpack_from(form, directory, stream.entry + at)
        struct.pack_into(form, directory, stream.entry + at, change(before) % 2**64)
        outside_of_a_family(bytes(directory), rows)
        struct.pack_into(form, directory, stream.entry + at, before)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("field", SHARED_FIELDS)
def test_a_row_that_has_a_value_which_is_not_there_is_in_no_family(field: str, rows: int) -> None:
    whole = DIRECTORIES[rows][2]
    column = Layout.parse(whole).node(field)
    for row in range(rows):
        for value in (column.values, 128, 255):
            directory = bytearray(whole)
            directory[column.streams[0].entry + 24 + row] = value
            outside_of_a_family(bytes(directory), rows)
        for value in range(column.values):
            directory = bytearray(whole)
            directory[column.streams[0].entry + 24 + row] = value
            assert taken_in(whole, resealed(bytes(directory)))


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
        (12, 8, [2**62, 2**62, 2**62, 2**62 + 12], False),
    ],
)
def test_counts_are_those_of_the_stream(length: int, width: int, counts: list[int], right: bool) -> None:
    block = encode({"x": [torch.zeros(3, dtype=torch.uint8)] * 4})
    assert taken_in(block.directory, of_one_stream(block, length, width, counts)) == right


def test_rows_without_bytes_have_none() -> None:
    block = encode({"x": [torch.zeros(2, 0)] * 4})
    assert taken_in(block.directory, of_one_stream(block, 0, 8, [1, 2, 3, 2**40]))
    assert not taken_in(block.directory, of_one_stream(block, 12, 8, [1, 2, 3, 6]))
    assert not taken_in(block.directory, of_one_stream(block, 0, 8, [1, 2, 3, 2**63]))


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


def test_few_blocks_and_those_of_many_rows_or_large_values_are_parsed_by_themselves() -> None:
    def found(values: list[dict[str, Any]]) -> list[bool]:
        return [each is not None for each in families([encode(value).directory for value in values])]

    assert found([{"x": torch.zeros(1)}] * (FAMILY_MIN - 1)) == [False] * (FAMILY_MIN - 1)
    assert found([{"x": torch.zeros(1)}] * FAMILY_MIN) == [True] * FAMILY_MIN
    assert found([{"x": torch.zeros(ROWS_MAX)}] * FAMILY_MIN) == [True] * FAMILY_MIN
    assert found([{"x": torch.zeros(ROWS_MAX + 1)}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert found([{"x": torch.zeros(0)}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert found([{"x": Shared([torch.arange(9)], [0, 0])}] * FAMILY_MIN) == [True] * FAMILY_MIN
    large = [{"x": [torch.zeros(STREAM_BYTES_MAX - length, dtype=torch.uint8)]} for length in range(1, FAMILY_MIN + 1)]
    assert found(large) == [True] * FAMILY_MIN
    assert found([{"x": [torch.zeros(STREAM_BYTES_MAX, dtype=torch.uint8)]}] * FAMILY_MIN) == [False] * FAMILY_MIN
    assert families([]) == []


def test_blocks_that_share_other_numbers_of_values_are_told_apart() -> None:
    """As the head of the column says how many there are."""
    alike = [encode({"x": Shared([torch.arange(9)] * values, [0, values - 1, 0])}) for values in (1, 2)]
    found = families([block.directory for block in alike * FAMILY_MIN])
    assert len({id(each[0]) for each in found if each}) == 2
    assert all(each and each[0].fields["x"].values == 1 + index % 2 for index, each in enumerate(found))


def test_families_of_other_columns_are_told_apart() -> None:
    kinds = [[{name: torch.zeros(1)}] * FAMILY_MIN for name in "abcdef"]
    shuffled = [kind[index] for index in range(FAMILY_MIN) for kind in kinds]
    found = families([encode(values).directory for values in shuffled])
    names = [None if each is None else next(iter(each[0].fields)) for each in found]
    expected = [name if index < KINDS_MAX else None for index, name in enumerate("abcdef")]
    assert names == expected * FAMILY_MIN


@pytest.mark.parametrize("rows", ROWS)
def test_blocks_that_became_known_a_few_at_a_time_join_one_family(rows: int) -> None:
    known = [Layout.parse(directory) for directory in DIRECTORIES[rows]]
    assert all(layout.family is None for layout in known)
    few = known[: FAMILY_MIN - 1]
    assert all(one is other for one, other in zip(Layout.join(few), few, strict=True))
    other = encode({"x": torch.zeros(ROWS_MAX + 1)}).layout
    *joined, same = Layout.join([*known, other])
    assert same is other
    for layout, directory in zip(joined, DIRECTORIES[rows], strict=True):
        assert_parsed_alike(layout, directory)
    assert len({id(layout.family[0]) for layout in joined if layout.family}) == 1
    assert all(one is other for one, other in zip(Layout.join(joined), joined, strict=True))
    again = Layout.join([*joined[:FAMILY_MIN], *known[FAMILY_MIN:]])
    assert len({id(layout.family[0]) for layout in again if layout.family}) == 1
    assert all(layout.family for layout in again)


def test_what_cannot_join_stays_as_it_is() -> None:
    alone = [encode({f"field {index}": torch.zeros(1)}).layout for index in range(2 * FAMILY_MIN)]
    assert all(one is other for one, other in zip(Layout.join(alone), alone, strict=True))
