"""`tq-bench growth`: whether cost grows as the work does, with its bytes, its rows, and what lies in the partition."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final, Literal

import numpy as np
from rich.progress import Progress

from benchmarks.statistics import Spread
from benchmarks.workers import Worker, serve, stop_all
from tqclient.limits import MIB
from tqserver.local import LocalCluster

Kind = Literal["one tensor", "list of tensors"]
Times = dict[str, float]

FACTOR: Final = 16
BASE_ROWS: Final = 256
BASE_BYTES: Final = {"full": 16 * MIB, "small": MIB}
LIVE: Final = {"full": (1_000, 1_000_000), "small": (1_000, 20_000)}
LIVE_BATCH_ROWS: Final = 64
BYTES_MAX, ROWS_MAX, LIVE_MAX = 18.0, 4.0, 1.5
"""Times as long as before an operation may take: for 16 times the bytes; for 16 times the rows, of as many bytes; in a
partition with a thousand times the samples."""
APART_MAX: Final = {1: 8.0, 8: 4.0}
"""The same for rows that so many puts brought: by rows of a put."""
WARM_UP: Final = 3
SPARE_BYTES: Final = 1024 * MIB
KINDS: Final[tuple[Kind, ...]] = ("one tensor", "list of tensors")


@dataclass(frozen=True, slots=True)
class Batch:
    """What is put, and read at once: one float32 field.

    Attributes:
        kind: how the producer holds it.
        rows: samples.
        size_bytes: of all rows together.
        apart: rows of a put; 0: all are put at once.
    """

    kind: Kind
    rows: int
    size_bytes: int
    apart: int = 0

    @property
    def partition(self) -> str:
        """Where it goes: batches that are held in another way have another form."""
        return f"bench/{self.kind}, {self.rows} rows, {self.apart or 'all'} at once, {self.size_bytes} bytes"

    def build(self) -> Any:
        """Returns the values: float32 `[rows, n]`, or as many float32 `[n]`, each with memory of its own."""
        import torch

        width = self.size_bytes // self.rows // 4
        values = torch.from_numpy(np.random.default_rng(0).standard_normal((self.rows, width), dtype=np.float32))
        return values if self.kind == "one tensor" else [row.clone() for row in values]


@dataclass(frozen=True, slots=True)
class Growth:
    """One operation on little and on much.

    Attributes:
        work: what grows.
        kind: of batch.
        operation: `put`, `get` or `claim`.
        less: its times on the smaller.
        more: on the larger.
        bound: times as long as that may take.
    """

    work: str
    kind: str
    operation: str
    less: Spread
    more: Spread
    bound: float

    @property
    def factor(self) -> float:
        """Times as long as on the smaller, by the medians."""
        return self.more.median_ms / self.less.median_ms

    @property
    def passed(self) -> bool:
        """Whether that is within the bound."""
        return self.factor <= self.bound


def run(*, repeats: int, scale: str) -> list[Growth]:
    """Measures all of it; each round takes everything once, so that what slows the machine down slows down all.

    Args:
        repeats: rounds that count.
        scale: a key of `LIVE`; small is for tests.
    """
    size = BASE_BYTES[scale]
    arena = 2 * size * FACTOR + SPARE_BYTES
    with LocalCluster(storage_nodes=1, arena=arena) as cluster, Progress(transient=True) as progress:
        return [
            *_with_bytes_and_rows(cluster.address, size, repeats, progress),
            *_with_samples(cluster.address, LIVE[scale], repeats, progress),
        ]


def _with_bytes_and_rows(address: str, size: int, repeats: int, progress: Progress) -> Iterator[Growth]:
    base = {kind: Batch(kind, BASE_ROWS, size) for kind in KINDS}
    longer = {kind: Batch(kind, BASE_ROWS, size * FACTOR) for kind in KINDS}
    more = {kind: Batch(kind, BASE_ROWS * FACTOR, size) for kind in KINDS}
    apart = {(kind, rows): Batch(kind, BASE_ROWS, size, apart=rows) for rows in APART_MAX for kind in KINDS}
    batches = [*base.values(), *longer.values(), *more.values(), *apart.values()]
    times = _rounds(address, (_producer, _consumer), batches, repeats, progress)
    for work, larger, bound in (
        (f"{FACTOR} × the bytes", longer, BYTES_MAX),
        (f"{FACTOR} × the rows, as many bytes", more, ROWS_MAX),
    ):
        for kind in KINDS:
            for operation in ("put", "get"):
                less, most = (Spread.of(times[batch][operation]) for batch in (base[kind], larger[kind]))
                yield Growth(work, kind, operation, less, most, bound)
    for (kind, rows), batch in apart.items():
        less, most = (Spread.of(times[each]["get"]) for each in (base[kind], batch))
        work = f"{BASE_ROWS // rows} puts of {rows} row{'s' * (rows > 1)}, not one of all"
        yield Growth(work, kind, "get", less, most, APART_MAX[rows])


def _with_samples(address: str, live: tuple[int, int], repeats: int, progress: Progress) -> Iterator[Growth]:
    times = _rounds(address, (_user,), list(live), repeats * FACTOR, progress)
    for operation in ("put", "claim"):
        less, most = (Spread.of(times[rows][operation]) for rows in live)
        work, kind = f"{live[1]:,} live samples, not {live[0]:,}", f"{LIVE_BATCH_ROWS} rows"
        yield Growth(work, kind, operation, less, most, LIVE_MAX)


def _rounds(
    address: str, ends: tuple[Callable[..., None], ...], cases: list[Any], repeats: int, progress: Progress
) -> dict[Any, dict[str, list[float]]]:
    """Returns, by case and operation, the seconds of each round that counts; every end does its part of a case."""
    bar = progress.add_task("starting", total=None)
    times: dict[Any, dict[str, list[float]]] = {case: {} for case in cases}
    workers: list[Worker] = []
    try:
        workers += [Worker(end, address, cases) for end in ends]
        for worker in workers:
            worker.call("ready")
        progress.update(bar, description="rounds", total=WARM_UP + repeats)
        for turn in range(WARM_UP + repeats):
            for case in cases:
                found: Times = {}
                token: Any = None
                for worker in workers:
                    seconds, token = worker.call("once", case, token)
                    found |= seconds
                workers[0].call("drop", case, token)
                if turn >= WARM_UP:
                    for operation, elapsed in found.items():
                        times[case].setdefault(operation, []).append(elapsed)
            progress.advance(bar)
    finally:
        stop_all(workers)
        progress.remove_task(bar)
    return times


def _producer(pipe: Connection, address: str, batches: list[Batch]) -> None:
    import tqclient as tq

    values = {batch: batch.build() for batch in batches}
    with tq.connect(address) as client:
        parts = {batch: client.create_partition(batch.partition, exist_ok=True) for batch in batches}

        def put(batch: Batch, _: None) -> tuple[Times, Any]:
            start = time.perf_counter()
            pieces = _pieces(values[batch], batch.apart or batch.rows)
            ids = np.concatenate([parts[batch].put({"value": piece}) for piece in pieces])
            return {"put": time.perf_counter() - start}, ids

        def drop(batch: Batch, ids: Any) -> None:
            parts[batch].clear(ids=ids)

        serve(pipe, {"ready": lambda: None, "once": put, "drop": drop})


def _pieces(values: Any, rows: int) -> list[Any]:
    return [values[row : row + rows] for row in range(0, len(values), rows)]


def _consumer(pipe: Connection, address: str, batches: list[Batch]) -> None:
    import tqclient as tq

    checked: set[Batch] = set()
    with tq.connect(address) as client:
        parts = {batch: client.create_partition(batch.partition, exist_ok=True) for batch in batches}

        def get(batch: Batch, ids: Any) -> tuple[Times, Any]:
            start = time.perf_counter()
            got = parts[batch].get(ids)
            value = got["value"]
            elapsed = time.perf_counter() - start
            if batch not in checked:  # every round brings the same bytes
                _check(batch, got.list("value"))
                checked.add(batch)
            del got, value
            return {"get": elapsed}, ids

        serve(pipe, {"ready": lambda: None, "once": get})


def _check(batch: Batch, rows: list[Any]) -> None:
    import torch

    if not all(torch.equal(got, put) for got, put in zip(rows, batch.build(), strict=True)):
        raise RuntimeError(f"what was read of {batch} differs from what was put")


def _user(pipe: Connection, address: str, live: list[int]) -> None:
    """Puts, claims and clears as many samples as it put, in partitions with more and with fewer of them."""
    import torch

    import tqclient as tq
    from benchmarks.scale import claims

    rng = np.random.default_rng(0)
    rows = {"tokens": [torch.zeros(4, dtype=torch.int16)] * LIVE_BATCH_ROWS}
    with tq.connect(address, timeout=120) as client:
        parts = {count: client.create_partition(f"bench/live-{count}", exist_ok=True) for count in live}
        for count, part in parts.items():
            claims.fill(part, count, rng, lambda _: None)
        consumers = {count: part.consumer("growth") for count, part in parts.items()}

        def once(count: int, _: None) -> tuple[Times, Any]:
            start = time.perf_counter()
            parts[count].put(rows)
            put = time.perf_counter()
            batch = consumers[count].claim(LIVE_BATCH_ROWS)
            claimed = time.perf_counter()
            batch.ack()
            return {"put": put - start, "claim": claimed - put}, batch.ids

        def drop(count: int, ids: Any) -> None:
            parts[count].clear(ids=ids)

        serve(pipe, {"ready": lambda: None, "once": once, "drop": drop})
