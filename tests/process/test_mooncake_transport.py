"""The mooncake transport against real nodes and their engines, over TCP on loopback."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from tests.harness.supervisor import stop_processes
from tests.process.storage_rig import Rig, wait_for
from tqclient.errors import InvalidArgument, TransportUnavailable, Unavailable
from tqclient.limits import KIB, MIB
from tqclient.transport import BufferPool, Place, Read, open_transport
from tqclient.transport.mooncake import MooncakeTransport
from tqclient.transport.mooncake.engine import Engine
from tqclient.transport.mooncake.gather import GatherPort
from tqclient.wire.v1 import common_pb2, controller_pb2

pytestmark = pytest.mark.usefixtures("engine_loaded", "no_leaks")

SESSION = 1
STAGING = 4 * MIB
DATA = np.random.default_rng(7).integers(0, 256, 12 * MIB + 77, dtype=np.uint8)


class Node:
    """A storage node, a window of it, and a transport to it."""

    def __init__(self, directory: Path, name: str) -> None:
        self.arena = Path(f"/dev/shm/tq-test-{name}-{os.getpid()}.arena")
        self.pool = BufferPool()
        self.rig = Rig(directory, "--mooncake=on", "--quarantine-seconds=30", arena=self.arena, arena_bytes=64 * MIB)

    def start(self) -> None:
        self.rig.start(sessions=[SESSION])
        wait_for(lambda: self.rig.describe().mooncake.segment != "", 30)  # a first engine reads the library from disk
        self.transport = self.open("mooncake")
        self.transport.session_opened(SESSION)
        self.window = self.rig.reserve(SESSION, DATA.size, segment=self.transport.segment)

    def open(self, prefer: str, timeout: float = 5) -> MooncakeTransport:
        node = controller_pb2.Node(name="n0", address=self.rig.daemon.address, arena=self.rig.describe().arena)
        transport = open_transport(node, prefer, channel=self.rig.channel, pool=self.pool, timeout=timeout)
        assert isinstance(transport, MooncakeTransport)
        return transport

    @property
    def engine_pid(self) -> int:
        return int(Path(f"/proc/{self.rig.daemon.pid}/task/{self.rig.daemon.pid}/children").read_text().split()[0])

    def put(self, length: int, *, timeout: float = 20) -> None:
        with self.transport.write(Place.at(self.window, 0, length), session=SESSION, timeout=timeout) as target:
            assert target.ctypes.data % 64 == 0
            np.copyto(target, DATA[:length])

    def get(self, ranges: list[tuple[int, int]], *, timeout: float = 20) -> None:
        extent = common_pb2.Extent(
            arena=self.transport.arena,
            offset=self.window.offset,
            length=DATA.size,
            generation=self.window.generation,
        )
        fetched = self.transport.read(extent, np.array(ranges, np.uint64).reshape(-1, 2), timeout=timeout)
        for offset, length in ranges:
            view = fetched.view(offset, length)
            assert np.array_equal(view, DATA[offset : offset + length])
            assert view.ctypes.data % 64 == offset % 64

    def moved(self, before: dict[str, int]) -> dict[str, int]:
        return {name: value - before[name] for name, value in self.transport.stats().items()}

    def close(self) -> None:
        if hasattr(self, "transport"):
            with suppress(OSError, IndexError):  # it may be between two engines
                os.kill(self.engine_pid, signal.SIGCONT)
            self.transport.close()
            wait_for(lambda: self.transport.stats()["abandoned"] == 0, 20)
        self.rig.__exit__(None, None, None)
        self.arena.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_MOONCAKE_STAGING", "4MiB")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path, "node")
    try:
        node.start()
        yield node
    finally:
        node.close()


@pytest.fixture(params=["any memory", "registered memory alone"])
def each_kind_of_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs a test twice: as over TCP, and as over RDMA, where every transfer begins and ends in registered memory.

    Returns:
        Whether any memory will do.
    """
    if request.param == "registered memory alone":
        monkeypatch.setattr(Engine, "takes_any_memory", False)
    return bool(request.param == "any memory")


def test_bytes_of_every_size_arrive_and_come_back_with_few_transfers(node: Node, *, each_kind_of_memory: bool) -> None:
    assert (node.transport.name, node.transport.mapped, node.transport.usable) == ("mooncake", False, True)
    assert "over tcp to 127.0.0.1:" in node.transport.reason
    assert "4 MiB staging, registrations here 1, there 1" in node.transport.reason
    for length in (1, 63, 64 * KIB + 1, MIB, 3 * MIB - 5, STAGING, 3 * STAGING + 77):
        before = node.transport.stats()
        node.put(length)
        assert node.moved(before)["bytes"] == length
        few = each_kind_of_memory or length <= 3 * MIB
        assert not few or node.moved(before)["transfers"] <= 4
        with node.arena.open("rb") as file:
            file.seek(node.window.offset)
            assert file.read(length) == DATA[:length].tobytes()
        node.get([(0, length)])
        assert node.transport.stats()["taken_bytes"] == 0
    node.put(0)
    node.get([])


