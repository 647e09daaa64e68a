"""The processes of a peer: its storage, one producer, one consumer; and what each adapter offers them.

An adapter is a module of this package with a `Source`, a `Target` and, unless it needs no daemons, a `Storage`.
Its calls are timed here, in the same way for every peer.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeAlias

from benchmarks import workers, workloads

WAIT_SECONDS: Final = 60.0
"""A consumer that hears of no batch for so long gives up."""
_NUMBER_BYTES: Final = 8
Commands: TypeAlias = dict[str, Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Setup:
    """What a process of a peer is started with.

    Attributes:
        workload: a key of `workloads.WORKLOADS`, or `workloads.ONE_ROW`.
        seed: of the batch.
        scale: a key of `workloads.SCALES`.
        directory: where the peer may keep sockets and logs.
        size_bytes: payload of the batch; storage is sized by it.
        rows: samples of the batch.
        fields: names of its columns.
        tensors: whether all of them are tensors.
        lists: whether some of them are lists of tensors.
        storage: what the peer's storage answered when it was ready.
    """

    workload: str
    seed: int
    scale: str
    directory: str
    size_bytes: int
    rows: int
    fields: tuple[str, ...]
    tensors: bool = False
    lists: bool = False
    storage: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, workload: str, seed: int, scale: str, **storage: Any) -> Setup:
        """Describes a workload."""
        columns = workloads.build(workload, seed, scale)
        size, rows = workloads.size_bytes(columns), workloads.rows_of(columns)
        tensors, lists = workloads.spec(columns) is not None, any(map(workloads.is_list_of_tensors, columns.values()))
        return cls(workload, seed, scale, "", size, rows, tuple(columns), tensors, lists, storage)


class Storage:
    """The daemons of a peer, for as long as the process lives."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def where(self) -> dict[str, Any]:
        """Returns what producer and consumer need to find it."""
        return {}

    def commands(self) -> Commands:
        """Returns what the runner may ask."""
        return {"where": self.where}

    def close(self) -> None:
        """Stops the daemons."""


class Source(ABC):
    """The producer's side of an adapter."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.columns = workloads.build(setup.workload, setup.seed, setup.scale)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def prepare(self, way: str, number: int) -> None:  # noqa: B027 - most have nothing to do
        """Does, outside of the timed region, what the producer of this way has done before it puts."""

    @abstractmethod
    def put(self, way: str, number: int) -> float | None:
        """Puts the whole batch, so that another process can have it. Timed.

        Args:
            way: one of the peer's.
            number: of the batch; never used before.

        Returns:
            Seconds of this put that went by in `prepare`; None: none did.
        """

    def announce(self, way: str, number: int) -> None:
        """Tells a waiting consumer: by a datagram, where the peer itself has nothing to wait on. Timed."""
        self._bell.sendto(number.to_bytes(_NUMBER_BYTES, "little"), _bell_path(self.setup))

    def drop(self, way: str, number: int) -> None:  # noqa: B027 - one side of each peer has nothing to do
        """Has the batch removed, or does its part of it. Not timed."""

    def drop_all(self, way: str, numbers: Sequence[int]) -> None:
        """Does so for some batches."""
        for number in numbers:
            self.drop(way, number)

    def commands(self) -> Commands:
        """Returns what the runner may ask."""
        return SourceCommands(self)

    def close(self) -> None:
        """Lets go of the peer."""
        self._bell.close()


class Target(ABC):
    """The consumer's side of an adapter."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        Path(_bell_path(setup)).unlink(missing_ok=True)
        self._bell = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._bell.bind(_bell_path(setup))
        self._bell.settimeout(WAIT_SECONDS)

    def wait(self, way: str) -> int:
        """Waits until a batch is announced; returns its number."""
        return int.from_bytes(self._bell.recv(_NUMBER_BYTES), "little")

    @abstractmethod
    def take(self, way: str, number: int) -> Any:
        """Returns every value of the batch, each usable as it is. Timed."""

    @abstractmethod
    def write_back(self, way: str, number: int, values: Any) -> None:
        """Adds `ROLLOUT_VALUES` to the samples: what was taken of `ROLLOUT_SOURCE`, as it is. Timed."""

    def retake(self, way: str, number: int) -> Any:
        """Returns the batch with what was written back. Timed."""
        return self.take(way, number)

    def columns(self, way: str, values: Any) -> workloads.Columns:
        """Returns what was taken as name → rows, for the checksum."""
        columns: workloads.Columns = values
        return columns

    def drop(self, way: str, number: int) -> None:  # noqa: B027 - one side of each peer has nothing to do
        """Has the batch removed, or does its part of it; what was taken is gone already. Not timed."""

    def commands(self) -> Commands:
        """Returns what the runner may ask."""
        return TargetCommands(self)

    def close(self) -> None:
        """Lets go of the peer."""
        self._bell.close()
        with suppress(FileNotFoundError):
            os.unlink(_bell_path(self.setup))


