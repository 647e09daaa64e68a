"""`tq-bench soak`: whether a service that only goes on has what it uses under control."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from rich.progress import Progress

from benchmarks.peers import OURS, PEERS
from benchmarks.peers.host import Setup
from benchmarks.peers.process import Open, opened
from benchmarks.statistics import Spread

WAYS: Final = ("default", "copy=False")
WARM_UP_SHARE: Final = 0.2
"""Of the time, in which pools fill and processes find their size; and in any case this many batches."""
WARM_UP_BATCHES: Final = 20
TOLERANCE: Final = 0.05
SAMPLES: Final = 120
"""That are spread over the time."""
CHECK_EVERY: Final = 50
"""Batches from one comparison of the bytes to the next."""
LEVELS: Final = {"RSS MiB": 0, "open files": 0, "threads": 2}
"""What must stay where it was after the warm-up, and by how much it may move in any case: gRPC has a thread more for a
while when calls come at once, and a twentieth of ten is none."""
FAULTS, REGISTRATIONS = "minor faults", "registrations"
"""What is counted from a process's start."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one quantity of one process.

    Attributes:
        process: its name.
        quantity: what was sampled.
        first: after the warm-up; of a level, the median of the first tenth from there on, as one value may be a peak.
        last: at the end.
        low: smallest from the warm-up on.
        high: largest from the warm-up on.
        passed: whether that is within bounds.
        bound: the rule, for people.
    """

    process: str
    quantity: str
    first: float
    last: float
    low: float
    high: float
    passed: bool
    bound: str


@dataclass(slots=True)
class Result:
    """The figures of one run.

    Attributes:
        workload: that went round.
        batches: that were put, claimed and read.
        size_bytes: payload of each.
        put: seconds of each put after the warm-up.
        take: of each claim and the reading of its values.
        get: of each get of the same samples by id.
        times_s: of the samples, since the start.
        samples: process → quantity → value at each of the times.
        verdicts: one for each quantity of each process.
    """

    workload: str
    batches: int = 0
    size_bytes: int = 0
    put: Spread | None = None
    take: Spread | None = None
    get: Spread | None = None
    times_s: list[float] = field(default_factory=list)
    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every quantity is within bounds."""
        return all(verdict.passed for verdict in self.verdicts)


def run(*, minutes: float, workload: str, seed: int = 0, scale: str = "full", transport: str = "auto") -> Result:
    """Puts, claims and gets one batch after the other, for some time, and samples what the processes use.

    Args:
        minutes: in all, the warm-up included.
        workload: a key of `workloads.WORKLOADS`.
        seed: of the batch.
        scale: a key of `workloads.SCALES`.
        transport: as in `tq.connect`.
    """
    setup = Setup.of(workload, seed, scale, transport=transport)
    with opened(PEERS[OURS], setup) as ends, Progress(transient=True) as progress:
        bar = progress.add_task(f"soak, {workload}", total=minutes * 60)
        loop = _Loop(ends, minutes * 60)
        loop.run(lambda seconds: progress.update(bar, completed=seconds))
    result = Result(workload, loop.batches, setup.size_bytes, times_s=loop.times_s, samples=loop.samples)
    result.put, result.take, result.get = (Spread.of(values) for values in loop.seconds.values())
    result.verdicts = judge(loop.samples, loop.warm_from, loop.batches - loop.warm_batches, setup.size_bytes)
    return result


