"""This side of the gather protocol: a few kept connections to the port beside a node's engine."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import Unavailable
from tqclient.wire import gather as wire
from tqclient.wire.addresses import split_address

CONNECT_SECONDS: Final = 2.0
KEPT_MAX: Final = 8
"""Connections that wait for their next use."""


class GatherUnreachable(Exception):
    """The port was never reached."""


class GatherRefused(Exception):
    """The port is reached, and does not serve this request: it has too many peers, or is another engine's by now."""


class GatherPort:
    """Connections to one engine's port, opened on demand; each is used by one call at a time.

    Args:
        address: `host:port`.
        secret: of the engine.
        peer: for messages.
    """

    def __init__(self, address: str, secret: int, peer: str) -> None:
        self._address = split_address(address)
        self._secret = secret
        self._peer = peer
        self._lock = threading.Lock()
        self._kept: list[socket.socket] = []
        self._owner = os.getpid()
        self._reached = False
        self._closed = False

    def read(self, runs: NDArray[np.uint64], targets: list[memoryview], timeout: float | None) -> None:
        """Fills the targets, one after another, with the bytes of the runs, one after another.

        Args:
            runs: `[n, 2]`: start and stop in the arena file; at least one, none empty.
            targets: as long together as the runs.
            timeout: seconds for all of it; None: no bound.

        Raises:
            GatherUnreachable: the port cannot be connected and never was.
            GatherRefused: use another way for this call.
            Unavailable: the engine is gone, or the time is up.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            kept = self._take()
            if kept is not None and self._use(kept, runs, targets, deadline, fresh=False):
                return
            self._use(self._connect(deadline), runs, targets, deadline, fresh=True)
        except TimeoutError:
            raise Unavailable(f"{self._peer} did not gather within {timeout} s") from None

    def close(self) -> None:
        """Closes the connections; one that is in use is closed when its call ends."""
        with self._lock:
            self._closed = True
            self._drop_kept()

    def _use(
        self,
        connection: socket.socket,
        runs: NDArray[np.uint64],
        targets: list[memoryview],
        deadline: float | None,
        *,
        fresh: bool,
    ) -> bool:
        """Reads over a connection and keeps it; whatever else happens closes it.

        Returns:
            False when it broke and another may be tried: it was not fresh.
        """
        answered = False
        whole = False
        rest = list(targets)
        index = 0
        try:
            for ranges in wire.batches(runs):
                _send(connection, wire.pack_request(self._secret, ranges), deadline)
                status = bytearray(wire.STATUS.size)
                _receive(connection, [memoryview(status)], 0, wire.STATUS.size, deadline)
                if wire.STATUS.unpack(status)[0] != wire.OK:
                    raise GatherRefused
                answered = True
                index = _receive(connection, rest, index, int(ranges[:, 1].sum()), deadline)
            whole = True
        except (TimeoutError, BlockingIOError):
            raise TimeoutError from None
        except OSError as error:
            if not fresh:
                with self._lock:
                    self._drop_kept()  # they go to the same process
                return False
            if answered:
                raise Unavailable(f"{self._peer} broke off a gather: {error}") from None
            raise GatherRefused from None
        finally:
            if whole:
                self._keep(connection)
            else:
                connection.close()
        return True

    def _take(self) -> socket.socket | None:
        with self._lock:
            if self._owner != os.getpid():  # forked: the connections are the parent's
                self._drop_kept()
                self._owner = os.getpid()
            return self._kept.pop() if self._kept else None

    def _keep(self, connection: socket.socket) -> None:
        with self._lock:
            if not self._closed and len(self._kept) < KEPT_MAX:
                self._kept.append(connection)
                return
        connection.close()

    def _drop_kept(self) -> None:
        while self._kept:
            self._kept.pop().close()

    def _connect(self, deadline: float | None) -> socket.socket:
        # Half of the time is left to another way, should this one be closed.
        left = CONNECT_SECONDS if deadline is None else (deadline - time.monotonic()) / 2
        if left <= 0:
            raise TimeoutError
        try:
            connection = socket.create_connection(self._address, min(left, CONNECT_SECONDS))
        except OSError as error:
            if self._reached:
                raise Unavailable(f"the engine of {self._peer} is gone: {error}") from None
            raise GatherUnreachable(f"{self._address[0]}:{self._address[1]}: {error}") from None
        self._reached = True
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def targets_of(buffer: NDArray[np.uint8], positions: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[memoryview]:
    """Returns views of ascending places of a buffer, at least one; one view for all that touch."""
    ends = positions + lengths
    gaps = np.flatnonzero(positions[1:] != ends[:-1])
    starts = positions[np.concatenate(([0], gaps + 1))].tolist()
    stops = ends[np.concatenate((gaps, [len(ends) - 1]))].tolist()
    view = buffer.data
    return [view[start:stop] for start, stop in zip(starts, stops, strict=True)]


def _send(connection: socket.socket, data: bytes, deadline: float | None) -> None:
    rest = memoryview(data)
    while rest:
        wire.bound(connection, deadline, select.POLLOUT)
        rest = rest[connection.send(rest) :]


def _receive(
    connection: socket.socket, targets: list[memoryview], index: int, length: int, deadline: float | None
) -> int:
    """Fills `length` bytes of the targets from `index` on; returns the first that has room left."""
    while length:
        wire.bound(connection, deadline, select.POLLIN)
        into, room = [], length
        for target in targets[index : index + wire.BUFFERS_MAX]:
            into.append(target[:room])
            room -= len(into[-1])
            if not room:
                break
        count = connection.recvmsg_into(into, 0, socket.MSG_WAITALL)[0]
        if count == 0:
            raise ConnectionError("the connection was closed")
        index = wire.advance(targets, index, count)
        length -= count
    return index
