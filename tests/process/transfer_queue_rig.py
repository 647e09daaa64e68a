"""What tests of the TransferQueue drop-in put and look at."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict


def tensors(rows: int, width: int = 3) -> Any:
    """Rows of `x`, int64 [rows, width], counted through, and of `r`, int64 [rows], likewise."""
    return TensorDict({"x": torch.arange(rows * width).reshape(rows, width), "r": torch.arange(rows)}, batch_size=rows)


def lists(value: Any) -> list[Any]:
    """The rows of a jagged tensor."""
    return [row.tolist() for row in value.unbind()]
