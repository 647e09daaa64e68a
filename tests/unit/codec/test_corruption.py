"""Damaged, truncated and hostile blocks: an error, never wrong values, in bounded memory and time."""

from __future__ import annotations

import struct
import time
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.values import identical, rows_of
from tqclient.codec import Layout, Part, Plan, Shared, allocate, read_column
from tqclient.codec.directory import FLAG_PICKLE
from tqclient.codec.kinds.record import RecordEncoder
from tqclient.errors import CorruptBlock, UnsupportedValue, UnsupportedVersion

COLUMNS: dict[str, Any] = {
    "tokens": [torch.arange(700), torch.arange(0), torch.arange(900)],
    "reward": torch.tensor([0.5, 1.5, 2.5]),
    "prompt": ["one", "zwei", "три"],
    "mm": [{"pixels": torch.full((row, 3), row), "grid": row} for row in range(3)],
    "image": Shared([torch.full((300, 2), 1.5), torch.zeros(0, 2)], [1, 0, 0]),
    "extra": [1, {"t": torch.ones(5)}, (2, "x")],
}
NODE = struct.Struct("<BBHIIIII")
STREAM = struct.Struct("<QQBBHI")
PREFIX = struct.Struct("<4sIIIQQ")


def read_all(block: NDArray[np.uint8]) -> dict[str, list[Any]]:
    layout = Layout.open(block)
    part = Part(layout, np.arange(layout.rows), lambda offset, length: block[offset : offset + length])
    return {name: read_column(name, [part], copy=True, allocate=allocate).list() for name in layout.fields}


def resealed(directory: bytes) -> bytes:
    """What a hostile writer would send: the checksum is right."""
    return directory[:-8] + struct.pack("<Q", xxhash.xxh3_64_intdigest(directory[:-8]))


def test_a_block_cut_at_every_length_is_corrupt() -> None:
    block = encode({"x": [torch.arange(3), torch.arange(2)], "y": ["a", "b"]}).bytes
    for size in range(block.size):
        with pytest.raises(CorruptBlock):
            Layout.open(block[:size])


def test_a_directory_cut_or_extended_is_corrupt() -> None:
    directory = encode(COLUMNS).directory
    for size in range(len(directory) - 8):
        with pytest.raises(CorruptBlock):
            Layout.parse(directory[:size])
        with pytest.raises(CorruptBlock):
            Layout.parse(resealed(directory[:size] + bytes(8)))
    with pytest.raises(CorruptBlock):
        Layout.parse(resealed(directory[:-8] + bytes(16)))


@given(st.data())
def test_a_flipped_bit_is_an_error_or_lies_in_padding(data: st.DataObject) -> None:
    block = encode(COLUMNS).bytes
    position = data.draw(st.integers(0, block.size * 8 - 1))
    block[position // 8] ^= 1 << position % 8
    try:
        read = read_all(block)
    except CorruptBlock:
        return
    assert all(identical(COLUMNS[name], read[name]) for name in ("tokens", "prompt", "mm", "extra"))
    assert identical(rows_of(COLUMNS["image"]), read["image"])
    assert torch.stack(read["reward"]).tolist() == [0.5, 1.5, 2.5]


@given(st.data())
def test_a_flipped_payload_bit_names_field_and_row_and_spares_the_neighbours(data: st.DataObject) -> None:
    columns = {"a": torch.arange(8 * 1024).reshape(8, 1024), "b": {"c": torch.arange(8 * 2048).reshape(8, 2048)}}
    block = encode(columns)
    name, row = data.draw(st.sampled_from([("a", 1024), ("b.c", 2048)])), data.draw(st.integers(0, 7))
    path, items = name
    start = int(block.layout.ranges(path, np.array([row]))[0, 0])
    bit = data.draw(st.integers(0, items * 64 - 1))
    block.bytes[start + bit // 8] ^= 1 << bit % 8
    field = path.partition(".")[0]
    with pytest.raises(CorruptBlock, match=rf"field '{path}', row {row} of its block") as caught:
        block.read(field)
    assert caught.value.rows == (row,)
    with pytest.raises(CorruptBlock):
        block.read(field, copy=False)
    others = [other for other in range(8) if other != row]
    read = block.read(field, rows=others).value
    expected = columns["a"] if field == "a" else columns["b"]["c"]
    assert torch.equal(read if field == "a" else read["c"], expected[others])


def test_bytes_that_change_between_copy_and_check_are_never_returned() -> None:
    """Memory recycled under the reader: what it fetched first is gone when it looks again."""
    block = encode({"x": torch.arange(4096).reshape(4, 1024)})
    before = block.bytes.copy()
    block.bytes[-100:] = 0
    calls = 0

    def fetch(offset: int, length: int) -> NDArray[np.uint8]:
        nonlocal calls
        calls += 1
        return (block.bytes if calls == 1 else before)[offset : offset + length]

    part = Part(block.layout, np.array([0, 1, 2, 3]), fetch)
    with pytest.raises(CorruptBlock):
        read_column("x", [part], copy=True, allocate=allocate)


@given(st.data())
def test_a_hostile_directory_is_an_error_or_stays_within_its_block(data: st.DataObject) -> None:
    """Any bytes replaced, with a checksum that fits."""
    block = encode(COLUMNS)
    directory = bytearray(block.directory)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(directory) - 9))
        directory[position] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        position = data.draw(st.integers(0, len(directory) - 16))
        directory[position : position + 8] = struct.pack(
            "<Q", data.draw(st.sampled_from([2**64 - 1, 2**63, 2**64 - 64]))
        )
    try:
        layout = Layout.parse(resealed(bytes(directory)))
    except (CorruptBlock, UnsupportedVersion):
        return
    for name in layout.fields:
        ranges = layout.ranges(name).astype(object)
        assert all(start + size <= layout.size_bytes for start, size in ranges)
        part = Part(layout, np.arange(layout.rows), block.fetch)
        if layout.size_bytes == block.bytes.size:
            try:
                read_column(name, [part], copy=True, allocate=allocate)
            except CorruptBlock:
                continue
            except UnsupportedValue:  # it says that values were pickled
                assert any(leaf.flags & FLAG_PICKLE for leaf in layout.node(name).leaves())


