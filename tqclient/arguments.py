"""Checks and packs the arguments of public calls. An error names the argument, the row, and what is accepted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeGuard

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.errors import InvalidArgument
from tqclient.wire.packing import I64, pack_array, pack_blobs, pack_strings
from tqclient.wire.v1.common_pb2 import Packed

Group: TypeAlias = "str | int | bytes"
Tags: TypeAlias = "Mapping[str, bool | int | float | str | bytes | None]"
WeightVersion: TypeAlias = "int | tuple[int, int] | Sequence[int | tuple[int, int] | None] | NDArray[np.integer[Any]]"

NO_VERSION: Final = -1
_ID_MAX: Final = (1 << 63) - 1
_NOT_SEVERAL: Final = (str, bytes, bytearray, memoryview, Mapping)
"""What can be iterated over, and is one thing all the same."""
_PLAIN_KINDS: Final = "biufcSU"
"""Of numpy's dtypes: those whose scalars are Python values."""


def row_ids(ids: Any, *, what: str = "ids", rows: int | None = None) -> NDArray[np.int64]:
    """Returns sample ids as int64 `[rows]`.

    Args:
        ids: integers: a sequence, a numpy array or a torch tensor.
        what: name of the argument.
        rows: how many there must be.
    """
    array = _integers(ids)
    if array is None:
        raise InvalidArgument(f"{what}: expected integers, one per row, not {ids!r:.80}")
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(f"{what}: expected integers [rows], got {array.dtype} with shape {array.shape}")
    if array.dtype == np.uint64 and array.size and array.max() > _ID_MAX:
        row = int(array.argmax())
        raise InvalidArgument(f"{what}[{row}]={array[row]}: ids are below 2**63", rows=[row])
    if rows is not None and len(array) != rows:
        raise InvalidArgument(f"{what}: {len(array)} of them for {rows} rows")
    return array.astype(np.int64)


def _integers(ids: Any) -> NDArray[Any] | None:
    """Returns an array; None of what is no several things, or of what would become an integer."""
    if not isinstance(ids, Iterable) or isinstance(ids, _NOT_SEVERAL):
        return None
    values = ids if hasattr(ids, "__array__") else list(ids)
    if isinstance(values, list) and not {bool, np.bool_}.isdisjoint(map(type, values)):
        return None
    try:
        return np.asarray(values)
    except (TypeError, ValueError, RuntimeError):  # what numpy and torch say of what is no array
        return None


def int_of(value: object, *, what: str, least: int, most: int) -> int:
    """Returns an int within bounds, of Python's or numpy's."""
    if not is_int(value) or not least <= value <= most:
        raise InvalidArgument(f"{what}={value!r:.80}: expected an int from {least} to {most}")
    return int(value)


def is_int(value: object) -> TypeGuard[int | np.integer[Any]]:
    """Whether it is an int of Python's or numpy's: to these, a bool and a span of time are ints as well."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool | np.timedelta64)


def flag(value: object, *, what: str) -> bool:
    """Returns a bool; nothing else is true or false."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidArgument(f"{what}={value!r:.80}: expected True or False")
    return bool(value)


