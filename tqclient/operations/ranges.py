"""Row ranges: which leading-dimension rows of each sample's value are wanted, checked against what is stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tqclient.arguments import is_int, items_of, pair_of
from tqclient.codec import Clip, Layout
from tqclient.errors import CorruptBlock, InvalidArgument, TQError
from tqclient.info import PartitionRef
from tqclient.rows import RowSet
from tqclient.schema import Form

RowRange: TypeAlias = "tuple[int, int | None]"
RangesOf: TypeAlias = "Callable[[NDArray[np.int64]], Any]"
Ranges: TypeAlias = "Mapping[str, RowRange | Sequence[RowRange] | NDArray[np.integer[Any]] | RangesOf]"

_TO_THE_END = -1


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is wanted of one field, or of a child of a struct.

    Attributes:
        path: as the user named it.
        pairs: int64 [rows, 2], or [1, 2] for all rows; a stop of -1 is the row's end. None: `choose` tells.
        uniform: whether one range was given for all rows.
        choose: lengths, int64 [rows] → pairs.
    """

    path: str
    pairs: NDArray[np.int64] | None
    uniform: bool
    choose: RangesOf | None = None

    def resolve(
        self, lengths: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Fits the ranges to rows of these lengths.

        Returns:
            (starts, stops), int64 [rows] each.

        Raises:
            InvalidArgument: there are more or less of them than rows, or one reaches beyond its row; names the row.
            RuntimeError: the function raised what would be taken for the read's own answer.
        """
        pairs = self.pairs
        if pairs is None:
            assert self.choose is not None
            pairs = _pairs(self.path, _chosen(self.path, self.choose, lengths.copy()))
        if not self.uniform and len(pairs) != len(lengths):
            raise InvalidArgument(f"ranges[{self.path!r}]: {len(pairs)} of them for {len(lengths)} rows")
        starts, stops = np.broadcast_to(pairs, (len(lengths), 2)).T
        stops = np.where(stops == _TO_THE_END, np.maximum(lengths, starts), stops)
        beyond = np.flatnonzero(np.maximum(starts, stops) > lengths)
        if beyond.size:
            row = int(beyond[0])
            raise InvalidArgument(
                f"ranges[{self.path!r}]: [{starts[row]}, {stops[row]}) reaches beyond row {row}, sample {ids[row]}, "
                f"whose length is {lengths[row]}",
                ids=[int(ids[row])],
                rows=[row],
            )
        return starts.astype(np.int64), stops.astype(np.int64)


def wanted_ranges(ranges: Any) -> list[Wanted]:
    """Reads what `get` or `claim` was given.

    Raises:
        InvalidArgument: no mapping, or something in it is no range.
    """
    if ranges is None:
        return []
    if not isinstance(ranges, Mapping) or not all(isinstance(path, str) for path in ranges):
        raise InvalidArgument(f"ranges={ranges!r:.80}: expected a dict from field to (start, stop)")
    wanted = []
    for path, given in ranges.items():
        if callable(given):
            wanted.append(Wanted(path, None, uniform=False, choose=given))
        else:
            uniform = (
                isinstance(given, tuple) and len(given) == 2 and not isinstance(given[0], tuple | list | np.ndarray)
            )
            wanted.append(Wanted(path, _pairs(path, [given] if uniform else given), uniform))
    return wanted


def _chosen(path: str, choose: RangesOf, lengths: NDArray[np.int64]) -> Any:
    """Asks a user's function. Its errors are no answers to the read: `Sealed` would end a loop over batches."""
    try:
        return choose(lengths)
    except InvalidArgument:
        raise
    except (TQError, StopIteration) as error:
        raise RuntimeError(f"ranges[{path!r}] raised {type(error).__name__}: {error}") from error


def _pairs(path: str, given: Any) -> NDArray[np.int64]:
    """Brings pairs to int64 [n, 2]; numbers that are no integers, or below 0, are refused."""
    listed = items_of(given) if hasattr(given, "tolist") else given
    if not isinstance(listed, list | tuple):
        raise InvalidArgument(f"ranges[{path!r}]={given!r:.80}: expected (start, stop), or one such pair per row")
    pairs = np.empty((len(listed), 2), np.int64)
    for row, pair in enumerate(listed):
        start, stop = _pair(f"ranges[{path!r}]", row, pair)
        pairs[row] = start, _TO_THE_END if stop is None else stop
    return pairs


def _pair(what: str, row: int, pair: Any) -> tuple[int, int | None]:
    ends = pair_of(pair)
    if ends is None:
        raise InvalidArgument(f"{what}: {pair!r:.80} of row {row} is no pair (start, stop)", rows=[row])
    start, stop = ends
    for end in (start, 0 if stop is None else stop):
        if not is_int(end):
            raise InvalidArgument(f"{what}: ({start!r:.40}, {stop!r:.40}) of row {row} are no integers", rows=[row])
    if not 0 <= start <= (start if stop is None else stop) < 1 << 62:
        raise InvalidArgument(
            f"{what}: ({start}, {stop}) of row {row}: expected 0 <= start <= stop, counted from the row's begin",
            rows=[row],
        )
    return int(start), None if stop is None else int(stop)


def check_ranges(wanted: Sequence[Wanted], ref: PartitionRef, fields: Sequence[str]) -> None:
    """Checks which fields ranges are of, as far as this client knows the fields.

    Args:
        wanted: the ranges.
        ref: partition.
        fields: that are read; empty: every field.

    Raises:
        InvalidArgument: a range is of a field that is not read, or whose rows have no length.
    """
    for each in wanted:
        field = _owner(each.path, fields or ref.fields)
        if field is None and not fields:
            continue  # it may be a field that this client has not heard of yet
        if field is None:
            raise InvalidArgument(f"ranges[{each.path!r}]: that is not read; what is: {', '.join(map(repr, fields))}")
        form = ref.form(field)
        if form is not None:
            _check_form(each.path, form, each.path[len(field) + 1 :])


def _owner(path: str, fields: Sequence[str]) -> str | None:
    """The field that a path leads into: the longest name that fits, as a name may hold dots."""
    return max((name for name in fields if path == name or path.startswith(name + ".")), key=len, default=None)


def _check_form(path: str, form: Form, rest: str) -> None:
    while rest and form.kind == "struct":
        children = dict(form.children)
        key = _owner(rest, list(children))
        if key is None:
            break
        form, rest = children[key], rest[len(key) + 1 :]
    if rest:
        raise InvalidArgument(f"ranges[{path!r}]: there is no {rest!r} in {form}")
    if form.kind == "ragged" and -1 in form.shape:
        raise InvalidArgument(f"ranges[{path!r}]: rows of {form} differ in every dimension; read them whole")
    if form.kind != "ragged" and not (form.kind == "dense" and form.shape):
        raise InvalidArgument(f"ranges[{path!r}]: rows of {form} have no leading dimension to take a range of")


Clips: TypeAlias = "Mapping[str, Sequence[tuple[Clip, ...]]]"
"""By field: for each of its runs, the columns that are clipped."""


def resolve_clips(wanted: Sequence[Wanted], ref: PartitionRef, rows: RowSet, layouts: Mapping[int, Layout]) -> Clips:
    """Fits ranges to located rows.

    Raises:
        InvalidArgument: as `check_ranges`, and `Wanted.resolve`.
        CorruptBlock: a block is not what the partition's fields say.
    """
    check_ranges(wanted, ref, list(rows.runs))
    clips: dict[str, list[tuple[Clip, ...]]] = {}
    for each in wanted:
        field = _owner(each.path, list(rows.runs))
        assert field is not None
        runs = rows.runs[field]
        try:
            nodes = [layouts[run.block_id].column(each.path, field).inner for run in runs]
            lengths = [layouts[run.block_id].lengths(each.path, run.rows, field) for run in runs]
        except InvalidArgument as error:
            raise CorruptBlock(f"partition {ref.name!r}: {error.message}") from None
        starts, stops = each.resolve(np.concatenate(lengths), rows.ids)
        bounds = [0, *itertools.accumulate(map(len, lengths))]
        added = [
            Clip(node, starts[low:high], stops[low:high], each.uniform)
            for node, (low, high) in zip(nodes, itertools.pairwise(bounds), strict=True)
        ]
        before = clips.get(field, [()] * len(runs))
        clips[field] = [(*clip, new) for clip, new in zip(before, added, strict=True)]
    return clips
