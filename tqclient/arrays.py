"""What numpy has no function for."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def spread(starts: NDArray[np.int64], counts: NDArray[np.int64], step: int = 1) -> NDArray[np.int64]:
    """Returns starts[i], starts[i] + step, and so on, counts[i] numbers of each i, one i after the other: int64."""
    ends = np.cumsum(counts)
    numbers: NDArray[np.int64] = np.repeat(starts - step * (ends - counts), counts)
    numbers += step * np.arange(len(numbers))
    return numbers
