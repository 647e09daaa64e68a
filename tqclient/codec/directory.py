"""The directory of a block: its columns, where their streams lie, row lengths and checksums.

It is all that a reader needs to know which bytes hold (and verify) any rows of any field; the controller stores it next
to the block's extent. Parsing takes no memory but views of the directory itself and one small object per column, and
believes nothing: each count is held against the bytes that are left before it is used.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arrays import bounds
from tqclient.codec import dtypes
from tqclient.codec.checksum import UNIT_MAX, UNIT_MIN, unit_count
from tqclient.codec.header import ALIGN, CRITICAL_SHARED, FORMAT, HEADER_BYTES, aligned, check_version
from tqclient.errors import CorruptBlock
from tqclient.schema import DEPTH_MAX, Form

_MAGIC: Final = b"TQDR"
_PREFIX: Final = struct.Struct("<4sIIIQQ")  # magic, format, critical, fields, rows, size_bytes
_NODE: Final = struct.Struct("<BBHIIIII")  # kind, container, flags, children, name and dtype bytes, dimensions, streams
_STREAM: Final = struct.Struct("<QQBBHI")  # offset, length, width of a count, log2 of the unit, 2 reserved
_CHECKSUM: Final = struct.Struct("<Q")
SIZE_AT: Final = 24
"""Where a directory says how large its block is, ..."""
COUNTS_AT: Final = _STREAM.size
"""... and where, from the entry of a stream on, its row counts come; then its checksums."""

COLUMNS_MAX: Final = 1 << 16
"""Columns of one block, structs' children included."""
DIMENSIONS_MAX: Final = 64

DENSE, RAGGED, STRUCT, TEXT, BYTES, RECORD, SHARED = range(1, 8)
_FORM_KIND: Final = {DENSE: "dense", RAGGED: "ragged", STRUCT: "struct", TEXT: "list", BYTES: "list", RECORD: "list"}
_CONTAINERS: Final = ("", "torch", "numpy", "nested")
COUNT_WIDTHS: Final = (1, 2, 4, 8)
"""Bytes that a row count may have."""
_COUNTS: Final = {width: np.dtype(f"<u{width}") for width in COUNT_WIDTHS}
_DIGEST: Final = np.dtype("<u8")
_KNOWN_HEADS: Final = 1024
"""Heads of columns that are remembered, each of ..."""
_KNOWN_HEAD_BYTES: Final = 1024
"""... so many bytes at most: one-row puts of a field have the same."""
FLAG_PICKLE: Final = 1
"""Some value of this record column was pickled."""


class StreamSize(NamedTuple):
    """What a plan knows of a stream before it is written."""

    length: int
    counts: NDArray[np.int64] | None  # per row, in items; None: all rows are equally long
    unit: int