def _first_stream(directory: bytes) -> int:
    """Where the first stream's description begins, in a directory of one dense or ragged field."""
    sizes = NODE.unpack_from(directory, PREFIX.size)
    return PREFIX.size + NODE.size + sizes[4] + sizes[5] + 8 * sizes[6]


@pytest.mark.parametrize(
    ("offset", "length"),
    [(2**64 - 64, 128), (0, 2**64 - 1), (64, 40), (2**63, 2**63), (448, 2**44), (1 << 43, 40)],
)
def test_wrapping_and_overlapping_extents(offset: int, length: int) -> None:
    directory = bytearray(encode({"x": [torch.arange(2), torch.arange(3)]}).directory)
    at = _first_stream(bytes(directory))
    struct.pack_into("<QQ", directory, at, offset, length)
    with pytest.raises(CorruptBlock):
        Layout.parse(resealed(bytes(directory)))


@pytest.mark.parametrize("rows", [2**20 + 1, 2**40, 2**64 - 1, 3, 2**20])
def test_a_row_count_that_the_directory_does_not_hold(rows: int) -> None:
    directory = bytearray(encode({"x": [torch.arange(2), torch.arange(3)]}).directory)
    struct.pack_into("<Q", directory, 16, rows)
    tracemalloc.start()
    with pytest.raises(CorruptBlock):
        Layout.parse(resealed(bytes(directory)))
    assert tracemalloc.get_traced_memory()[1] < 256 * 1024
    tracemalloc.stop()


def test_parsing_takes_little_more_than_the_directory() -> None:
    rows = 1 << 16
    directory = encode({"x": torch.zeros(rows, 2), "s": ["abc"] * rows, "r": [np.zeros(2, np.int8)] * rows}).directory
    tracemalloc.start()
    Layout.parse(directory)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * len(directory)
    elapsed = []
    for _ in range(20):
        started = time.perf_counter()
        Layout.parse(directory)
        elapsed.append(time.perf_counter() - started)
    assert min(elapsed) < 0.01


@pytest.mark.parametrize(("version", "critical"), [(2, 0), (2**32 - 1, 0), (1, 2), (1, 1 << 31)])
def test_what_a_newer_writer_made_is_an_unsupported_version(version: int, critical: int) -> None:
    block = encode({"x": [1]})
    directory = bytearray(block.directory)
    struct.pack_into("<II", directory, 4, version, critical)
    with pytest.raises(UnsupportedVersion):
        Layout.parse(resealed(bytes(directory)))
    struct.pack_into("<II", block.bytes, 8, version, critical)
    struct.pack_into("<Q", block.bytes, 56, xxhash.xxh3_64_intdigest(block.bytes[:56].tobytes()))
    with pytest.raises(UnsupportedVersion):
        Layout.open(block.bytes)


def test_version_zero_never_existed() -> None:
    directory = bytearray(encode({"x": [1]}).directory)
    struct.pack_into("<I", directory, 4, 0)
    with pytest.raises(CorruptBlock, match="format 0"):
        Layout.parse(resealed(bytes(directory)))


@pytest.mark.parametrize(
    "skeleton",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\x81\x90\x01",
        b"\xa1\xff",
        b"\x01\x02",
        b"\xd4\x63\x00",
        b"\xd4\x01\x01",
        b"\xd4\x05\x00",
        b"\xc7\x02\x09\x91\x01",
        b"\xc7\x05\x06\x92\xa1O\xc4\x00",
        b"\xc7\x0d\x0d\x94\xa5torch\xa4int8",
        b"\xc7\x10\x0d\x94\xa5torch\xa4int8\x91\x7f\x00",
        b"\xc7\x10\x0d\x94\xa5torch\xa4int8\x91\xff\x00",
        b"\xc7\x10\x0d\x94\xa5numpy\xa4|O08\x91\x01\x00",
        b"\x91" * 100_000 + b"\x01",
    ],
    ids=lambda skeleton: skeleton[:16].hex(),
)
def test_a_hostile_skeleton_is_corrupt(skeleton: bytes) -> None:
    """Written by our own encoder, with a checksum that fits: only the skeleton lies."""
    leaves = RecordEncoder([skeleton], [[]], np.zeros(1, np.int64), 0)
    with pytest.raises(CorruptBlock, match="'x', row 0"):
        Block(Plan({"x": leaves}, 1)).read("x")
