"""What a reader knows of a block: which bytes hold, and verify, which rows of which field."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import directory as _directory
from tqclient.codec.clips import Clip, row_lengths, spans
from tqclient.codec.header import ALIGN, Header
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.schema import Form


class Layout:
    """A parsed directory; immutable, and shared between threads.

    Attributes:
        rows: of the block.
        size_bytes: of the block.
        fields: their names, in the order in which they were put.
    """

    def __init__(self, rows: int, size_bytes: int, nodes: tuple[_directory.Node, ...]) -> None:
        self.rows = rows
        self.size_bytes = size_bytes
        self._nodes = {node.name: node for node in nodes}

    @classmethod
    def parse(cls, directory: bytes) -> Layout:
        """Decodes a directory that `Plan.write` returned.

        Raises:
            CorruptBlock: it is cut, damaged, or contradicts itself.
            UnsupportedVersion: a newer format, or a feature that this reader lacks.
        """
        return cls(*_directory.parse(directory))

    @classmethod
    def open(cls, block: NDArray[np.uint8]) -> Layout:
        """Decodes the header and the directory of a whole block, uint8 [size_bytes]. Payloads are not touched.

        Raises:
            CorruptBlock: it is cut, damaged, or contradicts itself.
            UnsupportedVersion: a newer format, or a feature that this reader lacks.
        """
        header = Header.parse(block)
        layout = cls.parse(block[header.directory].tobytes())
        if layout.size_bytes != header.size_bytes:
            raise CorruptBlock(f"header and directory disagree: {header.size_bytes} and {layout.size_bytes} bytes")
        return layout

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(self._nodes)

    def node(self, field: str) -> _directory.Node:
        """The column of a field, or of a child of a struct (`mm.pixel_values`).

        Raises:
            InvalidArgument: the block has none of that name.
        """
        if field in self._nodes:
            return self._nodes[field]
        candidates: Iterable[_directory.Node] = self._nodes.values()
        rest = field
        while rest:
            # A key may hold dots: the longest name that fits goes first.
            fitting = [node for node in candidates if rest == node.name or rest.startswith(node.name + ".")]
            if not fitting:
                break
            node = max(fitting, key=lambda node: len(node.name))
            if rest == node.name:
                return node
            candidates, rest = node.inner.children, rest[len(node.name) + 1 :]
        raise InvalidArgument(f"the block has no field {field!r}; it has {', '.join(map(repr, self._nodes))}")

    @cached_property
    def payload(self) -> NDArray[np.uint64]:
        """The bytes of the block that hold all rows of all fields, uint64 [n, 2]: (offset, length); n is 0 or 1."""
        leaves = (leaf for node in self._nodes.values() for leaf in node.leaves())
        streams = [stream for leaf in leaves for stream in leaf.streams if stream.length]
        if not streams:
            return np.zeros((0, 2), np.uint64)
        start, stop = streams[0].offset, streams[-1].offset + streams[-1].length
        return np.array([(start, stop - start)], np.uint64)

    def form(self, field: str) -> Form:
        """The form of a field."""
        return self.node(field).form

    def column_bytes(self, field: str) -> int:
        """Payload bytes of a field, all rows."""
        return sum(stream.length for leaf in self.node(field).leaves() for stream in leaf.streams)

    def row_lengths(self, field: str) -> NDArray[np.int64]:
        """Leading dimension of each row of a ragged column, int64 [rows].

        Raises:
            InvalidArgument: the column is not ragged.
        """
        node = self.node(field)
        if node.form.kind != "ragged":
            raise InvalidArgument(f"field {field!r} is {node.form}: its rows have no length of their own")
        return row_lengths(node, np.arange(self.rows), field)

    def ranges(
        self, field: str, rows: NDArray[np.int64] | None = None, clips: Sequence[Clip] = ()
    ) -> NDArray[np.uint64]:
        """The bytes of the block that must be at hand to read, and verify, rows of a field.

        Args:
            field: a field, or a child of a struct.
            rows: int64; any order, repeats allowed. None: all.
            clips: columns of which less than whole rows are wanted; only with rows.

        Returns:
            uint64 [n, 2]: (offset, length), ascending and disjoint.

        Raises:
            InvalidArgument: no such field, or a row out of bounds.
        """
        if rows is not None:
            check_rows(rows, self.rows)
        runs = list(_unit_runs(self.node(field), rows, clips))
        if not runs:
            return np.zeros((0, 2), np.uint64)
        return _merge(*map(np.concatenate, zip(*runs, strict=True)))


def _unit_runs(
    node: _directory.Node, rows: NDArray[np.int64] | None, clips: Sequence[Clip]
) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """For each stream the whole units that rows lie in: (starts, stops) within the block."""
    for index, stream in enumerate(node.streams):
        if rows is None:
            first, last = np.zeros(1, np.int64), np.full(1, stream.length, np.int64)
        else:
            first, last = spans(node, index, rows, clips)
        kept = first < last
        ends = np.minimum(-(-last[kept] // stream.unit) * stream.unit, stream.length)
        yield first[kept] // stream.unit * stream.unit + stream.offset, ends + stream.offset
    for child in node.children:
        # What rows share is asked for once for each of them, and merged: clips are by row.
        picked = node.picks(rows) if node.kind == _directory.SHARED and rows is not None else rows
        yield from _unit_runs(child, picked, clips)


def _merge(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[np.uint64]:
    if not starts.size:
        return np.zeros((0, 2), np.uint64)
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], np.maximum.accumulate(stops[order])
    # The padding between two streams is cheaper to read than another range is to ask for.
    first = np.flatnonzero(np.concatenate(([True], starts[1:] >= stops[:-1] + ALIGN)))
    last = np.append(first[1:] - 1, len(starts) - 1)
    merged: NDArray[np.uint64] = np.stack((starts[first], stops[last] - starts[first]), axis=1).astype(np.uint64)
    return merged


def check_rows(rows: NDArray[np.int64], count: int) -> None:
    """Checks row numbers against a block.

    Raises:
        InvalidArgument: one is out of bounds.
    """
    if rows.size and (int(rows.min()) < 0 or int(rows.max()) >= count):
        raise InvalidArgument(f"rows {int(rows.min())} to {int(rows.max())} of a block that has {count}")
