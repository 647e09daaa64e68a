"""Why a value cannot be carried, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import dtypes
from tqclient.errors import UnsupportedValue


class Refused(Exception):
    """A value that cannot be carried; collects its path from the inside out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.steps: list[str] = []

    def within(self, step: str) -> Refused:
        """Adds the step that leads to what was refused so far."""
        self.steps.append(step)
        return self

    def at(self, path: str) -> UnsupportedValue:
        """The error for a user."""
        return UnsupportedValue(f"{path}{''.join(reversed(self.steps))}: {self.reason}")


def step(key: Any) -> str:
    """How a key or an index reads within a path."""
    if isinstance(key, str) and key.isidentifier():
        return f".{key}"
    return f"[{key!r}]"


@dataclass(frozen=True, slots=True)
class RowPath:
    """Where the rows of a column stand in what the user wrote: `extra[3].callback`, or `mm.callback[3]`."""

    head: str
    tail: str = ""

    def at(self, row: int) -> str:
        """The path of one row's value."""
        return f"{self.head}[{row}]{self.tail}"

    def child(self, key: str) -> RowPath:
        """The path of a key of each row's dict."""
        return RowPath(self.head, self.tail + step(key))

    def __str__(self) -> str:
        return self.head + self.tail


class ValuePath(RowPath):
    """Where the only value of a column stands."""

    def at(self, row: int) -> str:
        """The path of the value."""
        return str(self)


def check_tensor(tensor: torch.Tensor) -> None:
    """Checks that a tensor other than a NestedTensor can be carried.

    Raises:
        Refused: a subclass, a layout, a device or a dtype that would not come back as it was.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        raise Refused(f"a {type(tensor).__module__}.{type(tensor).__qualname__} would come back as a plain tensor")
    if tensor.layout != torch.strided:
        raise Refused(f"a tensor of layout {tensor.layout} cannot be carried; convert it with .to_dense()")
    _check_values(tensor)


def check_nested(tensor: torch.Tensor) -> None:
    """Checks that a NestedTensor can be carried, as rows of a column or as one value.

    Raises:
        Refused: a device or a dtype that would not come back as it was.
    """
    # A jagged one takes the dispatcher 10 µs for each question; the tensor of its values does not.
    values = getattr(tensor, "_values", None)
    _check_values(values if isinstance(values, torch.Tensor) else tensor)


def _check_values(tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise Refused("a meta tensor has no values")
    if tensor.dtype not in dtypes.TORCH_NAME:
        raise Refused(f"a tensor of dtype {tensor.dtype} cannot be carried; convert it")


def check_array(array: NDArray[Any]) -> None:
    """Checks that an array can be carried.

    Raises:
        Refused: a subclass, or a dtype that holds objects or pointers.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise Refused(f"a {type(array).__module__}.{type(array).__qualname__} would come back as a plain array")
    try:
        dtypes.numpy_name(array.dtype)
    except dtypes.UnknownDtype:
        raise Refused(f"an array of dtype {array.dtype} cannot be carried; convert it") from None
    if lost := dtypes.loses(array.dtype):
        raise Refused(f"an array of dtype {array.dtype!r} would lose {lost}; convert it")
