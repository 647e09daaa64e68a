"""`tq-bench run`: put and get of each workload, interleaved with plain copies of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from benchmarks.machine import Usage
from benchmarks.statistics import Spread
from benchmarks.workers import Worker, consumer, producer
from tqserver.local import LocalCluster

ONE_IN, EACH_IN, ONE_OUT = "copy to shared memory", "copy to it value by value", "copy to private memory"
IN_PLACE = "allocate and commit"
OPERATIONS = (ONE_IN, EACH_IN, "put", IN_PLACE, ONE_OUT, "get", "get copy=False")
FLOORS_OF = {"put": (ONE_IN, EACH_IN), IN_PLACE: (ONE_IN,), "get": (ONE_OUT,), "get copy=False": (ONE_OUT,)}
"""The plain copies that an operation is set beside. One copy of a large array goes past the cache, and is faster for it
than copies of the same bytes from where the values have them."""


@dataclass(frozen=True, slots=True)
class Result:
    """One workload's figures.

    Attributes:
        workload: its name.
        size_bytes: payload bytes of one batch.
        cold_ms: the first call of each operation, when pages and connections were new.
        warm: of each operation, the later calls; a workload that has other than tensors is not filled in in place.
        processes: what each has used by the end.
    """

    workload: str
    size_bytes: int
    cold_ms: dict[str, float]
    warm: dict[str, Spread]
    processes: dict[str, Usage]

    def ratios(self, operation: str) -> list[float]:
        """Of the operation's median to those of its plain copies; empty for these themselves."""
        return [self.warm[operation].median_ms / self.warm[floor].median_ms for floor in FLOORS_OF.get(operation, ())]


def run(names: list[str], *, repeats: int, seed: int, transport: str, arena: str) -> list[Result]:
    """Measures workloads one after the other, each on a cluster of its own.

    Args:
        names: keys of `workloads.WORKLOADS`.
        repeats: warm rounds; each round runs every operation once, in turn.
        seed: of the workloads.
        transport: as in `tq.connect`.
        arena: of the storage node.
    """
    results = []
    with Progress(transient=True) as progress:
        for name in names:
            bar = progress.add_task(name, total=repeats + WARM_UP)
            results.append(_measure(name, repeats, seed, transport, arena, lambda bar=bar: progress.advance(bar)))
    return results


WARM_UP = 3
"""Rounds before the warm ones: the first is reported as cold, the others wait for the background prefault to end."""


def _measure(name: str, repeats: int, seed: int, transport: str, arena: str, tick: Any) -> Result:
    with LocalCluster(storage_nodes=1, arena=arena) as cluster:
        partition = f"bench/{name}"
        source = Worker(producer, cluster.address, transport, partition, name, seed)
        size = source.call("size")
        target = Worker(consumer, cluster.address, transport, partition, size)
        try:
            rounds = []
            for turn in range(WARM_UP + repeats):
                rounds.append(_round(source, target))
                if turn == 0:
                    cluster.wait_prefaulted()
                tick()
            processes = {
                "producer": source.usage(),
                "consumer": target.usage(),
                "tq-storage": Usage.of(cluster.storage[0].pid),
                "tq-controller": Usage.of(cluster.controller.pid),
            }
        finally:
            target.stop()
            source.stop()
    measured = [operation for operation in OPERATIONS if operation in rounds[0]]
    warm = {operation: Spread.of([times[operation] for times in rounds[WARM_UP:]]) for operation in measured}
    return Result(name, size, {key: value * 1e3 for key, value in rounds[0].items()}, warm, processes)


def _round(source: Worker, target: Worker) -> dict[str, float]:
    times = {ONE_IN: source.call("floor"), EACH_IN: source.call("values")}
    times["put"], ids = source.call("put")
    times[ONE_OUT] = target.call("floor")
    times["get"] = target.call("get", ids, True)
    times["get copy=False"] = target.call("get", ids, False)
    _check(source, target, ids)
    filled_in = source.call("allocate")
    if filled_in is not None:
        times[IN_PLACE], ids = filled_in
        _check(source, target, ids)
    return times


def _check(source: Worker, target: Worker, ids: Any) -> None:
    """Compares, outside of every timed region, the bytes that came back with those that went in; then removes them."""
    if target.call("digest", ids) != source.call("digest"):
        raise RuntimeError("what was read differs from what was put")
    source.call("clear", ids)
