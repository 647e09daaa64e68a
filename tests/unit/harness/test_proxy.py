from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import pytest

from tests.harness import FaultProxy, wait_until
from tests.harness.proxy import AnswerScanner
from tqclient.wire.dialing import dial

pytestmark = pytest.mark.usefixtures("no_leaks")


class EchoServer:
    """Sends back what it receives; remembers it."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.received = bytearray()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._threads.append(threading.Thread(target=self._echo, args=(connection,)))
            self._threads[-1].start()

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(65536):
                    self.received += data
                    connection.sendall(data)
            except ConnectionError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(60)


@pytest.fixture
def echo() -> Iterator[EchoServer]:
    server = EchoServer()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: EchoServer) -> Iterator[FaultProxy]:
    with FaultProxy(echo.address) as running:
        yield running


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        yield connection


def connect(proxy: FaultProxy) -> socket.socket:
    host, _, port = proxy.address.partition(":")
    return socket.create_connection((host, int(port)), timeout=5)


def knock(proxy: FaultProxy) -> bytes:
    with connect(proxy) as connection:
        return connection.recv(1)


def receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (piece := connection.recv(size - len(data))):
        data += piece
    return data


def silent(connection: socket.socket, seconds: float = 0.05) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(1) == b"?"
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)


def test_it_passes_on_what_it_gets(client: socket.socket, proxy: FaultProxy) -> None:
    data = bytes(range(256)) * 4096
    sender = threading.Thread(target=client.sendall, args=(data,))
    sender.start()
    assert receive(client, len(data)) == data
    sender.join()
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""
    counters = proxy.counters
    assert (counters.connections, counters.resets) == (1, 0)
    assert (counters.request_bytes, counters.reply_bytes) == (len(data), len(data))


@pytest.mark.parametrize(("direction", "least"), [("request", 0.1), ("reply", 0.1), ("both", 0.2)])
def test_delay(client: socket.socket, proxy: FaultProxy, direction, least: float) -> None:
    proxy.delay(0.1, direction=direction)
    start = time.monotonic()
    client.sendall(b"late")
    assert receive(client, 4) == b"late"
    assert least <= time.monotonic() - start < least + 1


def test_jitter_keeps_the_order(client: socket.socket, proxy: FaultProxy) -> None:
    proxy.delay(0.01, jitter=0.01)
    sent = b"".join(bytes([number]) * 3 for number in range(100))
    for number in range(100):
        client.sendall(bytes([number]) * 3)
    assert receive(client, len(sent)) == sent


def test_a_blackhole_delivers_after_it_is_healed(client: socket.socket, proxy: FaultProxy, echo: EchoServer) -> None:
    proxy.blackhole("reply")
    client.sendall(b"one")
    wait_until(lambda: echo.received == b"one", what="the request passes")
    assert silent(client)
    proxy.heal()
    assert receive(client, 3) == b"one"
    proxy.blackhole("request")
    client.sendall(b"two")
    assert silent(client)
    assert echo.received == b"one"
    proxy.heal()
    assert receive(client, 3) == b"two"


def test_swallowed_bytes_never_arrive_and_their_connection_is_cut(client: socket.socket, proxy: FaultProxy) -> None:
    proxy.swallow("reply")
    client.sendall(b"gone")
    wait_until(lambda: proxy.counters.swallowed_bytes == 4, what="the reply is swallowed")
    proxy.heal()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with connect(proxy) as other:
        other.sendall(b"new")
        assert receive(other, 3) == b"new"


def test_reset_cuts_what_is_open_and_nothing_else(client: socket.socket, proxy: FaultProxy) -> None:
    client.sendall(b"x")
    assert receive(client, 1) == b"x"
    proxy.reset()
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    with connect(proxy) as other:
        other.sendall(b"y")
        assert receive(other, 1) == b"y"
    assert proxy.counters.resets == 1


def test_resets_at_random_follow_the_probability(proxy: FaultProxy) -> None:
    proxy.reset_at_random(1.0, direction="request")
    with connect(proxy) as connection:
        connection.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)
    proxy.reset_at_random(0.0)
    with connect(proxy) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"


def test_refusing_cuts_new_connections_until_healed(proxy: FaultProxy) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionResetError):
        knock(proxy)
    proxy.heal()
    with connect(proxy) as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"


def test_a_dribbled_byte_is_a_segment_of_its_own(client: socket.socket, proxy: FaultProxy) -> None:
    proxy.dribble("reply")
    client.sendall(b"x" * 500)
    sizes = []
    while sum(sizes) < 500:
        sizes.append(len(client.recv(500)))
    assert len(sizes) > 1
    proxy.heal()
    client.sendall(b"y" * 500)
    assert receive(client, 500) == b"y" * 500


def test_the_server_may_move_or_be_away(proxy: FaultProxy) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        proxy.upstream = f"127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(ConnectionResetError):
        knock(proxy)


class CountingHandler(grpc.GenericRpcHandler):
    """Serves any unary method; counts what it carried out."""

    def __init__(self) -> None:
        self.calls = 0

    def service(self, handler_call_details):
        return grpc.unary_unary_rpc_method_handler(self._answer)

    def _answer(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        self.calls += 1
        return request * 2


@pytest.fixture
def handler() -> CountingHandler:
    return CountingHandler()


@pytest.fixture
def grpc_proxy(handler: CountingHandler) -> Iterator[FaultProxy]:
    with ThreadPoolExecutor(4) as executor:
        server = grpc.server(executor, handlers=[handler])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        with FaultProxy(f"127.0.0.1:{port}") as running:
            yield running
        server.stop(None).wait()


@pytest.fixture
def call(grpc_proxy: FaultProxy) -> Iterator[grpc.UnaryUnaryMultiCallable]:
    with dial(grpc_proxy.address) as channel:
        yield channel.unary_unary("/test/Echo")


def test_a_dropped_reply_means_carried_out_and_not_answered(
    call: grpc.UnaryUnaryMultiCallable, grpc_proxy: FaultProxy, handler: CountingHandler
) -> None:
    assert call(b"a", timeout=5) == b"aa"
    grpc_proxy.drop_next_reply()
    with pytest.raises(grpc.RpcError) as lost:
        call(b"b" * 100_000, timeout=5)
    assert lost.value.code() == grpc.StatusCode.UNAVAILABLE
    assert handler.calls == 2
    assert grpc_proxy.counters.dropped_replies == 1

    def is_answered() -> bool:
        with suppress(grpc.RpcError):  # a channel that does not know yet takes the dead connection once more
            return call(b"c", timeout=5, wait_for_ready=True) == b"cc"
        return False

    wait_until(is_answered, what="a new connection")
    assert handler.calls == 3


def test_grpc_goes_through_a_delayed_and_dribbled_connection(
    call: grpc.UnaryUnaryMultiCallable, grpc_proxy: FaultProxy
) -> None:
    grpc_proxy.delay(0.005, jitter=0.005)
    grpc_proxy.dribble()
    assert call(b"abc" * 100, timeout=10) == b"abc" * 200


def test_a_blackholed_call_ends_at_its_deadline(call: grpc.UnaryUnaryMultiCallable, grpc_proxy: FaultProxy) -> None:
    assert call(b"a", timeout=5) == b"aa"
    grpc_proxy.blackhole("reply")
    with pytest.raises(grpc.RpcError) as late:
        call(b"b", timeout=0.1)
    assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    grpc_proxy.heal()
    assert call(b"c", timeout=5) == b"cc"


def frame(kind: int, flags: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + (1).to_bytes(4, "big") + payload


@pytest.mark.parametrize("cut", [1, 2, 9, 10, 1000])
def test_the_scanner_finds_the_end_of_an_answer_however_it_is_cut(cut: int) -> None:
    before = frame(4, 0, b"\x01" * 12) + frame(6, 0, bytes(8)) + frame(1, 4, b"headers") + frame(0, 1, b"\x01\x05" * 30)
    stream = before + frame(1, 5, b"trailers")
    scanner = AnswerScanner()
    found = [start for start in range(0, len(stream), cut) if scanner.feed(stream[start : start + cut])]
    assert found == [(len(before) + 8) // cut * cut]  # where the trailers' 9 bytes of header are complete


def test_the_first_byte_of_any_other_protocol_is_an_answer() -> None:
    assert AnswerScanner().feed(b"H")
    assert not AnswerScanner().feed(b"")
