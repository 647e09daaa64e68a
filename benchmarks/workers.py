"""Child processes that are driven over a pipe, and the producer and the consumer of `tq-bench run`.

Nothing of one process is warm in another. What needs torch imports it late: most workers do without.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Final, Protocol

import numpy as np

from benchmarks.machine import Usage

ANSWER_SECONDS: Final = 120.0
"""A worker that does not answer for so long counts as hung."""
STOP_SECONDS: Final = 10.0
"""So long may a worker take to end before it is killed."""


class Child(Protocol):
    """What is asked of a child process."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    @property
    def exitcode(self) -> int | None:
        """Its exit status; None while it runs."""

    def is_alive(self) -> bool:
        """Returns whether it runs."""

    def join(self, timeout: float | None = None) -> None:
        """Waits until it has ended, or the time is over."""

    def kill(self) -> None:
        """Ends it by force."""


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Children that are started here never see a Ctrl-C: it is meant for this process, which ends them in order."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which children inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


class Worker:
    """One child process that carries out commands in turn."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=_run, args=(theirs, target, *arguments), daemon=True)
        resource_tracker.ensure_running()  # started below, it would end the deafness
        with deaf_to_interrupts():
            process.start()
        theirs.close()
        self._process: Child = process

    @property
    def pid(self) -> int:
        """Of the child."""
        assert self._process.pid is not None
        return self._process.pid

    def call(self, *command: Any) -> Any:
        """Sends a command and returns its answer; an exception of the child is raised here."""
        self.send(*command)
        return self.receive()

    def send(self, *command: Any) -> None:
        """Sends a command whose answer is received later."""
        with suppress(OSError):  # it is gone: what it said last tells why
            self._pipe.send(command)

    def receive(self) -> Any:
        """Returns what the child sends next; an exception of the child is raised here.

        Raises:
            RuntimeError: it ended instead.
            TimeoutError: it said nothing for `ANSWER_SECONDS`.
        """
        if not self._pipe.poll(ANSWER_SECONDS):
            raise TimeoutError(f"process {self.pid} did not answer for {ANSWER_SECONDS:.0f} s")
        try:
            answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(STOP_SECONDS)
            raise RuntimeError(f"process {self.pid} ended with status {self._process.exitcode}") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def check_alive(self) -> None:
        """Raises what `receive` raises when it has ended; takes no answer of one that runs."""
        if not self._process.is_alive():
            self.receive()

    def usage(self) -> Usage:
        """What the child has used so far."""
        return Usage.of(self.pid)

    def stop(self) -> None:
        """Ends the child, by force when it hangs. Repeatable."""
        stop_all([self])

    def _ask_to_end(self) -> None:
        with suppress(OSError):  # it is gone already
            self._pipe.send(None)

    def _wait_ended(self) -> None:
        self._process.join(STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def stop_all(workers: Collection[Worker]) -> None:
    """Ends workers, all at once."""
    for worker in workers:
        worker._ask_to_end()
    for worker in workers:
        worker._wait_ended()


def _run(pipe: Connection, target: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        target(pipe, *arguments)
    except Exception as error:  # raised by the parent's next call
        with suppress(BrokenPipeError):  # the parent is gone, and nobody asks
            pipe.send(_portable(error))


def _portable(error: Exception) -> Exception:
    """Returns the error, or what it says, when it holds on to something that cannot be sent (a gRPC call's does)."""
    try:
        pickle.dumps(error)
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _end_with_parent() -> None:
    """Ends a worker whose parent is gone, when it has not ended in an orderly way by itself."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        time.sleep(STOP_SECONDS)
        os._exit(1)


def serve(pipe: Connection, handlers: dict[str, Callable[..., Any]]) -> None:
    """Carries out commands until the parent has no more of them, or is gone."""
    while (command := _next(pipe)) is not None:
        try:
            pipe.send(handlers[command[0]](*command[1:]))
        except Exception as error:  # raised again in the parent
            pipe.send(_portable(error))


def _next(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


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


def warm_private(size: int) -> np.ndarray[Any, Any]:
    """Returns memory of this process whose pages are there, uint8 `[size]`."""
    return np.full(size, 1, dtype=np.uint8)


def warm_shared(size: int) -> np.ndarray[Any, Any]:
    """Returns shared memory whose pages are there, uint8 `[size]`."""
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
    from benchmarks import workloads

    columns = workloads.build(workload, seed)
    size = workloads.size_bytes(columns)
    source, target, pieces = warm_private(size), warm_shared(size), workloads.pieces(columns)
    with tq.connect(address, transport=transport) as client:
        part = client.create_partition(partition, exist_ok=True)

        def put() -> tuple[float, np.ndarray[Any, Any]]:
            start = time.perf_counter()
            ids = part.put(columns)
            return time.perf_counter() - start, ids

        spec = workloads.spec(columns)

        def allocate() -> tuple[float, np.ndarray[Any, Any]] | None:
            """Returns the seconds without those that filling in took."""
            if spec is None:
                return None
            start = time.perf_counter()
            with part.allocate(workloads.rows_of(columns), spec) as writer:
                elapsed = time.perf_counter() - start
                workloads.fill(writer, columns)
                start = time.perf_counter()
                ids = writer.commit()
                return elapsed + time.perf_counter() - start, ids

        serve(
            pipe,
            {
                "size": lambda: size,
                "digest": lambda: workloads.digest(columns),
                "floor": lambda: copy_time(target, source),
                "values": lambda: copies_time(target, pieces),
                "put": put,
                "allocate": allocate,
                "clear": lambda ids: part.clear(ids=ids),
            },
        )


def consumer(pipe: Connection, address: str, transport: str, partition: str, size: int) -> None:
    """Gets what the producer put."""
    import tqclient as tq
    from benchmarks import workloads

    source, target = warm_shared(size), warm_private(size)
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

        serve(pipe, {"floor": lambda: copy_time(target, source), "get": get, "digest": digest})