def seconds_of(value: object, *, what: str) -> float:
    """Returns a span of time, 0 or more; an endless one is as long as can be said."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise InvalidArgument(f"{what}={value!r:.80}: expected seconds, 0 or more")
    return float(min(value, sys.float_info.max))


def text_of(value: object, *, what: str) -> str:
    """Returns a str that UTF-8 has."""
    if isinstance(value, str):
        with suppress(UnicodeEncodeError):  # a lone surrogate
            value.encode()
            return value
    raise InvalidArgument(f"{what}={value!r:.80}: expected a str of UTF-8")


def name_of(name: object, *, what: str) -> str:
    """Returns a partition, consumer or field name that is within the limits."""
    try:
        if isinstance(name, str) and 0 < len(name.encode()) <= limits.NAME_BYTES_MAX:
            return name
    except UnicodeEncodeError:  # a lone surrogate
        pass
    raise InvalidArgument(f"{what}={name!r:.80}: expected a str of 1 to {limits.NAME_BYTES_MAX} bytes of UTF-8")


def names_of(names: Any, *, what: str) -> list[str]:
    """Returns several names; one string is not several names."""
    listed = items_of(names)
    if listed is None:
        raise InvalidArgument(f"{what}={names!r:.80}: give a list of names")
    return [name_of(name, what=f"{what}[{index}]") for index, name in enumerate(listed)]


def mapping_of(values: object, *, what: str) -> dict[Any, Any]:
    """Returns a mapping as a dict."""
    if not isinstance(values, Mapping):
        raise InvalidArgument(f"{what}={values!r:.80}: expected a mapping")
    return dict(values)


def pack_keys(keys: Sequence[str | None], rows: int | None = None) -> Packed:
    """Packs the keys of new samples: strings that differ, or None for no key."""
    values = _one_per_row(keys, "keys", rows)
    seen: dict[str, int] = {}
    for row, key in enumerate(values):
        if key is None:
            continue
        name_of(key, what=f"keys[{row}]")
        if seen.setdefault(key, row) != row:
            raise InvalidArgument(f"keys[{row}]={key!r} is the same as keys[{seen[key]}]", rows=[seen[key], row])
    return pack_strings([key or "" for key in values])


def pack_lookup_keys(keys: Sequence[str]) -> Packed:
    """Packs keys to look up; repetitions are allowed."""
    values = _one_per_row(keys, "keys", None)
    return pack_strings([name_of(key, what=f"keys[{row}]") for row, key in enumerate(values)])


def pack_groups(groups: Sequence[Group | None], rows: int | None = None) -> Packed:
    """Packs the groups of rows: str, int or bytes, or None for no group."""
    return pack_blobs(_group(group, row) for row, group in enumerate(_one_per_row(groups, "groups", rows)))


def pack_lookup_groups(groups: Sequence[Group]) -> Packed:
    """Packs groups to look up; repetitions are allowed."""
    values = _one_per_row(groups, "groups", None)
    for row, group in enumerate(values):
        if group is None:
            raise InvalidArgument(f"groups[{row}]=None: expected str, int or bytes", rows=[row])
    return pack_groups(values)


def _group(group: object, row: int) -> bytes:
    if group is None:
        return b""
    group = _plain(group)
    if isinstance(group, bool) or not isinstance(group, str | int | bytes):
        raise InvalidArgument(f"groups[{row}]={group!r}: expected str, int, bytes or None", rows=[row])
    try:
        packed: bytes = msgpack.packb(group)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"groups[{row}]={group!r}: {error}", rows=[row]) from None
    if len(packed) > limits.NAME_BYTES_MAX:
        raise InvalidArgument(f"groups[{row}]: {len(packed)} bytes, at most {limits.NAME_BYTES_MAX}", rows=[row])
    return packed


def pack_tags(tags: Tags | Sequence[Tags], rows: int, *, deletes: bool = False) -> Packed:
    """Packs the tags of rows.

    Args:
        tags: one mapping for all rows, or one per row.
        rows: of the call.
        deletes: whether None is a value: it deletes the tag.
    """
    if isinstance(tags, Mapping):
        return pack_blobs([_tags(tags, "tags", [], deletes)] * rows)
    values = _one_per_row(tags, "tags", rows)
    return pack_blobs(_tags(each, f"tags[{row}]", [row], deletes) for row, each in enumerate(values))


def tags_filter(tags: Tags, *, what: str = "tags") -> bytes:
    """Packs tags that samples are selected by."""
    return _tags(tags, what, [], False)


def _tags(tags: object, path: str, rows: list[int], deletes: bool) -> bytes:
    if not isinstance(tags, Mapping):
        raise InvalidArgument(f"{path}={tags!r:.80}: expected a mapping", rows=rows)
    if not tags:
        return b""
    plain = {}
    for name, value in tags.items():
        name_of(name, what=f"{path} name")
        plain[name] = _plain(value)
        if not isinstance(plain[name], bool | int | float | str | bytes) and not (deletes and value is None):
            raise InvalidArgument(f"{path}[{name!r}]={value!r:.80}: expected bool, int, float, str or bytes", rows=rows)
    try:
        packed: bytes = msgpack.packb(plain)
    except (OverflowError, UnicodeEncodeError) as error:
        raise InvalidArgument(f"{path}: {error}", rows=rows) from None
    if len(packed) > limits.TAGS_BYTES_MAX:
        raise InvalidArgument(f"{path}: {len(packed)} bytes, at most {limits.TAGS_BYTES_MAX}", rows=rows)
    return packed


def _one_per_row(values: Any, what: str, rows: int | None) -> list[Any]:
    listed = items_of(values)
    if listed is None:
        raise InvalidArgument(f"{what}={values!r:.80}: expected one per row")
    if rows is not None and len(listed) != rows:
        raise InvalidArgument(f"{what}: {len(listed)} of them for {rows} rows")
    return listed


def items_of(values: Any) -> list[Any] | None:
    """Returns the items of a list, an array or another iterable; None of what is not several things."""
    if not isinstance(values, Iterable) or isinstance(values, _NOT_SEVERAL):
        return None
    if not hasattr(values, "tolist"):
        return list(values)
    if isinstance(values, np.ndarray) and values.dtype.kind not in _PLAIN_KINDS + "O":
        return None
    try:
        listed = values.tolist()  # arrays and tensors give Python numbers
    except RuntimeError:  # a tensor without values
        return None
    return listed if isinstance(listed, list) else None


def pair_of(value: Any) -> tuple[Any, Any] | None:
    """Returns the two items of a tuple, a list or an array; None of anything else."""
    is_row = isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.ndim == 1)
    return (value[0], value[1]) if is_row and len(value) == 2 else None


def _plain(value: Any) -> Any:
    """Returns a Python value for one of numpy's, unless it would be another: times would be ints."""
    return value.item() if isinstance(value, np.generic) and value.dtype.kind in _PLAIN_KINDS else value


