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
        made: slots, from the first on, whose maps were looked at; the codes behind them say nothing yet.

    Args:
        tag: its name.
        capacity: slots.
    """

    def __init__(self, tag: str | bytes, capacity: int) -> None:
        self.codes = np.zeros(capacity, dtype=np.int64)
        self.is_full = False
        self.made = 0
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
        self.made = _moved(self.made, kept)
        if not self.is_full:
            self.codes = grown(self.codes[kept], capacity)
        return self

    def clear(self, slots: slice) -> None:
        """Samples have no tags."""
        if not self.is_full:
            self.codes[slots] = 0


class TagNumbers:
    """Which number each sample has under one tag.

    Attributes:
        tag: its name.
        numbers: float64 [capacity], by slot; minus infinity where a sample has none.
        is_full: never.
        made: as of `TagValues`.

    Args:
        tag: its name.
        capacity: slots.
    """

    is_full = False

    def __init__(self, tag: str, capacity: int) -> None:
        self.tag = tag
        self.numbers = np.full(capacity, -np.inf)
        self.made = 0

    @property
    def nbytes(self) -> int:
        """Bytes of memory, about."""
        return self.numbers.nbytes

    def set(self, slots: Any, maps: Sequence[dict[Any, Any]]) -> None:
        """Samples (int64 [n], or a slice) have these tags now."""
        self.numbers[slots] = [tags.number(each.get(self.tag)) for each in maps]

    def move(self, kept: Any, capacity: int) -> TagNumbers:
        """As `TagValues.move`."""
        self.made = _moved(self.made, kept)
        self.numbers = grown(self.numbers[kept], capacity)
        return self

    def clear(self, slots: slice) -> None:
        """Samples have no tags."""
        self.numbers[slots] = -np.inf


def _moved(made: int, kept: Any) -> int:
    """Returns how many slots have been looked at, when these are the first ones from here on: ascending, or a slice."""
    return made if isinstance(kept, slice) else int(np.searchsorted(kept, made))


class TagColumns:
    """The tags that anybody asked for."""

    def __init__(self) -> None:
        self._numbers = Cache[str, TagNumbers](limits.IDLE_NUMBERED_TAGS_MAX, limits.NUMBERED_TAGS_MAX)
        self._values = Cache[str | bytes, TagValues](limits.IDLE_NUMBERED_TAGS_MAX, limits.NUMBERED_TAGS_MAX)

    def numbers(self, tag: str, own: Sequence[bytes], capacity: int) -> NDArray[np.float64]:
        """Returns the number under a tag by slot (float64 [capacity]); minus infinity where a sample has none.

        Args:
            tag: its name.
            own: the tags of all samples, by slot; or nothing, where none has any.
            capacity: slots.
        """
        column = self._numbers.get(tag) or self._numbers.add(tag, TagNumbers(tag, capacity))
        _look([column], own, len(own))
        return column.numbers

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
            self.prepare(wanted, None, own, capacity, len(own))
        columns = [self._values.get(tag) for tag in wanted]
        found = [
            column.codes[slots] == column.code(value)
            for column, value in zip(columns, wanted.values(), strict=True)
            if column is not None and not column.is_full and column.made == len(own)
        ]
        return np.logical_and.reduce(found) if len(found) == len(wanted) else None

    def prepare(
        self, values: Iterable[str | bytes], numbers: str | None, own: Sequence[bytes], capacity: int, rows: int
    ) -> bool:
        """Looks at so many more samples, at most, for what is to be asked of all; says whether some are left.

        Args:
            values: tags that `having` will be asked for.
            numbers: the one that `numbers` will be asked for.
            own: as of `numbers`.
            capacity: as of `numbers`.
            rows: that are looked at.
        """
        columns: list[TagValues | TagNumbers] = []
        for tag in values:
            column = self._values.get(tag)
            if column is None or (column.is_full and len(own) <= limits.TAG_VALUES_MAX):
                column = self._values.add(tag, TagValues(tag, capacity))
            columns.append(column)
        if numbers is not None:
            columns.append(self._numbers.get(numbers) or self._numbers.add(numbers, TagNumbers(numbers, capacity)))
        return _look(columns, own, rows)

    def append(self, slots: slice) -> None:
        """New samples came, without tags."""
        for column in self._all():
            column.clear(slots)
            if column.made == slots.start:
                column.made = slots.stop
        self._changed()

    def set(self, slots: NDArray[np.int64], own: Sequence[bytes]) -> None:
        """Samples have these tags now."""
        columns = self._all()
        for part, maps in tags.unpacked_parts(own if columns else ()):
            for column in columns:
                column.set(slots[part], maps)
        self._changed()

    def _all(self) -> list[TagValues | TagNumbers]:
        return [*self._numbers, *self._values]

    def _changed(self) -> None:
        self._numbers.changed()
        self._values.changed()

    def move(self, kept: Any, capacity: int) -> None:
        """Keeps these slots (int64 [n], or a slice), in this order, as the first ones, and makes room for more."""
        self._numbers.replace(lambda numbers: numbers.move(kept, capacity))
        self._values.replace(lambda values: values.move(kept, capacity))


def _look(columns: Iterable[TagValues | TagNumbers], own: Sequence[bytes], rows: int) -> bool:
    """Has columns look at so many more maps, at most; says whether some are left."""
    missing = [column for column in columns if column.made < len(own) and not column.is_full]
    if not missing:
        return False
    start = min(column.made for column in missing)
    stop = min(start + rows, len(own))
    for part, maps in tags.unpacked_parts(own[start:stop]):
        for column in missing:
            column.set(slice(start + part.start, start + part.stop), maps)
    for column in missing:
        column.made = max(column.made, stop)
    return stop < len(own)
