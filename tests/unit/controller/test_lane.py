"""Lanes: what a daemon of this host answers over its Unix socket, and to whom. The daemon runs in a thread beside."""

from __future__ import annotations

import asyncio
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from tests.harness import wait_until
from tests.unit.controller.test_serving import Servicer
from tqclient import limits
from tqclient.channel import Access, Channels
from tqclient.driver import run_sync
from tqclient.errors import InternalError, InvalidArgument, SampleNotFound, TQError, Unavailable, UnsupportedVersion
from tqclient.lane import IDLE_MAX, Connection, Lane, why_not
from tqclient.lane_search import FIND_AGAIN_SECONDS, CallTime
from tqclient.operations.effects import CONTROLLER, Call, Operation
from tqclient.wire import lane as wire
from tqclient.wire.dialing import dial
from tqclient.wire.status import from_detail
from tqclient.wire.v1 import common_pb2, controller_pb2_grpc, lane_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.security import Security
from tqserver.serving import DaemonServer

pytestmark = pytest.mark.usefixtures("patient_lanes")

BEAT = b"/tq.v1.Controller/Heartbeat"


class Slow(Servicer):
    """Answers one more number when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.previewed = asyncio.Event()

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatReply:  # noqa: N802
        if request.session == 4:
            self.waits.set()
            await self.goes_on.wait()
        if request.session == 6:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await asyncio.sleep(0.05)  # until the socket is closed
                context.preview(b"to nobody")
                self.previewed.set()
                raise
        for size in request.dropped_pins if request.session == 7 else b"":
            context.preview(bytes([size]) * (1 << size))
        return await super().Heartbeat(request, context)


class Daemon:
    """A server on an event loop of its own, and clients of it."""

    def __init__(self, security: Security | None = None) -> None:
        self._security = security or Security()
        self._loop = uvloop.new_event_loop()  # as daemons have it
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.address = "127.0.0.1:0"
        self.start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def start(self) -> None:
        async def starting() -> None:
            self.server = DaemonServer(self._security)
            self.servicer = Slow()
            controller_pb2_grpc.add_ControllerServicer_to_server(self.servicer, self.server.grpc)
            self.address = self.server.bind(self.address)
            await self.server.start(["tq.v1.Controller"])

        self.run(starting())

    def go_on(self) -> None:
        self._loop.call_soon_threadsafe(self.servicer.goes_on.set)

    def stop(self, timeout: float = 0.0) -> None:
        self.run(self.server.drain(timeout))

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def found(self) -> lane_pb2.FindLaneReply:
        return self.run(self.server._lane.Find(lane_pb2.FindLaneRequest(), None))

    @property
    def connections(self) -> int:
        return len(self.server._lane.connections)

    @contextmanager
    def channels(self) -> Iterator[tuple[Channels, Lane]]:
        """Channels with lanes, and the lane of this daemon."""
        channels = Channels(self.address, Access(self.address, "one").channel, lane=Lane)
        try:
            channels.stub(CONTROLLER)
            yield channels, channels._lanes[self.address]
        finally:
            for each in channels.take_all():
                each.close()


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.close()


def beat(channels: Channels, session: int = 9, timeout: float = 10.0) -> int:
    def operation() -> Operation[pb.HeartbeatReply]:
        return (yield Call(CONTROLLER, "Heartbeat", pb.HeartbeatRequest(session=session), timeout))

    return run_sync(operation(), channels).epoch


def ask(daemon: Daemon, method: bytes, request: bytes) -> tuple[int, bytes]:
    """Calls by a connection of its own."""
    with closing(Connection(daemon.found, 10)) as connection:
        return connection.call(method, request, 5.0)


def until(condition: Callable[[], bool]) -> None:
    wait_until(condition, what="the daemon or the client is as far")


def test_calls_go_by_the_lane_once_the_daemon_has_answered(daemon: Daemon) -> None:
    with daemon.channels() as (channels, lane):
        assert beat(channels) == 5  # over gRPC: who knows whether it is there
        assert daemon.connections == 0
        for _ in range(3):
            assert beat(channels) == 5
        assert (daemon.connections, len(lane._idle), len(lane._busy)) == (1, 1, 0)
        assert daemon.servicer.called == 4
    until(lambda: daemon.connections == 0)


@pytest.mark.parametrize(
    ("session", "error", "text"),
    [(1, SampleNotFound, "sample 4 is gone"), (2, InternalError, "Heartbeat: RuntimeError")],
)
def test_errors_are_those_of_grpc(daemon: Daemon, session: int, error: type[TQError], text: str) -> None:
    with daemon.channels() as (channels, lane):
        beat(channels)
        for _ in range(2):
            with pytest.raises(error, match=text) as caught:
                beat(channels, session)
            assert caught.value.ids == ((4,) if session == 1 else ())
        assert len(lane._idle) == 1  # the connection is as good as before


@pytest.mark.parametrize("sizes", [[3], [0, 5, 1], [20, 2, 20]])  # 1 MiB does not come in one piece
def test_previews_come_ahead_of_the_reply_to_whoever_takes_them(daemon: Daemon, sizes: list[int]) -> None:
    request = pb.HeartbeatRequest(session=7, dropped_pins=bytes(sizes))
    with daemon.channels() as (channels, _):
        beat(channels)
        came: list[bytes] = []

        def operation(preview: Callable[[bytes], None] | None) -> Operation[pb.HeartbeatReply]:
            return (yield Call(CONTROLLER, "Heartbeat", request, 10.0, preview))

        assert run_sync(operation(came.append), channels).epoch == 5
        assert came == [bytes([size]) * (1 << size) for size in sizes]
        assert run_sync(operation(None), channels).epoch == 5
        assert beat(channels) == 5
        assert daemon.connections == 1


def test_a_preview_for_a_caller_who_is_gone_fails_nothing(daemon: Daemon) -> None:
    with closing(Connection(daemon.found, 10)) as connection, pytest.raises(TimeoutError):
        connection.call(BEAT, pb.HeartbeatRequest(session=6).SerializeToString(), 0.2)
    until(daemon.servicer.previewed.is_set)


def test_a_reply_that_is_too_large_says_so_and_a_large_request_arrives(daemon: Daemon) -> None:
    with daemon.channels() as (channels, _):
        beat(channels)
        stub = channels.stub(CONTROLLER)
        with pytest.raises(InvalidArgument, match=f"at most {limits.MESSAGE_BYTES_MAX}"):
            stub.GetDirectories(pb.GetDirectoriesRequest(), timeout=10)
        large = pb.HeartbeatRequest(session=9, dropped_pins=secrets.token_bytes(3 << 20))
        assert stub.Heartbeat(large, timeout=10).epoch == 5
        assert daemon.connections == 1


def test_a_caller_that_waits_no_longer_ends_its_call(daemon: Daemon) -> None:
    with daemon.channels() as (channels, lane):
        beat(channels)
        beat(channels)  # it is found
        with pytest.raises(Unavailable):
            beat(channels, 3, timeout=0.1)
        until(daemon.servicer.cancelled.is_set)
        assert beat(channels) == 5  # by a new connection
        assert (len(lane._idle), len(lane._busy)) == (1, 0)


def test_calls_of_many_threads_have_a_connection_each_and_few_are_kept(daemon: Daemon) -> None:
    with daemon.channels() as (channels, lane):
        beat(channels)
        beat(channels)  # it is found
        waiting = 2 * IDLE_MAX
        with ThreadPoolExecutor(waiting) as pool:
            calls = [pool.submit(beat, channels, 3, 2.0) for _ in range(waiting)]
            until(lambda: daemon.connections == waiting)
            assert beat(channels) == 5
            for call in calls:
                assert isinstance(call.exception(), Unavailable)
            assert list(pool.map(lambda _: beat(channels), range(50))) == [5] * 50
        assert 1 <= len(lane._idle) <= IDLE_MAX
        until(lambda: daemon.connections == len(lane._idle))


def test_a_daemon_that_started_again_is_found_again_and_no_call_fails_for_it(daemon: Daemon) -> None:
    with daemon.channels() as (channels, _):
        beat(channels)
        beat(channels)
        daemon.stop()
        with pytest.raises(Unavailable):
            beat(channels, timeout=1.0)
        daemon.start()
        until(lambda: not _fails(channels))
        beat(channels)
        assert daemon.connections == 1


def _fails(channels: Channels) -> bool:
    try:
        beat(channels)
    except Unavailable:
        return True
    return False


def test_a_drain_lets_calls_end_and_cuts_off_those_that_do_not(daemon: Daemon) -> None:
    with daemon.channels() as (channels, _), ThreadPoolExecutor(2) as pool:
        beat(channels)
        slow = pool.submit(beat, channels, 4)
        until(daemon.servicer.waits.is_set)
        stopping = pool.submit(daemon.stop, 10.0)
        until(lambda: daemon.server._lane.draining)
        daemon.go_on()
        assert slow.result() == 5
        stopping.result()
        daemon.start()
        until(lambda: not _fails(channels))
        beat(channels)
        stuck = pool.submit(beat, channels, 3)
        until(daemon.servicer.waits.is_set)
        began = time.monotonic()
        daemon.stop(0.3)
        assert time.monotonic() - began >= 0.3
        assert isinstance(stuck.exception(), Unavailable)
    daemon.start()


def test_closing_the_channels_ends_the_calls_of_other_threads(daemon: Daemon) -> None:
    with daemon.channels() as (channels, _), ThreadPoolExecutor(1) as pool:
        beat(channels)
        stuck = pool.submit(beat, channels, 3)
        until(daemon.servicer.waits.is_set)
        for each in channels.take_all():
            each.close()
        assert isinstance(stuck.exception(timeout=60), Unavailable)


def test_a_call_that_another_thread_cuts_short_says_so_and_a_late_cut_harms_nobody(daemon: Daemon) -> None:
    with daemon.channels() as (channels, lane), ThreadPoolExecutor(1) as pool:
        beat(channels)
        heartbeat = channels.stub(CONTROLLER).Heartbeat
        stuck = heartbeat.future(pb.HeartbeatRequest(session=3), timeout=10)
        result = pool.submit(stuck.result)
        until(daemon.servicer.waits.is_set)
        stuck.cancel()
        assert isinstance(result.exception(timeout=60), grpc.FutureCancelledError)
        until(daemon.servicer.cancelled.is_set)
        early = heartbeat.future(pb.HeartbeatRequest(session=9), timeout=10)
        early.cancel()
        with pytest.raises(grpc.FutureCancelledError):
            early.result()
        late = heartbeat.future(pb.HeartbeatRequest(session=9), timeout=10)
        assert late.result().epoch == 5
        late.cancel()
        assert beat(channels) == 5
        assert (len(lane._idle), len(lane._busy)) == (1, 0)


def test_who_does_not_know_the_secret_is_cut_off(daemon: Daemon) -> None:
    wrong = lane_pb2.FindLaneReply(name=daemon.found.name, secret=secrets.token_bytes(32))
    with pytest.raises(ConnectionError, match="closed"):
        Connection(wrong, 10)
    until(lambda: daemon.connections == 0)
    assert ask(daemon, BEAT, pb.HeartbeatRequest(session=9).SerializeToString())[0] == wire.OK


def test_who_listens_in_the_daemons_place_is_not_trusted() -> None:
    name = f"tq-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()

        def pretend() -> None:
            there, _ = listening.accept()
            with there:
                there.sendall(bytes(wire.CHALLENGE_BYTES))
                there.recv(wire.CHALLENGE_BYTES + wire.PROOF_BYTES)
                there.sendall(bytes(wire.PROOF_BYTES))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionError, match="is not the daemon"):
            Connection(lane_pb2.FindLaneReply(name=name, secret=bytes(32)), 10)
        thread.join()


def test_where_tokens_are_asked_for_there_is_no_lane(tmp_path: Path) -> None:
    """A token that is taken out of the file must be of no use from then on."""
    (tmp_path / "tokens").write_text("one\n")
    daemon = Daemon(Security(token_file=tmp_path / "tokens"))
    try:
        with daemon.channels() as (channels, _):
            for _ in range(3):
                assert beat(channels) == 5
        assert (daemon.found.name, daemon.found.secret, daemon.connections) == ("", b"", 0)
        assert reason(daemon) == "it has no lane, as one that asks for tokens"
    finally:
        daemon.close()


def reason(daemon: Daemon) -> str | None:
    with closing(Access(daemon.address, "one").channel(daemon.address)) as channel:
        return why_not(channel)


def test_why_a_lane_is_not_to_be_had_can_be_told(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    assert reason(daemon) is None
    monkeypatch.setattr(daemon.server._lane, "_connections_max", 0)
    assert str(reason(daemon)).startswith("its lane is not to be had: ")
    daemon.server._lane._name = "tq-lane-of-another-host"
    assert reason(daemon) == "it is on another host"
    monkeypatch.setenv("TQ_LANE", "off")
    assert reason(daemon) == "TQ_LANE=off"


def test_an_older_daemon_tells_of_no_lane() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with dial(f"127.0.0.1:{port}") as channel:
        assert why_not(channel) == "it does not tell of a lane (UNIMPLEMENTED)"
    server.stop(None).wait()


def test_a_lane_that_cannot_be_had_is_not_looked_for_at_each_call(daemon: Daemon) -> None:
    now = [0.0]
    asked = []
    lane = Lane(Access(daemon.address).channel(daemon.address), lambda: now[0])

    class Finder:
        def Find(self, request: Any, timeout: float) -> lane_pb2.FindLaneReply:  # noqa: N802
            asked.append(now[0])
            return lane_pb2.FindLaneReply(name="tq-lane-of-another-host", secret=bytes(32))

    lane._finder = Finder()
    assert lane.take(CallTime()) is None
    assert asked == []  # nobody has answered yet
    lane.search.answers = True
    for now[0] in (1.0, 2.0, FIND_AGAIN_SECONDS, FIND_AGAIN_SECONDS + 1.0):
        assert lane.take(CallTime()) is None
    assert asked == [1.0, FIND_AGAIN_SECONDS + 1.0]


@contextmanager
def silent(step: str) -> Iterator[lane_pb2.FindLaneReply | None]:
    """A daemon that is stopped while it is asked for its lane, or while one comes in by it: its queue takes one in.

    Yields:
        Where its lane is, if it told.
    """
    name = f"tq-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"\0{name}")
        listening.listen()
        yield lane_pb2.FindLaneReply(name=name, secret=bytes(32)) if step == "enter" else None


class OverGrpc:
    """A method of a stub, which notes how long it may take, and when it is called."""

    def __init__(self) -> None:
        self.called: list[tuple[float, float]] = []

    def __call__(self, request: Any, timeout: float) -> Any:
        self.called.append((timeout, time.monotonic()))
        return pb.HeartbeatReply()

    future = __call__

    def check(self, begun: float, whole: float) -> None:
        """Its one call has what is left of a whole call that began then, of which looking for the lane took half."""
        ((timeout, called),) = self.called
        assert called - begun > 0.4 * whole
        assert max(0.0, begun + whole - called) <= timeout <= 0.6 * whole


HEARTBEAT = pb.DESCRIPTOR.services_by_name["Controller"].methods_by_name["Heartbeat"]


@pytest.mark.parametrize("way", ["__call__", "future"])
@pytest.mark.parametrize("step", ["find", "enter"])
def test_looking_for_a_lane_takes_its_time_from_the_call(daemon: Daemon, step: str, way: str) -> None:
    """A daemon that was stopped held each call up for longer than it had."""
    with silent(step) as found, Access(daemon.address).channel(daemon.address) as channel:
        lane = Lane(channel)
        lane.search.answers, lane.search.found = True, found

        class Finder:
            def Find(self, request: Any, timeout: float) -> lane_pb2.FindLaneReply:  # noqa: N802
                time.sleep(timeout)
                return lane_pb2.FindLaneReply()

        lane._finder = Finder()
        over_grpc = OverGrpc()
        start = time.monotonic()
        getattr(lane.method(HEARTBEAT, over_grpc), way)(pb.HeartbeatRequest(), timeout=1.0)
    over_grpc.check(start, 1.0)


def raw(daemon: Daemon) -> socket.socket:
    """A trusted connection, for messages that no client of ours sends."""
    return Connection(daemon.found, 10)._socket


def _ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "message",
    [
        wire.REQUEST.pack(limits.MESSAGE_BYTES_MAX + 1, 0, len(BEAT)) + BEAT,
        wire.REQUEST.pack(0, 1000, len(BEAT)) + BEAT + b"more than one request",
    ],
    ids=["too long", "more than its turn"],
)
def test_what_breaks_the_rules_is_cut_off(daemon: Daemon, message: bytes) -> None:
    with raw(daemon) as connection:
        connection.settimeout(10)
        connection.sendall(message)
        assert _ended(connection)
    until(lambda: daemon.connections == 0)


def test_a_method_that_the_daemon_does_not_have_is_named_as_of_another_version(daemon: Daemon) -> None:
    status, body = ask(daemon, b"/tq.v1.Controller/Attach", b"")
    assert status == wire.FAILED
    assert UnsupportedVersion.__name__ in repr(_error(body))


def _error(body: bytes) -> TQError:
    return from_detail(common_pb2.ErrorDetail.FromString(body))


def test_a_request_may_come_in_pieces(daemon: Daemon) -> None:
    request = pb.HeartbeatRequest(session=9).SerializeToString()
    message = wire.REQUEST.pack(len(request), 1000, len(BEAT)) + BEAT + request
    with raw(daemon) as connection:
        connection.settimeout(10)
        for at in range(len(message)):
            connection.sendall(message[at : at + 1])
            time.sleep(0.001)
        assert connection.recv(wire.REPLY.size)[-1] == wire.OK


def test_bytes_that_do_not_parse_are_an_invalid_argument(daemon: Daemon) -> None:
    status, body = ask(daemon, BEAT, b"\xff\xff")
    assert status == wire.FAILED
    assert isinstance(_error(body), InvalidArgument)
