"""The node's transfer engine: a real `tq-storage`, the real library over TCP, and peers that hold nothing back."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.harness.supervisor import Child, Supervisor, child_environ
from tests.process.storage_rig import Rig, wait_for
from tqclient.errors import InvalidArgument, LeaseExpired, Unavailable
from tqclient.limits import MIB
from tqclient.wire.arena import engine_locked
from tqclient.wire.v1 import storage_pb2

PEER = Path(__file__).with_name("raw_peer.py")

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def arena() -> Iterator[Path]:
    """Where an arena may lie; in shared memory, as in production."""
    path = Path(f"/dev/shm/tq-test-engine-{os.getpid()}.arena")
    yield path
    path.unlink(missing_ok=True)


def engines(rig: Rig) -> list[int]:
    """Pids of the node's engines."""
    children = Path(f"/proc/{rig.daemon.pid}/task/{rig.daemon.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return engine_locked(descriptor)
    finally:
        os.close(descriptor)


def peer_reads(endpoint: storage_pb2.MooncakeEndpoint, offset: int, length: int) -> bytes:
    command = [sys.executable, str(PEER), "read", endpoint.segment, str(endpoint.base + offset), str(length)]
    done = subprocess.run(command, env=child_environ(), capture_output=True, text=True, timeout=30, check=True)
    assert not done.stdout.startswith("failed"), done.stdout + done.stderr
    return bytes.fromhex(done.stdout)


def blob(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()


def next_engine(rig: Rig, former: str, timeout: float = 3.0) -> storage_pb2.MooncakeEndpoint:
    wait_for(lambda: rig.describe().mooncake.segment not in ("", former), timeout)
    return rig.describe().mooncake


def test_the_whole_arena_is_registered_once_before_anybody_is_told(tmp_path: Path, arena: Path) -> None:
    host = socket.gethostname()
    with Rig(tmp_path, f"--mooncake-host={host}", arena=arena) as rig:
        started = time.monotonic()
        rig.start(sessions=[1])
        serving = time.monotonic() - started
        while not (reply := rig.describe()).mooncake.segment:  # it serves while the engine is still on its way
            assert (reply.mooncake_refusal, reply.mooncake_expected) == ("the engine is being started", True)
        endpoint = reply.mooncake
        assert (reply.mooncake_refusal, reply.mooncake_expected) == ("", False)
        assert (endpoint.protocol, endpoint.registrations) == ("tcp", 1)
        assert endpoint.segment.startswith(f"{host}:")
        assert endpoint.registered_bytes == reply.arena_bytes == 16 * MIB
        with arena.open("r+b") as file:
            file.seek(16 * MIB - 3)
            file.write(b"end")
        assert peer_reads(endpoint, 16 * MIB - 3, 3) == b"end"
        (pid,) = engines(rig)
        assert locked(arena)
        assert "mooncake" not in Path(f"/proc/{rig.daemon.pid}/maps").read_text()  # the node itself loads none of it
        assert rig.describe().mooncake == endpoint
        assert rig.daemon.terminate() == 0
        assert not alive(pid)
        assert not locked(arena)
    assert serving < 3  # beside other tests; the start itself is bounded in test_storage.py


@pytest.fixture
def rig(tmp_path: Path, arena: Path) -> Iterator[Rig]:
    with Rig(tmp_path, "--mooncake=on", "--quarantine-seconds=0.3", arena=arena) as rig:
        rig.start(sessions=[1, 2, 3])
        yield rig


def test_an_engine_that_is_killed_is_replaced_while_the_node_goes_on(rig: Rig) -> None:
    before = rig.describe()
    data = blob(5000)
    kept, waiting, open_still = (rig.reserve(s, 8192, segment=before.mooncake.segment) for s in (1, 2, 3))
    rig.write(1, kept, data)
    rig.controller.sealed([(kept.offset, 5000, kept.generation, 1)])
    rig.controller.sessions(ended=[2])
    (pid,) = engines(rig)
    os.kill(pid, signal.SIGKILL)
    endpoint = next_engine(rig, before.mooncake.segment)
    # Nobody can write to what the dead engine's windows held; a session that lives may still commit.
    assert rig.used() == (5120, 8192 - 5120 + 8192, 0)
    after = rig.describe()
    assert (after.incarnation, after.attached) == (before.incarnation, True)
    assert rig.read((kept.offset, 5000, kept.generation)) == data == peer_reads(endpoint, kept.offset, 5000)
    with pytest.raises(Unavailable, match="was replaced"):
        rig.reserve(1, 1, segment=before.mooncake.segment)
    rig.close_window(3, open_still, open_still.offset)
    assert rig.reserve(1, 100, segment=endpoint.segment).length == 256
    assert waiting.generation != open_still.generation


def test_whose_windows_are_quarantined_and_until_when(rig: Rig) -> None:
    segment = rig.describe().mooncake.segment
    with pytest.raises(InvalidArgument, match="not through both"):
        rig.reserve(1, 1, mapped=True, segment=segment)
    with pytest.raises(Unavailable, match=r"engine 127\.0\.0\.1:9 was replaced"):
        rig.reserve(1, 1, segment="127.0.0.1:9")
    said_done, silent = (rig.reserve(1, MIB, segment=segment) for _ in range(2))
    rig.reserve(1, MIB)
    rig.controller.sessions(ended=[1])
    rig.wait_used(0, 0, 2 * MIB)  # what was to come through the node itself is free at once
    with pytest.raises(LeaseExpired, match="has ended"):
        rig.reserve(1, 1, segment=segment)
    rig.close_window(1, said_done, said_done.offset + 4096)
    assert rig.used() == (0, 0, MIB)
    (pid,) = engines(rig)
    assert rig.wait_used(0, 0, 0) < 3
    assert not alive(pid)
    assert rig.describe().mooncake.segment != segment
    assert rig.describe().mooncake.registrations == 1
    rig.close_window(1, silent, silent.offset)  # long gone: passed over


def test_a_node_that_is_killed_takes_its_engine_along_and_comes_back(rig: Rig, arena: Path) -> None:
    before = rig.describe()
    windows = [rig.reserve(session, MIB, segment=before.mooncake.segment) for session in (1, 2)]
    (pid,) = engines(rig)
    rig.kill()
    wait_for(lambda: not alive(pid))
    assert not locked(arena)
    started = time.monotonic()
    rig.start(sessions=[2])
    after = rig.describe()
    assert time.monotonic() - started < 3
    assert after.incarnation != before.incarnation
    assert after.mooncake.segment not in ("", before.mooncake.segment)
    assert after.mooncake.base != before.mooncake.base  # an old peer's addresses name nothing here
    # Nothing can come through the engine of the former life any more: only what a live session may commit is kept.
    assert rig.used() == (0, MIB, 0)
    rig.controller.sealed([(windows[1].offset, 100, windows[1].generation, 1)])
    rig.wait_used(256, MIB - 256)
    rig.controller.sessions(ended=[2])
    rig.wait_used(256, 0)


def stop_amid_a_write(writer: Child, view: NDArray[np.uint8]) -> None:
    """Stops the peer while one of its writes is under way: some bytes are of that one, and some of the one before."""
    for _ in range(100):
        wait_for(lambda: view[0] != view[-1])
        writer.stop()
        if view[0] != view[-1]:
            return
        writer.resume()
    raise AssertionError("never caught in the middle of a write")


def test_bytes_of_a_stopped_one_sided_writer_change_for_nobody(
    tmp_path: Path, arena: Path, supervisor: Supervisor
) -> None:
    with Rig(tmp_path, "--mooncake=on", "--quarantine-seconds=0.5", arena=arena, arena_bytes=48 * MIB) as rig:
        rig.start(sessions=[1, 2])
        endpoint = rig.describe().mooncake
        window = rig.reserve(1, 32 * MIB, segment=endpoint.segment)
        mapping = np.memmap(arena, np.uint8, "r", offset=window.offset, shape=window.length)
        writer = supervisor.python(PEER, "write", endpoint.segment, endpoint.base + window.offset, window.length)
        writer.wait_for("writing")
        stop_amid_a_write(writer, mapping)

        rig.controller.sessions(ended=[1])
        rig.wait_used(0, 0, window.length)
        room = rig.describe().capacity_bytes - window.length
        other = rig.reserve(2, room)  # everything that is not quarantined
        assert other.offset + other.length <= window.offset or window.offset + window.length <= other.offset
        wait_for(lambda: rig.used() == (0, room, 0))
        assert rig.describe().mooncake.segment != endpoint.segment

        again = rig.reserve(2, window.length)
        assert again.offset == window.offset
        data = blob(window.length)
        rig.write(2, again, data)
        rig.controller.sealed([(again.offset, again.length, again.generation, 1)])
        rig.wait_used(window.length, room)
        writer.resume()
        assert writer.wait_for("failed") == "failed -1"
        assert mapping.tobytes() == data
        assert rig.read((again.offset, again.length, again.generation)) == data


def with_library(monkeypatch: pytest.MonkeyPatch, directory: Path, source: str) -> None:
    """Puts a module in front of the library, for nodes that are started from here."""
    package = directory / "library" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "engine.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(package.parent), os.environ.get("PYTHONPATH")])))


def test_a_node_without_the_library_serves_and_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_library(monkeypatch, tmp_path, "raise ImportError('libibverbs.so.1: cannot open shared object file')")
    with Rig(tmp_path, f"--mooncake-host={socket.gethostname()}") as rig:
        rig.start(sessions=[1])
        wait_for(lambda: not rig.describe().mooncake_expected)
        reply = rig.describe()
        assert reply.mooncake_refusal.startswith("mooncake needs system libraries: apt-get install libibverbs1")
        assert not reply.HasField("mooncake")
        assert rig.reserve(1, 100).length == 256
        with pytest.raises(Unavailable, match="was replaced"):
            rig.reserve(1, 100, segment="127.0.0.1:9")


@pytest.mark.parametrize(
    ("flag", "variable", "reason"),
    [
        ("on", "", "mooncake needs system libraries: apt-get install libibverbs1 libnuma1 libcurl4"),
        ("on", "MC_TCP_PROTO", "MC_TCP_PROTO=1 is set, and it reports writes as done before they are"),
        ("rdma", "MC_FORCE_TCP", "RDMA is required, and the engine found no adapter to use"),
    ],
)
def test_a_node_that_must_have_an_engine_refuses_to_start_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str, variable: str, reason: str
) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    else:
        with_library(monkeypatch, tmp_path, "raise ImportError('libibverbs.so.1: cannot open shared object file')")
    with Rig(tmp_path, f"--mooncake={flag}") as rig:
        with pytest.raises(Unavailable, match=f"(?s)ended with status 1.*{reason}"):
            rig.launch()
        assert rig.controller.hellos.empty()  # no controller ever heard of it
        assert "Traceback" not in rig.daemon.log.read_text()


def test_an_engine_is_nothing_without_its_node(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tqserver.storage.engine_process", f"--arena-path={tmp_path}/a", "--arena=1"]
    done = subprocess.run(
        [*command, "--host=127.0.0.1", "--parent=1"], capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert "the node, process 1, is gone" in done.stderr
