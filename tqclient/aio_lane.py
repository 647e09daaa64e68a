"""The asyncio client's end of a lane; `tqclient.lane` has that of threads, and says what a lane is.

Everything here belongs to the event loop of its client.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from tqclient.errors import Unavailable
from tqclient.lane import IDLE_MAX, Described
from tqclient.lane_search import CallTime, Search, is_away
from tqclient.wire import lane as wire
from tqclient.wire.v1 import lane_pb2
from tqclient.wire.v1.lane_pb2_grpc import LaneStub

_BROKEN: Final = (OSError, EOFError, asyncio.TimeoutError)  # the last is an OSError from Python 3.11 on
"""What the end of a connection, or of the time for it, is raised as."""


class AioLane:
    """The way to one daemon.

    Args:
        channel: asyncio one to the daemon, by which the lane is found.
        clock: monotonic seconds.
    """

    def __init__(self, channel: grpc.aio.Channel, clock: Callable[[], float] = time.monotonic) -> None:
        self._finder = LaneStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
        self.search = Search(clock)
        self._idle: list[AioConnection] = []
        self._busy: set[AioConnection] = set()
        self._closed = False

    def method(self, described: MethodDescriptor, over_grpc: Any) -> AioMethod:
        """Returns a method that goes by it while it is there; `over_grpc` is the same of a gRPC stub."""
        return AioMethod(self, described, over_grpc)

    async def take(self, time_left: CallTime) -> AioConnection | None:
        """Returns a connection, which `put_back` or `drop` is then called with; None: call over gRPC.

        Args:
            time_left: of the call that it is for; looking for the lane leaves some of it.
        """
        while self._idle:
            connection = self._idle.pop()
            if connection.is_usable():
                self._busy.add(connection)
                return connection
            self.drop(connection)  # the daemon has ended; another one may be at its place
        return await self._connect(time_left)

    def put_back(self, connection: AioConnection) -> None:
        """Keeps a connection whose call was answered for the next one."""
        self._busy.discard(connection)
        if not self._closed and len(self._idle) < IDLE_MAX:
            self._idle.append(connection)
        else:
            connection.close()

    def drop(self, connection: AioConnection) -> None:
        """Closes a connection that is of no use any more; the lane is looked for again."""
        self._busy.discard(connection)
        self.search.lost()
        connection.close()

    async def _connect(self, time_left: CallTime) -> AioConnection | None:
        found = self.search.found or await self._find(time_left.to_find())
        if found is None:
            return None
        try:
            connection = await AioConnection.open(found, time_left.to_find())
        except _BROKEN as error:
            self.search.refused(error)
            return None
        if self._closed:
            connection.close()
            return None
        self._busy.add(connection)
        return connection

    async def _find(self, seconds: float) -> lane_pb2.FindLaneReply | None:
        if self._closed or not self.search.begin():
            return None
        try:
            found: lane_pb2.FindLaneReply = await self._finder.Find(lane_pb2.FindLaneRequest(), timeout=seconds)
        except grpc.RpcError as error:
            self.search.failed(error)
            return None
        return self.search.told(found)

    async def close(self) -> None:
        """Closes every connection; calls under way end with Unavailable."""
        self._closed = True
        for connection in (*self._idle, *self._busy):
            connection.close()
        self._idle.clear()


class AioConnection:
    """One connection, for one call at a time. Made by `open`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, found: lane_pb2.FindLaneReply, seconds: float) -> AioConnection:
        """Connects.

        Args:
            found: where the daemon listens, and the secret that both sides know.
            seconds: how long the way into it may take.

        Raises:
            OSError, EOFError: nobody listens there, or it is not the daemon, or that has no connection to spare.
            asyncio.TimeoutError: the time is over.
        """
        end = socket.socket(socket.AF_UNIX)
        try:
            end.setblocking(False)
            end.connect(f"\0{found.name}")  # at once, or not at all
            reader, writer = await asyncio.open_unix_connection(sock=end)
        except BaseException:
            end.close()
            raise
        connection = cls(reader, writer)
        try:
            with connection._ends_in(seconds):
                theirs = await reader.readexactly(wire.CHALLENGE_BYTES)
                mine = secrets.token_bytes(wire.CHALLENGE_BYTES)
                writer.write(mine + wire.proof(found.secret, "client", theirs))
                proof = await reader.readexactly(wire.PROOF_BYTES)
            if not wire.proves(proof, found.secret, "daemon", mine):
                raise ConnectionError("whoever listens at the lane is not the daemon")
        except BaseException:
            connection.close()
            raise
        return connection

    def is_usable(self) -> bool:
        """Says whether the daemon has kept it open, as far as the event loop has heard."""
        return not self._writer.is_closing() and not self._reader.at_eof()

    async def call(self, name: bytes, request: bytes, timeout: float | None) -> tuple[int, bytes]:
        """Sends a request and returns the status and the bytes of its answer.

        Raises:
            OSError, EOFError, asyncio.TimeoutError: the connection broke, or the time is over: it is of no use any
                more.
        """
        with self._ends_in(timeout):
            self._writer.write(wire.request(name, request, timeout))
            await self._writer.drain()
            status = wire.PREVIEW
            while status == wire.PREVIEW:  # to make use of one takes work that an event loop has no time for
                length, status = wire.REPLY.unpack(await self._reader.readexactly(wire.REPLY.size))
                body = await self._reader.readexactly(length)
        return status, body

    @contextmanager
    def _ends_in(self, seconds: float | None) -> Iterator[None]:
        """Closes the connection under its block when the time is over; None: never.

        Not so `asyncio.wait_for`: before Python 3.12 it drops a cancellation that comes together with the answer.

        Raises:
            asyncio.TimeoutError: the time is over.
        """
        if seconds is None:
            yield
            return
        if seconds <= 0:
            raise asyncio.TimeoutError
        loop = asyncio.get_running_loop()
        timer = loop.call_later(seconds, self.close)
        try:
            yield
        except _BROKEN:
            if loop.time() >= timer.when():
                raise asyncio.TimeoutError from None
            raise
        finally:
            timer.cancel()

    def close(self) -> None:
        """Closes it; what waits for it fails."""
        self._writer.transport.abort()


class AioMethod(Described):
    """One unary method, as a stub of asyncio has it.

    Args:
        lane: to the daemon.
        method: as its service has it.
        over_grpc: the same method of a gRPC stub.
    """

    def __init__(self, lane: AioLane, method: MethodDescriptor, over_grpc: Any) -> None:
        super().__init__(method)
        self._lane = lane
        self._over_grpc = over_grpc

    async def __call__(self, request: Message, timeout: float | None = None) -> Any:
        """Calls; raises what a gRPC stub raises, or the `TQError` that this would have become."""
        time_left = CallTime(timeout)
        connection = await self._lane.take(time_left)
        if connection is None:
            return await self._call_over_grpc(request, time_left.left())
        answered = False
        try:
            status, body = await connection.call(self.path, request.SerializeToString(), time_left.left())
            answered = True
        except _BROKEN as error:
            reason = str(error) or "the time is over"
            raise Unavailable(f"{self}: {reason}") from None
        finally:  # also when it is cancelled: the daemon cancels what it does when the connection closes
            (self._lane.put_back if answered else self._lane.drop)(connection)
        return self.read(status, body)

    async def _call_over_grpc(self, request: Message, timeout: float | None) -> Any:
        try:
            reply = await self._over_grpc(request, timeout=timeout)
        except grpc.RpcError as error:
            self._lane.search.answers = not is_away(error)
            raise
        self._lane.search.answers = True
        return reply
