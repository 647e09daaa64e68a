"""The client's end of a lane: unary calls to a daemon of the same host over a Unix socket, the others over gRPC.

What a caller sees is a stub with the same methods, and errors with the same meaning. Each call has a connection to
itself; those that are free again are kept for the next ones.
"""

from __future__ import annotations

import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Protocol

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tqclient.errors import InternalError, InvalidArgument, Unavailable
from tqclient.lane_search import CallTime, Search, is_away, wanted
from tqclient.wire import lane as wire
from tqclient.wire.status import from_detail
from tqclient.wire.v1 import common_pb2, lane_pb2
from tqclient.wire.v1.lane_pb2_grpc import LaneStub

IDLE_MAX: Final = 4
"""Connections that are kept for the next calls."""
PROBE_SECONDS: Final = 5.0
"""How long `why_not` waits to be told of a lane."""
RECEIVE_BYTES: Final = 64 * 1024
TakePreview = Callable[[bytes], None]
"""Takes a message that came ahead of a reply; must not raise."""


def _ignore(_: bytes) -> None:
    """Takes a preview, and makes no use of it."""


class Lane:
    """The way to one daemon. Safe to use from many threads.

    Args:
        channel: blocking one to the daemon, by which the lane is found.
        clock: monotonic seconds.
    """

    def __init__(self, channel: grpc.Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._finder = LaneStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        self._lock = threading.Lock()
        self.search = Search(clock)
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()
        self._closed = False

    def method(self, described: MethodDescriptor, over_grpc: Any) -> Method:
        """Returns a method that goes by it while it is there; `over_grpc` is the same of a gRPC stub."""
        return Method(self, described, over_grpc)

    def take(self, time_left: CallTime) -> Connection | None:
        """Returns a connection, which `put_back` or `drop` is then called with; None: call over gRPC.

        Args:
            time_left: of the call that it is for; looking for the lane leaves some of it.
        """
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
                if connection is not None:
                    self._busy.add(connection)
            if connection is None:
                return self._connect(time_left)
            if connection.is_usable():
                return connection
            self.drop(connection)  # the daemon has ended; another one may be at its place

    def put_back(self, connection: Connection) -> None:
        """Keeps a connection whose call was answered for the next one."""
        with self._lock:
            self._busy.discard(connection)
            if not self._closed and len(self._idle) < IDLE_MAX:
                self._idle.append(connection)
                return
        connection.close()

    def drop(self, connection: Connection) -> None:
        """Closes a connection that is of no use any more; the lane is looked for again."""
        with self._lock:
            self._busy.discard(connection)
            self.search.lost()
        connection.close()

    def _connect(self, time_left: CallTime) -> Connection | None:
        found = self.search.found or self._find(time_left.to_find())
        if found is None:
            return None
        try:
            connection = Connection(found, time_left.to_find())
        except OSError as error:
            with self._lock:
                self.search.refused(error)
            return None
        with self._lock:
            if not self._closed:
                self._busy.add(connection)
                return connection
        connection.close()
        return None

    def _find(self, seconds: float) -> lane_pb2.FindLaneReply | None:
        with self._lock:
            if self._closed or not self.search.begin():
                return None
        try:
            found: lane_pb2.FindLaneReply = self._finder.Find(lane_pb2.FindLaneRequest(), timeout=seconds)
        except grpc.RpcError as error:
            with self._lock:
                self.search.failed(error)
            return None
        with self._lock:
            return self.search.told(found)

    def close(self) -> None:
        """Closes every connection; calls under way end with Unavailable."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for connection in idle:
            connection.close()
        for connection in busy:  # its thread closes it
            connection.shut_down()


def why_not(channel: grpc.Channel) -> str | None:
    """Says why calls to a daemon go over gRPC; None: they go by its lane.

    Args:
        channel: blocking one to the daemon.
    """
    if not wanted():
        return "TQ_LANE=off"
    try:
        found: lane_pb2.FindLaneReply = LaneStub(channel).Find(lane_pb2.FindLaneRequest(), timeout=PROBE_SECONDS)  # type: ignore[no-untyped-call,unused-ignore]
        if not found.name:
            return "it has no lane, as one that asks for tokens"
        Connection(found, CallTime().to_find()).close()
    except grpc.RpcError as error:
        return f"it does not tell of a lane ({error.code().name})"
    except ConnectionRefusedError:
        return "it is on another host"
    except OSError as error:
        return f"its lane is not to be had: {error}"
    return None


class Connection:
    """One connection, for one call at a time.

    Args:
        found: where the daemon listens, and the secret that both sides know.
        seconds: how long the way into it may take.

    Raises:
        OSError: nobody listens there: the daemon is on another host, or ended.
        ConnectionError: it is not the daemon, or has no connection to spare.
    """

    def __init__(self, found: lane_pb2.FindLaneReply, seconds: float) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._deadline: float | None = time.monotonic() + seconds
            self._wait_no_longer()
            self._socket.connect(f"\0{found.name}")
            theirs = self._receive(wire.CHALLENGE_BYTES)
            mine = secrets.token_bytes(wire.CHALLENGE_BYTES)
            self._socket.sendall(mine + wire.proof(found.secret, "client", theirs))
            if not wire.proves(self._receive(wire.PROOF_BYTES), found.secret, "daemon", mine):
                raise ConnectionError("whoever listens at the lane is not the daemon")
            self._poll = select.poll()
            self._poll.register(self._socket, select.POLLIN)
        except BaseException:
            self._socket.close()
            raise

    def is_usable(self) -> bool:
        """Says whether the daemon has kept it open; between two calls there is nothing to be read."""
        return not self._poll.poll(0)

    def call(
        self, name: bytes, request: bytes, timeout: float | None, preview: TakePreview = _ignore
    ) -> tuple[int, bytes]:
        """Sends a request and returns the status and the bytes of its answer.

        Args:
            name: of the method.
            request: encoded.
            timeout: seconds; None waits for ever.
            preview: takes what comes ahead of the answer.

        Raises:
            OSError: the connection broke, or the time is over (TimeoutError): it is of no use any more.
        """
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._wait_no_longer()
        self._socket.sendall(wire.request(name, request, timeout))
        self._wait_no_longer()
        status, body, rest = self._frame(b"")
        while status == wire.PREVIEW:
            preview(body)
            status, body, rest = self._frame(rest)
        if rest:
            raise ConnectionError("more came than was announced")
        return status, body

    def _frame(self, data: bytes) -> tuple[int, bytes, bytes]:
        """Returns the status and the body of what comes next, and what came with it; `data` came before."""
        if not data:
            self._wait_no_longer()
            data = self._socket.recv(RECEIVE_BYTES)
        if len(data) < wire.REPLY.size:
            data += self._receive(wire.REPLY.size - len(data))
        length, status = wire.REPLY.unpack_from(data)
        end = wire.REPLY.size + length
        if len(data) < end:
            data += self._receive(end - len(data))
        return status, data[wire.REPLY.size : end], data[end:]

    def _receive(self, length: int) -> bytes:
        data = bytearray(length)
        view, at = memoryview(data), 0
        while at < length:
            self._wait_no_longer()
            got = self._socket.recv_into(view[at:])
            if not got:
                raise ConnectionError("the daemon closed the connection")
            at += got
        return bytes(data)

    def _wait_no_longer(self) -> None:
        """Bounds what the socket does next by the time that is left."""
        left = None if self._deadline is None else self._deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("the time is over")
        self._socket.settimeout(left)

    def shut_down(self) -> None:
        """Ends what another thread waits for."""
        with suppress(OSError):  # it is closed, or the daemon is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes it."""
        self._socket.close()


class Running:
    """A call, which runs in the thread that asks for its result, and which another one may cut short; as much of a
    `grpc.Future` as is needed.

    Args:
        lane: that the connection is of.
        connection: taken for this call.
        method: that is called.
        request: of the call.
        timeout: seconds; None waits for ever.
        preview: takes what comes ahead of the reply.
    """

    def __init__(
        self,
        lane: Lane,
        connection: Connection,
        method: Method,
        request: Message,
        timeout: float | None,
        preview: TakePreview = _ignore,
    ) -> None:
        self._lane = lane
        self._lock = threading.RLock()  # `cancel` may run in a finalizer, inside any holder
        self._connection: Connection | None = connection
        self._method = method
        self._request = request
        self._timeout = timeout
        self._preview = preview
        self._cancelled = False

    def result(self) -> Any:
        """Sends the request and returns the reply; once only.

        Raises:
            grpc.FutureCancelledError: it was cut short.
            Unavailable: the daemon did not answer in time, or has ended.
            TQError: what it answered.
        """
        connection, answered = self._connection, False
        if connection is None:
            raise ValueError("it was run before")
        try:
            status, body = connection.call(
                self._method.path, self._request.SerializeToString(), self._timeout, self._preview
            )
            answered = True
        except OSError as error:
            if self._cancelled:
                raise grpc.FutureCancelledError from None
            raise Unavailable(f"{self._method}: {error}") from None
        finally:
            with self._lock:  # from here on the connection may be another call's
                self._connection = None
            (self._lane.put_back if answered and not self._cancelled else self._lane.drop)(connection)
        return self._method.read(status, body)

    def cancel(self) -> None:
        """Cuts the call short, if it has not ended."""
        with self._lock:
            if self._connection is not None:
                self._cancelled = True
                self._connection.shut_down()


class Described:
    """What a lane's frames say of a unary method.

    Args:
        method: as its service has it.

    Attributes:
        path: its name there.
    """

    def __init__(self, method: MethodDescriptor) -> None:
        self._method = method
        self.path = f"/{method.containing_service.full_name}/{method.name}".encode()
        self._reply: Any = GetMessageClass(method.output_type)

    def __str__(self) -> str:
        return f"{self._method.containing_service.name} of this host: {self._method.name}"

    def read(self, status: int, body: bytes) -> Any:
        """Returns the reply, or raises the error, that came by the lane."""
        try:
            if status == wire.OK:
                return self._reply.FromString(body)
            failure = from_detail(common_pb2.ErrorDetail.FromString(body))
        except (DecodeError, InvalidArgument):
            raise InternalError(f"{self}: {len(body)} bytes that are no answer of it") from None
        raise failure


class Method(Described):
    """One unary method, as a stub has it.

    Args:
        lane: to the daemon.
        method: as its service has it.
        over_grpc: the same method of a gRPC stub.
    """

    def __init__(self, lane: Lane, method: MethodDescriptor, over_grpc: Any) -> None:
        super().__init__(method)
        self._lane = lane
        self._over_grpc = over_grpc

    def __call__(self, request: Message, timeout: float | None = None, preview: TakePreview = _ignore) -> Any:
        """Calls; raises what a gRPC stub raises, or the `TQError` that this would have become.

        Args:
            request: of the call.
            timeout: seconds; None waits for ever.
            preview: takes what comes ahead of the reply, by the lane.
        """
        time_left = CallTime(timeout)
        connection = self._lane.take(time_left)
        if connection is not None:
            return Running(self._lane, connection, self, request, time_left.left(), preview).result()
        try:
            reply = self._over_grpc(request, timeout=time_left.left())
        except grpc.RpcError as error:
            self._lane.search.answers = not is_away(error)
            raise
        self._lane.search.answers = True
        return reply

    def future(self, request: Message, timeout: float | None = None) -> Any:
        """Returns the call as something with `result` and `cancel`."""
        time_left = CallTime(timeout)
        connection = self._lane.take(time_left)
        if connection is None:
            return self._over_grpc.future(request, timeout=time_left.left())
        return Running(self._lane, connection, self, request, time_left.left())


class AnyLane(Protocol):
    """What both kinds of lane have in common."""

    def method(self, described: MethodDescriptor, over_grpc: Any) -> Any:
        """Returns a method that goes by it while it is there; `over_grpc` is the same of a gRPC stub."""
        ...

    def close(self) -> Any:
        """Closes every connection; calls under way fail."""
        ...


class Methods:
    """A stub whose unary methods go by the lane while there is one, and over gRPC otherwise.

    Args:
        stub: the service's.
        service: what it serves.
        lane: to the daemon: a `Lane`, or an `AioLane` for a stub of asyncio.
    """

    def __init__(self, stub: Any, service: ServiceDescriptor, lane: AnyLane) -> None:
        self._stub = stub
        self._service = service
        self._lane = lane

    def __getattr__(self, name: str) -> Any:
        """Returns a method. It is made when it is first called for."""
        described, over_grpc = self._service.methods_by_name.get(name), getattr(self._stub, name)
        if described is None or described.client_streaming or described.server_streaming:
            return over_grpc
        method = self._lane.method(described, over_grpc)
        setattr(self, name, method)
        return method
