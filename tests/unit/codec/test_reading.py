"""Which of the ways to read a column is taken, and that each verifies what it gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tqclient.codec import Column, allocate, read_column
from tqclient.errors import CorruptBlock

ROW_BYTES = 4096  # one checksum unit each


@pytest.fixture
def block() -> Block:
    return encode({"x": torch.arange(100 * 1024, dtype=torch.int32).reshape(100, 1024), "small": torch.arange(100)})


class Allocations:
    """Counts the bytes that copies took."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def __call__(self, size: int) -> NDArray[np.uint8]:
        self.size_bytes += size
        return allocate(size)


def read_owned(block: Block, field: str, taken: Allocations, **options: Any) -> Column:
    part = replace(block.part(), owned_bytes=block.bytes.size)
    return read_column(field, [part], copy=True, allocate=taken, **options)


def test_what_was_fetched_into_memory_of_ones_own_is_not_copied_again(block: Block) -> None:
    taken = Allocations()
    column = read_owned(block, "x", taken)
    assert taken.size_bytes == 0
    assert not column.is_view  # valid for as long as anybody likes
    assert np.shares_memory(column.value.numpy(), block.bytes)
    column.value[0, 0] = 7  # and one's own to change


def test_a_small_column_does_not_keep_a_large_buffer_alive(block: Block) -> None:
    taken = Allocations()
    column = read_owned(block, "small", taken)
    assert taken.size_bytes == 100 * 8
    assert not np.shares_memory(column.value.numpy(), block.bytes)


def test_memory_of_ones_own_is_verified(block: Block) -> None:
    start = block.layout.node("x").streams[0].offset
    block.bytes[start + 41 * ROW_BYTES + 5] ^= 1
    with pytest.raises(CorruptBlock, match=r"'x', row 41 ") as caught:
        read_owned(block, "x", Allocations())
    assert list(caught.value.rows) == [41]


SCATTERED = pytest.mark.parametrize("rows", [[3, 97, 41, 8], [8, 41, 41, 3]])


@SCATTERED
def test_rows_that_are_located_all_at_once_are_what_was_written_and_verified(block: Block, rows: list[int]) -> None:
    part = block.sparse_part("x", rows)
    start = block.layout.node("x").streams[0].offset
    fetched = replace(part, fetch=no_fetch)
    value = read_column("x", [fetched], copy=True, allocate=allocate).value
    assert value.numpy().tolist() == [list(range(1024 * row, 1024 * (row + 1))) for row in rows]
    block.bytes[start + rows[1] * ROW_BYTES + 5] ^= 1
    with pytest.raises(CorruptBlock, match=rf"'x', row {rows[1]} ") as caught:
        read_column("x", [fetched], copy=True, allocate=allocate)
    assert list(caught.value.rows) == [1]


def no_fetch(offset: int, length: int) -> NDArray[np.uint8]:
    raise AssertionError(f"{length} bytes at {offset} were fetched on their own")


@SCATTERED
def test_scattered_rows_that_are_whole_units_are_verified_one_by_one(block: Block, rows: list[int]) -> None:
    whole = torch.arange(100 * 1024, dtype=torch.int32).reshape(100, 1024)
    assert torch.equal(block.read("x", rows=rows).value, whole[rows])
    start = block.layout.node("x").streams[0].offset
    block.bytes[start + 50 * ROW_BYTES] ^= 1  # nobody asked for that row
    assert torch.equal(block.read("x", rows=rows).value, whole[rows])
    block.bytes[start + 41 * ROW_BYTES + 4095] ^= 0x80
    with pytest.raises(CorruptBlock, match=r"'x', row 41 ") as caught:
        block.read("x", rows=rows)
    assert list(caught.value.rows) == [rows.index(41)]
