"""Gathers over real sockets: the server's threads, this side's connections, and peers that mean no good."""

from __future__ import annotations

import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.harness.leaks import leaks_nothing
from tests.harness.supervisor import wait_until
from tqclient.errors import Unavailable
from tqclient.transport.mooncake.gather import GatherPort, GatherRefused, GatherUnreachable, targets_of
from tqclient.wire import gather as wire
from tqserver import limits
from tqserver.storage.gather import GatherServer, listen

DATA_OFFSET = 512
MAPPING = np.random.default_rng(3).integers(0, 256, 3_000_000, dtype=np.uint8)
PORTS = (20_000, 30_000)


@contextmanager
def serve(seconds: float = 10) -> Iterator[GatherServer]:
    server = GatherServer(listen("127.0.0.1", PORTS), MAPPING.data, DATA_OFFSET, seconds=seconds)
    server.start()
    with closing(server):
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[GatherServer]:
    with serve() as server:
        yield server


@pytest.fixture(scope="module")
def port(server: GatherServer) -> Iterator[GatherPort]:
    with port_to(server) as port:
        yield port


def port_to(server: GatherServer, *, secret: int | None = None) -> closing[GatherPort]:
    secret = server.secret if secret is None else secret
    return closing(GatherPort(f"127.0.0.1:{server.port}", secret, "node n0"))


def connect(server: GatherServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), 5)


def fetch(port: GatherPort, runs: list[tuple[int, int]], timeout: float | None = 5) -> bytes:
    buffer = np.zeros(sum(stop - start for start, stop in runs), np.uint8)
    port.read(np.array(runs, np.uint64), [buffer.data], timeout)
    return buffer.tobytes()


def targets(buffer: NDArray[np.uint8], places: list[tuple[int, int]]) -> list[memoryview]:
    positions, lengths = np.array(places, np.int64).T
    return targets_of(buffer, positions, lengths)


def eventually(condition: Callable[[], bool]) -> None:
    wait_until(condition, what="the server is as far")


def peers(server: GatherServer) -> int:
    """Connections that it serves at present."""
    return limits.GATHER_CONNECTIONS_MAX - server._room._value


RUN = st.tuples(st.integers(DATA_OFFSET, MAPPING.size - 1), st.integers(1, 400_000)).map(
    lambda run: (run[0], min(run[0] + run[1], MAPPING.size))
)


@given(runs=st.lists(RUN, min_size=1, max_size=12), timeout=st.sampled_from([None, 5.0]))
def test_any_ranges_in_any_order_come_back_whole(
    port: GatherPort, runs: list[tuple[int, int]], timeout: float | None
) -> None:
    assert fetch(port, runs, timeout) == b"".join(MAPPING[start:stop].tobytes() for start, stop in runs)


def test_more_ranges_than_buffers_of_one_call_land_at_places_with_gaps(port: GatherPort) -> None:
    runs = [(DATA_OFFSET + 7 * i, DATA_OFFSET + 7 * i + 1 + i % 5) for i in range(5000)]
    buffer = np.zeros(5000 * 8, np.uint8)
    places = [(8 * i, stop - start) for i, (start, stop) in enumerate(runs)]
    port.read(np.array(runs, np.uint64), targets(buffer, places), 5)
    for (start, stop), (position, length) in zip(runs, places, strict=True):
        assert np.array_equal(buffer[position : position + length], MAPPING[start:stop])
        assert not buffer[position + length : position + 8].any()


def test_places_that_touch_are_one_target() -> None:
    views = targets(np.zeros(100, np.uint8), [(0, 10), (10, 5), (16, 4), (20, 1)])
    assert [len(view) for view in views] == [15, 5]


def test_what_is_too_much_for_one_request_is_cut() -> None:
    limit = 64 << 20
    cut = [batch.tolist() for batch in wire.batches(np.array([(0, limit + 5), (limit + 9, 2 * limit)], np.uint64))]
    assert cut == [[[0, limit]], [[limit, 5], [limit + 9, limit - 9]]]
    many = np.arange(2 * ((1 << 16) + 1), dtype=np.uint64).reshape(-1, 2)
    assert [len(batch) for batch in wire.batches(many)] == [1 << 16, 1]


def test_a_request_is_laid_out_as_specified() -> None:
    packed = wire.pack_request(0x0102030405060708, np.array([[4096, 7]], np.uint64))
    assert packed == b"tqgather" + bytes(range(8, 0, -1)) + struct.pack("<QQQ", 1, 4096, 7)


def ask(server: GatherServer, request: bytes) -> bytes:
    """Sends raw bytes and returns everything until the end of the connection."""
    with connect(server) as peer:
        peer.sendall(request)
        answer = b""
        try:
            while part := peer.recv(65536):
                answer += part
        except ConnectionResetError:  # it did not read all that was sent
            return answer
        return answer


def request(server: GatherServer, *ranges: int, magic: bytes = b"tqgather", count: int | None = None) -> bytes:
    count = len(ranges) // 2 if count is None else count
    return magic + struct.pack(f"<QQ{len(ranges)}Q", server.secret, count, *ranges)


