"""`tq-bench compare`: the same batches through us and through what a user would pick instead, interleaved."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final

from rich.progress import Progress

from benchmarks import workloads
from benchmarks.machine import Usage
from benchmarks.peers import Peer
from benchmarks.peers.host import Setup
from benchmarks.peers.process import Open, opened
from benchmarks.statistics import Spread

END_TO_END, PUT, GET = "end to end", "put", "get"
OPERATIONS: Final = (END_TO_END, PUT, GET)
WARM_UP: Final = 3
"""Rounds before the warm ones: the first is reported as cold."""
SETTLE_SECONDS: Final = 0.01
"""That a consumer has to begin to wait, before the producer begins to put. Not longer: idle processors grow slow."""
ROWS: Final = "rows"
PRODUCERS: Final = {"full": (1, 8, 64), "small": (1, 2)}
PROCESSES_MAX: Final = 8
"""Producers beyond these are further threads of them."""
BURST_SECONDS: Final = {"full": 1.0, "small": 0.1}
GROUPS: Final = {
    "regular": ("regular",),
    "jagged": ("jagged",),
    "multimodal": ("multimodal",),
    "small": ("small",),
    "fields": ("fields-1", "fields-8", "fields-32"),
    "tiny-jagged": ("tiny-jagged",),
    "rollout": ("rollout",),
}
"""What can be named on the command line, beside `ROWS`, and the workloads that each stands for."""


@dataclass(frozen=True, slots=True)
class Row:
    """One operation of one way of one peer on one workload.

    Attributes:
        workload: its name.
        peer: its name.
        way: of using it.
        operation: one of `OPERATIONS`.
        size_bytes: payload of the batch.
        cold_ms: the first time, when pages and connections were new.
        times: of the warm rounds.
    """

    workload: str
    peer: str
    way: str
    operation: str
    size_bytes: int
    cold_ms: float
    times: Spread


@dataclass(frozen=True, slots=True)
class Cost:
    """What one part of a peer used.

    Attributes:
        workload: its name.
        peer: its name.
        way: of using it.
        part: `producer`, `consumer` or `storage`.
        cpu_ms: of processor time for one batch, end to end; what it does besides, too.
        rss_peak_bytes: the largest resident set so far, whichever way was used; shared pages count.
    """

    workload: str
    peer: str
    way: str
    part: str
    cpu_ms: float
    rss_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Rate:
    """One-row puts from several producers at once.

    Attributes:
        peer: its name.
        way: of using it.
        producers: that put at once.
        calls_per_s: median over the bursts, of all producers together.
        times: of the single calls of every burst.
    """

    peer: str
    way: str
    producers: int
    calls_per_s: float
    times: Spread


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there are no figures: of a peer, or of one way of using it.

    Attributes:
        workload: on which it failed.
        peer: its name.
        way: of using it; None: the whole peer.
        reason: what was raised.
    """

    workload: str
    peer: str
    way: str | None
    reason: str


@dataclass(slots=True)
class Result:
    """The figures of one run."""

    repeats: int
    scale: str
    rows: list[Row] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sample:
    """What one turn of one way gave: seconds by operation, and processor seconds and peak memory by part."""

    seconds: dict[str, float]
    used: dict[str, tuple[float, int]]


class OutOfStep(RuntimeError):
    """Producer and consumer no longer agree on what comes next; the peer's processes are of no more use."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run.

    Attributes:
        names: keys of `GROUPS`, and `ROWS`.
        peers: to set beside each other.
        repeats: warm rounds.
        seed: of the batches.
        scale: a key of `workloads.SCALES`.
    """

    names: Sequence[str]
    peers: Sequence[Peer]
    repeats: int
    seed: int = 0
    scale: str = "full"


Opener = Callable[..., Any]


def run(plan: Plan, open_peer: Opener = opened) -> Result:
    """Measures each workload on all peers at once: round by round, each way of each peer in turn.

    Args:
        plan: what to run.
        open_peer: starts a peer's processes, as `process.opened` does.
    """
    result = Result(plan.repeats, plan.scale)
    with Progress(transient=True) as progress:
        for name in plan.names:
            for workload in GROUPS.get(name, (workloads.ONE_ROW,)):
                turn = _Rates(plan, result) if name == ROWS else _Batches(workload, plan, result)
                turn.measure(open_peer, progress)
    return result


