"""Keeps one transfer engine beside the node, a process of its own, and replaces it when that is what ends a quarantine.

A new engine is started and told to peers first, then the old one is killed and waited for: reads and writes that were
under way fail at their peers, which open the new one; what the old one's windows held can be used again.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final, Protocol

from tqclient.errors import TransportUnavailable
from tqclient.start import child_environment
from tqserver import limits, logs
from tqserver.waiting import within

_log = logs.get("storage.engine")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an engine is started with.

    Attributes:
        arena_path: of the arena file.
        arena: its identity.
        host: name or address under which peers reach this host.
        devices: RDMA adapters to use, with commas; empty for all.
        ports: lowest and highest port to listen on; None is the library's own range.
        gid_index: of the adapters' ports; None leaves it to the library.
        rdma: TCP will not do.
    """

    arena_path: Path
    arena: int
    host: str
    devices: str = ""
    ports: tuple[int, int] | None = None
    gid_index: int | None = None
    rdma: bool = False

    def command(self) -> list[str]:
        """Returns the command line of an engine's process; a child of the one that asks."""
        command = [sys.executable, "-m", "tqserver.storage.engine_process"]
        command += [f"--arena-path={self.arena_path}", f"--arena={self.arena}", f"--host={self.host}"]
        command += [f"--devices={self.devices}", f"--parent={os.getpid()}"]
        if self.ports is not None:
            command += ["--ports", *map(str, self.ports)]
        if self.gid_index is not None:
            command.append(f"--gid-index={self.gid_index}")
        if self.rdma:
            command.append("--rdma")
        return command

    @property
    def segments_remembered(self) -> int:
        """How many former engines' addresses a new one must not have; less than there are ports to draw from."""
        low, high = self.ports or limits.ENGINE_PORTS
        return min((high - low + 1) // 4, limits.SEGMENTS_REMEMBERED_MAX)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """What an engine serves; see `MooncakeEndpoint` in proto/tq/v1/storage.proto."""

    segment: str
    base: int
    registered_bytes: int
    protocol: str
    registrations: int
    pid: int
    gather: str = ""
    gather_secret: int = field(default=0, repr=False)


class EngineState(Protocol):
    """What DescribeNode tells of the engine."""

    @property
    def endpoint(self) -> Endpoint | None:
        """Of the engine that runs; None while there is none."""
        ...

    @property
    def refusal(self) -> str:
        """Why there is none; empty when there is one."""
        ...

    @property
    def expected(self) -> bool:
        """There is none, and one is being started."""
        ...


@dataclass(frozen=True, slots=True)
class NoEngine:
    """The state of a node that never has one."""

    refusal: str
    endpoint: None = None
    expected: bool = False


class Fenced(Protocol):
    """Whose windows are written through the engines: the node."""

    def engine_started(self, engine: int, segment: str) -> None:
        """An engine can be told to peers."""
        ...

    def engine_ended(self, engine: int) -> None:
        """Its process was reaped."""
        ...

    def quarantined_since(self) -> float | None:
        """Returns when, on the loop's clock, the oldest window began to wait for an engine's end."""
        ...


class _Child:
    """One engine's process.

    Started with Popen rather than by the loop, which would fork: gRPC's threads and a fork do not go together. It has
    to be made on the main thread, because it dies with the thread that made it.
    """

    def __init__(self, number: int, command: Sequence[str]) -> None:
        self.number = number
        self.ended = asyncio.Event()
        self._lines: deque[str] = deque(maxlen=limits.ENGINE_LOG_LINES)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            close_fds=True,
            env=child_environment(os.environ),
        )
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._reading = [
            asyncio.create_task(self._read(self._process.stdout, self._answers.put_nowait), name=f"engine {number}"),
            asyncio.create_task(self._read(self._process.stderr, self._log_line), name=f"engine {number} log"),
        ]

    async def _read(self, pipe: IO[bytes] | None, take: Callable[[bytes], object]) -> None:
        """Hands over each line that the process writes, and an empty one at the end of them."""
        reader = asyncio.StreamReader(limit=limits.ENGINE_LINE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
        line = b"-"
        while line:
            try:
                line = await reader.readline()
            except ValueError:  # longer than the limit: the reader has dropped it
                continue
            take(line)

    def _log_line(self, line: bytes) -> None:
        if line:
            self._lines.append(line.decode(errors="replace").rstrip())
            _log.debug("engine says", engine=self.number, line=self._lines[-1])

    async def answer(self) -> bytes:
        """Returns the line that it writes to stdout once it has started; an empty one when it is gone."""
        line = await self._answers.get()
        if line:
            self._lines.clear()  # the noise of a good start explains no later end
        return line

    async def reap(self) -> str:
        """Waits until the process is gone, with everything it had open; returns how it ended, for people."""
        await asyncio.gather(*self._reading)  # it holds its stdout until its end
        status = await asyncio.to_thread(self._process.wait)
        if self._process.stdin is not None:
            self._process.stdin.close()
        ended = f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
        return "; ".join([ended, *self._lines])

    def kill(self) -> None:
        """Ends the process; `reap` returns once it is gone."""
        self._process.kill()

    async def populate_after(self, event: asyncio.Event) -> None:
        """Tells the process to populate its mapping, once the event has come."""
        await event.wait()
        stdin = self._process.stdin
        if stdin is not None and not self.ended.is_set():
            with suppress(BrokenPipeError):  # it is gone
                stdin.write(b"p")
                stdin.flush()


class _Failed(Exception):
    """A start that may go better the next time."""


class Engine:
    """Starts, watches and replaces the engine.

    Args:
        node: told of starts and ends; a window is never handed out twice before both ends are known.
        options: of the engine.
        quarantine: seconds that a window may wait for its engine's end.
        populated: set once the arena's pages are there, so that the engine may map all of them; None: it never does.
        command: instead of that of `options`; for tests.

    Attributes:
        endpoint: of the engine that runs.
    """

    def __init__(
        self,
        node: Fenced,
        options: EngineOptions,
        *,
        quarantine: float,
        populated: asyncio.Event | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        self.endpoint: Endpoint | None = None
        self._node = node
        self._command: Final = list(command or options.command())
        self._quarantine = quarantine
        self._populated = populated
        self._segments: deque[str] = deque(maxlen=options.segments_remembered)
        self._number = 0
        self._current: _Child | None = None
        self._reapers: dict[asyncio.Task[None], _Child] = {}
        self._why = "the engine is being started"
        self._gave_up = False
        self._pause = 0.0  # before the next start
        self._first = asyncio.Event()

    @property
    def refusal(self) -> str:
        """Why there is no engine; empty when there is one."""
        return "" if self.endpoint else self._why

    @property
    def expected(self) -> bool:
        """There is no engine, and one is being started."""
        return self.endpoint is None and not self._gave_up

    async def first(self) -> Endpoint:
        """Waits for the outcome of the first start.

        Raises:
            TransportUnavailable: it failed.
        """
        await self._first.wait()
        if self.endpoint is None:
            raise TransportUnavailable(self._why)
        return self.endpoint

    async def run(self) -> None:
        """Keeps an engine until it is cancelled, or until a start is refused; ends every process that it started."""
        loop = asyncio.get_running_loop()
        try:
            while True:
                replaced = await self._replace()
                if self._gave_up:
                    return
                if not replaced:
                    await self._back_off()
                child, since = self._current, loop.time()
                if child is None:
                    continue
                await self._until_due(child)
                if not child.ended.is_set() or loop.time() - since >= limits.ENGINE_STEADY:
                    self._pause = 0.0
                else:
                    await self._back_off()
        finally:
            self._current = self.endpoint = None
            for child in self._reapers.values():
                child.kill()
            await asyncio.gather(*self._reapers)

    async def _back_off(self) -> None:
        self._pause = min(max(2 * self._pause, limits.ENGINE_BACKOFF_FIRST), limits.ENGINE_BACKOFF_MAX)
        await asyncio.sleep(self._pause)

    async def _replace(self) -> bool:
        """Starts an engine, tells the node, and ends the one before; False when the start failed."""
        try:
            child, endpoint = await self._start()
        except TransportUnavailable as error:
            self._failed(error.message, for_good=self._current is None)
            return False
        except _Failed as error:
            self._failed(str(error), for_good=False)
            return False
        former, self._current = self._current, child
        self.endpoint = endpoint
        self._segments.append(endpoint.segment)
        self._node.engine_started(child.number, endpoint.segment)
        _log.info("engine serves", engine=child.number, segment=endpoint.segment, protocol=endpoint.protocol)
        reaper = asyncio.create_task(self._reap(child), name=f"engine {child.number}")
        self._reapers[reaper] = child
        reaper.add_done_callback(self._reapers.pop)
        self._first.set()
        if former is not None and not former.ended.is_set():
            former.kill()
            await former.ended.wait()
        return True

    def _failed(self, why: str, *, for_good: bool) -> None:
        self._gave_up = for_good
        self._why = why
        _log.warning("no engine" if self.endpoint is None else "engine not replaced", reason=why, for_good=for_good)
        self._first.set()

    async def _start(self) -> tuple[_Child, Endpoint]:
        """Starts a process and hears what it serves.

        Raises:
            TransportUnavailable: it says that no start can go well.
            _Failed: it did not get there.
        """
        self._number += 1
        child = _Child(self._number, self._command)
        try:
            endpoint = await within(self._answer(child), limits.ENGINE_START)
            if endpoint.segment in self._segments:
                raise _Failed(f"{endpoint.segment} was an earlier engine's; another one is drawn")
        except asyncio.TimeoutError:
            child.kill()
            await child.reap()
            raise _Failed(f"the engine was not there after {limits.ENGINE_START} s") from None
        except BaseException:
            child.kill()
            await child.reap()
            raise
        return child, endpoint

    @staticmethod
    async def _answer(child: _Child) -> Endpoint:
        line = await child.answer()
        if not line:
            raise _Failed(f"the engine {await child.reap()}")
        facts = json.loads(line)
        if "refusal" in facts:
            raise TransportUnavailable(facts["refusal"])
        return Endpoint(**facts)

    async def _reap(self, child: _Child) -> None:
        """Waits for the end of an engine, however it comes, and tells the node."""
        populating = asyncio.create_task(child.populate_after(self._populated)) if self._populated else None
        how = await child.reap()
        if populating is not None:
            populating.cancel()
        if child is self._current:
            self._current = self.endpoint = None
            self._why = f"the engine {how}"
            _log.warning("engine is gone", engine=child.number, reason=how)
        child.ended.set()
        self._node.engine_ended(child.number)

    async def _until_due(self, child: _Child) -> None:
        """Waits until the engine has ended, or must be replaced because a window has waited for long enough."""
        loop = asyncio.get_running_loop()
        while not child.ended.is_set():
            since = self._node.quarantined_since()
            if since is not None and loop.time() - since >= self._quarantine:
                _log.info("engine is being replaced: bytes wait for its end", engine=child.number)
                return
            try:
                await within(child.ended.wait(), limits.ENGINE_POLL)
            except asyncio.TimeoutError:
                continue
