"""The transport: staging memory on this side, the node's registered arena on the other, transfers between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import grpc
import numpy as np
from numpy.typing import NDArray

from tqclient.errors import TQError, TransportUnavailable, Unavailable
from tqclient.limits import MIB
from tqclient.transport.base import Fetched, NodeContact, Place, Read
from tqclient.transport.mooncake.coalesce import (
    LANES,
    PORT,
    STREAM,
    Piece,
    bridge,
    gather_is_cheaper,
    piece_bytes,
    pieces,
    split,
    together_is_cheaper,
)
from tqclient.transport.mooncake.engine import Engine
from tqclient.transport.mooncake.flow import Flow
from tqclient.transport.mooncake.gather import GatherPort, GatherRefused, GatherUnreachable, targets_of
from tqclient.transport.mooncake.options import Options, own_address
from tqclient.transport.mooncake.staging import ALIGN, Slot, Staging
from tqclient.transport.ranges import Runs, merge_ranges
from tqclient.transport.sessions import SessionWriter, WriteSessions
from tqclient.transport.stream import Receipt, StreamFetched, StreamTransport
from tqclient.wire.arena import HEADER_BYTES, ArenaHeader
from tqclient.wire.v1 import common_pb2, storage_pb2

_log = logging.getLogger(__name__)

OPEN_SECONDS: Final = 2.0
"""In which a node's engine, whose node has just answered, has to serve a first read."""
DIRECT_BYTES_MAX: Final = 256 * MIB
"""In flight between one peer and buffers that are not registered, a lane's share at a time."""