@dataclass(slots=True, eq=False)
class Stream:
    """One run of payload: the rows of a column back to back. Nobody changes one: threads share it.

    Attributes:
        offset: of its first byte within the block.
        length: in bytes.
        unit: bytes per checksum.
        rows: how many it holds.
        item_bytes: bytes per item; a row has `counts[row]` items, or one when `counts` is None.
        counts: unsigned [rows], as narrow as it was written.
        checksums: uint64, one per unit.
        entry: where the directory tells of it.
    """

    offset: int
    length: int
    unit: int
    rows: int
    item_bytes: int
    counts: NDArray[Any] | None
    checksums: NDArray[np.uint64]
    entry: int
    _bounds: NDArray[np.int64] | None = field(default=None, repr=False)

    @property
    def entry_end(self) -> int:
        """Where that ends."""
        counts_bytes = 0 if self.counts is None else self.counts.nbytes
        return self.entry + COUNTS_AT + counts_bytes + self.checksums.nbytes

    def bounds(self) -> NDArray[np.int64]:
        """int64 [rows + 1]: row i is bytes bounds[i]:bounds[i + 1] of the stream."""
        if self._bounds is None:
            counts = np.ones(self.rows, np.int64) if self.counts is None else self.counts
            self._bounds = bounds(counts) * self.item_bytes
        return self._bounds

    def extents(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(starts, stops) in bytes within the stream, int64 [len(rows)] each."""
        if self.counts is None:
            starts = rows * self.item_bytes
            return starts, starts + self.item_bytes
        bounds, run = self.bounds(), _run(rows)
        if run is not None:
            return bounds[run], bounds[run.start + 1 : run.stop + 1]
        return bounds[rows], bounds[rows + 1]

    def row_counts(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Items of each row, int64."""
        if self.counts is None:
            return np.ones(self.rows if rows is None else len(rows), np.int64)
        run = None if rows is None else _run(rows)
        return (self.counts if rows is None else self.counts[rows if run is None else run]).astype(np.int64)


def _run(rows: NDArray[np.int64]) -> slice | None:
    """Neighbouring rows in order as a slice, by which an array is not copied; None where they are not."""
    if not rows.size or rows[-1] - rows[0] != rows.size - 1 or (rows[1:] - rows[:-1] != 1).any():
        return None
    return slice(int(rows[0]), int(rows[0]) + rows.size)


@dataclass(frozen=True, slots=True)
class Node:
    """One column, a struct of columns, or a column whose rows share values.

    Attributes:
        name: of the field, or of the struct's key; empty for the values that rows share.
        kind: one of the numbers above.
        form: what reading gives; of a shared column, that of its values.
        flags: `FLAG_PICKLE`.
        streams: its own.
        children: of a struct: its columns. Of a shared column: its values, as many rows as there are of them.
    """

    name: str
    kind: int
    form: Form
    flags: int
    streams: tuple[Stream, ...]
    children: tuple[Node, ...]

    @property
    def inner(self) -> Node:
        """The values of a shared column; any other column itself."""
        return self.children[0].inner if self.kind == SHARED else self

    @property
    def values(self) -> int:
        """How many values the rows of a shared column share."""
        return next(stream.rows for node in self.children[0].preorder() for stream in node.streams)

    def picks(self, rows: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """Of a shared column: which of its values each row has, int64 [rows]."""
        return self.streams[0].row_counts(rows)

    def preorder(self) -> Iterator[Node]:
        """This node, then those below it, in the order in which the directory has them."""
        yield self
        for child in self.children:
            yield from child.preorder()

    def leaves(self) -> list[Node]:
        """The columns that have no others below them."""
        return [node for node in self.preorder() if not node.children]


class NodePlan(NamedTuple):
    """What is written of a node, but for where its streams lie and their checksums."""

    name: str
    kind: int
    form: Form
    flags: int
    streams: Sequence[StreamSize]
    children: Sequence[NodePlan]

    def preorder(self) -> Iterator[NodePlan]:
        """This node, then those below it, in the order in which the directory has them."""
        yield self
        for child in self.children:
            yield from child.preorder()


def critical_flags(nodes: Sequence[NodePlan]) -> int:
    """What a reader must understand to read these columns."""
    shared = any(node.kind == SHARED or (node.children and critical_flags(node.children)) for node in nodes)
    return CRITICAL_SHARED if shared else 0


def count_width(counts: NDArray[np.int64]) -> int:
    """Bytes per row count: the narrowest of 1, 2, 4, 8."""
    largest = int(counts.max(initial=0))
    return next(width for width in COUNT_WIDTHS if largest < 1 << (8 * width))


def directory_bytes(nodes: Sequence[NodePlan]) -> int:
    """The exact size of what `build` returns."""
    return _PREFIX.size + sum(map(_node_bytes, nodes)) + _CHECKSUM.size


def _node_bytes(node: NodePlan) -> int:
    size = _NODE.size + len(node.name.encode()) + len(node.form.dtype.encode()) + 8 * len(node.form.shape)
    for length, counts, unit in node.streams:
        size += _STREAM.size + 8 * unit_count(length, unit)
        size += 0 if counts is None else count_width(counts) * len(counts)
    return size + sum(map(_node_bytes, node.children))


def build(
    nodes: Sequence[NodePlan],
    rows: int,
    size_bytes: int,
    offsets: Sequence[int],
    checksums: Sequence[NDArray[np.uint64]],
) -> bytes:
    """Encodes a directory.

    Args:
        nodes: the fields.
        rows: of the block.
        size_bytes: of the block.
        offsets: of each stream within the block, nodes in preorder.
        checksums: of each stream, likewise.
    """
    streams = iter(zip(offsets, checksums, strict=True))
    parts = [_PREFIX.pack(_MAGIC, FORMAT, critical_flags(nodes), len(nodes), rows, size_bytes)]
    for node in (each for top in nodes for each in top.preorder()):
        name, dtype, shape = node.name.encode(), node.form.dtype.encode(), node.form.shape
        container = _CONTAINERS.index(node.form.container)
        sizes = (len(node.children), len(name), len(dtype), len(shape), len(node.streams))
        parts.append(_NODE.pack(node.kind, container, node.flags, *sizes))
        parts.extend((name, dtype, np.array(shape, "<i8").tobytes()))
        for length, counts, unit in node.streams:
            offset, digests = next(streams)
            width = 0 if counts is None else count_width(counts)
            parts.append(_STREAM.pack(offset, length, width, unit.bit_length() - 1, 0, 0))
            if counts is not None:
                parts.append(counts.astype(f"<u{width}").tobytes())
            parts.append(digests.tobytes())
    body = b"".join(parts)
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


class _Head(NamedTuple):
    """What the head of a column says: the same in each block that its field is put in.

    The form lacks a struct's children; of a shared column it has the shape alone.
    """

    name: str
    kind: int
    form: Form
    flags: int
    children: int
    streams: tuple[tuple[int, bool], ...]


class _Cursor:
    """Reads a directory front to back, never past its end."""

    def __init__(self, body: memoryview, payload: int) -> None:
        self.body = body
        self.position = 0
        self.payload_end = payload
        self.streams = (0, 0)  # where the bytes of the first one begin, and of the last one end
        self.columns = 0
        self.critical = 0

    def skip(self, size: int) -> int:
        """Goes past a part; returns where it begins."""
        position = self.position
        if size > len(self.body) - position:
            raise CorruptBlock(f"the directory ends within a part of {size} bytes at {position}")
        self.position = position + size
        return position

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack_from(self.body, self.skip(form.size))

    def array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        position = self.skip(dtype.itemsize * count)
        return np.frombuffer(self.body, dtype, count, position) if count else np.empty(0, dtype)

    def head(self) -> _Head:
        start = self.skip(_NODE.size)
        *_, name_bytes, dtype_bytes, dimensions, _ = _NODE.unpack_from(self.body, start)
        self.skip(name_bytes + dtype_bytes + 8 * dimensions)
        head = bytes(self.body[start : self.position])
        return _known_head(head) if len(head) <= _KNOWN_HEAD_BYTES else _parse_head(head)


def parse(directory: bytes) -> tuple[int, int, tuple[Node, ...], tuple[int, int]]:
    """Decodes a directory.

    Returns:
        (rows, size_bytes, fields, (start, stop) of all their bytes). Counts and checksums are views of `directory`.

    Raises:
        CorruptBlock: it is cut, damaged, or contradicts itself.
        UnsupportedVersion: a newer format, or a feature that this reader lacks.
    """
    if len(directory) < _PREFIX.size + _CHECKSUM.size:
        raise CorruptBlock(f"a directory of {len(directory)} bytes is shorter than its prefix")
    body = memoryview(directory)[: -_CHECKSUM.size]
    if _CHECKSUM.unpack_from(directory, len(body))[0] != xxhash.xxh3_64_intdigest(body):
        raise CorruptBlock("the block's directory fails its checksum")
    cursor = _Cursor(body, aligned(HEADER_BYTES + len(directory)))
    magic, version, cursor.critical, fields, rows, size_bytes = cursor.unpack(_PREFIX)
    if magic != _MAGIC:
        raise CorruptBlock(f"not a directory: it begins with {magic!r}")
    check_version("directory", version, cursor.critical)
    if rows > limits.ROWS_PER_PUT_MAX or size_bytes > limits.BLOCK_BYTES_MAX or fields > limits.FIELDS_MAX:
        raise CorruptBlock(f"{rows} rows, {fields} fields or {size_bytes} bytes are more than any block may have")
    if size_bytes < cursor.payload_end:
        raise CorruptBlock(f"a block of {size_bytes} bytes is shorter than its header and directory")
    nodes = tuple([_parse_node(cursor, rows, size_bytes, DEPTH_MAX) for _ in range(fields)])
    if cursor.position != len(body):
        raise CorruptBlock(f"{len(body) - cursor.position} bytes follow the directory's last column")
    if cursor.payload_end != size_bytes:
        raise CorruptBlock(f"the streams end at {cursor.payload_end}, but the block at {size_bytes}")
    if len({node.name for node in nodes}) != len(nodes):
        raise CorruptBlock("two fields of the block have one name")
    return rows, size_bytes, nodes, cursor.streams


def _parse_node(cursor: _Cursor, rows: int, size_bytes: int, depth: int) -> Node:
    name, kind, form, flags, children, streams = cursor.head()
    cursor.columns += 1
    if depth == 0 or cursor.columns > COLUMNS_MAX:
        raise CorruptBlock(f"columns nest deeper than {DEPTH_MAX} or are more than {COLUMNS_MAX}")
    if kind == SHARED and not cursor.critical & CRITICAL_SHARED:
        raise CorruptBlock("a column of shared values in a block that says it has none")
    parsed = tuple([_parse_stream(cursor, rows, size_bytes, *each, name) for each in streams])
    if not children:
        return Node(name, kind, form, flags, parsed, ())
    child_rows = _shared_values(form.shape, rows, parsed[0], name) if kind == SHARED else rows
    nodes = tuple([_parse_node(cursor, child_rows, size_bytes, depth - 1) for _ in range(children)])
    if kind == SHARED:
        return Node(name, kind, nodes[0].form, flags, parsed, nodes)
    if len({node.name for node in nodes}) != len(nodes):
        raise CorruptBlock(f"two children of column {name!r} have one name")
    return Node(
        name, kind, replace(form, children=tuple((node.name, node.form) for node in nodes)), flags, parsed, nodes
    )


def _parse_head(head: bytes) -> _Head:
    kind, container, flags, children, name_bytes, _, dimensions, streams = _NODE.unpack_from(head)
    if not DENSE <= kind <= SHARED or container >= len(_CONTAINERS) or dimensions > DIMENSIONS_MAX:
        raise CorruptBlock(f"column kind {kind}, container {container} or {dimensions} dimensions do not exist")
    if (children != 1) if kind == SHARED else (children > 0) != (kind == STRUCT):
        raise CorruptBlock(f"a column of kind {kind} has {children} children")
    text, shape_bytes = head[_NODE.size : len(head) - 8 * dimensions], head[len(head) - 8 * dimensions :]
    try:
        name, dtype = text[:name_bytes].decode(), text[name_bytes:].decode()
    except UnicodeDecodeError:
        raise CorruptBlock("a name in the directory is not UTF-8") from None
    shape = tuple(np.frombuffer(shape_bytes, "<i8").tolist())
    items = _item_bytes(kind, _CONTAINERS[container], dtype, shape, streams)
    form = Form(_FORM_KIND.get(kind, "list"), _CONTAINERS[container], dtype, shape)  # type: ignore[arg-type]
    return _Head(name, kind, form, flags, children, tuple(items))


_known_head: Final = lru_cache(_KNOWN_HEADS)(_parse_head)


def _shared_values(shape: tuple[int, ...], rows: int, picks: Stream, path: str) -> int:
    """How many values the rows of a shared column share."""
    counts = picks.counts
    if len(shape) != 1 or not 0 <= shape[0] <= rows:
        raise CorruptBlock(f"column {path!r}: {rows} rows cannot share values of shape {shape}")
    if counts is not None and int(counts.max(initial=0)) >= max(shape[0], 1):
        raise CorruptBlock(f"column {path!r}: a row has value {int(counts.max())} of {shape[0]}")
    if rows and not shape[0]:
        raise CorruptBlock(f"column {path!r}: {rows} rows share no value")
    return shape[0]


def _item_bytes(kind: int, container: str, dtype: str, shape: tuple[int, ...], streams: int) -> list[tuple[int, bool]]:
    """(bytes per item, whether rows have counts) for each stream that a column of this kind has."""
    expected: list[tuple[int, bool]]
    if kind in (DENSE, RAGGED):
        shapes_vary = kind == RAGGED and container == "nested" and bool(shape)
        if any(size < 0 for size in shape) and not (shapes_vary and set(shape) == {-1}):
            raise CorruptBlock(f"the shape {shape} has a negative size")
        if container not in ("torch", "numpy") and not (kind == RAGGED and container == "nested"):
            raise CorruptBlock(f"column kind {kind} cannot be of container {container!r}")
        try:
            item = dtypes.itemsize(container, dtype)
        except dtypes.UnknownDtype as error:
            raise CorruptBlock(str(error)) from None
        if shapes_vary:
            expected = [(item, True), (8 * (len(shape) + 1), False)]
        else:
            if item * math.prod(max(1, size) for size in shape) >= limits.BLOCK_BYTES_MAX:
                raise CorruptBlock(f"rows of shape {shape} are longer than any block")
            item *= math.prod(shape)
            expected = [(item, kind == RAGGED)]
    else:
        if container or dtype or (shape and kind != SHARED):
            raise CorruptBlock(f"column kind {kind} has no container, dtype or shape")
        expected = {
            STRUCT: [],
            TEXT: [(1, True)],
            BYTES: [(1, True)],
            RECORD: [(1, True), (1, True)],
            SHARED: [(0, True)],  # no bytes of its own: its counts say which value each row has
        }[kind]
    if len(expected) != streams:
        raise CorruptBlock(f"a column of kind {kind} has {streams} streams instead of {len(expected)}")
    return expected


def _parse_stream(cursor: _Cursor, rows: int, size_bytes: int, item_bytes: int, counted: bool, path: str) -> Stream:
    entry = cursor.position
    offset, length, width, unit_log2, _, _ = cursor.unpack(_STREAM)
    if offset != cursor.payload_end or offset % ALIGN or length > size_bytes - offset:
        raise CorruptBlock(f"a stream of column {path!r}, [{offset}, +{length}], lies out of place or out of the block")
    cursor.payload_end = aligned(offset + length)
    if length:
        cursor.streams = (cursor.streams[0] or offset, offset + length)
    if (width not in _COUNTS) if counted else width != 0:
        raise CorruptBlock(f"column {path!r} has row counts of {width} bytes")
    unit = 1 << min(unit_log2, 63)
    if not UNIT_MIN <= unit <= UNIT_MAX:
        raise CorruptBlock(f"column {path!r} has a checksum unit of {unit} bytes")
    counts = cursor.array(_COUNTS[width], rows) if counted else None
    if counts is None:
        items = rows
    elif rows == 1:
        items = largest = int(counts[0])
    else:
        items, largest = int(counts.sum(dtype=np.uint64)), int(counts.max(initial=0))
    # Each count is below 2^44 and there are at most 2^20, so that their sum cannot wrap.
    if counts is not None and largest >= limits.BLOCK_BYTES_MAX:
        raise CorruptBlock(f"a row of column {path!r} is longer than any block")
    if items * item_bytes != length:
        raise CorruptBlock(f"the rows of column {path!r} have {items * item_bytes} bytes, but its stream has {length}")
    checksums = cursor.array(_DIGEST, unit_count(length, unit))
    return Stream(offset, length, unit, rows, item_bytes, counts, checksums, entry)
