"""Tags of samples: msgpack maps, compared and read without unpacking the same bytes twice."""

from __future__ import annotations

import math
import sys
from typing import Any, Final

import msgpack

from tqserver.controller.core import limits

ABORTED: Final = "aborted"
"""A sample whose tag of this name is true is no member of its group any more."""
GROUP_SIZE: Final = "group_size"
"""How many members the group of a sample has, when the sampler does not say."""
GROUP_SIZE_MAX: Final = (1 << 63) - 1
"""No group ever has so many members: one that is to have more than fits an int64 is as incomplete with this many."""
SHARD: Final = "shard"
"""The part of its partition that a sample belongs to: an int."""
KNOWN_MAX: Final = 4_096
"""Encoded maps whose outcome a filter remembers; ..."""
KNOWN_BYTES_MAX: Final = 1 << 19
"""... and their bytes: nobody else may have them any more."""


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


def number(tags: bytes, name: str) -> float:
    """Returns the number under a tag; minus infinity where there is none."""
    value: Any = msgpack.unpackb(tags).get(name) if tags else None
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


def shard(tags: bytes) -> int | None:
    """Returns the shard that a sample says it belongs to, if it says one."""
    value = msgpack.unpackb(tags).get(SHARD)
    return value if type(value) is int and 0 <= value < limits.SHARDS_MAX else None


class TagFilter:
    """Which samples a claim may have, by their tags.

    Args:
        where: an encoded map: all of these tags, with these values.
        unaborted: none that is tagged as aborted.
    """

    def __init__(self, where: bytes, unaborted: bool) -> None:
        self._where: dict[Any, Any] = msgpack.unpackb(where) if where else {}
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
