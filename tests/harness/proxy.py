"""A TCP proxy that breaks connections in the ways that networks do, on the test's word.

It runs in a thread of its own; every method may be called from any other thread, and has taken effect when it returns.
A direction is `request` (from the client), `reply` (to the client) or `both`.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

Direction = Literal["request", "reply", "both"]

READ_BYTES: Final = 64 * 1024
CHUNKS_IN_FLIGHT: Final = 256
"""Per direction of a connection; beyond it the sender is held back, as by a full socket buffer."""
CONTROL_SECONDS: Final = 10.0
_RESET: Final = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing sends RST

T = TypeVar("T")


@dataclass
class _Faults:
    """How one direction is broken, now."""

    delay: float = 0.0
    jitter: float = 0.0
    reset_probability: float = 0.0
    dribble: bool = False
    swallow: bool = False
    reset_on_answer: bool = False


@dataclass
class Counters:
    """What went through so far.

    Attributes:
        connections: that were accepted.
        resets: connections that the proxy cut.
        request_bytes: that were passed on to the server.
        reply_bytes: that were passed on to the client.
        swallowed_bytes: that were not passed on, either way.
        dropped_replies: answers that `drop_next_reply` swallowed.
    """

    connections: int = 0
    resets: int = 0
    request_bytes: int = 0
    reply_bytes: int = 0
    swallowed_bytes: int = 0
    dropped_replies: int = 0


class AnswerScanner:
    """Finds, in what an HTTP/2 server sends, the end of an answer; in anything else, the first byte is the answer.

    A gRPC answer ends with a HEADERS frame that carries END_STREAM; SETTINGS, PING and WINDOW_UPDATE frames may come
    before it, and say nothing about whether the call was carried out. Frame layout: RFC 9113, section 4.1.
    """

    _HEADER_BYTES: Final = 9
    _HEADERS: Final = 1
    _SETTINGS: Final = 4
    _END_STREAM: Final = 1

    def __init__(self) -> None:
        self._header = bytearray()
        self._skip = 0
        self._is_http2: bool | None = None

    def feed(self, data: bytes) -> bool:
        """Takes the next bytes of the connection; returns whether an answer ends within them."""
        found = False
        position = 0
        if self._is_http2 is None and data and not self._header and data[0] != 0:
            self._is_http2 = False  # a first SETTINGS frame is shorter than 64 KiB
        while position < len(data):
            if self._is_http2 is False:
                return True
            if self._skip:
                step = min(self._skip, len(data) - position)
                self._skip -= step
                position += step
                continue
            step = self._HEADER_BYTES - len(self._header)
            self._header += data[position : position + step]
            position += step
            if len(self._header) == self._HEADER_BYTES:
                found |= self._frame(bytes(self._header))
                self._header.clear()
        return found

    def _frame(self, header: bytes) -> bool:
        kind, flags = header[3], header[4]
        if self._is_http2 is None:
            self._is_http2 = kind == self._SETTINGS  # a server's first frame
        self._skip = int.from_bytes(header[:3], "big")
        return self._is_http2 and kind == self._HEADERS and bool(flags & self._END_STREAM)


class _Pipe:
    """One direction of one connection: reads at once, passes on when the faults let it."""

    def __init__(
        self,
        proxy: FaultProxy,
        connection: _Connection,
        direction: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._proxy = proxy
        self._connection = connection
        self._direction = direction
        self._reader = reader
        self._writer = writer
        self._chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_IN_FLIGHT)
        self._scanner = AnswerScanner()
        self.lost_bytes = False

    async def read(self) -> None:
        due = 0.0
        while True:
            data = await self._reader.read(READ_BYTES)
            faults = self._proxy.faults[self._direction]
            pause = max(0.0, faults.delay + self._proxy.random.uniform(-faults.jitter, faults.jitter))
            due = max(due, self._proxy.loop.time() + pause)  # in order, whatever the jitter
            await self._chunks.put((due, data))
            if not data:
                return

    async def write(self) -> None:
        while True:
            due, data = await self._chunks.get()
            await asyncio.sleep(max(0.0, due - self._proxy.loop.time()))
            await self._proxy.gates[self._direction].wait()
            if not data:
                with suppress(OSError):  # the other end has closed already
                    self._writer.write_eof()
                return
            faults = self._proxy.faults[self._direction]
            if self._proxy.random.random() < faults.reset_probability:
                self._connection.reset()
                return
            answered = self._scanner.feed(data)
            if faults.swallow:
                self.lost_bytes = True
                self._proxy.counters.swallowed_bytes += len(data)
                if answered and faults.reset_on_answer:
                    self._proxy.counters.dropped_replies += 1
                    self._proxy.stop_swallowing()
            else:
                await self._pass_on(data)

    async def _pass_on(self, data: bytes) -> None:
        faults = self._proxy.faults[self._direction]
        position = 0
        while position < len(data):
            piece = data[position : position + 1] if faults.dribble else data[position:]
            self._writer.write(piece)
            await self._writer.drain()
            position += len(piece)
            self._proxy.count(self._direction, len(piece))
            if faults.dribble:
                await asyncio.sleep(0)  # so that each byte is a segment of its own


class _Connection:
    """One client connection and its connection to the server."""

    def __init__(self, proxy: FaultProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._proxy = proxy
        self._reader = reader
        self._writers = [writer]
        self._pipes: list[_Pipe] = []

    @property
    def lost_bytes(self) -> bool:
        return any(pipe.lost_bytes for pipe in self._pipes)

    async def run(self) -> None:
        if self._proxy.refusing:
            self.reset()
            return
        host, _, port = self._proxy.upstream.rpartition(":")
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
        except OSError:
            self.reset()
            return
        self._writers.append(writer)
        self._pipes = [
            _Pipe(self._proxy, self, "request", self._reader, writer),
            _Pipe(self._proxy, self, "reply", reader, self._writers[0]),
        ]
        tasks = [asyncio.create_task(step()) for pipe in self._pipes for step in (pipe.read, pipe.write)]
        try:
            # An end that was cut raises OSError in one of the four; the other three have nothing left to do then.
            await asyncio.gather(*tasks)
        except OSError:
            self.abort()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        self._proxy.counters.resets += 1
        self.abort()

    def abort(self) -> None:
        for writer in self._writers:
            with suppress(OSError):  # closed already
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            writer.transport.abort()


class FaultProxy:
    """Stands between clients and one server on this machine.

    Attributes:
        upstream: host:port of the server; may be changed, for connections to come.
        address: host:port to connect to instead.
        counters: what went through.
    """

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        """Starts to listen.

        Args:
            upstream: host:port of the server; it need not be there yet.
            seed: of jitter and random resets.
        """
        self.upstream = upstream
        self.address = ""
        self.counters = Counters()
        self.random = random.Random(seed)
        self.refusing = False
        self.faults = {"request": _Faults(), "reply": _Faults()}
        self.gates: dict[str, asyncio.Event] = {}
        self.loop = asyncio.SelectorEventLoop()
        self._connections: dict[asyncio.Task[None], _Connection] = {}
        self._ready = threading.Event()
        self._stopping: asyncio.Event | None = None
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)
        self._thread.start()
        if not self._ready.wait(CONTROL_SECONDS):
            raise RuntimeError("the proxy did not start")

    def delay(self, seconds: float, *, jitter: float = 0.0, direction: Direction = "both") -> None:
        """Holds every chunk back for `seconds` ± `jitter`; order stays."""
        self._set(direction, delay=seconds, jitter=jitter)

    def blackhole(self, direction: Direction = "both") -> None:
        """Lets nothing through; what was sent meanwhile arrives after `heal`, as after a broken link comes back."""

        def close_gates() -> None:
            for name in _directions(direction):
                self.gates[name].clear()

        self._control(close_gates)

    def swallow(self, direction: Direction = "both") -> None:
        """Discards what is sent. A connection that has lost bytes can't go on: `heal` resets it."""
        self._set(direction, swallow=True)

    def dribble(self, direction: Direction = "both") -> None:
        """Passes every byte on as a segment of its own."""
        self._set(direction, dribble=True)

    def reset_at_random(self, probability: float, *, direction: Direction = "both") -> None:
        """Cuts the connection, with this probability, instead of passing on a chunk."""
        self._set(direction, reset_probability=probability)

    def reset(self) -> None:
        """Cuts every connection with RST, now; new ones work."""
        self._control(self._reset)

    def refuse(self) -> None:
        """Cuts every connection, and each new one, until `heal`: the server is down."""
        self.refusing = True
        self.reset()

    def drop_next_reply(self) -> None:
        """Lets the next call reach the server, swallows the answer, and cuts the connection where the answer ends.

        What else shares a connection with that call is lost with it. Over TLS, the first record that is sent counts as
        the answer.
        """
        self._set("reply", swallow=True, reset_on_answer=True)

    def heal(self) -> None:
        """Ends every fault."""
        self._control(self._heal)

    def stop_swallowing(self) -> None:
        """Ends `swallow` and `drop_next_reply`; called within the proxy's own thread."""
        for faults in self.faults.values():
            faults.swallow = faults.reset_on_answer = False
        for connection in list(self._connections.values()):
            if connection.lost_bytes:
                connection.reset()

    def count(self, direction: str, size: int) -> None:
        """Counts bytes that were passed on; called within the proxy's own thread."""
        if direction == "request":
            self.counters.request_bytes += size
        else:
            self.counters.reply_bytes += size

    def close(self) -> None:
        """Cuts what is open and ends the thread; repeatable."""
        if self._thread.is_alive() and self._stopping is not None:
            self.loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(CONTROL_SECONDS)

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _reset(self) -> None:
        for connection in self._connections.values():
            connection.reset()

    def _heal(self) -> None:
        self.refusing = False
        self.stop_swallowing()
        for name, gate in self.gates.items():
            # In place: a chunk that is being dribbled sees it too.
            vars(self.faults[name]).update(vars(_Faults()))
            gate.set()

    def _set(self, direction: Direction, **changes: float | bool) -> None:
        def change() -> None:
            for name in _directions(direction):
                vars(self.faults[name]).update(changes)

        self._control(change)

    def _control(self, action: Callable[[], T]) -> T:
        async def run() -> T:
            return action()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(CONTROL_SECONDS)

    def _run(self) -> None:
        try:
            self.loop.run_until_complete(self._serve())
        finally:
            self.loop.close()

    async def _serve(self) -> None:
        self._stopping = asyncio.Event()
        for name in self.faults:
            self.gates[name] = asyncio.Event()
            self.gates[name].set()
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stopping.wait()
        server.close()
        tasks = list(self._connections)
        for task, connection in self._connections.items():
            connection.abort()
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.counters.connections += 1
        connection = _Connection(self, reader, writer)
        task = self.loop.create_task(connection.run())
        self._connections[task] = connection
        task.add_done_callback(self._connections.pop)


def _directions(direction: Direction) -> Iterator[str]:
    return iter(("request", "reply") if direction == "both" else (direction,))
