"""measure → reserve → write: a batch's exact size first, its bytes straight into their place second."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arrays import bounds
from tqclient.codec.checksum import Checksums
from tqclient.codec.columns import check_row_counts, encode_column
from tqclient.codec.directory import build, critical_flags, directory_bytes
from tqclient.codec.header import ALIGN, HEADER_BYTES, Header, aligned
from tqclient.codec.kinds.base import Encoder
from tqclient.codec.parallel import Later
from tqclient.errors import InvalidArgument
from tqclient.schema import Form


def measure(columns: Mapping[str, Any], *, rows: int | None = None, allow_pickle: bool = False) -> Plan:
    """Checks columns and plans the block that will hold them.

    Nothing is copied but texts, the skeletons of records, and lists of tensors of a few bytes each.

    Args:
        columns: as `normalise` gives them.
        rows: how many each must have; None: as many as the first has.
        allow_pickle: pickle what cannot be said otherwise; readers must allow it too.

    Returns:
        A plan that holds the caller's tensors: they must not change until it was written.

    Raises:
        UnsupportedValue: a value that would not come back as it is, with its path.
        InvalidArgument: no columns, too many, or row counts that differ.
    """
    if not columns:
        raise InvalidArgument("there are no fields to put")
    if len(columns) > limits.FIELDS_MAX:
        raise InvalidArgument(f"{len(columns)} fields; at most {limits.FIELDS_MAX} are allowed")
    encoders = {name: encode_column(name, column, 0, allow_pickle=allow_pickle) for name, column in columns.items()}
    counts = {name: encoder.rows for name, encoder in encoders.items()}
    if rows is not None:
        for name, count in counts.items():
            if count != rows:
                raise InvalidArgument(f"field {name!r} has {count} rows, but {rows} are expected")
    check_row_counts(counts)
    count = next(iter(counts.values()))
    if count > limits.ROWS_PER_PUT_MAX:
        raise InvalidArgument(f"{count} rows in one put; at most {limits.ROWS_PER_PUT_MAX} are allowed")
    return Plan(encoders, count)


class Plan:
    """A measured block, ready to be written; may be written from several threads, and more than once.

    Attributes:
        rows: how many.
        size_bytes: exactly what `write` fills.
    """

    def __init__(self, columns: Mapping[str, Encoder], rows: int) -> None:
        self._columns = dict(columns)
        self.rows = rows
        self._nodes = [column.node(name) for name, column in self._columns.items()]
        self._streams = [stream for top in self._nodes for node in top.preorder() for stream in node.streams]
        self._directory_bytes = directory_bytes(self._nodes)
        self._offsets, self.size_bytes = self._place()

    def _place(self) -> tuple[list[int], int]:
        """Each stream on its 64-byte boundary, nodes in preorder."""
        offsets = []
        end = aligned(HEADER_BYTES + self._directory_bytes)
        for stream in self._streams:
            offsets.append(end)
            end = aligned(end + stream.length)
        return offsets, end

    @cached_property
    def forms(self) -> dict[str, Form]:
        """The form of each field."""
        return {name: column.form for name, column in self._columns.items()}

    def lengths(self) -> dict[str, NDArray[np.int64]]:
        """The leading dimensions of the rows of each ragged field, int64 [rows].

        Returns:
            By path: `tokens`, or `images.pixels` for a child of a struct. A path that two columns share, because a name
            has a dot in it, is left out.
        """
        found: dict[str, NDArray[np.int64]] = {}
        ambiguous = set()
        for name, column in self._columns.items():
            for below, lengths in column.row_lengths():
                path = name + below
                if path in found:
                    ambiguous.add(path)
                found[path] = lengths
        return {path: lengths for path, lengths in found.items() if path not in ambiguous}

    def split(self, block_bytes_max: int) -> list[Plan]:
        """Cuts the rows, in order, into plans of at most `block_bytes_max` bytes; a larger row stands alone."""
        if self.size_bytes <= block_bytes_max or self.rows <= 1:
            return [self]
        row_bytes = sum((column.row_bytes() for column in self._columns.values()), np.zeros(self.rows, np.int64))
        ends = bounds(row_bytes)
        plans = []
        start = 0
        while start < self.rows:
            stop = int(np.searchsorted(ends, ends[start] + block_bytes_max, side="right")) - 1
            stop = min(max(stop, start + 1), self.rows)
            plan = self._slice(start, stop)
            # Header, directory and padding come on top of the rows.
            while plan.size_bytes > block_bytes_max and plan.rows > 1:
                fitting = min(plan.rows - 1, plan.rows * block_bytes_max // plan.size_bytes)
                plan = self._slice(start, start + max(1, fitting))
            plans.append(plan)
            start += plan.rows
        return plans

    def _slice(self, start: int, stop: int) -> Plan:
        return Plan({name: column.slice(start, stop) for name, column in self._columns.items()}, stop - start)

    def over(self, target: NDArray[np.uint8]) -> Plan:
        """The same block over what lies in a target: to `write` it there moves none of the values.

        Args:
            target: as for `write`, whose contents do not matter.

        Raises:
            InvalidArgument: a column is neither tensors nor made of them.
        """
        streams = iter([place.stream for place in self._places(target)])
        return Plan({name: column.over(streams) for name, column in self._columns.items()}, self.rows)

    def tensors(self) -> dict[str, Any]:
        """What fills in a plan that `over` returned, by field: a tensor, a list of one for each row, or a dict."""
        return {name: column.tensors() for name, column in self._columns.items()}

    def _places(self, target: NDArray[np.uint8]) -> list[Checksums]:
        """Where the streams lie, nodes in preorder."""
        return [
            Checksums(target[offset : offset + stream.length], stream.unit)
            for offset, stream in zip(self._offsets, self._streams, strict=True)
        ]

    def write(self, target: NDArray[np.uint8]) -> bytes:
        """Writes the block.

        Args:
            target: uint8 [size_bytes], contiguous, writable, 64-byte aligned. Every byte is written.

        Returns:
            The directory, which the block holds as well.

        Raises:
            InvalidArgument: the target is of another size, dtype or alignment.
        """
        fits = target.dtype == np.uint8 and target.shape == (self.size_bytes,) and target.flags.c_contiguous
        if not fits or target.ctypes.data % ALIGN:
            raise InvalidArgument(f"the target must be uint8 [{self.size_bytes}], contiguous and {ALIGN}-byte aligned")
        places = self._places(target)
        for offset, stream in zip(self._offsets, self._streams, strict=True):
            end = offset + stream.length
            target[end : aligned(end)] = 0
        left = iter(places)
        later = Later()
        for field, top in zip(self._columns.values(), self._nodes, strict=True):
            for column, node in zip(field.preorder(), top.preorder(), strict=True):
                column.write(list(islice(left, len(node.streams))), later)
        later.run()
        directory = build(self._nodes, self.rows, self.size_bytes, self._offsets, [each.finish() for each in places])
        header = Header(self.size_bytes, len(directory), critical_flags(self._nodes))
        end = HEADER_BYTES + len(directory)
        target[:HEADER_BYTES] = np.frombuffer(header.to_bytes(), np.uint8)
        target[HEADER_BYTES:end] = np.frombuffer(directory, np.uint8)
        target[end : aligned(end)] = 0
        return directory
