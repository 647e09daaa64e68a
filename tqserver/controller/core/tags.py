"""Tags of samples: msgpack maps, compared and read without unpacking the same bytes twice."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import repeat
from operator import contains
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
_NO_TAGS: Final = bytes(msgpack.packb({}))


def merge(own: bytes, new: bytes) -> bytes:
    """Returns encoded maps merged; a null value deletes."""
    if not new:
        return own
    tags = msgpack.unpackb(own) if own else {}
    tags.update(msgpack.unpackb(new))
    left = {key: value for key, value in tags.items() if value is not None}
    return bytes(msgpack.packb(left)) if left else b""


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


class Having:
    """Which encoded maps, as `merge` returns them, have all of some tags, with these values.

    Args:
        wanted: tag → value.
    """

    def __init__(self, wanted: dict[Any, Any]) -> None:
        self._wanted = wanted
        self._traces = [_trace(tag, value) for tag, value in wanted.items()]

    def of(self, values: Sequence[bytes]) -> NDArray[np.bool_]:
        """Returns what is said of each map: bool [values].

        Equal ones are asked once where most are equal to others. Where they differ, most of those that have not all of
        the tags lack some bytes as well, which is told in a tenth of the time that it takes to unpack them.
        """
        found = np.ones(len(values), np.bool_)
        if not self._wanted:
            return found
        different = set(values)
        if 2 * len(different) < len(values):
            known = dict(zip(different, self.of(list(different)).tolist(), strict=True))
            return np.fromiter(map(known.__getitem__, values), np.bool_, len(values))
        for trace in self._traces:
            found &= np.fromiter(map(contains, values, repeat(trace)), np.bool_, len(values))
        places = found.nonzero()[0]
        for part, maps in unpacked_parts([values[place] for place in places.tolist()]):
            found[places[part]] = [self._said_by(own) for own in maps]
        return found

    def _said_by(self, own: dict[Any, Any]) -> bool:
        return all(tag in own and _same(own[tag], value) for tag, value in self._wanted.items())


def _same(left: Any, right: Any) -> bool:
    return bool(type(left) is type(right) and left == right)  # 1, 1.0 and True are different tags


def _trace(tag: Any, value: Any) -> bytes:
    """Returns what is somewhere among the bytes of each map that has this tag and value."""
    only_one = type(value) in PLAIN and (type(value) is not float or value != 0)  # -0.0 is another encoding of 0.0
    return bytes(msgpack.packb(tag) + (msgpack.packb(value) if only_one else b""))


_ABORTED: Final = Having({ABORTED: True})


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
        wanted: dict[Any, Any] = msgpack.unpackb(where) if where else {}
        self._having = Having(wanted)
        self.plain = wanted if all(type(value) in PLAIN for value in wanted.values()) else {}
        self.unaborted = unaborted

    def __call__(self, tags: bytes) -> bool:
        """Whether a sample with these tags passes."""
        return bool(self.of([tags])[0])

    def of(self, values: Sequence[bytes]) -> NDArray[np.bool_]:
        """Returns which of many pass: bool [values]."""
        passes = self._having.of(values)
        return passes & ~_ABORTED.of(values) if self.unaborted else passes


UNABORTED: Final = TagFilter(b"", True)
