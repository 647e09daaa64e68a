"""The producer and the consumer process of a run, each driven over a pipe: nothing of one is warm in the other."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.machine import Usage

Command = tuple[Any, ...]


class Worker:
    """One child process that carries out commands in turn."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        """Of the child."""
        assert self._process.pid is not None
        return self._process.pid

    def call(self, *command: Any) -> Any:
        """Sends a command and returns its answer; an exception of the child is raised here."""
        self._pipe.send(command)
        return self.receive()

    def receive(self) -> Any:
        """Returns what the child sends next; an exception of the child is raised here."""
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def usage(self) -> Usage:
        """What the child has used so far."""
        return Usage.of(self.pid)

    def stop(self) -> None:
        """Ends the child."""
        self._pipe.send(None)
        self._process.join()


def _serve(pipe: Connection, handlers: dict[str, Callable[..., Any]]) -> None:
    while (command := pipe.recv()) is not None:
        try:
            pipe.send(handlers[command[0]](*command[1:]))
        except Exception as error:  # raised again in the parent
            pipe.send(error)


def copy_time(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> float:
    """Returns the seconds of one plain copy between two warm buffers: the floor."""
    start = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - start


def copies_time(target: np.ndarray[Any, Any], pieces: list[np.ndarray[Any, Any]]) -> float:
    """Returns the seconds of one plain copy per value, back to back into a warm buffer."""
    start = time.perf_counter()
    end = 0
    for piece in pieces:
        begin, end = end, end + piece.size
        np.copyto(target[begin:end], piece)
    return time.perf_counter() - start


def _warm_private(size: int) -> np.ndarray[Any, Any]:
    return np.full(size, 1, dtype=np.uint8)


def _warm_shared(size: int) -> np.ndarray[Any, Any]:
    descriptor = os.memfd_create("tq-bench-floor")
    try:
        os.posix_fallocate(descriptor, 0, size)
        shared = np.frombuffer(mmap.mmap(descriptor, size), dtype=np.uint8)
    finally:
        os.close(descriptor)
    shared[:] = 1
    return shared


def producer(pipe: Connection, address: str, transport: str, partition: str, workload: str, seed: int) -> None:
    """Puts one workload again and again."""
    import tqclient as tq

    columns = workloads.build(workload, seed)
    size = workloads.size_bytes(columns)
    source, target, pieces = _warm_private(size), _warm_shared(size), workloads.pieces(columns)
    with tq.connect(address, transport=transport) as client:
        part = client.create_partition(partition, exist_ok=True)

        def put() -> tuple[float, np.ndarray[Any, Any]]:
            start = time.perf_counter()
            ids = part.put(columns)
            return time.perf_counter() - start, ids

        _serve(
            pipe,
            {
                "size": lambda: size,
                "digest": lambda: workloads.digest(columns),
                "floor": lambda: copy_time(target, source),
                "values": lambda: copies_time(target, pieces),
                "put": put,
                "clear": lambda ids: part.clear(ids=ids),
            },
        )


def consumer(pipe: Connection, address: str, transport: str, partition: str, size: int) -> None:
    """Gets what the producer put."""
    import tqclient as tq

    source, target = _warm_shared(size), _warm_private(size)
    with tq.connect(address, transport=transport) as client:
        part = client.partition(partition)

        def get(ids: np.ndarray[Any, Any], copy: bool) -> float:
            start = time.perf_counter()
            batch = part.get(ids, copy=copy)
            values = [batch[field] for field in batch.fields]
            elapsed = time.perf_counter() - start
            del values, batch
            return elapsed

        def digest(ids: np.ndarray[Any, Any]) -> int:
            batch = part.get(ids)
            return workloads.digest({field: batch.list(field) for field in batch.fields})

        _serve(pipe, {"floor": lambda: copy_time(target, source), "get": get, "digest": digest})
