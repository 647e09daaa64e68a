"""Anything else that msgpack can say: a skeleton per row, and the row's tensors out of line.

Stream 0 holds the skeletons, stream 1 the tensors and arrays, each on a 64-byte boundary; a row has a span of both, so
that rows are read on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import buffers
from tqclient.codec.checksum import Checksums
from tqclient.codec.directory import BYTES, FLAG_PICKLE, RECORD, TEXT, StreamSize
from tqclient.codec.header import aligned
from tqclient.codec.kinds import text
from tqclient.codec.kinds.base import Column, Encoder, stream_size
from tqclient.codec.parallel import Later
from tqclient.codec.refusal import Refused, RowPath
from tqclient.codec.skeleton import Checker, SkeletonReader, SkeletonWriter
from tqclient.codec.streams import Group, Reading, read_rows
from tqclient.errors import CorruptBlock, UnsupportedValue
from tqclient.schema import Form

Leaf = tuple[Any, int]


class RecordEncoder(Encoder):
    """A list of arbitrary values, whose skeletons are encoded already."""

    kind = RECORD
    form = Form("list")

    def __init__(
        self, skeletons: Sequence[bytes], leaves: Sequence[Sequence[Leaf]], leaf_bytes: NDArray[np.int64], flags: int
    ) -> None:
        self.rows = len(skeletons)
        self.flags = flags
        self._skeletons = skeletons
        self._counts = np.fromiter(map(len, skeletons), np.int64, len(skeletons))
        self._leaves = leaves
        self._leaf_bytes = leaf_bytes

    def streams(self) -> list[StreamSize]:
        return [stream_size(int(counts.sum()), self.rows, counts) for counts in (self._counts, self._leaf_bytes)]

    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        skeletons, leaves = streams
        buffers.write_joined(self._skeletons, self._counts, skeletons)
        if not leaves.stream.size:
            return
        tasks: list[Callable[[], None]] = []
        start = 0
        for row, row_bytes in zip(self._leaves, self._leaf_bytes.tolist(), strict=True):
            for leaf, offset in row:
                end = start + offset + leaf.nbytes
                leaves.stream[end : aligned(end)] = 0
                tasks.extend(buffers.copies(leaf, leaves, start + offset))
            start += row_bytes
        later.add(tasks, leaves.stream.size)

    def row_bytes(self) -> NDArray[np.int64]:
        return self._counts + self._leaf_bytes

    def slice(self, start: int, stop: int) -> RecordEncoder:
        rows = slice(start, stop)
        return RecordEncoder(self._skeletons[rows], self._leaves[rows], self._leaf_bytes[rows], self.flags)

    def take(self, rows: NDArray[np.int64]) -> RecordEncoder:
        chosen = rows.tolist()
        skeletons = [self._skeletons[row] for row in chosen]
        return RecordEncoder(skeletons, [self._leaves[row] for row in chosen], self._leaf_bytes[rows], self.flags)


def encode(values: Sequence[Any], path: RowPath, depth: int, *, allow_pickle: bool) -> RecordEncoder:
    """Checks and encodes rows.

    Args:
        values: one per row.
        path: for errors.
        depth: dicts around each row's value.
        allow_pickle: accept arbitrary classes.

    Raises:
        UnsupportedValue: with the path of the offender.
    """
    return _encode_without_leaves(values, depth, allow_pickle) or _encode_each(values, path, depth, allow_pickle)


def _encode_without_leaves(values: Sequence[Any], depth: int, allow_pickle: bool) -> RecordEncoder | None:
    """Encodes rows that are not refused and hold no tensors or arrays; None where one does not."""
    checker, writer = Checker(allow_pickle=allow_pickle), SkeletonWriter()
    try:
        if not checker.plain(values, depth):
            checker.check(values[0], depth)
            writer.encode(values[0])
            if writer.leaves:
                return None
            for value in values:
                checker.check(value, depth)
        skeletons = writer.encode_all(values)
    except (Refused, UnicodeEncodeError):
        return None
    if writer.leaves:
        return None
    flags = FLAG_PICKLE if writer.pickled else 0
    return RecordEncoder(skeletons, [()] * len(values), np.zeros(len(values), np.int64), flags)


def _encode_each(values: Sequence[Any], path: RowPath, depth: int, allow_pickle: bool) -> RecordEncoder:
    writer = SkeletonWriter()
    skeletons, leaves = [], []
    leaf_bytes = np.zeros(len(values), np.int64)
    checker = Checker(allow_pickle=allow_pickle)
    for row, value in enumerate(values):
        try:
            checker.check(value, depth)
            skeletons.append(writer.encode(value))
        except Refused as refused:
            raise refused.at(path.at(row)) from refused.__cause__
        except UnicodeEncodeError:
            raise _surrogate(value, depth).at(path.at(row)) from None
        leaves.append(writer.leaves)
        leaf_bytes[row] = writer.leaf_bytes
    return RecordEncoder(skeletons, leaves, leaf_bytes, FLAG_PICKLE if writer.pickled else 0)


def _surrogate(value: Any, depth: int) -> Refused:
    """Finds the text that the encoder stumbled over."""
    try:
        Checker(allow_pickle=True, texts=True).check(value, depth)
    except Refused as found:
        return found
    return Refused("a text has a lone surrogate")


class ListColumn(Column):
    """A list of values: text, bytes or records."""

    form = Form("list")

    def __init__(self, values: list[Any], is_view: bool) -> None:
        self.rows = len(values)
        self.is_view = is_view
        self._values = values

    @property
    def value(self) -> list[Any]:
        return self._values

    def list(self) -> list[Any]:
        return self._values

    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        if not isinstance(other, ListColumn):
            return np.zeros(self.rows, bool)
        pairs = zip(self._values, other._values, strict=True)
        return np.fromiter((_same(a, b) for a, b in pairs), bool, self.rows)


def _same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if type(a) in (str, bytes):
        return bool(a == b)
    one, two = SkeletonWriter(), SkeletonWriter()
    # The skeletons hold dtype, shape and place of each leaf: equal ones have comparable leaves.
    return one.encode(a) == two.encode(b) and all(
        _same_leaf(x, y) for (x, _), (y, _) in zip(one.leaves, two.leaves, strict=True)
    )


def _same_leaf(a: Any, b: Any) -> bool:
    return np.array_equal(buffers.bytes_of(a), buffers.bytes_of(b))


def read(groups: Sequence[Group], reading: Reading) -> ListColumn:
    """Reads a list column, whose blocks may hold texts, bytes and records."""
    kinds = {group.node.kind: None for group in groups}
    if len(kinds) == 1:
        return ListColumn(*_read_alike(groups, reading))
    values: list[Any] = [None] * sum(len(group.rows) for group in groups)
    any_view = False
    for kind in kinds:
        alike = [group for group in groups if group.node.kind == kind]
        places = np.concatenate([group.at for group in alike])
        try:
            decoded, is_view = _read_alike(_apart(alike), reading)
        except CorruptBlock as error:
            raise CorruptBlock(error.message, rows=places[list(error.rows)].tolist()) from None
        any_view |= is_view
        for place, value in zip(places.tolist(), decoded, strict=True):
            values[place] = value
    return ListColumn(values, any_view)


def _apart(groups: Sequence[Group]) -> list[Group]:
    """The same, one after the other and as if there were no others."""
    apart = []
    start = 0
    for group in groups:
        place = start if group.place >= 0 else -1
        apart.append(group._replace(at=start + np.arange(len(group.rows)), place=place))
        start += len(group.rows)
    return apart


def _read_alike(groups: Sequence[Group], reading: Reading) -> tuple[list[Any], bool]:
    """Reads columns of one kind; returns the values, and whether they show the blocks themselves."""
    if groups[0].node.kind in (TEXT, BYTES):
        return list(text.read(groups, reading)), False
    if not reading.allow_pickle and any(group.node.flags & FLAG_PICKLE for group in groups):
        raise UnsupportedValue(
            f"field {reading.path!r} holds pickled values; "
            "reading them needs allow_pickle=True, which runs the writer's code"
        )
    skeletons = read_rows(groups, 0, reading, view=False)
    data, stops = skeletons.data.tobytes(), skeletons.bounds[1:].tolist()
    if not any(group.node.streams[1].length for group in groups):
        plain = SkeletonReader(data, allow_pickle=reading.allow_pickle).all(stops)
        if plain is not None:
            return plain, False
    leaves = read_rows(groups, 1, reading, view=not reading.copy)
    reader = SkeletonReader(data, allow_pickle=reading.allow_pickle)
    bounds = leaves.bounds.tolist()
    values = []
    for place, stop in enumerate(stops):
        try:
            values.append(reader.next(stop, leaves.data[bounds[place] : bounds[place + 1]]))
        except CorruptBlock as error:
            row = _row_of(groups, place)
            raise CorruptBlock(f"field {reading.path!r}, row {row} of its block: {error}", rows=[place]) from None
    return values, leaves.is_view


def _row_of(groups: Sequence[Group], place: int) -> int:
    """The row, within its block, that is delivered at a place."""
    return next(
        group.row_in_block(int(np.flatnonzero(group.at == place)[0])) for group in groups if (group.at == place).any()
    )