END = MAPPING.size
HIGH = (1 << 64) - 1


@pytest.mark.parametrize(
    "ranges",
    [
        (0, 1),
        (DATA_OFFSET - 1, 2),
        (END, 1),
        (END + 1, 0),
        (END - 1, 2),
        (HIGH, HIGH),
        (HIGH, 2),
        (DATA_OFFSET, HIGH),
        (DATA_OFFSET, HIGH - DATA_OFFSET + 2),
        (DATA_OFFSET, 8, END, 8),
        (DATA_OFFSET, END - DATA_OFFSET) * 23,  # the same bytes again and again: 69 MB
    ],
)
def test_what_lies_outside_is_refused_and_nothing_of_it_is_sent(server: GatherServer, ranges: tuple[int, ...]) -> None:
    assert ask(server, request(server, *ranges)) == struct.pack("<I", 1)


def test_strangers_get_no_byte(server: GatherServer) -> None:
    good = request(server, DATA_OFFSET, 8)
    wrong = bytearray(good)
    wrong[8] ^= 1
    absurd = [request(server, DATA_OFFSET, 8, count=count) for count in (0, (1 << 16) + 1, HIGH)]
    for bad in (bytes(wrong), request(server, DATA_OFFSET, 8, magic=b"GET / HT"), *absurd, bytes(40)):
        assert ask(server, bad) == b""


def test_a_request_cut_anywhere_leaves_nothing_behind(server: GatherServer, port: GatherPort) -> None:
    good = request(server, DATA_OFFSET, 8)
    fetch(port, [(DATA_OFFSET, DATA_OFFSET + 1)])
    eventually(lambda: peers(server) == 1)
    with leaks_nothing():
        for length in range(len(good)):
            with connect(server) as peer:
                peer.sendall(good[:length])
    eventually(lambda: peers(server) == 1)


def dribble(peer: socket.socket, data: bytes) -> None:
    """Sends a byte at a time, each in time."""
    for i in range(len(data)):
        peer.sendall(data[i : i + 1])
        time.sleep(0.02)


def test_slow_and_silent_peers_are_cut_off_and_hold_nobody_up() -> None:
    with serve(seconds=1.0) as server, leaks_nothing(), ExitStack() as stack:
        wanted = request(server, *(DATA_OFFSET, END - DATA_OFFSET) * 20)
        slow = [stack.enter_context(connect(server)) for _ in range(3)]
        started = time.monotonic()
        slow[1].sendall(wanted)  # and takes nothing of 60 MB
        port = stack.enter_context(port_to(server))
        assert fetch(port, [(600, 700)]) == MAPPING[600:700].tobytes()
        assert time.monotonic() - started < 1.0  # none of them is cut off yet
        with pytest.raises(ConnectionError):
            dribble(slow[2], wanted)
        assert slow[0].recv(1) == b""
        assert fetch(port, [(600, 700)]) == MAPPING[600:700].tobytes()  # its kept connection was cut off, too


def test_signals_do_not_prolong_the_wait_for_a_silent_server() -> None:
    """A profiler's, for one: after each of them, Python repeats the call that it met."""
    deadline = time.monotonic() + 20

    def tick(*_: object) -> None:
        if time.monotonic() > deadline:
            raise AssertionError("it waits still")

    with closing(listen("127.0.0.1", PORTS)) as silent:
        former = signal.signal(signal.SIGALRM, tick)
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        try:
            with (
                closing(GatherPort(f"127.0.0.1:{silent.getsockname()[1]}", 1, "node 1")) as port,
                pytest.raises(Unavailable, match=r"did not gather within 0\.5 s"),
            ):
                fetch(port, [(DATA_OFFSET, DATA_OFFSET + 10)], 0.5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, former)


def test_a_full_server_refuses_and_has_room_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "GATHER_CONNECTIONS_MAX", 2)
    with serve() as server, connect(server), port_to(server) as port:
        with connect(server), pytest.raises(GatherRefused):
            fetch(port, [(600, 700)])
        eventually(lambda: _served(port))


def _served(port: GatherPort) -> bool:
    try:
        return fetch(port, [(600, 700)]) == MAPPING[600:700].tobytes()
    except GatherRefused:
        return False


def test_a_port_that_nobody_listens_on_was_never_reached() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = GatherPort(f"127.0.0.1:{unused.getsockname()[1]}", 1, "node n0")
        with closing(port), pytest.raises(GatherUnreachable):
            fetch(port, [(600, 700)])


def test_a_server_that_is_gone_is_unavailable_and_its_port_with_another_secret_refuses() -> None:
    with serve(seconds=0.05) as server, port_to(server) as port:
        fetch(port, [(600, 700)])
        with port_to(server, secret=server.secret ^ 1) as other, pytest.raises(GatherRefused):
            fetch(other, [(600, 700)])
        server.close()
        eventually(lambda: peers(server) == 0)  # it has let go of the connection that `port` keeps
        with pytest.raises(Unavailable, match="the engine of node n0 is gone"):
            fetch(port, [(600, 700)])