class MooncakeTransport(SessionWriter):
    """See `NodeTransport`.

    Blocks are encoded in the staging memory, where they fit. Other bytes lie in the pool's buffers: over TCP, transfers
    begin and end there; over RDMA, they cost one more copy, through the staging memory.
    """

    name = "mooncake"
    mapped = False
    better_after: float | None = None

    def __init__(self, contact: NodeContact, engine: Engine) -> None:
        """Takes over the engine."""
        self._contact = contact
        self._engine = engine
        self._stream = StreamTransport(contact)
        self._sessions = WriteSessions(take=lambda _: None, drop=lambda _: None, end=engine.release)
        self._endpoint = contact.description.mooncake
        self._broken = False
        self._gathers = 0
        self._port = (
            GatherPort(self._endpoint.gather, self._endpoint.gather_secret, contact.peer)
            if self._endpoint.gather
            else None
        )
        # What callers fill lies apart from what their bytes pass through in pieces, so the latter never waits for them.
        passing = engine.memory.size // 4 // ALIGN // LANES * ALIGN * LANES
        self._passing = Staging(0, passing)
        self._targets = Staging(passing, (engine.memory.size - passing) // ALIGN * ALIGN)
        self._direct = Staging(0, DIRECT_BYTES_MAX)  # no memory: what may be in flight from and to the pool's buffers
        self._staging_bytes = engine.memory.size
        self.arena: int = contact.description.arena
        self.segment: str = engine.segment

    @property
    def usable(self) -> bool:
        """See `NodeTransport.usable`. False after any failure: whoever opens it anew asks the node for its engine."""
        return not self._broken

    @property
    def quiet(self) -> bool:
        """See `NodeTransport.quiet`."""
        return self._engine.counters.abandoned == 0

    @property
    def reason(self) -> str:
        """See `NodeTransport.reason`."""
        counters = self._engine.counters
        return "; ".join(
            (
                f"one-sided over {self._engine.protocol} to {self.segment} of {self._contact.peer}, "
                f"{self._staging_bytes >> 20} MiB staging, registrations here {counters.registrations}, "
                f"there {self._endpoint.registrations}",
                *self._contact.refusals,
            )
        )

    def stats(self) -> dict[str, int]:
        """Returns counts since it was opened: `registrations`, `transfers`, `failures`, `bytes`, `gathers`.

        Also, as of now: `abandoned` transfers, and `taken_bytes` of the staging memory.
        """
        counters = self._engine.counters
        return {
            "registrations": counters.registrations,
            "transfers": counters.transfers,
            "failures": counters.failures,
            "bytes": counters.bytes,
            "abandoned": counters.abandoned,
            "gathers": self._gathers,
            "taken_bytes": self._targets.taken_bytes + self._passing.taken_bytes + self._direct.taken_bytes,
        }

    @contextmanager
    def write(self, place: Place, *, session: int, timeout: float | None) -> Iterator[NDArray[np.uint8]]:
        """See `NodeTransport.write`."""
        self._contact.check_place(place)
        remote = self._endpoint.base + place.offset
        with self._sessions.writing(session):
            slot = self._targets.take(place.length)
            if slot is None:
                target = self._contact.pool.take(place.length)
                yield target
                with self._flow(timeout) as flow:
                    self._send(flow, target, remote)
                return
            try:
                target = self._staged(slot, place.length)
                yield target
                with self._flow(timeout) as flow:
                    for start, stop in split(place.length, self._targets.length):
                        slot.hold()
                        flow.start(slot, target[start:stop], remote + start, writes=True)
            finally:
                slot.release()

    def read(self, extent: common_pb2.Extent, ranges: NDArray[np.uint64], *, timeout: float | None) -> Fetched:
        """See `NodeTransport.read`."""
        self._contact.check_extent(extent)
        if self._sessions.closed:
            raise Unavailable("the transport is closed")
        merged = merge_ranges(ranges, extent.length)
        port = self._port
        if gather_is_cheaper(merged, STREAM if port is None else PORT):
            self._gathers += 1
            started = time.monotonic()
            gathered = None if port is None else self._gather(port, [Read(extent, ranges)], timeout)
            left = None if timeout is None else timeout + started - time.monotonic()
            return gathered[0] if gathered else self._stream.read(extent, ranges, timeout=left)
        groups = bridge(merged.tolist())
        runs = Runs(merged)
        buffer = self._contact.pool.take(runs.buffer_bytes)
        moved = sum(group[-1][1] - group[0][0] for group in groups)
        if not moved:
            return StreamFetched(buffer, runs)
        remote = self._endpoint.base + extent.offset
        lane_bytes = {area: piece_bytes(moved, area.length // LANES) for area in (self._direct, self._passing)}
        self._engine.hold()
        try:
            with self._flow(timeout) as flow:
                for group in groups:
                    # The buffer has no room for what lies between runs.
                    direct = len(group) == 1 and self._engine.takes_any_memory
                    area = self._direct if direct else self._passing
                    for piece in pieces([group], lane_bytes[area]):
                        slot = flow.take(area, piece.stop - piece.start)
                        receive = self._receive if direct else self._receive_through
                        receive(flow, slot, piece, remote, runs, buffer)
        finally:
            self._engine.release()
        return StreamFetched(buffer, runs)

    def read_many(self, reads: Sequence[Read], *, timeout: float | None) -> list[Fetched]:
        """See `NodeTransport.read_many`."""
        if self._sessions.closed:
            raise Unavailable("the transport is closed")
        started = time.monotonic()

        def left() -> float | None:
            return None if timeout is None else timeout + started - time.monotonic()

        port = self._port
        ranges = [each.ranges for each in reads]
        if len(reads) > 1 and together_is_cheaper(ranges, STREAM if port is None else PORT):
            self._gathers += 1
            gathered = None if port is None else self._gather(port, reads, timeout)
            return gathered or self._stream.read_many(reads, timeout=left())
        return [self.read(extent, ranges, timeout=left()) for extent, ranges in reads]

    def close(self) -> None:
        """See `NodeTransport.close`. The engine lives on until its last transfer has ended."""
        self._stream.close()
        if self._port is not None:
            self._port.close()
        self._sessions.close()

    def _gather(self, port: GatherPort, reads: Sequence[Read], timeout: float | None) -> list[Fetched] | None:
        """Reads through the port beside the engine; None when the node's stream has to do it."""
        receipt = Receipt(self._contact, reads)
        if not receipt.wanted:
            return receipt.fetched()
        places = receipt.places
        wanted = np.array([(offset, offset + length) for offset, length, _ in receipt.wanted], np.uint64)
        try:
            port.read(wanted, targets_of(receipt.buffer, places[:, 0], places[:, 1]), timeout)
        except GatherRefused:
            return None
        except GatherUnreachable as error:
            _log.warning(
                "%s: no gathers at its engine, %s; its stream does them from now on", self._contact.peer, error
            )
            self._port = None
            port.close()
            return None
        except Unavailable:
            self._broken = True
            raise
        return receipt.fetched()

    @contextmanager
    def _flow(self, timeout: float | None) -> Iterator[Flow]:
        try:
            with Flow(self._engine, self._contact.peer, timeout) as flow:
                yield flow
                flow.finish()
        except Unavailable:
            self._broken = True
            raise

    def _staged(self, slot: Slot, length: int) -> NDArray[np.uint8]:
        return self._engine.memory[slot.offset : slot.offset + length]

    def _send(self, flow: Flow, source: NDArray[np.uint8], remote: int) -> None:
        """Sends from the source itself, or copies a piece while those before it are on their way."""
        direct = self._engine.takes_any_memory
        area = self._direct if direct else self._passing
        for start, stop in split(source.size, area.length // LANES):
            slot = flow.take(area, stop - start)
            local = source[start:stop]
            if not direct:
                local = self._staged(slot, stop - start)
                np.copyto(local, source[start:stop])
            flow.start(slot, local, remote + start, writes=True)

    def _receive(
        self, flow: Flow, slot: Slot, piece: Piece, remote: int, runs: Runs, buffer: NDArray[np.uint8]
    ) -> None:
        """Reads a piece, one run, to where it is wanted."""
        position = runs.locate(piece.start, piece.stop - piece.start)
        local = buffer[position : position + piece.stop - piece.start]
        flow.start(slot, local, remote + piece.start, writes=False)

    def _receive_through(
        self, flow: Flow, slot: Slot, piece: Piece, remote: int, runs: Runs, buffer: NDArray[np.uint8]
    ) -> None:
        """Reads a piece into the slot's memory, and copies what is wanted of it."""
        local = self._staged(slot, piece.stop - piece.start)

        def copy_out() -> None:
            for start, stop in piece.wanted:
                position = runs.locate(start, stop - start)
                np.copyto(buffer[position : position + stop - start], local[start - piece.start : stop - piece.start])

        flow.start(slot, local, remote + piece.start, writes=False, then=copy_out)


def open_mooncake(contact: NodeContact) -> MooncakeTransport:
    """Makes an engine for the node's engine, and proves that the node's arena is reached through it.

    Raises:
        TransportUnavailable: the node has no engine, the library is missing here, the engine cannot be reached, or RDMA
            is required and this is TCP.
        Unavailable: there is no engine now, but one is being started: ask again.
    """
    described = contact.description
    if not described.HasField("mooncake"):
        why = described.mooncake_refusal or "the node has no transfer engine"
        raise Unavailable(why) if described.mooncake_expected else TransportUnavailable(why)
    endpoint = described.mooncake
    if endpoint.registered_bytes < described.arena_bytes:
        raise TransportUnavailable(f"the node registered {endpoint.registered_bytes} bytes of {described.arena_bytes}")
    if contact.rdma and endpoint.protocol != "rdma":
        raise TransportUnavailable(f"RDMA is required, and the node's engine runs over {endpoint.protocol}")
    options = Options.from_environment()
    opening = _Opening(endpoint, described.arena, options.host or own_address(endpoint.segment), options)
    try:
        engine = opening.result(_open_seconds(contact))
    except TransportUnavailable:
        if _replaced(contact):
            raise Unavailable(f"the node has replaced its engine {endpoint.segment}") from None
        raise
    if contact.rdma and engine.protocol != "rdma":
        engine.release()
        raise TransportUnavailable(f"RDMA is required, and the engine of this process runs over {engine.protocol}")
    return MooncakeTransport(contact, engine)


def _open_seconds(contact: NodeContact) -> float:
    return min(OPEN_SECONDS, contact.remaining)


def _replaced(contact: NodeContact) -> bool:
    """Whether the node tells of another engine by now."""
    try:
        reply: Any = contact.stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=_open_seconds(contact))
    except grpc.RpcError:
        return True
    return bool(reply.mooncake.segment != contact.description.mooncake.segment or reply.mooncake_expected)


class _Opening:
    """Makes an engine and reads the arena's first page through it, in a thread: the library may wait for a minute."""

    _running: Final[set[str]] = set()
    _lock: Final = threading.Lock()

    def __init__(self, endpoint: storage_pb2.MooncakeEndpoint, arena: int, host: str, options: Options) -> None:
        self._endpoint = endpoint
        self._arena = arena
        self._host = host
        self._options = options
        self._settled = threading.Event()
        self._given_up = False
        self._engine: Engine | None = None
        self._error: TQError | None = None

    def result(self, timeout: float) -> Engine:
        """Returns the engine. When the time is up, what is still in progress cleans up after itself.

        Raises:
            TransportUnavailable: it could not be had.
            Unavailable: another call is opening it, or there was too little time to tell: ask again.
        """
        segment = self._endpoint.segment
        with self._lock:
            if segment in self._running:
                raise Unavailable(f"the engine {segment} is being opened by another call")
            self._running.add(segment)
        threading.Thread(target=self._run, name="tq-mooncake-opening", daemon=True).start()
        self._settled.wait(timeout)
        with self._lock:
            self._given_up = not self._settled.is_set()
        if self._given_up and timeout < OPEN_SECONDS:
            raise Unavailable(f"the engine {segment} did not answer within the {timeout:.3f} s that were left")
        if self._given_up:
            raise TransportUnavailable(f"the engine {segment} did not answer within {timeout:g} s: is it firewalled?")
        if self._engine is None:
            raise self._error or TransportUnavailable(f"the engine {segment} could not be opened")
        return self._engine

    def _run(self) -> None:
        engine: Engine | None = None
        error: TQError | None = None
        try:
            engine = Engine(
                self._host, self._endpoint.segment, self._options.staging_bytes, devices=self._options.devices
            )
            _check_arena(engine, self._endpoint, self._arena)
        except TQError as failure:
            error = failure
        if engine is not None and error is not None:
            engine.release()
            engine = None
        with self._lock:
            self._running.discard(self._endpoint.segment)
            given_up = self._given_up
            self._engine, self._error = engine, error
            self._settled.set()
        if given_up and engine is not None:
            engine.release()


def _check_arena(engine: Engine, endpoint: storage_pb2.MooncakeEndpoint, arena: int) -> None:
    area = Staging(0, HEADER_BYTES)
    try:
        with Flow(engine, f"the engine {endpoint.segment}", None) as flow:
            header = engine.memory[:HEADER_BYTES]
            flow.start(flow.take(area, HEADER_BYTES), header, endpoint.base, writes=False)
            flow.finish()
    except Unavailable as error:
        raise TransportUnavailable(f"{error.message}: can its ports be reached from here?") from None
    found = ArenaHeader.from_bytes(header.tobytes()).arena
    if found != arena:
        raise TransportUnavailable(f"the engine {endpoint.segment} serves arena {found:016x}, not {arena:016x}")
