"""One peer's processes, and the environments that they run in."""

from __future__ import annotations

import multiprocessing
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from benchmarks.machine import Usage, children_of
from benchmarks.peers import Peer, bootstrap
from benchmarks.peers.host import Setup, serve
from benchmarks.workers import Worker, deaf_to_interrupts, stop_all

HOME: Final = "TQ_BENCH_PEERS"
_DEFAULT_HOME: Final = "~/.cache/tq-bench/peers"


class Hosted(Worker):
    """A worker in the interpreter of another environment."""

    def __init__(self, interpreter: Path, environ: Mapping[str, str], adapter: str, role: str, setup: Setup) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with (Path(setup.directory) / f"{role}.log").open("wb") as log, deaf_to_interrupts():
            process = subprocess.Popen(
                [str(interpreter), "-I", bootstrap.__file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environ),
            )
        theirs.close()
        self._process = _Popened(process)
        self.send(adapter, role, setup)


class _Popened:
    """A child with the face of `multiprocessing.Process`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def join(self, timeout: float | None = None) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


def home() -> Path:
    """Returns the folder with an environment for each peer that is installed."""
    return Path(os.environ.get(HOME) or _DEFAULT_HOME).expanduser()


def interpreter(peer: Peer) -> Path:
    """Returns that of a peer's environment.

    Raises:
        RuntimeError: it is not installed.
    """
    if peer.requirements is None:
        return Path(sys.executable)
    found = home() / peer.environment / "bin" / "python"
    if not found.exists():
        raise RuntimeError(f"it is not installed: tq-bench peers install {peer.name}")
    return found


@dataclass(frozen=True, slots=True)
class Open:
    """A peer whose processes run.

    Attributes:
        peer: which.
        storage: the process whose children are its daemons, if it has any.
        sources: the producers; most measurements have one.
        target: the consumer, if there is one.
        target_pid: of the process that takes, which `target` may have started.
    """

    peer: Peer
    storage: Worker
    sources: list[Worker]
    target: Worker | None
    target_pid: int = 0

    def usage(self) -> dict[str, Usage]:
        """Returns what each part has used so far; the storage is all that `storage` started, but for the consumer."""
        pids = {self.storage.pid, *children_of(self.storage.pid)} - {self.target_pid}
        parts = {"producer": {self.sources[0].pid}, "consumer": {self.target_pid}, "storage": pids}
        return {part: Usage.of_all(pids) for part, pids in parts.items() if pids != {0}}


@contextmanager
def opened(peer: Peer, setup: Setup, *, producers: int = 1, consumer: bool = True) -> Iterator[Open]:
    """Starts a peer's processes, and ends them.

    Args:
        peer: which.
        setup: of them all; `directory`, and what its storage answers, are filled in here.
        producers: processes that put.
        consumer: whether there is one that takes.

    Raises:
        RuntimeError: it is not installed, or could not be started.
    """
    python = interpreter(peer)
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    secret = {peer.secret: secrets.token_hex(32)} if peer.secret else {}
    environ = {**os.environ, "PATH": path, **dict(peer.variables), **secret}

    def start(role: str) -> Worker:
        if peer.requirements is None:
            return Worker(serve, peer.adapter, role, setup)
        return Hosted(python, environ, peer.adapter, role, setup)

    with tempfile.TemporaryDirectory(prefix="tq-bench-", ignore_cleanup_errors=True) as directory:
        setup = replace(setup, directory=directory)
        workers = [start("storage")]
        try:
            setup = replace(setup, storage=workers[0].call("where"))
            workers += [start("source") for _ in range(producers)]
            sources = workers[1:]
            target = start("target") if consumer else None
            if target is not None:
                workers.append(target)
            pids = [worker.call("pid") for worker in workers[1:]]
            yield Open(peer, workers[0], sources, target, pids[-1] if consumer else 0)
        finally:
            stop_all(workers[1:])
            stop_all(workers[:1])