def pack_versions(version: WeightVersion, rows: int) -> tuple[bytes, bytes]:
    """Packs weight versions.

    Args:
        version: for all rows, an int or a tuple (min, max); or one of these, or None, per row: a list or an array
            `[rows]` or `[rows, 2]`.
        rows: of the call.

    Returns:
        The minima and the maxima, int64 `[rows]` each.
    """
    if isinstance(version, int | tuple | np.integer):
        spans = np.broadcast_to(np.array([_span(version, "weight_version", [])], dtype=np.int64), (rows, 2))
    else:
        values = _one_per_row(version, "weight_version", rows)
        listed = [_span(value, f"weight_version[{row}]", [row]) for row, value in enumerate(values)]
        spans = np.array(listed, dtype=np.int64).reshape(rows, 2)
    return pack_array(spans[:, 0], I64), pack_array(spans[:, 1], I64)


def _span(value: Any, path: str, rows: list[int]) -> tuple[int, int]:
    if value is None:
        return NO_VERSION, NO_VERSION
    ends = pair_of(value) or (value, value)
    if not all(map(is_int, ends)):
        raise InvalidArgument(f"{path}={value!r:.80}: expected an int or a pair (min, max)", rows=rows)
    low, high = int(ends[0]), int(ends[1])
    if not 0 <= low <= high < 1 << 63:
        raise InvalidArgument(f"{path}={value!r:.80}: expected 0 <= min <= max < 2**63", rows=rows)
    return low, high


@dataclass(frozen=True, slots=True)
class RowArguments:
    """What a put says of its rows, besides their values.

    Attributes:
        ids: of samples that exist; None puts new samples.
        keys, groups, weight_version, tags: as `Partition.put` takes them.
        upsert: replace what is there.
    """

    ids: Any = None
    keys: Sequence[str | None] | None = None
    groups: Sequence[Group | None] | None = None
    weight_version: WeightVersion | None = None
    tags: Tags | Sequence[Tags] | None = None
    upsert: bool = False

    def to_wire(self, rows: int) -> dict[str, Any]:
        """Checks the arguments against the number of rows.

        Returns:
            Fields of a CommitRequest.
        """
        wire: dict[str, Any] = {"rows": rows, "upsert": flag(self.upsert, what="upsert")}
        if self.ids is not None:
            if self.keys is not None:
                raise InvalidArgument("keys are given with new samples; samples that exist (ids=...) keep their keys")
            ids = row_ids(self.ids, rows=rows)
            _check_distinct(ids)
            wire["ids"] = pack_array(ids, I64)
        if self.keys is not None:
            wire["keys"] = pack_keys(self.keys, rows)
        if self.groups is not None:
            wire["groups"] = pack_groups(self.groups, rows)
        if self.weight_version is not None:
            wire["version_min"], wire["version_max"] = pack_versions(self.weight_version, rows)
        if self.tags is not None:
            wire["tags"] = pack_tags(self.tags, rows)
        return wire


def _check_distinct(ids: NDArray[np.int64]) -> None:
    order = np.argsort(ids, kind="stable")
    repeated = np.flatnonzero(ids[order][1:] == ids[order][:-1])
    if len(repeated):
        first, second = sorted((int(order[repeated[0]]), int(order[repeated[0] + 1])))
        raise InvalidArgument(f"ids[{second}]={ids[second]} is the same as ids[{first}]", rows=[first, second])
