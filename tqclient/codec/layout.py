"""What a reader knows of a block: which bytes hold, and verify, which rows of which field."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import directory as _directory
from tqclient.codec.checksum import whole_units
from tqclient.codec.clips import Clip, clips_on, row_lengths, spans
from tqclient.codec.family import FAMILY_MIN, ROWS_MAX, Family, families
from tqclient.codec.header import ALIGN, Header
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.schema import Form


class Layout:
    """A parsed directory; immutable, and shared between threads.

    Attributes:
        rows: of the block.
        size_bytes: of the block.
        family: that it was parsed with, and its place among its blocks; None: it was parsed by itself.
    """

    __slots__ = ("_directory", "_fields", "_nodes", "_payload", "family", "rows", "size_bytes")

    def __init__(
        self,
        rows: int,
        size_bytes: int,
        fields: dict[str, _directory.Node],
        payload: tuple[int, int],
        *,
        family: tuple[Family, int] | None = None,
        directory: bytes = b"",
    ) -> None:
        """Use `parse`, `parse_many` or `open`.

        Args:
            rows: of the block.
            size_bytes: of the block.
            fields: its columns by name; of a member of a family, those of the family's first block.
            payload: (start, stop) of the bytes of all fields; stop is 0 where there are none.
            family: see above.
            directory: of a block that is, or may become, a member of a family; a member is parsed by itself if somebody
                asks for one of its columns.
        """
        self.rows = rows
        self.size_bytes = size_bytes
        self.family = family
        self._payload = payload
        self._directory = directory
        self._fields = fields
        self._nodes = fields if family is None else None

    @classmethod
    def parse(cls, directory: bytes) -> Layout:
        """Decodes a directory that `Plan.write` returned.

        Raises:
            CorruptBlock: it is cut, damaged, or contradicts itself.
            UnsupportedVersion: a newer format, or a feature that this reader lacks.
        """
        rows, size_bytes, nodes, payload = _directory.parse(directory)
        fields = {node.name: node for node in nodes}
        return cls(rows, size_bytes, fields, payload, directory=directory if rows <= ROWS_MAX else b"")

    @classmethod
    def parse_many(cls, directories: Sequence[bytes]) -> list[Layout | None]:
        """Decodes those of many directories that differ in numbers alone; None: `parse` it by itself."""
        return [
            None if found is None else cls._of_member(*found, directory)
            for directory, found in zip(directories, families(directories), strict=True)
        ]

    @classmethod
    def join(cls, layouts: Sequence[Layout]) -> list[Layout]:
        """Makes families of blocks that became known a few at a time: what is of many is read many times over.

        Returns:
            As many, in the same order: the same ones, or new members in their place.
        """
        small = [each for each in layouts if each._directory]
        kinds = {id(each) if each.family is None else id(each.family[0]) for each in small}
        if len(small) < FAMILY_MIN or len(kinds) * FAMILY_MIN <= len(small):
            return list(layouts)
        found = iter(cls.parse_many([each._directory for each in small]))
        return [(next(found) or each) if each._directory else each for each in layouts]

    @classmethod
    def _of_member(cls, family: Family, block: int, directory: bytes) -> Layout:
        payload = int(family.starts[block]), int(family.stops[block])
        return cls(
            family.rows, int(family.sizes[block]), family.fields, payload, family=(family, block), directory=directory
        )

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

    @property
    def fields(self) -> tuple[str, ...]:
        """Names of the fields, in the order in which they were put."""
        return tuple(self._fields)

    @property
    def _own(self) -> dict[str, _directory.Node]:
        if self._nodes is None:
            self._nodes = {node.name: node for node in _directory.parse(self._directory)[2]}
        return self._nodes

    def node(self, field: str) -> _directory.Node:
        """The column of a field, or of a child of a struct (`mm.pixel_values`).

        Raises:
            InvalidArgument: the block has none of that name.
        """
        return find(self._own, field)

    def column(self, path: str, field: str | None = None) -> _directory.Node:
        """The column that a clip is of: as `node`, but that of a member is the one of its family's first block.

        Args:
            path: of a field, or of a child of a struct.
            field: that it leads into; None: the one of that name, or else the longest that fits.
        """
        return find(self._fields if field is None else {field: self._fields[field]}, path)

    def own_clips(self, clips: Sequence[Clip]) -> tuple[Clip, ...]:
        """Clips of `column` as those of `node`, by which a block is read that is read by itself."""
        if self.family is None or not clips:
            return tuple(clips)
        return clips_on(clips, self._fields.values(), self._own.values())

    def lengths(self, path: str, rows: NDArray[np.int64], field: str | None = None) -> NDArray[np.int64]:
        """Leading dimension of rows of a field, or of a child of a struct, int64 [rows]; arguments as of `column`.

        Raises:
            InvalidArgument: no such field, or its rows have none, or each may vary in every dimension.
        """
        node = self.column(path, field)
        if self.family is None:
            return row_lengths(node, rows, path)
        family, block = self.family
        return row_lengths(node, rows, path, partial(family.row_counts, block))

    @property
    def payload(self) -> NDArray[np.uint64]:
        """The bytes of the block that hold all rows of all fields, uint64 [n, 2]: (offset, length); n is 0 or 1."""
        start, stop = self._payload
        return np.array([(start, stop - start)] if stop else [], np.uint64).reshape(-1, 2)

    def whole(self, fields: Collection[str]) -> NDArray[np.uint64]:
        """The bytes of the block that hold all rows of some fields, as `ranges`.

        Raises:
            InvalidArgument: no such field.
        """
        if set(fields) == self._fields.keys():
            return self.payload
        if self.family is None or not set(fields) <= self._fields.keys():
            return np.concatenate([self.ranges(name) for name in fields])
        family, block = self.family
        return family.ranges(block, fields)

    def needed(
        self, fields: Collection[str], rows: NDArray[np.int64], clips: Sequence[Clip] = ()
    ) -> NDArray[np.uint64]:
        """The bytes of the block that must be at hand to read, and verify, rows of some fields, as `ranges`.

        Raises:
            InvalidArgument: no such field, or a row out of bounds.
        """
        if self.family is None or not set(fields) <= self._fields.keys():
            return np.concatenate([self.ranges(name, rows, clips) for name in fields])
        check_rows(rows, self.rows)
        family, block = self.family
        return _merge(*family.row_ranges(block, fields, rows, clips))

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
        form = self.form(field)
        if form.kind != "ragged":
            raise InvalidArgument(f"field {field!r} is {form}: its rows have no length of their own")
        return self.lengths(field, np.arange(self.rows))

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


def find(nodes: Mapping[str, _directory.Node], field: str) -> _directory.Node:
    """Finds a field, or a child of a struct, among a block's columns; raises as `Layout.node`.

    Of a struct that rows share, a child is shared as well: its rows are those of the block.
    """
    if field in nodes:
        return nodes[field]
    candidates: Iterable[_directory.Node] = nodes.values()
    rest, shared = field, list[_directory.Node]()
    while rest:
        # A key may hold dots: the longest name that fits goes first.
        fitting = [node for node in candidates if rest == node.name or rest.startswith(node.name + ".")]
        if not fitting:
            break
        node = max(fitting, key=lambda node: len(node.name))
        if rest == node.name:
            for outer in reversed(shared):
                node = replace(outer, name=node.name, form=node.form, children=(node,))
            return node
        rest = rest[len(node.name) + 1 :]
        while node.kind == _directory.SHARED:
            shared.append(node)
            node = node.children[0]
        candidates = node.children
    raise InvalidArgument(f"the block has no field {field!r}; it has {', '.join(map(repr, nodes))}")


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
        starts, stops = whole_units(first[kept], last[kept], stream.unit, stream.length)
        yield starts + stream.offset, stops + stream.offset
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
    if not rows.size:
        return
    low, high = (int(rows[0]),) * 2 if rows.size == 1 else (int(rows.min()), int(rows.max()))
    if low < 0 or high >= count:
        raise InvalidArgument(f"rows {low} to {high} of a block that has {count}")


def is_everything(rows: NDArray[np.int64], count: int) -> bool:
    """Says whether these are all rows of a block of `count`, in their order."""
    if len(rows) != count or count < 2:
        return len(rows) == count and (not count or int(rows[0]) == 0)
    return rows[0] == 0 and rows[-1] == count - 1 and bool((rows[1:] > rows[:-1]).all())
