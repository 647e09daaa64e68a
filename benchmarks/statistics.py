"""Medians and spread."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Of repeated timings, in milliseconds."""

    median_ms: float
    min_ms: float
    max_ms: float
    p99_ms: float
    count: int

    @classmethod
    def of(cls, seconds: list[float]) -> Spread:
        """Summarises at least one timing, given in seconds."""
        values = np.asarray(seconds) * 1e3
        return cls(
            median_ms=float(np.median(values)),
            min_ms=float(values.min()),
            max_ms=float(values.max()),
            p99_ms=float(np.percentile(values, 99)),
            count=len(values),
        )

    def __str__(self) -> str:
        return f"{self.median_ms:.2f} ({self.min_ms:.2f}–{self.max_ms:.2f})"
