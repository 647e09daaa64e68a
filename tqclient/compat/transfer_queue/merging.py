"""What the two kinds of metadata have in common."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch


def even_spans(size: int, parts: int) -> Iterator[tuple[int, int]]:
    """Yields the bounds of `parts` consecutive parts; the first ones have one more when it doesn't divide.

    Raises:
        ValueError: there is no such division.
    """
    if isinstance(parts, bool) or not isinstance(parts, int) or parts < 1:
        raise ValueError(f"chunks={parts!r}: expected an int of 1 or more")
    base, longer = divmod(size, parts)
    start = 0
    for part in range(parts):
        stop = start + base + (part < longer)
        yield start, stop
        start = stop


def check_permutation(indexes: Sequence[int], size: int) -> None:
    """Raises ValueError unless the indexes name each of `size` rows once."""
    if sorted(indexes) != list(range(size)):
        raise ValueError(f"a new order of {size} rows names each of 0 to {size - 1} once, not {list(indexes)}")


def merge_info(parts: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Unites batch-level information.

    Raises:
        ValueError: two parts have different values for one name.
    """
    merged: dict[str, Any] = {}
    for number, part in enumerate(parts):
        for name, value in (part or {}).items():
            if name in merged and not _same(merged[name], value):
                raise ValueError(
                    f"extra_info[{name!r}] is {merged[name]!r} in one batch and {value!r} in batch {number}: "
                    "they cannot be concatenated"
                )
            merged.setdefault(name, value)
    return merged


def _same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return bool(one == other)
