"""What every column kind implements: an `Encoder` on the way in, a `Column` on the way out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tqclient.codec.checksum import Checksums, unit_bytes
from tqclient.codec.directory import NodePlan, StreamSize
from tqclient.codec.parallel import Later
from tqclient.errors import InvalidArgument
from tqclient.schema import Form


class Encoder(ABC):
    """The values of one column, measured. It holds the caller's tensors, not copies of them.

    Attributes:
        kind: the directory's number for the kind.
        form: what the partition's schema must agree to.
        rows: how many.
        flags: of the directory's node.
    """

    kind: ClassVar[int]
    form: Form
    rows: int
    flags: int = 0

    @abstractmethod
    def streams(self) -> list[StreamSize]:
        """The streams of this column itself, without its children's."""

    @abstractmethod
    def write(self, streams: Sequence[Checksums], later: Later) -> None:
        """Writes each stream, and hashes what it wrote, or leaves that to `later`.

        Args:
            streams: those that `streams()` told of, in their places.
            later: run before the checksums are finished.
        """

    @abstractmethod
    def row_bytes(self) -> NDArray[np.int64]:
        """Payload bytes of each row, int64 [rows], children included."""

    @abstractmethod
    def slice(self, start: int, stop: int) -> Encoder:
        """The rows [start, stop), of the same form."""

    @abstractmethod
    def take(self, rows: NDArray[np.int64]) -> Encoder:
        """Some rows, in any order, of the same form."""

    def over(self, streams: Iterator[NDArray[np.uint8]]) -> Encoder:
        """The same column, whose values are what lies in its streams: to write it there moves none of them.

        Args:
            streams: where the streams of this column, and of those below it, lie, in preorder.

        Raises:
            InvalidArgument: its streams are not the values themselves.
        """
        raise InvalidArgument(f"a column of kind {self.form} has no tensors of known shapes to be filled in")

    def tensors(self) -> Any:
        """What fills in a column that `over` returned: a tensor, a list of one for each row, or a dict of those."""
        raise InvalidArgument(f"a column of kind {self.form} has no tensors of known shapes to be filled in")

    def lengths(self) -> NDArray[np.int64] | None:
        """The leading dimension of each row, int64 [rows], where rows have one of their own."""
        return None

    def row_lengths(self) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """The lengths of this column and of those within it, each with what leads from here to there: `.pixels`."""
        lengths = self.lengths()
        if lengths is not None:
            yield "", lengths
        for key, child in self.children():
            for path, inner in child.row_lengths():
                yield f".{key}{path}", inner

    def children(self) -> list[tuple[str, Encoder]]:
        """(key, column) of a struct."""
        return []

    def preorder(self) -> Iterator[Encoder]:
        """This column, then those below it, in the order in which the block has their streams."""
        yield self
        for _, child in self.children():
            yield from child.preorder()

    def node(self, name: str) -> NodePlan:
        """What the directory says of this column."""
        children = [child.node(key) for key, child in self.children()]
        return NodePlan(name, self.kind, self.form, self.flags, self.streams(), children)


def stream_size(length: int, rows: int, counts: NDArray[np.int64] | None = None) -> StreamSize:
    """A stream of `length` bytes with the checksum unit that suits its rows."""
    return StreamSize(length, counts, unit_bytes(length, rows))


class Column(ABC):
    """One column as it was read.

    Attributes:
        form: what it is.
        rows: how many.
        is_view: whether it shows bytes of the block itself. A view stays mapped as long as it is referenced, but
            it is valid only while the claim or pin that it was read under lasts. Never write to a view.
    """

    form: Form
    rows: int
    is_view: bool = False

    @property
    @abstractmethod
    def value(self) -> Any:
        """What was put: a tensor, an array, a NestedTensor, a dict of those, or a list."""

    @abstractmethod
    def list(self) -> list[Any]:
        """One Python value per row."""

    def padded(self, value: Any = 0) -> Any:
        """A ragged column as one dense tensor or array, [rows, longest, *shape].

        Args:
            value: fills the rows' ends.

        Raises:
            InvalidArgument: the column is not ragged, or its dtype has no such value.
        """
        raise InvalidArgument(f"only a ragged column can be padded; this one is {self.form}")

    def parts(self) -> Iterator[Column]:
        """This column, or those that it is made of."""
        yield self

    def plain(self) -> Column:
        """The column with memory of its own for each row, where rows share some; else itself."""
        return self

    @abstractmethod
    def same_rows(self, other: Column) -> NDArray[np.bool_]:
        """Which rows carry the same bytes and types as those of `other`, bool [rows]; both are plain, and as long."""
