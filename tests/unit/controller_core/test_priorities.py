"""The index of numbers against sorting everything."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from tqserver.controller.core.priorities import PriorityIndex

CAPACITY = 2_000


class Table:
    """Ready slots and their numbers, and the index over them."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng = rng
        self.ready = np.zeros(CAPACITY, dtype=np.bool_)
        self.numbers = np.full(CAPACITY, -np.inf)
        self.size = 0
        self.index = PriorityIndex()

    def put(self, rows: int) -> None:
        new = slice(self.size, min(self.size + rows, CAPACITY))
        count = new.stop - new.start
        self.numbers[new] = np.where(self.rng.random(count) < 0.1, -np.inf, self.rng.integers(0, 6, count))
        self.ready[new] = self.rng.random(count) < 0.7
        self.index.touch(new)
        self.size = new.stop

    def turn(self, rows: int) -> None:
        slots = self.some(rows)
        self.ready[slots] = self.rng.random(len(slots)) < 0.5
        self.index.touch(slots)

    def tag(self, rows: int) -> None:
        slots = self.some(rows)
        self.numbers[slots] = self.rng.integers(0, 9, len(slots))
        self.index.touch(slots)

    def some(self, rows: int) -> NDArray[np.int64]:
        return np.unique(self.rng.integers(0, max(self.size, 1), rows))

    def check(self, rows: int) -> None:
        ready = np.flatnonzero(self.ready[: self.size])
        expected = sorted(ready.tolist(), key=lambda slot: (-self.numbers[slot], slot))[:rows]
        assert self.index.highest(self.ready, self.numbers, self.size, rows).tolist() == expected


@pytest.mark.parametrize("history", range(40))
def test_the_highest_numbers_after_any_history(seed: int, history: int) -> None:
    table = Table(np.random.default_rng([seed, history]))
    for step in table.rng.integers(0, 4, 80):
        (table.put, table.turn, table.tag, table.check)[step](int(table.rng.integers(1, 60)))
    table.check(CAPACITY)


def test_nobody_asking_takes_no_memory_without_end() -> None:
    table = Table(np.random.default_rng(0))
    table.put(100)
    table.check(1)
    for _ in range(1_000):
        table.index.touch(slice(0, 100))
    assert sum(map(len, table.index._touched)) <= 200
    table.check(100)
