"""Rows of one field, from many blocks, in the order in which they are delivered."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.codec.clips import Clip, clips_on, join_clips
from tqclient.codec.directory import DENSE, RAGGED, SHARED, STRUCT
from tqclient.codec.family import Family
from tqclient.codec.kinds import dense, ragged, record, shared, struct
from tqclient.codec.kinds.base import Column
from tqclient.codec.layout import Layout, check_rows, find, is_everything
from tqclient.codec.parallel import Later
from tqclient.codec.scattered import Picks
from tqclient.codec.streams import Allocate, Fetch, Group, Locate, Reading
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.limits import MIB
from tqclient.schema import Form

JOINED_BYTES_MAX: Final = MIB
"""What is wanted of a block, by its mean row, beyond which it is worth copies of its own, on several cores."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some rows of one block.

    Attributes:
        layout: of the block.
        rows: int64; any order, repeats allowed.
        fetch: (offset, length) within the block → uint8 [length]. It is asked only for bytes within
            `layout.ranges(field, rows, clips)`.
        owned_bytes: of the memory that `fetch` gives views of, where that is private to the reader: then a copy is
            made only where a view would keep much more alive than it shows. 0: it is not.
        locate: finds many stretches at once, within the same bytes as `fetch`; None: each is fetched.
        clips: columns of which less than whole rows are wanted; the same ones, in the same order, in all parts.
        memory: that `fetch` gives views of, uint8, with byte i of the block at `origin + i`; None: it is not told.
        origin: see there.
    """

    layout: Layout
    rows: NDArray[np.int64]
    fetch: Fetch
    owned_bytes: int = 0
    locate: Locate | None = None
    clips: tuple[Clip, ...] = ()
    memory: NDArray[np.uint8] | None = None
    origin: int = 0


class Gathered(NamedTuple):
    """The parts that come from one block, or from the blocks of a family, together; see `gather`.

    Attributes:
        part: one of them.
        rows: int64, of all; those of a family are numbered as they were picked.
        at: int64 [len(rows)]: the place of each in delivery order.
        clips: of all.
        place: as in `Group`.
        picks: of a family, which rows of which of its blocks; None: they are of one block.
    """

    part: Part
    rows: NDArray[np.int64]
    at: NDArray[np.int64]
    clips: tuple[Clip, ...]
    place: int
    picks: Picks | None = None

    def group(self, field: str) -> Group:
        """The wanted rows of one field; raises InvalidArgument when there is none of that name."""
        part = self.part
        if self.picks is None or part.layout.family is None or part.memory is None:
            node, clips = part.layout.node(field), self.clips
        else:
            column = find(part.layout.family[0].fields, field)
            node = part.layout.family[0].scattered(column, self.picks, part.memory, self.clips)
            clips = clips_on(self.clips, [column], [node])
        return Group(node, part.fetch, self.rows, self.at, part.owned_bytes, part.locate, clips, self.place)


def gather(parts: Sequence[Part]) -> list[Gathered]:
    """Brings the parts of each block together; a shuffled batch alternates between its blocks row by row.

    Fields that have the same parts share the outcome.

    Raises:
        InvalidArgument: a row out of bounds.
    """
    starts = list(itertools.accumulate((len(part.rows) for part in parts), initial=0))
    order = np.arange(starts[-1])
    gathered, left = _join_families(parts, starts, order)
    by_block: dict[tuple[int, Fetch], list[int]] = {}
    for index in left:
        by_block.setdefault((id(parts[index].layout), parts[index].fetch), []).append(index)
    for indices in by_block.values():
        part, start = parts[indices[0]], starts[indices[0]]
        if len(indices) == 1:
            rows, at, clips = part.rows, order[start : start + len(part.rows)], part.clips
        else:
            rows = np.concatenate([parts[index].rows for index in indices])
            at = np.concatenate([order[starts[index] : starts[index + 1]] for index in indices])
            clips = join_clips([parts[index].clips for index in indices])
        check_rows(rows, part.layout.rows)
        whole = len(indices) == 1 and not clips and is_everything(rows, part.layout.rows)
        gathered.append(Gathered(part, rows, at, part.layout.own_clips(clips), start if whole else -1))
    return gathered


def _join_families(
    parts: Sequence[Part], starts: Sequence[int], order: NDArray[np.int64]
) -> tuple[list[Gathered], list[int]]:
    """Makes one of all parts of blocks of a family that lie in one memory; returns the indexes of the others, too.

    Args:
        parts: see `gather`.
        starts: of each, its first place in delivery order.
        order: int64, all places.
    """
    members: dict[tuple[int, int], list[int]] = {}
    left = []
    for index, part in enumerate(parts):
        family = None if part.layout.family is None else part.layout.family[0]
        if family is None or part.memory is None or not _is_small(part, family):
            left.append(index)
        else:
            members.setdefault((id(family), id(part.memory)), []).append(index)
    gathered = []
    for indices in members.values():
        own = [parts[index] for index in indices]
        if len({id(part.layout) for part in own}) == 1:  # of one block there may be a view
            left.extend(indices)
        else:
            at = np.concatenate([order[starts[index] : starts[index + 1]] for index in indices])
            gathered.append(_joined_family(own, at))
    return gathered, left


def _is_small(part: Part, family: Family) -> bool:
    rows = part.layout.rows if family.shares else len(part.rows)  # one row may need all that they share
    return rows * part.layout.size_bytes <= JOINED_BYTES_MAX * part.layout.rows


def _joined_family(parts: Sequence[Part], at: NDArray[np.int64]) -> Gathered:
    part, counts = parts[0], [len(part.rows) for part in parts]
    rows = np.concatenate([part.rows for part in parts])
    check_rows(rows, part.layout.rows)
    blocks = np.repeat([part.layout.family[1] for part in parts], counts)  # type: ignore[index]
    origins = np.repeat([part.origin for part in parts], counts)
    clips = join_clips([part.clips for part in parts])
    return Gathered(part, np.arange(rows.size), at, clips, -1, Picks.of_rows(blocks, rows, origins, at))


def read_column(
    field: str,
    parts: Sequence[Part] | Sequence[Gathered],
    *,
    copy: bool,
    allocate: Allocate,
    verify: bool = True,
    verify_views: bool = True,
    allow_pickle: bool = False,
    form: Form | None = None,
    later: Later | None = None,
) -> Column:
    """Reads one field.

    Args:
        field: its name.
        parts: in delivery order. Parts of one layout and one fetch are read together, however they alternate. Or what
            `gather` made of them.
        copy: False gives views where all rows of a stream lie side by side in one block, and copies elsewhere.
        allocate: nbytes → uint8 [nbytes], 64-byte aligned: where copies go. The column keeps it alive.
        verify: compare checksums. Off only for memory that was verified before.
        verify_views: compare those of views of the block itself, too. Whoever turns it off does so later, or never.
        allow_pickle: unpickle what the writer pickled: runs code of the writer's choice.
        form: the partition's, where the rows of a dense block joined a ragged field. None: what the parts imply.
        later: takes large copies of tensors and arrays, so that those of many fields are made at once. Until it was
            run, nobody may look at the column, and what `fetch` gave stays as it is. None: all are made now.

    Returns:
        The column; see `Column.is_view` for how long it is valid.

    Raises:
        CorruptBlock: bytes fail their checksum or their bounds; names the field and the row. Of copies that are made
            later, that is raised by them.
        InvalidArgument: no parts, no such field, or a row out of bounds.
        UnsupportedValue: values were pickled, and `allow_pickle` is off.
    """
    if not parts:
        raise InvalidArgument(f"field {field!r}: no parts to read")
    gathered: Any = parts if isinstance(parts[0], Gathered) else gather(parts)  # type: ignore[arg-type]
    groups = [each.group(field) for each in gathered]
    joined = form or _joined(field, [group.node.form for group in groups])
    return _read(groups, joined, Reading(field, copy, allocate, verify, allow_pickle, verify_views, later))


def _joined(path: str, forms: Sequence[Form]) -> Form:
    """The form that all parts fit: ragged, once one part is."""
    known = next((form for form in forms if form.kind == "ragged"), forms[0])
    if known.kind != "struct":
        return known
    children = []
    for key, _ in known.children:
        try:
            fitting = [dict(form.children)[key] for form in forms]
        except KeyError:
            raise CorruptBlock(f"field {path!r}: a block lacks its child {key!r}") from None
        children.append((key, _joined(f"{path}.{key}", fitting)))
    return Form("struct", children=tuple(children))


def _read(groups: Sequence[Group], form: Form, reading: Reading) -> Column:
    for group in groups:
        if group.node.form is not form and not _fits(group.node.form, form):
            raise CorruptBlock(
                f"field {reading.path!r} is {form}, but a block holds {group.node.form}", rows=group.at[:1].tolist()
            )
    if any(group.node.kind == SHARED for group in groups):
        return shared.read(groups, form, reading, _read)
    if groups[0].clip is not None:
        form = groups[0].clip.form(form)
    kind = {"dense": DENSE, "ragged": RAGGED, "struct": STRUCT}.get(form.kind)
    if kind == DENSE:
        return dense.read(groups, form, reading)
    if kind == RAGGED:
        return ragged.read(groups, form, reading)
    if kind == STRUCT:
        return struct.read(groups, form, reading, _read)
    return record.read(groups, reading)


def _fits(stored: Form, form: Form) -> bool:
    """Whether rows of a stored column can be read as `form`."""
    if form.kind == "struct":
        return stored.kind == "struct" and {key for key, _ in form.children} <= {key for key, _ in stored.children}
    if form.kind == "ragged" and stored.kind == "dense":
        return stored.dtype == form.dtype and stored.shape[:1] != () and stored.shape[1:] == form.shape
    return (stored.kind, stored.dtype, stored.shape) == (form.kind, form.dtype, form.shape)