class _Loop:
    """The batches that go round."""

    def __init__(self, ends: Open, seconds: float) -> None:
        assert ends.target is not None
        self.batches = 0
        self.warm_from = 0
        self.warm_batches = 0
        self.times_s: list[float] = []
        self.samples: dict[str, dict[str, list[float]]] = {}
        self.seconds: dict[str, list[float]] = {"put": [], "take": [], "get": []}
        self._source, self._target = ends.sources[0], ends.target
        self._duration_s = seconds
        self._daemons: Mapping[str, int] = ends.storage.call("where")["pids"]
        self._pids = {"producer": self._source.pid, "consumer": self._target.pid, **self._daemons}

    def run(self, tick: Callable[[float], None]) -> None:
        """Goes round until the time is over."""
        start = time.monotonic()
        next_sample, interval = 0.0, self._duration_s / SAMPLES
        for way in itertools.cycle(WAYS):
            elapsed = time.monotonic() - start
            warm = elapsed >= self._duration_s * WARM_UP_SHARE and self.batches >= WARM_UP_BATCHES
            if warm and not self.warm_batches:
                self.warm_from, self.warm_batches = len(self.times_s), self.batches
            if elapsed >= next_sample or (warm and len(self.times_s) == self.warm_from):
                self._sample(elapsed)
                next_sample = elapsed + interval
                tick(elapsed)
            if elapsed >= self._duration_s and len(self.times_s) > self.warm_from + 1 and self.warm_batches:
                return
            self._turn(way, warm)

    def _turn(self, way: str, warm: bool) -> None:
        self.batches += 1
        checked = self.batches % CHECK_EVERY == 1
        digest = self._source.call("stamp", self.batches)[0] if checked else 0
        begun, put = self._source.call("put", way, self.batches)
        asked, got = self._target.call("take", way, False)
        if checked and self._target.call("digest", way) != digest:
            raise RuntimeError("what was read differs from what was put")
        get = self._target.call("get", way)
        self._target.call("drop", way)
        self._source.call("drop", way, self.batches)
        if warm:
            for name, seconds in zip(self.seconds, (put - begun, got - asked, get), strict=True):
                self.seconds[name].append(seconds)

    def _sample(self, elapsed: float) -> None:
        self.times_s.append(elapsed)
        registrations = {"producer": self._source, "consumer": self._target}
        for process, pid in self._pids.items():
            values = usage(pid)
            if process in registrations:
                values[REGISTRATIONS] = float(registrations[process].call("registrations"))
            for quantity, value in values.items():
                self.samples.setdefault(process, {}).setdefault(quantity, []).append(value)


def usage(pid: int) -> dict[str, float]:
    """Returns what a live process uses now, and the faults that it has had so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    resident = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {
        "RSS MiB": resident / 2**20,
        "open files": float(len(os.listdir(f"/proc/{pid}/fd"))),
        "threads": float(fields[17]),
        FAULTS: float(fields[7]),
    }


def judge(
    samples: Mapping[str, Mapping[str, list[float]]], warm_from: int, batches: int, size_bytes: int
) -> list[Verdict]:
    """Says of each quantity of each process whether it stayed within bounds.

    Args:
        samples: process → quantity → values.
        warm_from: index of the first value after the warm-up.
        batches: that went round since then.
        size_bytes: payload of each.
    """
    pages = size_bytes / os.sysconf("SC_PAGE_SIZE")
    verdicts = []
    for process, quantities in samples.items():
        for quantity, values in quantities.items():
            warm = np.asarray(values[warm_from:])
            first, last, low, high = (float(value) for value in (warm[0], warm[-1], warm.min(), warm.max()))
            if quantity in LEVELS:
                first = float(np.median(warm[: max(1, len(warm) // 10)]))
                free = LEVELS[quantity]
                passed = max(high - first, first - low) <= max(TOLERANCE * first, free)
                bound = f"±{TOLERANCE:.0%}" + (f" or {free}" if free else "")
            elif quantity == FAULTS:
                rate = (last - first) / max(1, batches)
                passed = rate <= TOLERANCE * pages
                bound = f"{rate:.1f} a batch, at most {TOLERANCE:.0%} of its {pages:.0f} pages"
            else:
                passed, bound = last == first, "none more"
            verdicts.append(Verdict(process, quantity, first, last, low, high, passed, bound))
    return verdicts


def lines(samples: Mapping[str, Mapping[str, list[float]]]) -> dict[str, dict[str, list[Any]]]:
    """Returns quantity → process → values, for a plot."""
    turned: dict[str, dict[str, list[Any]]] = {}
    for process, quantities in samples.items():
        for quantity, values in quantities.items():
            turned.setdefault(quantity, {})[process] = values
    return turned
