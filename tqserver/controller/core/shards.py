"""The shards of a partition's samples, by slot: their tags are looked at when they are set, and not when they go."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqserver.controller.core import tags
from tqserver.controller.core.arrays import counted, grown

_WORD: Final = tags.SHARD.encode()


class Shards:
    """Which shard each sample belongs to, and how many samples each shard has.

    Attributes:
        sizes: shard → live samples whose tag names it; none is 0.
    """

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}
        # uint16 [capacity]: shard + 1, 0 for none; empty until a sample has one. Nothing lies in slots not yet used.
        self._codes = np.zeros(0, dtype=np.uint16)

    def set(self, slots: NDArray[np.int64], own: Sequence[bytes], capacity: int) -> None:
        """Samples (int64 [n], each once) have these encoded tags now.

        Args:
            slots: of the samples.
            own: their tags, as many.
            capacity: slots there are.
        """
        codes = _codes(own)
        if not len(self._codes):
            if not codes.any():
                return
            self._codes = np.zeros(capacity, dtype=np.uint16)
        self._count(slots, -1)
        self._codes[slots] = codes
        self._count(slots, 1)

    def remove(self, slots: NDArray[np.int64]) -> None:
        """Samples, each named once, go."""
        if len(self._codes):
            self._count(slots, -1)
            self._codes[slots] = 0

    def _count(self, slots: NDArray[np.int64], sign: int) -> None:
        codes = self._codes[slots]
        found, counts = counted(codes[codes > 0])
        for code, count in zip(found.tolist(), counts.tolist(), strict=True):
            size = self.sizes.get(code - 1, 0) + sign * count
            if size:
                self.sizes[code - 1] = size
            else:
                del self.sizes[code - 1]

    def move(self, kept: NDArray[np.int64] | slice, capacity: int) -> None:
        """Keeps these slots (int64 [n], or a slice), in this order, as the first ones, and makes room for more."""
        if len(self._codes):
            self._codes = grown(self._codes[kept], capacity)


def _codes(own: Sequence[bytes]) -> NDArray[np.uint16]:
    """Returns the shard that each of many encoded maps names, and 1; 0 for none: uint16 [n]."""
    named = np.fromiter((_WORD in each for each in own), np.bool_, len(own))
    codes = np.zeros(len(own), dtype=np.uint16)
    if named.any():
        places = np.flatnonzero(named)
        for part, maps in tags.unpacked_parts(list(compress(own, named))):
            codes[places[part]] = [tags.shard_code(each) for each in maps]
    return codes
