"""The ways of moving bytes that `tq-bench transport` compares. Each is a pair of child processes, or one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

from benchmarks.payload import Shape
from benchmarks.workers import Worker


@dataclass(frozen=True, slots=True)
class Setup:
    """What a path is opened with.

    Attributes:
        shape: how much is moved.
        seed: of the bytes.
        address: of the controller of the run's cluster.
        staging: bytes of our client's staging for Mooncake, as text; None: its default.
    """

    shape: Shape
    seed: int
    address: str = ""
    staging: str | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """The two ends of a path that is open; they may be one process.

    Attributes:
        source: answers `load` → token of the block of rows; `put` batch → (seconds by what was timed, token);
            `digest` batch, rows → of what it put; `drop` token.
        target: answers `get` batch, token, rows, digest → seconds by what was timed. It has compared the bytes.
    """

    source: Worker
    target: Worker


Opened: TypeAlias = AbstractContextManager[Ends]


@dataclass(frozen=True, slots=True)
class Path:
    """One way of moving bytes.

    Attributes:
        name: for people.
        open: starts its processes.
        clustered: whether it needs a controller and a storage node.
    """

    name: str
    open: Callable[[Setup], Opened]
    clustered: bool = False
