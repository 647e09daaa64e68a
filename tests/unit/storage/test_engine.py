"""The supervisor with a process that says what the test wants, and is otherwise a real one."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tqclient.errors import TransportUnavailable
from tqserver import limits
from tqserver.storage.engine import Endpoint, Engine, EngineOptions
from tqserver.storage.engine_process import arguments

pytestmark = pytest.mark.usefixtures("no_leaks")

# Each start takes the next line of the script: what to print, `silent`, or a status to end with.
FAKE = """
import json, os, sys
script, log = sys.argv[1:]
with open(log, "a+") as starts:
    starts.write(f"{os.getpid()}\\n")
    starts.seek(0)
    number = len(starts.readlines())
with open(script) as lines:
    line = lines.read().splitlines()[number - 1]
if line.isdecimal():
    sys.stderr.write("it hurts\\n")
    sys.exit(int(line))
if line != "silent":
    print(line.replace("PID", str(os.getpid())), flush=True)
while told := os.read(0, 1):
    with open(log + ".told", "a") as file:
        file.write(f"{number}{told.decode()} ")
"""


def serves(segment: str) -> str:
    return (
        f'{{"segment": "{segment}", "base": 4096, "registered_bytes": 64, "protocol": "tcp", "registrations": 1, '
        '"pid": PID}'
    )


class FakeNode:
    """Remembers what it was told, and that processes were gone when their end was told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.segments: list[str] = []
        self.present: set[int] = set()
        self.since: float | None = None
        self.endpoint: Callable[[], Endpoint | None] = lambda: None
        self._pids: dict[int, int] = {}

    def engine_started(self, engine: int, segment: str) -> None:
        endpoint = self.endpoint()
        assert endpoint is not None
        assert endpoint.segment == segment
        self._pids[engine] = endpoint.pid
        self.segments.append(segment)
        self.present.add(engine)
        self.events.append(("started", engine))

    def engine_ended(self, engine: int) -> None:
        assert not Path(f"/proc/{self._pids[engine]}").exists()  # reaped
        self.present.remove(engine)
        self.events.append(("ended", engine))
        self.since = None

    def quarantined_since(self) -> float | None:
        return self.since


