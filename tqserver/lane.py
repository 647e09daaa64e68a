"""The daemon's end of a lane: the unary methods that its gRPC server has, behind the same boundary, over a Unix socket.

gRPC takes a millisecond for a call to a daemon that was idle, and half a millisecond of processor time on either side;
this takes a tenth of both.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

from tqclient import limits
from tqclient.errors import UnsupportedVersion
from tqclient.wire import lane as wire
from tqclient.wire.status import DETAIL_KEY, to_detail
from tqclient.wire.v1 import lane_pb2, lane_pb2_grpc

Unary = Callable[[bytes, Any], Awaitable[bytes]]
"""Takes a request's bytes and a context; returns the reply's, or aborts."""

HELLO_SECONDS: Final = 5.0
"""Whoever has not shown by then that they know the secret is cut off."""
NAME_BYTES: Final = 16
DESCRIPTORS_SHARE: Final = 4
"""At most one in so many of the process's file descriptors is a lane's connection; the others call over gRPC."""

_log = logging.getLogger(__name__)


class Refused(Exception):
    """A call ended with an error.

    Attributes:
        detail: an ErrorDetail, encoded.
    """

    def __init__(self, detail: bytes) -> None:
        super().__init__()
        self.detail = detail


class LaneContext:
    """What a handler learns of its call; as much of `grpc.aio.ServicerContext` as the handlers use.

    Args:
        seconds: that the caller will wait; None: for ever.
        preview: sends a message ahead of the reply, to a caller that asked for it.
    """

    def __init__(self, seconds: float | None, preview: Callable[[bytes], None]) -> None:
        self.preview = preview
        self._loop = asyncio.get_running_loop()
        self._deadline = None if seconds is None else self._loop.time() + seconds

    def time_remaining(self) -> float | None:
        """Returns the seconds that the caller will wait; None when it waits for ever."""
        return None if self._deadline is None else self._deadline - self._loop.time()

    async def abort(self, code: object, details: str, trailing_metadata: Sequence[tuple[str, bytes]]) -> NoReturn:
        """Ends the call with the error whose detail is in the trailing metadata."""
        raise Refused(dict(trailing_metadata)[DETAIL_KEY])


class LaneServer(lane_pb2_grpc.LaneServicer):
    """Serves the lane, and tells over gRPC where it is."""

    def __init__(self) -> None:
        self.methods: dict[bytes, Unary] = {}
        self.secret = secrets.token_bytes(32)
        self.connections: set[Connection] = set()
        self.draining = False
        self._name = ""
        self._server: asyncio.Server | None = None
        self._connections_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0] // DESCRIPTORS_SHARE

    def add(self, service: str, methods: Mapping[str, Unary]) -> None:
        """Takes in the unary methods of a service."""
        self.methods.update({f"/{service}/{name}".encode(): method for name, method in methods.items()})

    async def start(self) -> None:
        """Listens; where that cannot be, everybody goes on over gRPC."""
        name = f"tq-lane-{secrets.token_hex(NAME_BYTES)}"
        listening = socket.socket(socket.AF_UNIX)
        try:
            listening.bind(f"\0{name}")
            self._server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(self), sock=listening)
        except OSError as error:
            listening.close()
            _log.warning("no lane for clients of this host, they call over gRPC: %s", error)
        else:
            self._name = name

    async def Find(self, request: lane_pb2.FindLaneRequest, context: Any) -> lane_pb2.FindLaneReply:  # noqa: N802
        """Tells a client where the lane is."""
        return lane_pb2.FindLaneReply(name=self._name, secret=self.secret if self._name else b"")

    def admit(self, connection: Connection) -> bool:
        """Takes in a connection, if there may be another one."""
        if self.draining or len(self.connections) >= self._connections_max:
            return False
        self.connections.add(connection)
        return True

    async def drain(self, timeout: float) -> None:
        """Ends the lane: calls under way may finish; those that have not within `timeout` seconds are cut off."""
        self.draining = True
        if self._server is not None:
            self._server.close()
        calls = {call: connection for connection in self.connections if (call := connection.finish()) is not None}
        if calls:
            _, stuck = await asyncio.wait(calls, timeout=timeout)
            for call in stuck:
                calls[call].cut()


class Connection(asyncio.Protocol):
    """One client's connection.

    Args:
        lane: that it came in by.
    """

    def __init__(self, lane: LaneServer) -> None:
        self._lane = lane
        self._challenge = secrets.token_bytes(wire.CHALLENGE_BYTES)
        self._trusted = False
        self._buffer = bytearray()  # the beginning of a message
        self._needed = 0  # bytes, before it is looked at again
        self._timer: asyncio.TimerHandle | None = None
        self._call: asyncio.Task[None] | None = None

    # asyncio.Protocol.

    def connection_made(self, transport: Any) -> None:
        """Greets the client."""
        self._transport = transport
        if not self._lane.admit(self):
            transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(HELLO_SECONDS, self._transport.abort)
        transport.write(self._challenge)

    def data_received(self, data: bytes) -> None:
        """Takes in what the client sent; a short request comes in one piece, and is not copied."""
        if self._call is not None:  # it is not its turn
            self.cut()
            return
        if self._buffer:
            self._buffer += data
            if len(self._buffer) < self._needed:
                return
            data = bytes(self._buffer)
        self._needed = self._take(data)
        if self._needed > len(data):
            self._buffer = self._buffer or bytearray(data)
        else:
            self._buffer.clear()

    def connection_lost(self, error: Exception | None) -> None:
        """The client is gone, or was cut off: nobody waits for its call any more."""
        self._lane.connections.discard(self)
        self._trust_timer_ends()
        if self._call is not None:
            self._call.cancel()

    # Messages.

    def _take(self, data: bytes) -> int:
        """Takes a whole message; returns how many bytes it has, or those that are needed to see that."""
        return self._request(data) if self._trusted else self._hello(data)

    def _hello(self, data: bytes) -> int:
        size = wire.CHALLENGE_BYTES + wire.PROOF_BYTES
        if len(data) < size:
            return size
        theirs, offered = data[: wire.CHALLENGE_BYTES], data[wire.CHALLENGE_BYTES :]
        if not wire.proves(offered, self._lane.secret, "client", self._challenge):
            self.cut()
            return size
        self._trust_timer_ends()
        self._trusted = True
        self._transport.write(wire.proof(self._lane.secret, "daemon", theirs))
        return size

    def _request(self, data: bytes) -> int:
        if len(data) < wire.REQUEST.size:
            return wire.REQUEST.size
        length, milliseconds, name_length = wire.REQUEST.unpack_from(data)  # type: tuple[int, int, int]
        start = wire.REQUEST.size + name_length
        if length > limits.MESSAGE_BYTES_MAX or len(data) > start + length:
            self.cut()
        elif len(data) == start + length:
            method = self._lane.methods.get(data[wire.REQUEST.size : start])
            seconds = None if milliseconds == wire.FOR_EVER_MS else milliseconds / 1000
            self._call = asyncio.get_running_loop().create_task(self._answer(method, data[start:], seconds))
        return start + length

    async def _answer(self, method: Unary | None, request: bytes, seconds: float | None) -> None:
        status, body = wire.OK, b""
        try:
            if method is None:
                error = UnsupportedVersion("this daemon has no such method; it is of another version than the client")
                raise Refused(to_detail(error).SerializeToString())
            body = await method(request, LaneContext(seconds, self._preview))
        except Refused as refused:
            status, body = wire.FAILED, refused.detail
        finally:
            self._call = None
        self._send(status, body)
        if self._lane.draining:
            self._transport.close()

    def _preview(self, body: bytes) -> None:
        self._send(wire.PREVIEW, body)

    def _send(self, status: int, body: bytes) -> None:
        if not self._transport.is_closing():  # else nobody is there any more, as the call will soon be told
            self._transport.write(wire.REPLY.pack(len(body), status) + body)

    # Its end.

    def _trust_timer_ends(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def finish(self) -> asyncio.Task[None] | None:
        """Ends the connection after the call that is under way, which is returned; or at once."""
        if self._call is None:
            self._transport.close()
        return self._call

    def cut(self) -> None:
        """Ends the connection at once."""
        self._transport.abort()
