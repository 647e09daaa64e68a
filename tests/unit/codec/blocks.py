"""Blocks in memory, and fetches that hand out no byte more than the layout asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import Column, Layout, Part, Plan, allocate, measure, normalise, read_column


class Block:
    """A written block."""

    def __init__(self, plan: Plan) -> None:
        self.bytes = allocate(plan.size_bytes)
        self.bytes[:] = 0xA5  # whatever an arena held before
        self.directory = plan.write(self.bytes)
        self.layout = Layout.parse(self.directory)

    def fetch(self, offset: int, length: int) -> NDArray[np.uint8]:
        """A view of the bytes, as a mapping gives it."""
        assert 0 <= offset <= offset + length <= self.bytes.size
        return self.bytes[offset : offset + length]

    def part(self, rows: Sequence[int] | None = None) -> Part:
        """All rows, or some."""
        return Part(self.layout, np.arange(self.layout.rows) if rows is None else np.array(rows, np.int64), self.fetch)

    def sparse_part(self, field: str, rows: Sequence[int]) -> Part:
        """A part whose fetch has the ranges that the layout names, and fails on any other byte."""
        ranges = [tuple(map(int, entry)) for entry in self.layout.ranges(field, np.array(rows, np.int64))]
        assert ranges == sorted(ranges)

        def fetch(offset: int, length: int) -> NDArray[np.uint8]:
            assert any(start <= offset and offset + length <= start + size for start, size in ranges)
            return self.bytes[offset : offset + length]

        def locate(
            offsets: NDArray[np.int64], lengths: NDArray[np.int64]
        ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
            held = np.full(self.bytes.size + 64, 0x5A, np.uint8)
            for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
                held[64 + offset : 64 + offset + length] = fetch(offset, length)
            return held, offsets + 64

        return Part(self.layout, np.array(rows, np.int64), fetch, locate=locate)

    def read(self, field: str, *, copy: bool = True, rows: Sequence[int] | None = None, **options: Any) -> Column:
        """Reads a field."""
        return read_column(field, [self.part(rows)], copy=copy, allocate=allocate, **options)


def encode(values: Any, **options: Any) -> Block:
    """Puts values into a block."""
    return Block(measure(normalise(values), **options))