class _Turns:
    """The peers that are open for one workload."""

    producers = 1

    def __init__(self, workload: str, plan: Plan, result: Result) -> None:
        self.workload = workload
        self.plan = plan
        self.result = result
        self._stacks: dict[str, ExitStack] = {}
        self._lanes: list[tuple[Open, str]] = []
        self._turn = -1  # the first round is in the order of the plan: each peer's first way meets everything new
        self.setup = Setup.of(workload, plan.seed, plan.scale)

    @contextmanager
    def running(self, open_peer: Opener, ways: int | None, *, consumer: bool) -> Iterator[None]:
        """Opens every peer; one that cannot be has that for a result."""
        try:
            for peer in self.plan.peers:
                with self.guard(peer, None):
                    stack = self._stacks[peer.name] = ExitStack()
                    context = open_peer(peer, self.setup, producers=self.producers, consumer=consumer)
                    ends = stack.enter_context(context)
                    suited = peer.ways_for(tensors=self.setup.tensors, lists=self.setup.lists)
                    self._lanes += [(ends, way) for way in suited[:ways]]
            yield
        finally:
            for stack in self._stacks.values():
                stack.close()

    def in_turn(self) -> list[tuple[Open, str]]:
        """Returns what still runs, each time beginning with another: none always follows the same neighbour."""
        self._turn += 1
        first = self._turn % max(1, len(self._lanes))
        return self._lanes[first:] + self._lanes[:first]

    @contextmanager
    def guard(self, peer: Peer, way: str | None) -> Iterator[None]:
        """Turns a failure into a result, and leaves out what failed from there on."""
        try:
            yield
        except Exception as error:  # whatever it is: the others go on
            whole = way is None or isinstance(error, (OutOfStep, TimeoutError))
            reason = str(error) if type(error) in (RuntimeError, OutOfStep) else f"{type(error).__name__}: {error}"
            self.result.failures.append(Failure(self.workload, peer.name, None if whole else way, reason))
            self._lanes = [
                lane for lane in self._lanes if lane[0].peer.name != peer.name or not (whole or lane[1] == way)
            ]
            if whole and peer.name in self._stacks:
                with suppress(Exception):  # it has failed already
                    self._stacks.pop(peer.name).close()

    def runs(self, ends: Open, way: str) -> bool:
        """Returns whether a lane has not failed meanwhile."""
        return (ends, way) in self._lanes


class _Batches(_Turns):
    """Whole batches, from a producer to a consumer."""

    def __init__(self, workload: str, plan: Plan, result: Result) -> None:
        super().__init__(workload, plan, result)
        self._numbers = itertools.count(1)
        self._samples: dict[tuple[str, str], list[Sample]] = {}

    def measure(self, open_peer: Opener, progress: Progress) -> None:
        """Runs all rounds, and adds what they gave to the result."""
        rounds = WARM_UP + self.plan.repeats
        bar = progress.add_task(f"{self.workload}: starting", total=None)
        with self.running(open_peer, None, consumer=True):
            progress.update(bar, description=self.workload, total=rounds * max(1, len(self._lanes)))
            for _ in range(rounds):
                digests = self._stamp()
                for ends, way in self.in_turn():
                    if self.runs(ends, way) and ends.peer.name in digests:
                        with self.guard(ends.peer, way):
                            sample = self._sample(ends, way, digests[ends.peer.name])
                            self._samples.setdefault((ends.peer.name, way), []).append(sample)
                    progress.advance(bar)
        progress.remove_task(bar)
        for peer in self.plan.peers:
            for way in peer.ways:
                samples = self._samples.get((peer.name, way), [])
                if len(samples) == rounds:
                    self._report(peer.name, way, samples)

    def _stamp(self) -> dict[str, tuple[int, int]]:
        """Changes every producer's batch; returns, by peer, the digest of it, and of what a critic makes of it."""
        number, digests = next(self._numbers), {}
        for ends in {id(ends): ends for ends, _ in self._lanes}.values():
            with self.guard(ends.peer, None):
                digests[ends.peer.name] = ends.sources[0].call("stamp", number)
        return digests

    def _sample(self, ends: Open, way: str, digests: tuple[int, int]) -> Sample:
        """One batch to a consumer that waits; then one more, put and taken one after the other.

        Before them goes one that is not timed: since this way had its last turn, the others had the processor and its
        caches for seconds. Only the very first batch meets everything as it is.
        """
        source, target = ends.sources[0], ends.target
        assert target is not None
        written = self.workload == "rollout"
        if (ends.peer.name, way) in self._samples:
            self._put_and_take(ends, way, digests[False])
        for end in (source, target):  # what looking through earlier batches has left is no part of this one
            end.call("collect")
        number = next(self._numbers)
        source.call("prepare", way, number)
        before = ends.usage()
        target.send("take", way, written)
        time.sleep(SETTLE_SECONDS)
        try:
            start, _ = source.call("put", way, number)
        except Exception as error:
            raise OutOfStep(f"{type(error).__name__}: {error}") from error
        _, end = target.receive()
        used = _difference(before, ends.usage())
        self._settle(ends, way, number, digests[written])
        put, get = self._put_and_take(ends, way, digests[False])
        return Sample({END_TO_END: end - start, PUT: put, GET: get}, used)

    def _put_and_take(self, ends: Open, way: str, digest: int) -> tuple[float, float]:
        """One batch that is put, and then taken; returns the seconds of each."""
        source, target = ends.sources[0], ends.target
        assert target is not None
        number = next(self._numbers)
        source.call("prepare", way, number)
        begun, put = source.call("put", way, number)
        asked, got = target.call("take", way, False)
        self._settle(ends, way, number, digest)
        return put - begun, got - asked

    @staticmethod
    def _settle(ends: Open, way: str, number: int, digest: int) -> None:
        """Outside of every timed region: the bytes that came back are those that went in; then they may go."""
        source, target = ends.sources[0], ends.target
        assert target is not None
        if target.call("digest", way) != digest:
            raise RuntimeError("what was read differs from what was put")
        target.call("drop", way)
        source.call("drop", way, number)

    def _report(self, peer: str, way: str, samples: list[Sample]) -> None:
        warm = samples[WARM_UP:]
        for operation in OPERATIONS:
            times = Spread.of([sample.seconds[operation] for sample in warm])
            cold_ms = samples[0].seconds[operation] * 1e3
            self.result.rows.append(Row(self.workload, peer, way, operation, self.setup.size_bytes, cold_ms, times))
        for part in warm[0].used:
            cpu_ms = sum(sample.used[part][0] for sample in warm) / len(warm) * 1e3
            rss = max(sample.used[part][1] for sample in samples)
            self.result.costs.append(Cost(self.workload, peer, way, part, cpu_ms, rss))


