"""Which weight versions live samples have: counted at every change, for `capacity_versions`."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core.arrays import counted
from tqserver.controller.core.samples import SampleTable, Slots


class LiveVersions:
    """Live samples by version_max; those without one count for none.

    Args:
        samples: to begin with (linear in their number).
    """

    def __init__(self, samples: SampleTable) -> None:
        self._samples = samples
        self.counts: dict[int, int] = {}
        self.add(samples.slots())

    def add(self, slots: Slots) -> None:
        """Samples came, or were given versions."""
        self._count(self._samples.version_max[slots], 1)

    def discard(self, slots: Slots) -> None:
        """Samples go, or are about to be given other versions."""
        self._count(self._samples.version_max[slots], -1)

    def _count(self, versions: NDArray[np.int64], sign: int) -> None:
        for version, count in _counted(versions):
            left = self.counts.get(version, 0) + sign * count
            if left:
                self.counts[version] = left
            else:
                del self.counts[version]

    def after(self, slots: Slots, versions: NDArray[np.int64]) -> set[int]:
        """Returns what would be live if samples had these versions (-1: as before); a slot of -1 is a new sample."""
        given = versions >= 0
        slots, versions = slots[given], versions[given]
        before = _counted(self._samples.version_max[slots[slots >= 0]])
        emptied = {version for version, count in before if self.counts[version] == count}
        return (self.counts.keys() - emptied) | set(versions.tolist())


def _counted(versions: NDArray[np.int64]) -> list[tuple[int, int]]:
    unique, counts = counted(versions[versions >= 0])
    return list(zip(unique.tolist(), counts.tolist(), strict=True))
