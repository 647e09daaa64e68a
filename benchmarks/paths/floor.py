"""memcpy: what copying the same bytes costs, within one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.paths import Ends, Path, Setup
from benchmarks.payload import ROW_BYTES, Batch, Bytes, Payload, Rows, Shape, blank, check
from benchmarks.workers import Worker, copy_time, serve, warm_private, warm_shared


def _copier(pipe: Connection, shape: Shape, seed: int) -> None:
    payload = Payload(shape, seed)
    shared, private = warm_shared(shape.buffer_bytes), warm_private(shape.buffer_bytes)
    spans: dict[Batch, slice] = {
        "large": slice(0, shape.block_offset),
        "scattered": slice(shape.block_offset, shape.small_offset),
        "small": slice(shape.small_offset, shape.buffer_bytes),
    }
    shared[spans["scattered"]] = payload.block.reshape(-1)

    def put(batch: Batch) -> tuple[dict[str, float], None]:
        payload.renew(batch)
        return {"np.copyto": copy_time(shared[spans[batch]], payload.buffer[spans[batch]])}, None

    def get(batch: Batch, token: None, rows: Rows | None, expected: int) -> dict[str, float]:
        source, target = shared[spans[batch]], private[: shape.size_bytes(batch)]
        blank(target)
        if rows is None:
            times = {"np.copyto": copy_time(target, source)}
        else:
            times = {"np.take": _take_time(target.reshape(-1, ROW_BYTES), source.reshape(-1, ROW_BYTES), rows)}
        check(target, expected, "memcpy")
        return times

    serve(pipe, {"load": lambda: None, "put": put, "digest": payload.digest, "drop": lambda token: None, "get": get})


def _take_time(target: Bytes, source: Bytes, rows: Rows) -> float:
    start = time.perf_counter()
    np.take(source, rows, axis=0, out=target, mode="clip")  # "raise" would go through a buffer
    return time.perf_counter() - start


@contextmanager
def _open(setup: Setup) -> Iterator[Ends]:
    worker = Worker(_copier, setup.shape, setup.seed)
    try:
        yield Ends(worker, worker)
    finally:
        worker.stop()


PATH = Path("memcpy", _open)
