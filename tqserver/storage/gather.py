"""Serves gathers beside an engine: many ranges of the arena as one answer, sent from the mapping without a copy.

The protocol is specified in `tqclient.wire.gather`. Each connection has a thread; nothing of one can hold another up.
"""

from __future__ import annotations

import errno
import secrets
import select
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Final

from tqclient.errors import InvalidArgument
from tqclient.wire import gather as wire
from tqclient.wire.addresses import join_address
from tqserver import limits

_PORT_TRIES: Final = 64


def listen(host: str, ports: tuple[int, int]) -> socket.socket:
    """Listens on every interface, as the library does, on a port drawn from those between and including `ports`.

    Raises:
        OSError: none could be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    low, high = ports
    failure = OSError("no port was tried")
    for _ in range(_PORT_TRIES):
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(("", low + secrets.randbelow(high - low + 1)))
            listener.listen(limits.GATHER_CONNECTIONS_MAX)
        except OSError as error:
            listener.close()
            failure = error
        else:
            return listener
    raise failure


class GatherServer:
    """Serves one mapping.

    Args:
        listener: that it takes over.
        mapping: of the whole arena file.
        data_offset: from where on bytes may be asked for.
        seconds: see `wire.GATHER_SECONDS`.

    Attributes:
        port: that it listens on.
        secret: that requests must have.
    """

    def __init__(
        self, listener: socket.socket, mapping: memoryview, data_offset: int, *, seconds: float = wire.GATHER_SECONDS
    ) -> None:
        self.port: int = listener.getsockname()[1]
        self.secret: Final = secrets.randbits(64)
        self._listener = listener
        self._mapping = mapping
        self._data_offset = data_offset
        self._seconds = seconds
        self._room = threading.BoundedSemaphore(limits.GATHER_CONNECTIONS_MAX)

    def start(self) -> None:
        """Accepts connections in a thread of its own, until `close`."""
        threading.Thread(target=self._accept, name="tq-gather", daemon=True).start()

    def close(self) -> None:
        """Accepts no more connections. Those that are open end with their peers, or when these are silent."""
        with suppress(OSError):  # it has ended by itself
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while True:
                try:
                    connection, _ = self._listener.accept()
                except ConnectionError:
                    continue
                except OSError as error:
                    if error.errno in (errno.EINVAL, errno.EBADF):  # shut down
                        return
                    time.sleep(limits.GATHER_ACCEPT_PAUSE)  # short of descriptors or memory, for now
                    continue
                if not self._room.acquire(blocking=False):
                    connection.close()
                    continue
                threading.Thread(target=self._serve, args=(connection,), name="tq-gather-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                while self._answer(connection):
                    pass
        except (OSError, InvalidArgument):
            return  # gone, silent for too long, or no peer of ours: the end of the connection says it
        finally:
            self._room.release()

    def _answer(self, connection: socket.socket) -> bool:
        """Serves one request; False when the connection is to be ended."""
        deadline = time.monotonic() + self._seconds
        header = self._receive(connection, wire.HEADER_BYTES, deadline)
        ranges = self._receive(connection, wire.unpack_header(header, self.secret) * wire.RANGE_BYTES, deadline)
        deadline = time.monotonic() + self._seconds
        try:
            runs = wire.unpack_ranges(ranges, self._data_offset, len(self._mapping))
        except InvalidArgument:
            self._send(connection, [memoryview(wire.STATUS.pack(wire.OUT_OF_BOUNDS))], deadline)
            return False
        mapping = self._mapping
        buffers = [memoryview(wire.STATUS.pack(wire.OK)), *(mapping[start:stop] for start, stop in runs)]
        self._send(connection, buffers, deadline)
        return True

    @staticmethod
    def _receive(connection: socket.socket, length: int, deadline: float) -> bytearray:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            wire.bound(connection, deadline, select.POLLIN)
            count = connection.recv_into(rest)
            if count == 0:
                raise ConnectionError("the peer is gone")
            rest = rest[count:]
        return data

    @staticmethod
    def _send(connection: socket.socket, buffers: list[memoryview], deadline: float) -> None:
        index = 0
        while index < len(buffers):
            wire.bound(connection, deadline, select.POLLOUT)
            sent = connection.sendmsg(buffers[index : index + wire.BUFFERS_MAX])
            index = wire.advance(buffers, index, sent)


def serve(host: str, ports: tuple[int, int] | None, mapping: memoryview, data_offset: int) -> dict[str, object]:
    """Starts to serve a mapping for the life of the process; returns what the node is told of it.

    An engine without it is as good as before: its peers use the node's stream. So this never fails.
    """
    try:
        server = GatherServer(listen(host, ports or limits.ENGINE_PORTS), mapping, data_offset)
    except OSError as error:
        sys.stderr.write(f"no gathers: {error}\n")
        return {}
    server.start()
    return {"gather": join_address(host, server.port), "gather_secret": server.secret}