def _difference(before: dict[str, Usage], after: dict[str, Usage]) -> dict[str, tuple[float, int]]:
    return {part: (used.cpu_s - before[part].cpu_s, used.rss_peak_bytes) for part, used in after.items()}


class _Rates(_Turns):
    """One-row puts from many producers at once, by each peer's first way."""

    def __init__(self, plan: Plan, result: Result) -> None:
        self.producers = min(PROCESSES_MAX, max(PRODUCERS[plan.scale]))
        super().__init__(workloads.ONE_ROW, plan, result)
        self.workload = ROWS
        self._bursts: dict[tuple[str, str, int], list[tuple[float, list[float]]]] = {}
        self._first = itertools.count(0, 1 << 20)

    def measure(self, open_peer: Opener, progress: Progress) -> None:
        """Runs all bursts, and adds what they gave to the result."""
        bar = progress.add_task(f"{ROWS}: starting", total=None)
        with self.running(open_peer, 1, consumer=False):
            for ends, way in self.in_turn():
                with self.guard(ends.peer, way):
                    for source in ends.sources:
                        source.call("prepare", way, 0)
            counts = PRODUCERS[self.plan.scale]
            progress.update(bar, description=ROWS, total=(1 + self.plan.repeats) * len(counts) * len(self._lanes))
            for turn in range(1 + self.plan.repeats):
                for count in counts:
                    for ends, way in self.in_turn():
                        if self.runs(ends, way):
                            with self.guard(ends.peer, way):
                                burst = self._burst(ends, way, count)
                                if turn:  # the first is a warm-up
                                    self._bursts.setdefault((ends.peer.name, way, count), []).append(burst)
                        progress.advance(bar)
        progress.remove_task(bar)
        order = [peer.name for peer in self.plan.peers]
        for peer, way, count in sorted(self._bursts, key=lambda key: (key[2], order.index(key[0]))):
            bursts = self._bursts[peer, way, count]
            rate = sorted(rate for rate, _ in bursts)[len(bursts) // 2]
            times = Spread.of([seconds for _, part in bursts for seconds in part])
            self.result.rates.append(Rate(peer, way, count, rate, times))

    def _burst(self, ends: Open, way: str, count: int) -> tuple[float, list[float]]:
        """Returns calls per second, and the seconds of each."""
        processes = min(count, len(ends.sources))
        sources, threads = ends.sources[:processes], count // processes
        for source in sources:
            source.send("burst", way, next(self._first), threads, BURST_SECONDS[self.plan.scale])
        try:
            answers = [source.receive() for source in sources]
        except Exception as error:
            raise OutOfStep(f"{type(error).__name__}: {error}") from error
        times = [seconds for _, part in answers for seconds in part]
        return len(times) / max(elapsed for elapsed, _ in answers), times
