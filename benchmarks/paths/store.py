"""Mooncake Store: a master, a process that lends its memory, and clients that put and get by key."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any, Final

from benchmarks.paths import Ends, Path, Setup
from benchmarks.paths.engine import HOST, tune
from benchmarks.payload import ROW_BYTES, Batch, Bytes, Payload, Rows, Shape, blank, check
from benchmarks.workers import Worker, serve, stop_all, warm_private
from tqclient.limits import MIB

START_SECONDS: Final = 10.0
LOCAL_BYTES: Final = 16 * MIB  # a client's own staging; unused here, as every buffer is registered
LENT_BYTES_MIN: Final = 64 * MIB
"""It refuses to lend very little; and it evicts long before it is full, so it lends twice what lies there at once."""
LOAD_KEYS: Final = 1024
BLOCK_KEY: Final = "block"

Token = list[str]


def _connect(master: str, lent_bytes: int) -> Any:
    tune()
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if status := store.setup(HOST, "P2PHANDSHAKE", lent_bytes, LOCAL_BYTES, "tcp", "", master):
        raise RuntimeError(f"no connection to the master: {status}")
    return store


def _storage(pipe: Connection, lent_bytes: int) -> None:
    """Runs the master as its child: whatever happens to the parent, both end."""
    with tempfile.TemporaryFile() as log:
        address, metrics = f"{HOST}:{_free_port()}", _free_port()
        master = subprocess.Popen(_master_command(address, metrics), stdout=log, stderr=log)
        try:
            _wait_serving(address, master, log)
            store = _connect(address, lent_bytes)
            serve(pipe, {"where": lambda: address})
            store.close()
        finally:
            master.terminate()
            master.wait()


def _master_command(address: str, metrics_port: int) -> list[str]:
    import mooncake

    binary = FilePath(mooncake.__path__[0]) / "mooncake_master"
    port = address.rpartition(":")[2]
    return [
        str(binary),
        f"--rpc_address={HOST}",
        f"--rpc_port={port}",
        f"--metrics_host={HOST}",
        f"--metrics_port={metrics_port}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_serving(address: str, master: subprocess.Popen[bytes], log: Any) -> None:
    deadline = time.monotonic() + START_SECONDS
    host, _, port = address.rpartition(":")
    while master.poll() is None and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=1.0):
            return
        time.sleep(0.02)
    log.seek(0)
    raise RuntimeError(f"mooncake_master does not serve: {log.read()[-500:].decode(errors='replace')}")


def _register(store: Any, buffer: Bytes) -> None:
    if status := store.register_buffer(buffer.ctypes.data, buffer.size):
        raise RuntimeError(f"the buffer could not be registered: {status}")


def _timed(call: Callable[[], Any], expected: Any) -> float:
    start = time.perf_counter()
    reply = call()
    elapsed = time.perf_counter() - start
    if reply != expected:
        raise RuntimeError(f"Mooncake Store answered {str(reply)[:100]}")
    return elapsed


def _addresses(values: Bytes) -> list[int]:
    """Returns the address of each row, uint8 `[n, size]`."""
    return [values.ctypes.data + number * values.strides[0] for number in range(len(values))]


def _producer(pipe: Connection, shape: Shape, seed: int, master: str) -> None:
    payload = Payload(shape, seed)
    store = _connect(master, 0)
    _register(store, payload.buffer)
    puts = 0

    def put_batch(keys: Token, values: Bytes) -> float:
        lengths = [values.shape[1]] * len(keys)
        return _timed(lambda: store.batch_put_from(keys, _addresses(values), lengths), [0] * len(keys))

    def load() -> Token:
        keys = [f"row/{row}" for row in range(shape.block_rows)]
        for first in range(0, len(keys), LOAD_KEYS):
            put_batch(keys[first : first + LOAD_KEYS], payload.block[first : first + LOAD_KEYS])
        _timed(lambda: store.put_from(BLOCK_KEY, payload.block.ctypes.data, payload.block.size), 0)
        return keys

    def put(batch: Batch) -> tuple[dict[str, float], Token]:
        nonlocal puts
        puts += 1
        payload.renew(batch)
        values = payload.values(batch)
        keys = [f"{batch}/{puts}/{number}" for number in range(len(values))]
        if batch == "small":
            return {"put_from": _timed(lambda: store.put_from(keys[0], values.ctypes.data, values.size), 0)}, keys
        return {"batch_put_from": put_batch(keys, values)}, keys

    def drop(keys: Token) -> None:
        _timed(lambda: store.batch_remove(keys, True), [0] * len(keys))

    serve(pipe, {"load": load, "put": put, "digest": payload.digest, "drop": drop})
    store.close()


def _consumer(pipe: Connection, shape: Shape, master: str) -> None:
    buffer = warm_private(max(shape.size_bytes("large"), shape.size_bytes("scattered")))
    store = _connect(master, 0)
    _register(store, buffer)

    def get(batch: Batch, keys: Token, rows: Rows | None, expected: int) -> dict[str, float]:
        target = buffer[: shape.size_bytes(batch)]
        if rows is not None:
            keys = [keys[row] for row in rows]
        length = target.size // len(keys)
        lengths, addresses = [length] * len(keys), _addresses(target.reshape(-1, length))
        calls: dict[str, tuple[Callable[[], Any], Any]] = {
            "batch_get_into": (lambda: store.batch_get_into(keys, addresses, lengths), lengths)
        }
        if batch == "small":
            calls = {"get_into": (lambda: store.get_into(keys[0], addresses[0], length), length)}
        if rows is not None:
            to, at = [number * ROW_BYTES for number in range(len(rows))], (rows * ROW_BYTES).tolist()
            calls["get_into_ranges of one key"] = (
                lambda: store.get_into_ranges([addresses[0]], [[BLOCK_KEY]], [[to]], [[at]], [[lengths]]),
                [[lengths]],
            )
        times = {}
        for what, (call, reply) in calls.items():
            blank(target)
            times[what] = _timed(call, reply)
            check(target, expected, f"Mooncake Store, {what}")
        return times

    serve(pipe, {"get": get})
    store.close()


@contextmanager
def _open(setup: Setup) -> Iterator[Ends]:
    lying = setup.shape.buffer_bytes + setup.shape.block_rows * ROW_BYTES
    workers = [Worker(_storage, max(2 * lying, LENT_BYTES_MIN))]
    try:
        master = workers[0].call("where")
        workers.append(Worker(_producer, setup.shape, setup.seed, master))
        workers.append(Worker(_consumer, setup.shape, master))
        yield Ends(workers[1], workers[2])
    finally:
        stop_all(workers)


PATH = Path("Mooncake Store", _open)
