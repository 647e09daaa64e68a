"""Leading-dimension ranges of rows: a reader that wants a slice of each row touches the bytes of that slice alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tqclient.codec.directory import DENSE, RAGGED, SHARED, Node, Stream
from tqclient.errors import InvalidArgument
from tqclient.schema import Form

RowCounts = Callable[[Stream, NDArray[np.int64]], NDArray[np.int64]]
"""A stream, and rows of it → the items of each, int64 [rows]."""


@dataclass(frozen=True, slots=True)
class Clip:
    """What is wanted of each row of one column of one block.

    Attributes:
        node: the column: dense or ragged; see `Layout.column`.
        starts: int64 [rows], items of the leading dimension; row i gives [starts[i], stops[i]).
        stops: int64 [rows]; the caller has checked that 0 <= starts <= stops <= `row_lengths`.
        uniform: whether one range was asked for, for all rows: then a dense column stays dense. Else it becomes ragged,
            whatever the ranges happen to be.
    """

    node: Node
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    uniform: bool

    @property
    def item_bytes(self) -> int:
        """Bytes of one item."""
        item_bytes = self.node.streams[0].item_bytes
        return item_bytes // max(1, self.node.form.shape[0]) if self.node.kind == DENSE else item_bytes

    @property
    def counts(self) -> NDArray[np.int64]:
        """Items of each row that are left, int64 [rows]."""
        return self.stops - self.starts

    def take(self, rows: NDArray[np.int64]) -> Clip:
        """The same of some rows, in another order."""
        return Clip(self.node, self.starts[rows], self.stops[rows], self.uniform)

    def form(self, form: Form) -> Form:
        """The form of a column of `form` after it was clipped."""
        if form.kind != "dense":
            return form
        if self.uniform:
            return Form("dense", form.container, form.dtype, (int(self.counts.max(initial=0)), *form.shape[1:]))
        return Form("ragged", form.container, form.dtype, form.shape[1:])


def join_clips(clips: Sequence[Sequence[Clip]]) -> tuple[Clip, ...]:
    """Joins the clips of parts of one block, or of blocks of a family: each part has the same columns clipped."""
    if len(clips) == 1:
        return tuple(clips[0])
    return tuple(
        Clip(
            same[0].node,
            np.concatenate([clip.starts for clip in same]),
            np.concatenate([clip.stops for clip in same]),
            same[0].uniform,
        )
        for same in zip(*clips, strict=True)
    )


def ends_of(clips: Sequence[Clip]) -> list[NDArray[np.int64]]:
    """What clips say of rows: int64 [rows] each."""
    return [each for clip in clips for each in (clip.starts, clip.stops)]


def clip_of(node: Node, clips: Sequence[Clip]) -> Clip | None:
    """The clip of a column; None when its rows are wanted whole."""
    return next((clip for clip in clips if clip.node is node), None)


def spans(
    node: Node, index: int, rows: NDArray[np.int64], clips: Sequence[Clip]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The bytes of stream `index` of a column that rows need: (starts, stops) within the stream, int64 [rows] each."""
    starts, stops = node.streams[index].extents(rows)
    clip = clip_of(node, clips)
    if clip is None:
        return starts, stops
    return starts + clip.starts * clip.item_bytes, starts + clip.stops * clip.item_bytes


def clips_on(clips: Sequence[Clip], columns: Iterable[Node], others: Iterable[Node]) -> tuple[Clip, ...]:
    """Returns clips of columns, or of columns within them, as those of others, which differ in numbers alone."""
    if not clips:
        return ()
    before = [each for column in columns for each in column.preorder()]
    after = [each for column in others for each in column.preorder()]
    by_column = {id(column): other for column, other in zip(before, after, strict=True)}
    return tuple([replace(clip, node=by_column[id(clip.node)]) for clip in clips])


def row_lengths(
    node: Node, rows: NDArray[np.int64], path: str, row_counts: RowCounts = Stream.row_counts
) -> NDArray[np.int64]:
    """Leading dimension of rows of a column, int64 [rows].

    Args:
        node: the column.
        rows: int64, of its block.
        path: of the column, for errors.
        row_counts: tells how many items rows of a stream have.

    Raises:
        InvalidArgument: its rows have none, or each may vary in every dimension.
    """
    if node.kind == SHARED:
        return row_lengths(node.children[0], row_counts(node.streams[0], rows), path, row_counts)
    if node.kind == RAGGED and len(node.streams) == 1:
        return row_counts(node.streams[0], rows)
    if node.kind == DENSE and node.form.shape:
        return np.full(len(rows), node.form.shape[0], np.int64)
    raise InvalidArgument(f"field {path!r} is {node.form}: its rows have no length")
