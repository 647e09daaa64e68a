"""What fills up the ends of padded rows: the value that was given, or none at all."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument

_NUMBERS: Final = "biufc"
"""Kinds of numpy's dtypes of which torch has some, too."""


def filling(value: Any, dtype: torch.dtype | np.dtype[Any]) -> Any:
    """Returns what rows of a dtype are filled up with, as a 0-dim tensor, or array, of it.

    Raises:
        InvalidArgument: it would become another value, as 0.5 among integers. A float among floats may be rounded.
    """
    try:
        with np.errstate(all="ignore"):  # what is too large is found out below
            found = _found(value, dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError):  # what torch and numpy say of what they cannot hold
        found = None
    if found is None:
        name = str(dtype).removeprefix("torch.")
        raise InvalidArgument(f"padded(value={value!r:.80}): {name:.80} has no such value; give one that it has")
    return found


def _found(value: Any, dtype: torch.dtype | np.dtype[Any]) -> Any:
    """Returns the filling; None, or an error, where there is none."""
    if isinstance(dtype, torch.dtype):
        number = _number(value)
        tensor = torch.tensor(number, dtype=dtype)
        floats = torch.finfo(dtype) if dtype.is_floating_point or dtype.is_complex else None
        return tensor if _is_kept(number, tensor.item(), floats) else None
    if dtype.kind not in _NUMBERS:
        return _no_number(value, dtype)
    number = _number(value)
    array = np.array(number, dtype)
    return array if _is_kept(number, array.item(), np.finfo(dtype) if dtype.kind in "fc" else None) else None


def _number(value: Any) -> Any:
    """Returns a Python number, or one of those of numpy's that Python lacks."""
    if isinstance(value, torch.Tensor) and not value.dim():
        return value.item()
    if isinstance(value, np.ndarray | np.generic) and not value.ndim and value.dtype.kind in _NUMBERS:
        return value.item()
    if isinstance(value, bool | int | float | complex):
        return value
    raise TypeError("not a number")


def _is_kept(given: Any, found: Any, floats: Any) -> bool:
    """Whether a number is still the same; floats, whose dtype is `floats`, may be rounded."""
    return all(
        one == other
        or (floats is not None and isinstance(one, float | np.floating) and _is_rounded(one, other, floats))
        for one, other in ((given.real, found.real), (given.imag, found.imag))
    )


def _is_rounded(given: Any, found: Any, floats: Any) -> bool:
    return bool(np.isnan(found)) if np.isnan(given) else bool(floats.min <= given <= floats.max)


def _no_number(value: Any, dtype: np.dtype[Any]) -> NDArray[Any] | None:
    """Returns a text, bytes, a time or a structure."""
    given = np.asarray(value)
    if given.ndim or given.dtype.kind != dtype.kind:
        return None
    if dtype.kind == "V":
        return given if given.dtype == dtype else None
    array = given.astype(dtype)
    return array if array.astype(given.dtype).tobytes() == given.tobytes() else None