def test_scattered_rows_are_a_few_transfers_and_far_apart_ones_are_gathered(node: Node) -> None:
    node.put(DATA.size)
    rows = [(i * 6_000 + 13, 4 * KIB) for i in range(1000)]
    before = node.transport.stats()
    node.get(rows)
    # 6 MB in pieces of a quarter of the quarter of the staging that bytes pass through.
    assert node.moved(before)["transfers"] <= 25
    assert node.moved(before)["gathers"] == 0
    for rows in ([(i * 120_000, 64) for i in range(100)], [(i * 12_000 + 13, 4 * KIB) for i in range(1000)]):
        before = node.transport.stats()
        node.get(rows)  # of an extent that is not sealed: the node's stream would refuse it
        assert {name: node.moved(before)[name] for name in ("transfers", "gathers")} == {"transfers": 0, "gathers": 1}
    assert node.transport.stats()["registrations"] == 1


def test_many_small_extents_are_one_gather_and_a_large_one_is_none(node: Node) -> None:
    node.put(DATA.size)

    def read(starts: list[int], length: int) -> dict[str, int]:
        wanted = []
        for start in starts:
            offset, generation = node.window.offset + start, node.window.generation
            extent = common_pb2.Extent(
                arena=node.transport.arena, offset=offset, length=length + 100, generation=generation
            )
            wanted.append(Read(extent, np.array([(13, length)], np.uint64)))
        before = node.transport.stats()
        for start, found in zip(starts, node.transport.read_many(wanted, timeout=20), strict=True):
            assert np.array_equal(found.view(13, length), DATA[start + 13 : start + 13 + length])
        return {name: node.moved(before)[name] for name in ("transfers", "gathers")}

    assert read(list(range(0, 640_000, 1280)), 777) == {"transfers": 0, "gathers": 1}
    assert read([], 1) == {"transfers": 0, "gathers": 0}
    alone = read([6 * MIB], 5 * MIB)
    assert alone["transfers"] >= 1
    assert alone["gathers"] == 0


def test_a_gather_from_an_engine_that_was_killed_is_unavailable_and_its_successor_serves(node: Node) -> None:
    node.put(DATA.size)
    rows = [(i * 12_000 + 13, 4 * KIB) for i in range(1000)]
    node.get(rows)
    former = node.transport
    os.kill(node.engine_pid, signal.SIGKILL)
    wait_for(lambda: node.rig.describe().mooncake.segment not in ("", former.segment))
    with pytest.raises(Unavailable, match=r"the engine of .* is gone"):
        node.get(rows)
    assert not former.usable
    former.close()
    node.transport = node.open("mooncake")
    node.get(rows)
    assert node.moved(dict.fromkeys(node.transport.stats(), 0))["gathers"] == 1


def test_where_the_port_for_gathers_is_closed_the_stream_does_them_from_then_on(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    node.put(DATA.size)
    node.rig.controller.sealed([(node.window.offset, DATA.size, node.window.generation, 1)])
    wait_for(lambda: node.rig.describe().sealed_bytes > 0)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        closed = GatherPort(f"127.0.0.1:{unused.getsockname()[1]}", 1, "node n0")
        monkeypatch.setattr(node.transport, "_port", closed)
        for _ in range(2):
            node.get([(i * 120_000, 64) for i in range(100)])
    assert [record.levelname for record in caplog.records if "no gathers" in record.message] == ["WARNING"]
    assert node.transport.usable


def test_a_gather_from_a_stopped_engine_ends_at_its_deadline(node: Node) -> None:
    node.put(DATA.size)
    rows = [(i * 12_000, 4 * KIB) for i in range(1000)]
    node.get(rows)
    stop_processes(node.engine_pid)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not gather within 0\.3 s"):
        node.get(rows, timeout=0.3)
    assert time.monotonic() - started < 2
    os.kill(node.engine_pid, signal.SIGCONT)
    node.get(rows)  # what was half read is not read on


def test_memory_is_registered_once_however_much_is_moved(node: Node) -> None:
    for i in range(200):
        node.put(1000 + i)
        node.get([(0, 500), (900, 100)])
    stats = node.transport.stats()
    assert (stats["registrations"], stats["transfers"], stats["failures"]) == (1, 401, 0)
    assert node.rig.describe().mooncake.registrations == 1


def test_what_lies_outside_is_refused_before_anything_moves(node: Node) -> None:
    before = node.transport.stats()
    outside = Place(64 * MIB - 256, 512, node.window.generation, node.window.incarnation)
    with (
        pytest.raises(InvalidArgument, match="no place of the arena"),
        node.transport.write(outside, session=SESSION, timeout=1),
    ):
        pass
    with pytest.raises(InvalidArgument, match="a range of"):
        node.get([(DATA.size - 1, 2)])
    assert node.transport.stats() == before


def test_rdma_is_refused_where_there_is_none(node: Node) -> None:
    with pytest.raises(TransportUnavailable, match="RDMA is required, and the node's engine runs over tcp"):
        node.open("rdma")


def test_a_killed_engine_is_a_typed_error_and_its_successor_is_reached(node: Node) -> None:
    node.put(MIB)
    former = node.transport
    pid = node.engine_pid
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not Path(f"/proc/{pid}").exists())
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"a transfer of 1048576 bytes failed"):
        node.get([(0, MIB)])
    assert time.monotonic() - started < 3
    assert not former.usable
    wait_for(lambda: node.rig.describe().mooncake.segment not in ("", former.segment))
    node.transport = node.open("mooncake")
    node.get([(0, MIB)])
    former.close()


