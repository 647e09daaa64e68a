"""The one model that both trainers change and both rollout workers read: a versioned file.

The trainers are asynchronous: each works out a gradient on the version it has read, then applies it to the latest
version under a lock. Unlike a collective, that survives `kill -9` of either: the kernel drops a dead holder's lock, and
a version appears by an atomic rename, so a reader meets the old one or the new one and never half of either.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

LEARNING_RATE: Final = 2e-3
BETA_MEAN: Final = 0.9
BETA_SQUARE: Final = 0.99
EPSILON: Final = 1e-8
GRADIENT_NORM_MAX: Final = 1.0


@dataclass(frozen=True)
class Weights:
    """One version of the model, with the state of its optimizer.

    Attributes:
        version: counts the updates.
        parameters: float32 [size], every parameter of the policy end to end.
        mean: float32 [size], Adam's running mean of the gradient.
        square: float32 [size], Adam's running mean of its square.
    """

    version: int
    parameters: torch.Tensor
    mean: torch.Tensor
    square: torch.Tensor

    @classmethod
    def first(cls, parameters: torch.Tensor) -> Weights:
        """Version 0, before any update."""
        return cls(0, parameters, torch.zeros_like(parameters), torch.zeros_like(parameters))

    def updated(self, gradient: torch.Tensor) -> Weights:
        """The next version: one step of Adam along a gradient (float32 [size]), whose norm is clipped."""
        gradient = gradient * min(1.0, GRADIENT_NORM_MAX / (gradient.norm().item() + EPSILON))
        version = self.version + 1
        mean = torch.lerp(gradient, self.mean, BETA_MEAN)
        square = torch.lerp(gradient.square(), self.square, BETA_SQUARE)
        step = mean / (1 - BETA_MEAN**version)
        scale = (square / (1 - BETA_SQUARE**version)).sqrt() + EPSILON
        return Weights(version, self.parameters - LEARNING_RATE * step / scale, mean, square)


class WeightStore:
    """The model's latest version, in a folder that all workers see."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "weights"
        self._lock = folder / "weights.lock"

    def read(self) -> Weights:
        """The latest version; never waits."""
        raw = self._file.read_bytes()
        tensors = torch.from_numpy(np.frombuffer(raw, np.float32, offset=8).copy()).view(3, -1)
        return Weights(int.from_bytes(raw[:8], "little"), *tensors)

    def write(self, weights: Weights) -> None:
        """Makes a version the latest, at once and whole."""
        new = self._file.with_suffix(f".{os.getpid()}")
        tensors = torch.stack([weights.parameters, weights.mean, weights.square])
        new.write_bytes(weights.version.to_bytes(8, "little") + tensors.numpy().tobytes())
        new.replace(self._file)

    def update(self, gradient: torch.Tensor, announce: Callable[[int], None]) -> Weights:
        """Moves the latest version along a gradient, one caller at a time.

        Args:
            gradient: float32 [size].
            announce: told of every new version, in order.

        Returns:
            The new version.
        """
        with self._lock.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # released by close, thus also by the end of the process
            weights = self.read().updated(gradient)
            self.write(weights)
            announce(weights.version)
            return weights
