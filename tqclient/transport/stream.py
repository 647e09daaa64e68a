"""grpc: reads and writes as chunked streams of the node's Storage service. Works everywhere, and is slow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from numpy.typing import NDArray

from tqclient.errors import Unavailable
from tqclient.limits import CHUNK_BYTES
from tqclient.transport.base import Fetched, NodeContact, Place
from tqclient.transport.ranges import Runs, merge_ranges
from tqclient.transport.sessions import SessionWriter, WriteSessions
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import common_pb2, storage_pb2


class StreamFetched:
    """Runs of an extent, in one receive buffer."""

    def __init__(self, buffer: NDArray[np.uint8], runs: Runs) -> None:
        self._buffer: NDArray[np.uint8] | None = buffer
        self._runs = runs
        self.owned_bytes = buffer.size

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """See `Fetched.view`."""
        if self._buffer is None:
            raise Unavailable("the fetched bytes were closed")
        position = self._runs.locate(offset, length)
        return self._buffer[position : position + length]

    def locate(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """See `Fetched.locate`."""
        if self._buffer is None:
            raise Unavailable("the fetched bytes were closed")
        return self._buffer, self._runs.locate_all(offsets, lengths)

    def close(self) -> None:
        """See `Fetched.close`."""
        self._buffer = None


class StreamTransport(SessionWriter):
    """See `NodeTransport`."""

    name = "grpc"
    mapped = False
    segment = ""
    usable = True
    quiet = True

    def __init__(self, contact: NodeContact) -> None:
        self._contact = contact
        self.better_after = contact.better_after
        self._sessions = WriteSessions(take=lambda _: None, drop=lambda _: None, end=lambda: None)
        self.arena: int = contact.description.arena
        self.reason = "; ".join((f"chunked streams to {contact.peer}", *contact.refusals))

    @contextmanager
    def write(self, place: Place, *, session: int, timeout: float | None) -> Iterator[NDArray[np.uint8]]:
        """See `NodeTransport.write`."""
        self._contact.check_place(place)
        with self._sessions.writing(session):
            staging = self._contact.pool.take(place.length)
            yield staging
            if place.length:
                self._send(place, session, staging, timeout)

    def read(self, extent: common_pb2.Extent, ranges: NDArray[np.uint64], *, timeout: float | None) -> Fetched:
        """See `NodeTransport.read`."""
        self._contact.check_extent(extent)
        if self._sessions.closed:
            raise Unavailable("the transport is closed")
        merged = merge_ranges(ranges, extent.length)
        runs = Runs(merged)
        buffer = self._contact.pool.take(runs.buffer_bytes)
        targets = [
            buffer[position : position + stop - start]
            for position, (start, stop) in zip(runs.positions.tolist(), merged.tolist(), strict=True)
        ]
        if targets:
            wanted = [(extent.offset + start, stop - start, extent.generation) for start, stop in merged.tolist()]
            self._receive(storage_pb2.ReadRequest(ranges=pack_array(wanted, U64)), targets, timeout)
        return StreamFetched(buffer, runs)

    def close(self) -> None:
        """See `NodeTransport.close`."""
        self._sessions.close()

    def _send(self, place: Place, session: int, staging: NDArray[np.uint8], timeout: float | None) -> None:
        try:
            self._contact.stub.Write(_chunks(place, session, staging), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=self._contact.peer) from None

    def _receive(
        self, request: storage_pb2.ReadRequest, targets: list[NDArray[np.uint8]], timeout: float | None
    ) -> None:
        call: Any = self._contact.stub.Read(request, timeout=timeout)
        try:
            rest = _scatter(call, targets)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer=self._contact.peer) from None
        finally:
            call.cancel()  # without effect once it has ended; else nobody would read what still comes
        if rest:
            raise Unavailable(f"{self._contact.peer} sent {abs(rest)} bytes too {'few' if rest > 0 else 'many'}")


def _chunks(place: Place, session: int, staging: NDArray[np.uint8]) -> Iterator[storage_pb2.WriteChunk]:
    """Cuts the staged bytes into messages; the first one names the place."""
    chunk = storage_pb2.WriteChunk(
        session=session,
        generation=place.generation,
        incarnation=place.incarnation,
        offset=place.offset,
        length=place.length,
    )
    for start in range(0, place.length, CHUNK_BYTES):
        chunk.data = staging[start : start + CHUNK_BYTES].tobytes()
        yield chunk
        chunk = storage_pb2.WriteChunk()


def _scatter(chunks: Iterator[memoryview], targets: list[NDArray[np.uint8]]) -> int:
    """Fills the targets one after another.

    Returns:
        How many bytes were missing, or, negative, how many the first chunk that did not fit had too many.
    """
    rest = sum(len(target) for target in targets)
    waiting = iter(targets)
    target = next(waiting)
    for data in chunks:
        source = np.frombuffer(data, dtype=np.uint8)
        rest -= len(source)
        if rest < 0:
            break
        while len(source):
            if not len(target):
                target = next(waiting)
            count = min(len(source), len(target))
            np.copyto(target[:count], source[:count])
            source, target = source[count:], target[count:]
    return rest


def open_stream(contact: NodeContact) -> StreamTransport:
    """Uses the node's Storage service, which answered already."""
    return StreamTransport(contact)
