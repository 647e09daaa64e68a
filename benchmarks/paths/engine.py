"""raw engine: Mooncake's TransferEngine as its users call it, between registered buffers that are filled already."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

from benchmarks.paths import Ends, Path, Setup
from benchmarks.payload import ROW_BYTES, Batch, Bytes, Payload, Rows, Shape, blank, check
from benchmarks.workers import Worker, serve, stop_all, warm_private
from tqclient.wire.mooncake import configure

HOST: Final = "127.0.0.1"
OVER_TCP: Final = {"MC_FORCE_TCP": "1"}
"""Environment of all that is compared: over the same network, whatever adapters there are."""
POLL_SECONDS: Final = 50e-6


def tune() -> None:
    """Gives Mooncake the settings that our own transport runs with, and silences this process. Before its import.

    Mooncake logs to stderr whatever it is told.
    """
    os.environ.update(OVER_TCP)
    configure(os.environ)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)


class Engine:
    """One engine with one registered buffer."""

    def __init__(self, buffer: Bytes) -> None:
        tune()
        from mooncake.engine import TransferEngine

        self._engine: Any = TransferEngine()
        if self._engine.initialize(HOST, "P2PHANDSHAKE", "tcp", ""):
            raise RuntimeError("the engine could not be initialized")
        if self._engine.register_memory(buffer.ctypes.data, buffer.size):
            raise RuntimeError("the buffer could not be registered")
        self.segment = f"{HOST}:{self._engine.get_rpc_port()}"

    def write(self, peer: str, source: int, target: int, length: int) -> float:
        """Returns the seconds of one transfer to a peer's address."""
        return _timed(lambda: self._engine.transfer_sync_write(peer, source, target, length))

    def read(self, peer: str, target: int, source: int, length: int) -> float:
        """Returns the seconds of one transfer from a peer's address."""
        return _timed(lambda: self._engine.transfer_sync_read(peer, target, source, length))

    def read_batch(self, peer: str, targets: list[int], sources: list[int], length: int) -> float:
        """Returns the seconds of one blocking batch with an item for each address."""
        lengths = [length] * len(sources)
        return _timed(lambda: self._engine.batch_transfer_sync_read(peer, targets, sources, lengths))

    def read_each(self, peer: str, targets: list[int], sources: list[int], length: int) -> float:
        """Returns the seconds of one asynchronous transfer for each address, all in flight at once."""
        return _timed(lambda: self._read_each(peer, targets, sources, length))

    def _read_each(self, peer: str, targets: list[int], sources: list[int], length: int) -> int:
        submit, look = self._engine.batch_transfer_async_read, self._engine.transfer_check_status
        failed = 0
        for operation in [submit(peer, [to], [at], [length]) for to, at in zip(targets, sources, strict=True)]:
            if operation == 0:  # was not submitted; must not be looked at
                failed += 1
                continue
            while (state := look(operation)) == 0:
                time.sleep(POLL_SECONDS)
            failed += state != 1
        return failed


def _timed(transfer: Callable[[], int]) -> float:
    start = time.perf_counter()
    failure = transfer()
    elapsed = time.perf_counter() - start
    if failure:
        raise RuntimeError(f"the transfer failed with {failure}")
    return elapsed


def _owner(pipe: Connection, shape: Shape) -> None:
    buffer = warm_private(shape.buffer_bytes)
    engine = Engine(buffer)
    serve(pipe, {"where": lambda: (engine.segment, buffer.ctypes.data)})


def _producer(pipe: Connection, shape: Shape, seed: int, peer: str, base: int) -> None:
    payload = Payload(shape, seed)
    engine = Engine(payload.buffer)
    first = payload.buffer.ctypes.data

    def write(batch: Batch) -> float:
        values = payload.values(batch)
        return engine.write(peer, values.ctypes.data, base + values.ctypes.data - first, values.size)

    def put(batch: Batch) -> tuple[dict[str, float], None]:
        payload.renew(batch)
        return {"one transfer": write(batch)}, None

    def load() -> None:
        write("scattered")

    serve(pipe, {"load": load, "put": put, "digest": payload.digest, "drop": lambda token: None})


def _consumer(pipe: Connection, shape: Shape, peer: str, base: int) -> None:
    buffer = warm_private(max(shape.size_bytes("large"), shape.size_bytes("scattered")))
    engine = Engine(buffer)
    first = buffer.ctypes.data

    def get(batch: Batch, token: None, rows: Rows | None, expected: int) -> dict[str, float]:
        target = buffer[: shape.size_bytes(batch)]
        transfers: dict[str, Callable[[], float]]
        if rows is None:
            source = base + (0 if batch == "large" else shape.small_offset)
            transfers = {"one transfer": lambda: engine.read(peer, first, source, target.size)}
        else:
            sources = (base + shape.block_offset + rows * ROW_BYTES).tolist()
            targets = [first + number * ROW_BYTES for number in range(len(rows))]
            transfers = {
                "one batch, an item a row": lambda: engine.read_batch(peer, targets, sources, ROW_BYTES),
                "an async operation a row": lambda: engine.read_each(peer, targets, sources, ROW_BYTES),
            }
        times = {}
        for what, transfer in transfers.items():
            blank(target)
            times[what] = transfer()
            check(target, expected, f"raw engine, {what}")
        return times

    serve(pipe, {"get": get})


@contextmanager
def _open(setup: Setup) -> Iterator[Ends]:
    workers = [Worker(_owner, setup.shape)]
    try:
        peer, base = workers[0].call("where")
        workers.append(Worker(_producer, setup.shape, setup.seed, peer, base))
        workers.append(Worker(_consumer, setup.shape, peer, base))
        yield Ends(workers[1], workers[2])
    finally:
        stop_all(workers)


PATH = Path("raw engine", _open)