def _bell_path(setup: Setup) -> str:
    return f"{setup.directory}/bell"


def main(descriptor: int) -> None:
    """Runs one process of a peer; the runner says over the pipe which."""
    os.set_inheritable(descriptor, False)
    pipe = Connection(descriptor)
    adapter, role, setup = pipe.recv()
    try:
        serve(pipe, adapter, role, setup)
    except Exception as error:
        with suppress(OSError):
            pipe.send(_plain(error))
    # Threads of the peer's libraries are not waited for: everything that matters was closed.
    os._exit(0)


def serve(pipe: Connection, adapter: str, role: str, setup: Setup) -> None:
    """Carries out the runner's commands in one process of a peer.

    Args:
        pipe: to the runner.
        adapter: module of this package.
        role: `storage`, `source` or `target`.
        setup: of the peer.
    """
    module = importlib.import_module(f"benchmarks.peers.{adapter}")
    end: Storage | Source | Target = getattr(module, role.capitalize())(setup)
    try:
        workers.serve(pipe, {command: _told(handler) for command, handler in end.commands().items()})
    finally:
        end.close()


def _told(handler: Callable[..., Any]) -> Callable[..., Any]:
    """Turns what a foreign library raises into what the runner can read."""

    def call(*arguments: Any) -> Any:
        try:
            return handler(*arguments)
        except Exception as error:
            raise _plain(error) from None

    return call


def _plain(error: Exception) -> RuntimeError:
    return error if type(error) is RuntimeError else RuntimeError(f"{type(error).__name__}: {error}")


def _collect() -> None:
    """Collects garbage; what lives on is passed over from then on, or each time would take 150 ms for torch alone."""
    gc.collect()
    gc.freeze()


class SourceCommands(Commands):
    """The producer's commands."""

    def __init__(self, source: Source) -> None:
        self._source = source
        super().__init__(
            stamp=self._stamp,
            prepare=source.prepare,
            put=self._put,
            drop=source.drop,
            burst=self._burst,
            pid=os.getpid,
            collect=_collect,
        )

    def _stamp(self, number: int) -> tuple[int, int]:
        """Changes the batch; returns its digest, and that of the same with the critic's values."""
        columns = self._source.columns
        workloads.stamp(columns, number)
        if workloads.ROLLOUT_SOURCE not in columns:
            return (digest := workloads.digest(columns)), digest
        written = {**columns, workloads.ROLLOUT_VALUES: columns[workloads.ROLLOUT_SOURCE]}
        return workloads.digest(columns), workloads.digest(written)

    def _put(self, way: str, number: int) -> tuple[float, float]:
        """Returns when the put began, and when it had returned."""
        start = time.perf_counter()
        before = self._source.put(way, number) or 0.0
        end = time.perf_counter()
        self._source.announce(way, number)
        return start - before, end

    def _burst(self, way: str, first: int, threads: int, seconds: float) -> tuple[float, list[float]]:
        """Puts over and over from some threads at once; returns the time it took, and that of each call."""
        until = time.perf_counter() + seconds
        times: list[list[float]] = [[] for _ in range(threads)]
        failures: list[Exception] = []
        numbers = [range(first + thread, first + (1 << 20), threads) for thread in range(threads)]

        def repeat(thread: int) -> None:
            try:
                for number in numbers[thread]:
                    start = time.perf_counter()
                    if start >= until:
                        return
                    self._source.put(way, number)
                    times[thread].append(time.perf_counter() - start)
            except Exception as error:
                failures.append(error)

        start = time.perf_counter()
        running = [threading.Thread(target=repeat, args=(thread,)) for thread in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
        elapsed = time.perf_counter() - start
        for thread_numbers, thread_times in zip(numbers, times, strict=True):
            self._source.drop_all(way, thread_numbers[: len(thread_times)])
        if failures:
            raise failures[0]
        return elapsed, [value for part in times for value in part]


class TargetCommands(Commands):
    """The consumer's commands."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._taken: Any = None
        self._number = 0
        super().__init__(take=self._take, digest=self._digest, drop=self._drop, pid=os.getpid, collect=_collect)

    def _take(self, way: str, write_back: bool) -> tuple[float, float]:
        """Waits for a batch and takes it; returns when it began to wait, and when it had every value."""
        target = self._target
        start = time.perf_counter()
        number = target.wait(way)
        taken = target.take(way, number)
        if write_back:
            target.write_back(way, number, taken)
            taken = target.retake(way, number)
        end = time.perf_counter()
        self._taken, self._number = taken, number
        return start, end

    def _digest(self, way: str) -> int:
        taken, self._taken = self._taken, None
        return workloads.digest(self._target.columns(way, taken))

    def _drop(self, way: str) -> None:
        self._taken = None
        self._target.drop(way, self._number)
