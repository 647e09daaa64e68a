"""Blocks that an earlier release wrote are read as they were meant, and written the same to the byte."""

from __future__ import annotations

import numpy as np
import pytest

from tests.golden.codec import format_1
from tests.unit.codec.values import identical, rows_of
from tqclient.codec import Layout, Part, allocate, read_column


@pytest.mark.parametrize("name", list(format_1.BATCHES))
def test_golden_blocks_are_read(name: str) -> None:
    block = np.frombuffer(format_1.path(name).read_bytes(), np.uint8)
    layout = Layout.open(block)
    part = Part(layout, np.arange(layout.rows), lambda offset, length: block[offset : offset + length])
    assert layout.fields == tuple(format_1.BATCHES[name])
    for field, column in format_1.BATCHES[name].items():
        read = read_column(field, [part], copy=True, allocate=allocate)
        assert identical(rows_of(column), read.list()), field


@pytest.mark.parametrize("name", list(format_1.BATCHES))
def test_golden_blocks_are_written(name: str) -> None:
    assert format_1.encode(name) == format_1.path(name).read_bytes()


def test_there_is_no_golden_block_without_a_batch() -> None:
    assert sorted(format_1.FOLDER.glob("*.bin")) == sorted(map(format_1.path, format_1.BATCHES))
