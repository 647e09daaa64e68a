"""Tags of samples: msgpack maps, compared and read without unpacking the same bytes twice."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import compress
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core import limits

ABORTED: Final = "aborted"
"""A sample whose tag of this name is true is no member of its group any more."""
GROUP_SIZE: Final = "group_size"
"""How many members the group of a sample has, when the sampler does not say."""
GROUP_SIZE_MAX: Final = (1 << 63) - 1
"""No group ever has so many members: one that is to have more than fits an int64 is as incomplete with this many."""
SHARD: Final = "shard"
"""The part of its partition that a sample belongs to: an int."""
PLAIN: Final = (bool, int, float, str, bytes)
"""Types of values that are equal where their types are the same and they hash alike."""
CHUNK_ROWS: Final = 4_096
"""Maps that are unpacked at one time: a million would take more memory than all that is known of their samples."""
KNOWN_MAX: Final = 4_096
"""Encoded maps whose outcome a filter remembers; ..."""
KNOWN_BYTES_MAX: Final = 1 << 19
"""... and their bytes: nobody else may have them any more."""
_NO_TAGS: Final = bytes(msgpack.packb({}))


def merge(own: bytes, new: bytes) -> bytes:
    """Returns encoded maps merged; a null value deletes."""
    if not new:
        return own
    tags = msgpack.unpackb(own) if own else {}
    tags.update(msgpack.unpackb(new))
    left = {key: value for key, value in tags.items() if value is not None}
    return bytes(msgpack.packb(left)) if left else b""


def has_all(tags: bytes, wanted: dict[Any, Any]) -> bool:
    """Whether an encoded map has all of these tags, with these values."""
    own = msgpack.unpackb(tags) if tags else {}
    return all(key in own and _same(own[key], value) for key, value in wanted.items())


def _same(left: Any, right: Any) -> bool:
    return bool(type(left) is type(right) and left == right)  # 1, 1.0 and True are different tags


def unpacked(values: Sequence[bytes]) -> list[dict[Any, Any]]:
    """Unpacks encoded maps, an empty string as {}; equal ones may be one object."""
    different = list(set(values))
    if 2 * len(different) < len(values):
        known = dict(zip(different, unpacked(different), strict=True))
        return [known[value] for value in values]
    unpacker = msgpack.Unpacker(max_buffer_size=0)  # as large as they are
    unpacker.feed(b"".join(value or _NO_TAGS for value in values))
    return list(unpacker)


def unpacked_parts(values: Sequence[bytes]) -> Iterator[tuple[slice, list[dict[Any, Any]]]]:
    """Yields `CHUNK_ROWS` encoded maps at a time, unpacked, and which of them these are."""
    for start in range(0, len(values), CHUNK_ROWS):
        maps = unpacked(values[start : start + CHUNK_ROWS])
        yield slice(start, start + len(maps)), maps


def each(ask: Callable[[bytes], bool], values: Sequence[bytes]) -> NDArray[np.bool_]:
    """Returns what is said of each value, and asks once of equal ones where most are equal to others."""
    different = set(values)
    if 2 * len(different) < len(values):
        ask = {value: ask(value) for value in different}.__getitem__
    return np.fromiter(map(ask, values), np.bool_, len(values))


def number(value: Any) -> float:
    """Returns the number that a value under a tag is; minus infinity if it is none."""
    kind = type(value)  # of a million samples at a time: this must be quick
    return float(value) if kind is int or (kind is float and value == value) else -math.inf  # noqa: PLR0124 - not NaN


def group_size(tags: bytes) -> int | None:
    """Returns the size of its group that a sample says, if it says one."""
    if GROUP_SIZE.encode() not in tags:
        return None
    value = msgpack.unpackb(tags).get(GROUP_SIZE)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        return None
    return min(value, GROUP_SIZE_MAX)


def shard_code(tags: dict[Any, Any]) -> int:
    """Returns the shard that a sample says it belongs to, and 1; 0 if it says none."""
    value = tags.get(SHARD)
    return value + 1 if type(value) is int and 0 <= value < limits.SHARDS_MAX else 0


class TagFilter:
    """Which samples a claim may have, by their tags.

    Args:
        where: an encoded map: all of these tags, with these values.
        unaborted: none that is tagged as aborted.

    Attributes:
        plain: the tags that it wants where all of their values are plain, or else none.
        unaborted: as given.
    """

    def __init__(self, where: bytes, unaborted: bool) -> None:
        self._where: dict[Any, Any] = msgpack.unpackb(where) if where else {}
        self.plain = self._where if all(type(value) in PLAIN for value in self._where.values()) else {}
        self.unaborted = unaborted
        self._abortion = ABORTED.encode() if unaborted else None
        self._known: dict[bytes, bool] = {}
        self._known_bytes = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return sys.getsizeof(self._known) + self._known_bytes

    def __call__(self, tags: bytes) -> bool:
        """Whether a sample with these tags passes."""
        if not self._where and (self._abortion is None or self._abortion not in tags):
            return True  # the rule, and worth no look into maps that are all different
        known = self._known.get(tags)
        if known is None:
            if len(self._known) >= KNOWN_MAX or self._known_bytes + len(tags) > KNOWN_BYTES_MAX:
                self._known.clear()
                self._known_bytes = 0
            self._known_bytes += len(tags)
            aborted = self._abortion is not None and has_all(tags, {ABORTED: True})
            known = self._known[tags] = not aborted and has_all(tags, self._where)
        return known

    def of(self, values: Sequence[bytes]) -> NDArray[np.bool_]:
        """Returns which of many pass: bool [values]."""
        word = self._abortion
        if self._where or word is None:
            return each(self, values)
        suspect = np.fromiter((word in value for value in values), np.bool_, len(values))
        passes = ~suspect
        passes[suspect] = each(self, list(compress(values, suspect)))
        return passes


UNABORTED: Final = TagFilter(b"", True)
