"""Columns of every kind as users give them, chosen at random, and what ranges of their rows are."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import torch

import tqclient as tq

DTYPES: Final = (torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.uint8)
KEYS: Final = ("a", "b", "c.d", "x")
DEPTH_MAX: Final = 2


class Kind:
    """What a field, or a child of a struct, is: the same in each put.

    Attributes:
        name: of one of `LEAVES`, or "struct".
        longest: rows have fewer items than this.
        width: of a row's second dimension.
        dtype: of its elements.
        children: of a struct.
        shares: whether its rows sometimes have values in common.
    """

    def __init__(self, choose: random.Random, depth: int = 0) -> None:
        """Chooses one."""
        self.name = choose.choice([*LEAVES, *["struct"] * 3] if depth < DEPTH_MAX else [*LEAVES])
        if depth and self.name == "nested":
            self.name = "ragged"
        self.longest, self.width = choose.choice([3, 40, 600, 3000]), choose.choice([1, 2, 5, 200])
        self.dtype = choose.choice(DTYPES)
        self.shares = self.name != "nested" and choose.random() < 0.4
        names = choose.sample(KEYS, choose.randint(1, 3)) if self.name == "struct" else []
        self.children = {name: Kind(choose, depth + 1) for name in names}

    def __repr__(self) -> str:
        return f"{self.name}{'*' * self.shares}{self.children or ''}"

    def column(self, choose: random.Random, rows: int, *, plain: bool = False) -> Any:
        """Returns a column of so many rows; `plain`: whose rows share nothing."""
        if self.shares and not plain and choose.random() < 0.7:
            values = choose.randint(1, rows)
            index = [choose.randrange(values) for _ in range(rows)]
            return tq.Shared(self.column(choose, values, plain=True), index)
        if self.children:
            return {key: child.column(choose, rows, plain=plain) for key, child in self.children.items()}
        return LEAVES[self.name](np.random.default_rng(choose.getrandbits(32)), rows, self)

    def ranged(self, path: str) -> Iterator[str]:
        """Yields the paths, from `path` on, at which rows have a leading dimension."""
        if self.name in RANGED:
            yield path
        for key, child in self.children.items():
            yield from child.ranged(f"{path}.{key}")


def _ragged(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return [torch.from_numpy(rng.integers(0, 99, rng.integers(0, kind.longest))).to(kind.dtype) for _ in range(rows)]


def _wide(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    sizes = [(int(rng.integers(0, 1 + kind.longest // kind.width)), kind.width) for _ in range(rows)]
    return [torch.from_numpy(rng.integers(0, 99, size)).to(kind.dtype) for size in sizes]


def _nested(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return torch.nested.nested_tensor(_ragged(rng, rows, kind), layout=torch.jagged)


def _dense(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return torch.from_numpy(rng.integers(0, 99, (rows, kind.width, 2))).to(kind.dtype)


def _scalars(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return torch.from_numpy(rng.integers(0, 99, rows)).to(kind.dtype)


def _arrays(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return [rng.random(int(rng.integers(0, kind.longest)), np.float32) for _ in range(rows)]


def _array(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return rng.random((rows, kind.width))


def _texts(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return [f"{'é' * int(rng.integers(0, 2))}{rng.integers(0, 99)}" * int(rng.integers(0, 50)) for _ in range(rows)]


def _bytes(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    return [rng.bytes(int(rng.integers(0, 50))) for _ in range(rows)]


def _records(rng: np.random.Generator, rows: int, kind: Kind) -> Any:
    numbers = rng.integers(0, 9, rows).tolist()
    return [[number, {"a": None, "b": 1.5}, torch.arange(number)] if number else None for number in numbers]


LEAVES: Final[dict[str, Callable[[np.random.Generator, int, Kind], Any]]] = {
    "ragged": _ragged,
    "wide": _wide,
    "nested": _nested,
    "dense": _dense,
    "scalars": _scalars,
    "arrays": _arrays,
    "array": _array,
    "texts": _texts,
    "bytes": _bytes,
    "records": _records,
}
RANGED: Final = {"ragged", "wide", "nested", "dense", "arrays", "array"}


def value_at(value: Any, path: str) -> Any:
    """Returns what a path leads to within a row's value."""
    if not path:
        return value
    key = key_of(value, path)
    return value_at(value[key], path[len(key) + 1 :])


def clipped(value: Any, path: str, wanted: slice) -> Any:
    """Returns a row's value with only a range of what a path leads to."""
    if not path:
        return value[wanted]
    key = key_of(value, path)
    return {**value, key: clipped(value[key], path[len(key) + 1 :], wanted)}


def key_of(value: Any, path: str) -> str:
    """Returns the key that a path goes on with: the longest that fits."""
    return max((key for key in value if path == key or path.startswith(f"{key}.")), key=len)
