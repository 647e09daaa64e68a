"""grpc: reads and writes as chunked streams of the node's Storage service. Works everywhere, and is slow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from tqclient.errors import Unavailable
from tqclient.limits import CHUNK_BYTES, MIB
from tqclient.transport.base import Fetched, NodeContact, Place, Read
from tqclient.transport.ranges import ALIGN, Runs, merge_ranges
from tqclient.transport.sessions import SessionWriter, WriteSessions
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import common_pb2, storage_pb2

GAPS_SPAN_MAX: Final = MIB
GAPS_FACTOR_MAX: Final = 4
"""Bytes from the first to the last run, for the bytes of the runs."""


class StreamFetched:
    """Runs of an extent, in one receive buffer."""

    def __init__(self, memory: NDArray[np.uint8], runs: Runs, start: int = 0) -> None:
        """Args: `memory`: with the runs from `start` on, and perhaps other extents' around them."""
        self._memory: NDArray[np.uint8] | None = memory
        self._start = start
        self._buffer: NDArray[np.uint8] | None = memory[start : start + runs.buffer_bytes]
        self._runs = runs
        self.owned_bytes = memory.size

    @property
    def memory(self) -> tuple[NDArray[np.uint8], int] | None:
        """See `Fetched.memory`."""
        lead = self._runs.lead
        return None if self._memory is None or lead is None else (self._memory, self._start + lead)

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
        self._buffer = self._memory = None


class Receipt:
    """Room for what is read of several extents: one buffer.

    Attributes:
        wanted: of each run: (offset in the arena, bytes, generation).
        buffer: uint8, that holds all of them.
    """

    def __init__(self, contact: NodeContact, reads: Sequence[Read]) -> None:
        """Raises InvalidArgument and Unavailable as `NodeTransport.read`."""
        self.wanted: list[tuple[int, int, int]] = []
        self._places: list[int] = []
        self._extents: list[tuple[Runs, int]] = []
        size = 0
        for extent, ranges in reads:
            contact.check_extent(extent)
            merged = merge_ranges(ranges, extent.length)
            runs = Runs(merged, gaps=_keeps_gaps(merged))
            self._extents.append((runs, size))
            self._places += (size + runs.positions).tolist()
            offset, generation = extent.offset, extent.generation
            self.wanted += [(offset + start, stop - start, generation) for start, stop in merged.tolist()]
            size += -(-runs.buffer_bytes // ALIGN) * ALIGN
        self.buffer = contact.pool.take(size)

    @property
    def places(self) -> NDArray[np.int64]:
        """int64 [runs, 2]: where each run goes in the buffer, and how long it is."""
        sizes = [length for _, length, _ in self.wanted]
        return np.array([self._places, sizes], np.int64).T

    def fetched(self) -> list[Fetched]:
        """Returns what was read of each extent, once the buffer is filled."""
        return [StreamFetched(self.buffer, runs, start) for runs, start in self._extents]


def _keeps_gaps(runs: NDArray[np.int64]) -> bool:
    """Whether so little lies between runs that it may have room in the buffer: many blocks are then decoded as one."""
    if len(runs) < 2:
        return False
    span, wanted = int(runs[-1, 1] - runs[0, 0]), int((runs[:, 1] - runs[:, 0]).sum())
    return span <= min(GAPS_SPAN_MAX, GAPS_FACTOR_MAX * wanted)


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
        return self.read_many([Read(extent, ranges)], timeout=timeout)[0]

    def read_many(self, reads: Sequence[Read], *, timeout: float | None) -> list[Fetched]:
        """See `NodeTransport.read_many`."""
        if self._sessions.closed:
            raise Unavailable("the transport is closed")
        receipt = Receipt(self._contact, reads)
        if receipt.wanted:
            targets = [receipt.buffer[place : place + length] for place, length in receipt.places.tolist()]
            self._receive(storage_pb2.ReadRequest(ranges=pack_array(receipt.wanted, U64)), targets, timeout)
        return receipt.fetched()

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