class Run:
    """An engine's supervisor over a script, with what became of it."""

    def __init__(self, directory: Path, *script: str, quarantine: float = 60.0) -> None:
        (directory / "script").write_text("\n".join(script))
        self._starts = directory / "starts"
        command = [sys.executable, "-S", "-c", FAKE, str(directory / "script"), str(self._starts)]
        self.node = FakeNode()
        options = EngineOptions(Path("x"), 1, "h", ports=(2000, 2007))
        self.populated = asyncio.Event()
        self.engine = Engine(self.node, options, quarantine=quarantine, populated=self.populated, command=command)
        self.node.endpoint = lambda: self.engine.endpoint

    def pids(self) -> list[int]:
        """Of every process that was started, in order."""
        return [int(pid) for pid in self._starts.read_text().split()] if self._starts.exists() else []

    def told(self) -> str:
        """What the processes heard on their stdin, each with the number of the process."""
        path = self._starts.with_name("starts.told")
        return path.read_text() if path.exists() else ""

    async def until(self, condition: Callable[[], object]) -> None:
        for _ in range(1000):
            if condition():
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"not within 5 s; {self.node.events}")

    async def __aenter__(self) -> Run:
        self._task = asyncio.create_task(self.engine.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        assert not set(map(str, self.pids())) & set(os.listdir("/proc"))
        assert (self.engine.endpoint, self.node.present) == (None, set())


def test_an_engine_is_told_once_it_serves_and_another_one_after_it_died(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, serves("h:1"), serves("h:2")) as run:
            assert (run.engine.refusal, run.engine.expected) == ("the engine is being started", True)
            first = await run.engine.first()
            assert first == Endpoint("h:1", 4096, 64, "tcp", 1, first.pid)
            assert (run.engine.refusal, run.engine.expected) == ("", False)
            os.kill(first.pid, signal.SIGKILL)
            await run.until(lambda: ("ended", 1) in run.node.events)
            assert run.engine.endpoint is None
            assert (run.engine.refusal, run.engine.expected) == ("the engine was ended by signal 9", True)
            await run.until(lambda: run.node.segments == ["h:1", "h:2"])
            assert run.node.events == [("started", 1), ("ended", 1), ("started", 2)]

    asyncio.run(scenario())


def test_a_quarantine_that_lasts_too_long_is_ended_by_another_engine(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, serves("h:1"), serves("h:2"), quarantine=0.2) as run:
            await run.engine.first()
            run.node.since = began = asyncio.get_running_loop().time()
            await run.until(lambda: ("ended", 1) in run.node.events)
            assert asyncio.get_running_loop().time() - began >= 0.2
            # The new one is there before the old one is gone: peers are never without.
            assert run.node.events == [("started", 1), ("started", 2), ("ended", 1)]
            assert run.node.segments == ["h:1", "h:2"]
            assert run.engine.endpoint is not None

    asyncio.run(scenario())


def test_an_engine_that_cannot_be_replaced_goes_on(tmp_path: Path) -> None:
    async def scenario() -> None:
        refuses = '{"refusal": "uninstalled"}'
        async with Run(tmp_path, serves("h:1"), "7", refuses, serves("h:2"), quarantine=0.0) as run:
            first = await run.engine.first()
            run.node.since = 0.0
            await run.until(lambda: len(run.pids()) == 3)
            assert run.engine.endpoint == first
            assert (run.engine.refusal, run.engine.expected) == ("", False)
            await run.until(lambda: ("ended", 1) in run.node.events)
            assert run.node.segments == ["h:1", "h:2"]

    asyncio.run(scenario())


def test_starts_that_fail_are_told_and_repeated_with_growing_pauses(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, "7", "7", "7", serves("h:1")) as run:
            began = asyncio.get_running_loop().time()
            with pytest.raises(TransportUnavailable, match="the engine ended with status 7; it hurts"):
                await run.engine.first()
            assert run.engine.expected
            await run.until(lambda: run.engine.endpoint)
            assert asyncio.get_running_loop().time() - began >= 0.1 + 0.2 + 0.4

    asyncio.run(scenario())


def test_engines_populate_their_mapping_once_the_arenas_pages_are_there(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, serves("h:1"), serves("h:2"), serves("h:3")) as run:
            await run.engine.first()
            first = run.pids()[0]
            os.kill(first, signal.SIGKILL)
            await run.until(lambda: run.node.segments == ["h:1", "h:2"])
            assert run.told() == ""
            run.populated.set()
            await run.until(lambda: run.told() == "2p ")
            os.kill(run.pids()[1], signal.SIGKILL)
            await run.until(lambda: run.told() == "2p 3p ")

    asyncio.run(scenario())


def test_a_refusal_is_final(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, '{"refusal": "apt-get install it"}') as run:
            with pytest.raises(TransportUnavailable, match="apt-get install it"):
                await run.engine.first()
            assert (run.engine.refusal, run.engine.expected) == ("apt-get install it", False)
            await asyncio.wait_for(run._task, 5)
            assert len(run.pids()) == 1

    asyncio.run(scenario())


def test_a_start_that_never_answers_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, "silent", serves("h:1")) as run:
            monkeypatch.setattr(limits, "ENGINE_START", 0.3)
            with pytest.raises(TransportUnavailable, match=r"not there after 0\.3 s"):
                await run.engine.first()
            monkeypatch.undo()
            await run.until(lambda: run.engine.endpoint)

    asyncio.run(scenario())


def test_an_address_of_an_earlier_engine_is_not_taken_again(tmp_path: Path) -> None:
    """Peers know an engine by its address alone: under an old one they would write to where the old one's bytes lay."""

    async def scenario() -> None:
        # Of 8 ports, two engines are remembered.
        script = [serves(f"h:{port}") for port in (1, 2, 1, 2, 3, 1)]
        async with Run(tmp_path, *script, quarantine=0.0) as run:
            for engines in range(1, 5):
                await run.until(lambda n=engines: len(run.node.segments) == n and len(run.node.present) == 1)
                assert run.node.segments == ["h:1", "h:2", "h:3", "h:1"][:engines]
                run.node.since = 0.0 if engines < 4 else None
            assert len(run.pids()) == 6

    asyncio.run(scenario())


@pytest.mark.parametrize("script", [serves("h:1"), "silent"])
def test_nothing_is_left_of_an_engine_whose_node_stops(tmp_path: Path, script: str) -> None:
    async def scenario() -> None:
        async with Run(tmp_path, script) as run:
            await run.until(run.pids)

    asyncio.run(scenario())


def test_the_command_names_everything_that_was_asked_for() -> None:
    options = EngineOptions(Path("/dev/shm/a"), 77, "10.0.0.1", "mlx5_0,mlx5_1", (20_000, 20_100), 3, rdma=True)
    command = options.command()
    assert command[:3] == [sys.executable, "-m", "tqserver.storage.engine_process"]
    parsed = arguments(command[3:])
    assert (parsed.arena_path, parsed.arena, parsed.host) == (Path("/dev/shm/a"), 77, "10.0.0.1")
    assert (parsed.devices, parsed.ports, parsed.gid_index) == ("mlx5_0,mlx5_1", [20_000, 20_100], 3)
    assert (parsed.rdma, parsed.parent) == (True, os.getpid())
    assert not arguments(EngineOptions(Path("/a"), 1, "h").command()[3:]).rdma