def test_a_stopped_engine_quarantines_the_staging_until_its_transfers_end(node: Node) -> None:
    node.put(100)
    stop_processes(node.engine_pid)
    started = time.monotonic()
    # More than the kernel's socket buffers take, so that it cannot end.
    with pytest.raises(Unavailable, match=r"a transfer did not end within 0\.3 s"):
        node.put(3 * MIB, timeout=0.3)
    assert 0.3 <= time.monotonic() - started < 1.5
    assert not node.transport.usable
    stats = node.transport.stats()
    assert stats["abandoned"] > 0
    assert stats["taken_bytes"] == 3 * MIB
    os.kill(node.engine_pid, signal.SIGCONT)
    wait_for(lambda: node.transport.stats()["abandoned"] == 0, 15)
    assert node.transport.stats()["taken_bytes"] == 0
    node.put(3 * MIB)


@pytest.mark.parametrize("writes", [True, False])
def test_a_stopped_engine_keeps_the_buffers_of_its_transfers_until_they_end(node: Node, *, writes: bool) -> None:
    node.put(DATA.size)
    assert node.pool.stats().live_bytes == 0
    stop_processes(node.engine_pid)
    with pytest.raises(Unavailable, match=r"a transfer did not end within 0\.3 s"):
        node.put(DATA.size, timeout=0.3) if writes else node.get([(0, DATA.size)], timeout=0.3)
    assert node.transport.stats()["abandoned"] > 0
    assert node.pool.stats().live_bytes >= DATA.size
    os.kill(node.engine_pid, signal.SIGCONT)
    wait_for(lambda: node.transport.stats()["abandoned"] == 0, 15)
    assert node.transport.stats()["taken_bytes"] == 0
    wait_for(lambda: node.pool.stats().live_bytes == 0)


def p99_ms(node: Node, count: int = 400) -> float:
    samples = []
    for _ in range(count):
        started = time.perf_counter()
        node.get([(0, 64 * KIB)])
        samples.append((time.perf_counter() - started) * 1e3)
    return float(np.percentile(samples, 99))


def test_a_stopped_node_does_not_hold_up_another(node: Node, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = Node(tmp_path / "other", "other")
    try:
        other.start()
        node.put(64 * KIB)
        idle_ms = p99_ms(node)
        stop_processes(other.engine_pid)
        with pytest.raises(Unavailable):
            other.put(3 * MIB, timeout=0.1)
        beside_ms = p99_ms(node)
        assert beside_ms <= max(2 * idle_ms, 50)  # some ms are scheduling; waiting for the other would be seconds
    finally:
        other.close()


def test_a_path_is_opened_within_the_time_that_is_left(node: Node) -> None:
    stop_processes(node.engine_pid)
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not answer within the 0\.\d+ s that were left"):
        node.open("mooncake", timeout=0.4)
    assert time.monotonic() - started < 1.4  # not after OPEN_SECONDS
    os.kill(node.engine_pid, signal.SIGCONT)
    wait_for(lambda: not any(thread.name == "tq-mooncake-opening" for thread in threading.enumerate()), 10)


def test_an_engine_that_does_not_answer_is_refused_in_time(node: Node) -> None:
    stop_processes(node.engine_pid)
    started = time.monotonic()
    with pytest.raises(TransportUnavailable, match="did not answer within 2 s"):
        node.open("mooncake")
    with pytest.raises(Unavailable, match="is being opened by another call"):
        node.open("mooncake")
    assert time.monotonic() - started < 4
    os.kill(node.engine_pid, signal.SIGCONT)
    # What was still in progress cleans up after itself.
    wait_for(lambda: not any(thread.name == "tq-mooncake-opening" for thread in threading.enumerate()), 10)
