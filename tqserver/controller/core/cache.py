"""What is made of all samples of a partition, which takes as long as there are samples, and is kept up to date then."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from tqserver.controller.core import limits


class Sized(Protocol):
    """What says how large it is."""

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""


K = TypeVar("K")
V = TypeVar("V", bound=Sized)


class Cache(Generic[K, V]):
    """Derived values: what they say does not depend on which of them are here, nor does any reply.

    Claims that wait look at theirs in turn, again and again. So what is in use makes room for others only where there
    would be too many, and then it is not the least recently used: that will be looked at next, and one value too many
    would have all of them made anew in each round.

    Args:
        idle: of the values that are idle, the latest used so many are kept.
        most: values; one more displaces another.
        most_bytes: of all values; beyond it, too, another one displaces one.
    """

    __slots__ = ("_changes", "_idle", "_most", "_most_bytes", "_used", "_values")

    def __init__(self, idle: int, most: int, most_bytes: float = math.inf) -> None:
        self._idle = idle
        self._most = most
        self._most_bytes = most_bytes
        self._values: OrderedDict[K, V] = OrderedDict()  # the latest used comes last
        self._used: set[K] = set()  # since the last sweep
        self._changes = 0  # since then

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: K) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[V]:
        return iter(self._values.values())

    def items(self) -> list[tuple[K, V]]:
        """Returns keys and values, the latest used last."""
        return list(self._values.items())

    def get(self, key: K) -> V | None:
        """Returns a value that somebody looks at, if it is here."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
            self._used.add(key)
        return value

    def add(self, key: K, value: V) -> V:
        """Takes in a value that somebody looks at; returns it."""
        full = len(self._values) >= self._most
        if self._values and (full or value.nbytes + sum(each.nbytes for each in self) > self._most_bytes):
            # Neither what the caller looked at just now, nor what will soon be looked at again.
            self._drop(next(islice(self._values, len(self._values) // 2, None)))
        self._values[key] = value
        self._used.add(key)
        return value

    def replace(self, change: Callable[[V], V]) -> None:
        """Puts another value in the place of each."""
        for key, value in self._values.items():
            self._values[key] = change(value)

    def pop_latest(self) -> tuple[K, V]:
        """Takes out the latest used value."""
        key, value = self._values.popitem()
        self._used.discard(key)
        return key, value

    def clear(self) -> None:
        """Drops all values."""
        self._values.clear()
        self._used.clear()

    def changed(self) -> None:
        """The values had to follow one more change: drops those that are idle."""
        self._changes += 1
        if self._changes < limits.IDLE_CHANGES:
            return
        for key in list(islice(self._values, max(len(self._values) - self._idle, 0))):
            if key not in self._used:
                self._drop(key)
        self._used.clear()
        self._changes = 0

    def _drop(self, key: K) -> None:
        del self._values[key]
        self._used.discard(key)
