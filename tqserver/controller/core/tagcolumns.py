"""What samples have under single tags, by slot: found out on first use, and kept up to date from then on.

Who asks for one value after the other, or for the same one after each put, looks at an array, and not at maps of which
each takes a microsecond.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core import limits, tags
from tqserver.controller.core.arrays import grown
from tqserver.controller.core.cache import Cache

VALUE_BYTES: Final = 200
"""Of a value that is told apart from others, about."""


class TagValues:
    """Which value each sample has under one tag.

    Attributes:
        tag: its name.
        codes: int64 [capacity], by slot: the number of the value; 0: none that is plain (see `tags.PLAIN`).
        is_full: there are too many values to tell them apart, and the codes say nothing.

    Args:
        tag: its name.
        capacity: slots.
    """

    def __init__(self, tag: str | bytes, capacity: int) -> None:
        self.codes = np.zeros(capacity, dtype=np.int64)
        self.is_full = False
        self.tag = tag
        self._known: dict[type, dict[Any, int]] = {kind: {} for kind in tags.PLAIN}
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return self.codes.nbytes + VALUE_BYTES * self._count

    def code(self, value: Any) -> int:
        """Returns the number of a plain value; -1: no sample has it."""
        return self._known[type(value)].get(value, -1)

    def set(self, slots: Any, maps: Sequence[dict[Any, Any]]) -> None:
        """Samples (int64 [n], or a slice) have these tags now."""
        if self.is_full:
            return
        codes = []
        for own in maps:
            value = own.get(self.tag)
            known = self._known.get(type(value))
            if known is None or value != value:  # noqa: PLR0124 - NaN equals nothing, itself neither
                codes.append(0)
                continue
            code = known.get(value)
            if code is None:
                self._count += 1
                code = known[value] = self._count
            codes.append(code)
        self.codes[slots] = codes
        if self._count > limits.TAG_VALUES_MAX:
            self.is_full = True
            self.codes, self._known, self._count = self.codes[:0], {}, 0

    def move(self, kept: Any, capacity: int) -> TagValues:
        """Keeps these slots, in this order, as the first ones, and makes room for more; returns itself."""
        if not self.is_full:
            self.codes = grown(self.codes[kept], capacity)
        return self

    def clear(self, slots: slice) -> None:
        """Samples have no tags."""
        if not self.is_full:
            self.codes[slots] = 0


class TagColumns:
    """The tags that anybody asked for."""

    def __init__(self) -> None:
        self._numbers = Cache[str, NDArray[np.float64]](limits.IDLE_NUMBERED_TAGS_MAX, limits.NUMBERED_TAGS_MAX)
        self._values = Cache[str | bytes, TagValues](limits.IDLE_NUMBERED_TAGS_MAX, limits.NUMBERED_TAGS_MAX)

    def numbers(self, tag: str, own: Sequence[bytes], capacity: int) -> NDArray[np.float64]:
        """Returns the number under a tag by slot (float64 [capacity]); minus infinity where a sample has none.

        Args:
            tag: its name.
            own: the tags of all samples, by slot; or nothing, where none has any.
            capacity: slots.
        """
        found = self._numbers.get(tag)
        if found is None:
            found = self._numbers.add(tag, np.full(capacity, -np.inf))
            for part, maps in tags.unpacked_parts(own):
                found[part] = [tags.number(each.get(tag)) for each in maps]
        return found

    def having(
        self, wanted: dict[Any, Any], own: Sequence[bytes], slots: Any, capacity: int
    ) -> NDArray[np.bool_] | None:
        """Returns which samples have all of some plain values: bool, by entry of `slots`.

        None: that is quicker found out from the maps of those samples; or there are too many values.

        Args:
            wanted: tag → value; at least one.
            own: as of `numbers`.
            slots: int64 [n], or a slice.
            capacity: as of `numbers`.
        """
        if isinstance(slots, slice) and slots == slice(0, len(own)):
            self._make(wanted, own, capacity)
        columns = [self._values.get(tag) for tag in wanted]
        found = [
            column.codes[slots] == column.code(value)
            for column, value in zip(columns, wanted.values(), strict=True)
            if column is not None and not column.is_full
        ]
        return np.logical_and.reduce(found) if len(found) == len(wanted) else None

    def _make(self, wanted: Iterable[str | bytes], own: Sequence[bytes], capacity: int) -> None:
        known = {tag for tag, values in self._values.items() if not values.is_full or len(own) > limits.TAG_VALUES_MAX}
        missing = [TagValues(tag, capacity) for tag in wanted if tag not in known]
        for part, maps in tags.unpacked_parts(own if missing else ()):
            for column in missing:
                column.set(part, maps)
        for column in missing:
            self._values.add(column.tag, column)

    def append(self, slots: slice) -> None:
        """New samples came, without tags."""
        for numbers in self._numbers:
            numbers[slots] = -np.inf
        for values in self._values:
            values.clear(slots)
        self._changed()

    def set(self, slots: NDArray[np.int64], own: Sequence[bytes]) -> None:
        """Samples have these tags now."""
        for part, maps in tags.unpacked_parts(own if len(self._numbers) or len(self._values) else ()):
            for tag, numbers in self._numbers.items():
                numbers[slots[part]] = [tags.number(each.get(tag)) for each in maps]
            for values in self._values:
                values.set(slots[part], maps)
        self._changed()

    def _changed(self) -> None:
        self._numbers.changed()
        self._values.changed()

    def move(self, kept: Any, capacity: int) -> None:
        """Keeps these slots (int64 [n], or a slice), in this order, as the first ones, and makes room for more."""
        self._numbers.replace(lambda array: grown(array[kept], capacity))
        self._values.replace(lambda values: values.move(kept, capacity))
