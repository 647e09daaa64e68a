"""Onto the device that a training loop works on, beside the step that runs there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from tqclient.arguments import flag
from tqclient.errors import InvalidArgument
from tqclient.torch.batch import LoadedBatch

Ready = Any
"""A CUDA event behind the copies of a batch; None: they are done."""


class Mover:
    """Moves batches to a device, or into pinned memory.

    Args:
        device: to move to; None leaves values where they are.
        pin_memory: go by way of pinned memory, or end there without a device; None: where the device is CUDA.

    Raises:
        InvalidArgument: the device, or CUDA to pin memory for, is not there.
    """

    def __init__(self, device: str | torch.device | int | None, pin_memory: bool | None) -> None:
        self.device = None if device is None else _checked(device)
        is_cuda = self.device is not None and self.device.type == "cuda"
        pins = pin_memory is not None and flag(pin_memory, what="pin_memory")
        if pins and not torch.cuda.is_available():
            raise InvalidArgument("pin_memory=True needs CUDA, which is not there: leave it out")
        self._pins = is_cuda if pin_memory is None else pins
        self._stream = torch.cuda.Stream(self.device) if is_cuda else None  # type: ignore[no-untyped-call]

    @property
    def idle(self) -> bool:
        """Whether it leaves everything as it is."""
        return self.device is None and not self._pins

    def move(self, value: Any) -> tuple[Any, Ready]:
        """Begins to move every tensor of a value; it is there once `arrived` was told. Other things stay as they are.

        Args:
            value: a `LoadedBatch`, a tensor, what has `.to(device)`, or dicts, lists and tuples of those.
        """
        if self.idle:
            return value, None
        if self._stream is None:
            return self._moved(value), None
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            moved = self._moved(value)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return moved, event

    def arrived(self, value: Any, ready: Ready) -> None:
        """Has the current stream wait for a value, and keeps the memory from others until it is done with it."""
        if ready is None:
            return
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ready)
        for tensor in _tensors(value):
            tensor.record_stream(stream)

    def _moved(self, value: Any) -> Any:
        if isinstance(value, LoadedBatch):
            return value.carried(self._moved)
        if isinstance(value, torch.Tensor):
            return self._moved_tensor(value)
        if isinstance(value, dict):
            return {name: self._moved(each) for name, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self._moved, value))
        if type(value) in (list, tuple):
            return type(value)(map(self._moved, value))
        if self.device is not None and callable(getattr(value, "to", None)):  # a TensorDict, say
            return value.to(self.device)
        return value

    def _moved_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        jagged: Any = tensor
        if tensor.is_nested and tensor.layout == torch.jagged and jagged._ragged_idx == 1 and jagged.lengths() is None:
            # By its parts: these can be pinned, and with the lengths known no kernel has to come back for them.
            counts = np.diff(jagged.offsets().cpu().numpy())
            return torch.nested.nested_tensor_from_jagged(
                self._moved_tensor(jagged.values()),
                self._moved_tensor(jagged.offsets()),
                min_seqlen=int(counts.min()) if len(counts) else 0,
                max_seqlen=int(counts.max()) if len(counts) else 0,
            )
        if tensor.is_nested:
            return tensor if self.device is None else tensor.to(self.device)
        if self._pins and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()
        return tensor if self.device is None else tensor.to(self.device, non_blocking=self._pins)


def _checked(device: str | torch.device | int) -> torch.device:
    try:
        checked = torch.device(device)
        torch.empty(0, device=checked)
    except (RuntimeError, AssertionError, ImportError, TypeError, ValueError) as error:
        raise InvalidArgument(f"device={device!r:.80} is not there: {str(error).splitlines()[0]}") from None
    if checked.type == "meta":
        raise InvalidArgument("device='meta' holds no values")
    return checked


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        jagged: Any = value
        if value.is_nested and value.layout == torch.jagged:
            return [each for each in (jagged.values(), jagged.offsets()) if each.is_cuda]
        return [value] if value.is_cuda else []
    if isinstance(value, Mapping | LoadedBatch):
        return [tensor for each in value.values() for tensor in _tensors(each)]
    if isinstance(value, list | tuple):
        return [tensor for each in value for tensor in _tensors(each)]
    return []
