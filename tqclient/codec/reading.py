"""Rows of one field, from many blocks, in the order in which they are delivered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tqclient.codec.clips import Clip, join_clips
from tqclient.codec.directory import DENSE, RAGGED, SHARED, STRUCT
from tqclient.codec.kinds import dense, ragged, record, shared, struct
from tqclient.codec.kinds.base import Column
from tqclient.codec.layout import Layout, check_rows
from tqclient.codec.parallel import Later
from tqclient.codec.streams import Allocate, Fetch, Group, Locate, Reading
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.schema import Form


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
    """

    layout: Layout
    rows: NDArray[np.int64]
    fetch: Fetch
    owned_bytes: int = 0
    locate: Locate | None = None
    clips: tuple[Clip, ...] = ()


def read_column(
    field: str,
    parts: Sequence[Part],
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
        parts: in delivery order. Parts of one layout and one fetch are read together, however they alternate.
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
    groups = _groups(field, parts)
    joined = form or _joined(field, [group.node.form for group in groups])
    return _read(groups, joined, Reading(field, copy, allocate, verify, allow_pickle, verify_views, later))


def _groups(field: str, parts: Sequence[Part]) -> list[Group]:
    """Brings the parts of each block together; a shuffled batch alternates between its blocks row by row."""
    if len(parts) == 1:
        part = parts[0]
        check_rows(part.rows, part.layout.rows)
        node, at = part.layout.node(field), np.arange(len(part.rows))
        return [Group(node, part.fetch, part.rows, at, part.owned_bytes, part.locate, part.clips)]
    gathered: dict[tuple[int, Fetch], list[int]] = {}
    for index, part in enumerate(parts):
        gathered.setdefault((id(part.layout), part.fetch), []).append(index)
    counts = np.fromiter((len(part.rows) for part in parts), np.int64, len(parts))
    starts = np.cumsum(counts) - counts
    groups = []
    for indices in gathered.values():
        part = parts[indices[0]]
        rows = np.concatenate([parts[index].rows for index in indices])
        check_rows(rows, part.layout.rows)
        sizes = counts[indices]
        at = np.arange(len(rows)) + np.repeat(starts[indices] - (np.cumsum(sizes) - sizes), sizes)
        clips = join_clips([parts[index].clips for index in indices])
        groups.append(Group(part.layout.node(field), part.fetch, rows, at, part.owned_bytes, part.locate, clips))
    return groups


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
        if not _fits(group.node.form, form):
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
