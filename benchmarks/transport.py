"""`tq-bench transport`: the same bytes over every path, interleaved in one run over loopback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from benchmarks.paths import Ends, Path, Setup, engine, floor, service, store
from benchmarks.payload import Batch, Rows, Shape
from benchmarks.statistics import Spread
from tqserver.local import LocalCluster

MOONCAKE: Final = "mooncake"
PATHS: Final = (
    floor.PATH,
    service.path("shm"),
    service.path(MOONCAKE),
    service.path("grpc"),
    engine.PATH,
    store.PATH,
)
BASE: Final = engine.PATH.name
"""What the others are set beside: the first thing that it times in each operation."""
WARM_UP: Final = 2
"""Rounds that are not counted: pages and connections are new."""
_TURNS: Final[dict[Batch, int]] = {"large": 1, "small": 10, "scattered": 3}
"""How often each batch has its turn in a round: the quicker, the more its time is at chance's mercy."""
_OPERATIONS: Final[tuple[tuple[Batch, str], ...]] = (
    ("large", "put"),
    ("large", "get"),
    ("scattered", "get"),
    ("small", "put"),
    ("small", "get"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table.

    Attributes:
        operation: as people call it.
        path: name of the path.
        timed: which part or way of it.
        size_bytes: that it moves.
        times: of the counted rounds.
        speed: median over the turns, where that of the raw engine is 1; None when that did not run.
    """

    operation: str
    path: str
    timed: str
    size_bytes: int
    times: Spread
    speed: float | None

    @property
    def gigabytes_per_second(self) -> float:
        """At the median."""
        return self.size_bytes / self.times.median_ms / 1e6


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run.

    Attributes:
        rounds: that were counted.
        rows: of the table, by operation.
        failures: path → why it did not run, or not to the end.
        registrations: whose register calls → their number before and after the counted rounds.
    """

    rounds: int
    rows: list[Row]
    failures: dict[str, str]
    registrations: dict[str, tuple[int, int]]


@dataclass(slots=True)
class _Timings:
    """Seconds by (operation, path, what was timed), in the order of their first round."""

    seconds: dict[tuple[str, str, str], list[float]] = field(default_factory=dict)

    def add(self, operation: str, path: str, times: dict[str, float]) -> None:
        for timed, seconds in times.items():
            self.seconds.setdefault((operation, path, timed), []).append(seconds)


def run(
    paths: Sequence[Path] = PATHS,
    *,
    repeats: int,
    seed: int = 0,
    arena: str = "3GiB",
    staging: str | None = None,
    shape: Shape | None = None,
) -> Result:
    """Measures every path in turn, round by round. One that fails is left out from there on, and its reason kept.

    Args:
        paths: some of `PATHS`.
        repeats: rounds that count.
        seed: of the bytes, and of which rows are read.
        arena: of the storage node.
        staging: of our client for Mooncake; None: its default.
        shape: how much is moved; None: what the table is about.
    """
    shape = shape or Shape()
    with ExitStack() as stack, Progress(transient=True) as progress:
        bar = progress.add_task("transport", total=WARM_UP + repeats)
        bench = _Bench(shape, seed)
        address = bench.start_cluster(stack, paths, arena)
        setup = Setup(shape, seed, address, staging)
        for path in paths:
            bench.open(stack, path, setup)
        bench.load()
        for _ in range(WARM_UP):
            bench.round(_Timings())
            progress.advance(bar)
        timings = _Timings()
        before = bench.registrations()
        for _ in range(repeats):
            bench.round(timings)
            progress.advance(bar)
        after = bench.registrations()
    counts = {name: (before[name], count) for name, count in after.items() if name in before}
    names = [path.name for path in paths if path.name not in bench.failures]
    return Result(repeats, _rows(shape, timings.seconds, names), bench.failures, counts)


class _Bench:
    """The paths that are open."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self.failures: dict[str, str] = {}
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        self._ends: dict[str, Ends] = {}
        self._blocks: dict[str, Any] = {}
        self._turn = 0

    def start_cluster(self, stack: ExitStack, paths: Sequence[Path], arena: str) -> str:
        """Starts the daemons that some paths need; returns the controller's address, or nothing when none does.

        A node that cannot run an engine for Mooncake runs without, for the others.
        """
        names = {path.name for path in paths if path.clustered}
        if MOONCAKE in names:
            with self._guard(MOONCAKE):
                cluster = LocalCluster(arena=arena, mooncake="on", environ=engine.OVER_TCP)
                return stack.enter_context(cluster).address
        return stack.enter_context(LocalCluster(arena=arena, mooncake="off")).address if names else ""

    def open(self, stack: ExitStack, path: Path, setup: Setup) -> None:
        """Starts a path's processes, which may still be busy with that when this returns."""
        if path.name in self.failures:
            return
        with self._guard(path.name):
            self._ends[path.name] = stack.enter_context(path.open(setup))

    def load(self) -> None:
        """Puts the block of rows that the scattered gets read from."""
        for name, ends in self._in_turn():
            with self._guard(name):
                self._blocks[name] = ends.source.call("load")

    def round(self, timings: _Timings) -> None:
        """Runs every operation on every path."""
        for batch, turns in _TURNS.items():
            for _ in range(turns):
                if batch == "scattered":
                    rows = self._rng.choice(self._shape.block_rows, self._shape.scattered_rows, replace=False)
                    self._get_each(timings, batch, self._blocks, rows)
                else:
                    tokens = self._put_each(timings, batch)
                    self._get_each(timings, batch, tokens, None)
                    self._drop_each(tokens)

    def registrations(self) -> dict[str, int]:
        """Returns the register calls so far: of each Mooncake client of ours, and of the node's engine."""
        counts: dict[str, int] = {}
        if (ends := self._ends.get(MOONCAKE)) is None:
            return counts
        with self._guard(MOONCAKE):
            for end, worker in {"producer": ends.source, "consumer": ends.target}.items():
                found = worker.call("registrations")
                counts |= {f"{MOONCAKE} {end}": found["client"], "node": found["node"]}
        return counts

    def _put_each(self, timings: _Timings, batch: Batch) -> dict[str, Any]:
        tokens = {}
        for name, ends in self._in_turn():
            with self._guard(name):
                times, tokens[name] = ends.source.call("put", batch)
                timings.add(operation(self._shape, batch, "put"), name, times)
        return tokens

    def _get_each(self, timings: _Timings, batch: Batch, tokens: dict[str, Any], rows: Rows | None) -> None:
        for name, ends in self._in_turn():
            with self._guard(name):
                expected = ends.source.call("digest", batch, rows)
                times = ends.target.call("get", batch, tokens[name], rows, expected)
                timings.add(operation(self._shape, batch, "get"), name, times)

    def _drop_each(self, tokens: dict[str, Any]) -> None:
        for name, ends in self._in_turn():
            with self._guard(name):
                ends.source.call("drop", tokens[name])

    def _in_turn(self) -> list[tuple[str, Ends]]:
        """Returns the open paths, each time beginning with another one: none always follows the same neighbour."""
        self._turn += 1
        ends = list(self._ends.items())
        first = self._turn % max(1, len(ends))
        return ends[first:] + ends[:first]

    @contextmanager
    def _guard(self, name: str) -> Iterator[None]:
        """Turns a failure of a path into its result."""
        try:
            yield
        except Exception as error:  # whatever it is: the others go on
            self.failures[name] = f"{type(error).__name__}: {error}"
            self._ends.pop(name, None)


def operation(shape: Shape, batch: Batch, verb: str) -> str:
    """Names an operation."""
    if batch == "large":
        return f"{shape.values} × {_size(shape.value_bytes)} {verb}"
    if batch == "scattered":
        return f"{shape.scattered_rows:,} × 4 KiB scattered {verb}"
    return f"4 KiB {verb}"


def _size(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if size_bytes >= 1 << 20 else f"{size_bytes >> 10} KiB"


def _rows(shape: Shape, seconds: dict[tuple[str, str, str], list[float]], names: list[str]) -> list[Row]:
    sizes = {operation(shape, batch, verb): shape.size_bytes(batch) for batch, verb in _OPERATIONS}
    rows = []
    for name, size_bytes in sizes.items():
        mine = [key for key in seconds if key[0] == name and key[1] in names]
        base = next((seconds[key] for key in mine if key[1] == BASE), None)
        for key in sorted(mine, key=lambda key: names.index(key[1])):
            # Turn by turn: what else the machine does at the time slows down both.
            speed = float(np.median(np.divide(base, seconds[key]))) if base else None
            rows.append(Row(name, key[1], key[2], size_bytes, Spread.of(seconds[key]), speed))
    return rows
