"""The Storage service, `proto/tq/v1/storage.proto`, over a `Node`. Its streams are the slow path, shm is the fast."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np

from tqclient.errors import InvalidArgument
from tqclient.limits import CHUNK_BYTES
from tqclient.wire.chunks import READ_METHOD, encode_chunk
from tqclient.wire.packing import U64, unpack_array
from tqclient.wire.v1 import storage_pb2 as pb
from tqclient.wire.v1 import storage_pb2_grpc
from tqserver import limits
from tqserver.storage.engine import EngineState
from tqserver.storage.node import Node


class StorageService(storage_pb2_grpc.StorageServicer):
    """Answers clients.

    Args:
        node: what it serves.
        prefaulted_bytes: how far the prefault has come.
        engine: the transfer engine beside it.
    """

    def __init__(self, node: Node, prefaulted_bytes: Callable[[], int], engine: EngineState) -> None:
        self._node = node
        self._prefaulted_bytes = prefaulted_bytes
        self._engine = engine

    async def DescribeNode(self, request: pb.DescribeNodeRequest, context: Any) -> pb.DescribeNodeReply:  # noqa: N802
        """Answers with the node's identity and usage."""
        node, header, usage = self._node, self._node.arena.header, self._node.usage()
        return pb.DescribeNodeReply(
            name=header.node,
            arena=header.arena,
            incarnation=node.incarnation,
            arena_path=str(node.arena.path),
            arena_bytes=header.file_bytes,
            data_offset=header.data_offset,
            segment_bytes=header.segment_bytes,
            capacity_bytes=usage.capacity,
            sealed_bytes=usage.sealed,
            reserved_bytes=usage.reserved,
            quarantined_bytes=usage.quarantined,
            prefaulted_bytes=min(self._prefaulted_bytes(), usage.capacity),
            controller_sequence=node.arena.controller_sequence,
            attached=node.attached,
            mooncake=self._endpoint(),
            mooncake_refusal=self._engine.refusal,
            mooncake_expected=self._engine.expected,
            arena_removed=node.arena.is_removed(),
        )

    def _endpoint(self) -> pb.MooncakeEndpoint | None:
        endpoint = self._engine.endpoint
        if endpoint is None:
            return None
        return pb.MooncakeEndpoint(
            segment=endpoint.segment,
            base=endpoint.base,
            registered_bytes=endpoint.registered_bytes,
            protocol=endpoint.protocol,
            registrations=endpoint.registrations,
            gather=endpoint.gather,
            gather_secret=endpoint.gather_secret,
        )

    async def Reserve(self, request: pb.ReserveRequest, context: Any) -> pb.Window:  # noqa: N802
        """Opens a window."""
        window = await self._node.reserve(
            request.session,
            request.partition_id,
            request.length,
            mapped=request.mapped,
            segment=request.segment,
            ticket=request.ticket,
            tickets_below=request.tickets_below,
        )
        return pb.Window(
            offset=window.offset,
            length=window.length,
            generation=window.generation,
            incarnation=self._node.incarnation,
        )

    async def CloseWindow(self, request: pb.CloseWindowRequest, context: Any) -> pb.CloseWindowReply:  # noqa: N802
        """Frees the rest of windows, each whatever becomes of the others."""
        more = unpack_array(request.more, U64, what="more", columns=2).tolist()
        tickets = unpack_array(request.tickets, U64, what="tickets").tolist()
        session, failure = request.session, None
        for generation, end in [(request.generation, request.end), *more]:
            try:
                self._node.close_window(session, generation, end)
            except InvalidArgument as error:
                failure = failure or error
        if tickets:
            await self._node.close_tickets(session, tickets)
        if failure is not None:
            raise failure
        return pb.CloseWindowReply(all=True)

    async def Write(self, chunks: AsyncIterator[pb.WriteChunk], context: Any) -> pb.WriteReply:  # noqa: N802
        """Copies a stream into a window. Every piece is checked against the window as it is then."""
        first: pb.WriteChunk | None = None
        done_bytes = 0
        async for chunk in chunks:
            if first is None:
                first = chunk
                self._target(first, 0, first.length)
            data = np.frombuffer(chunk.data, dtype=np.uint8)
            if done_bytes + len(data) > first.length:
                raise InvalidArgument(f"more than the {first.length} bytes that the first chunk announced")
            for start in range(0, len(data), CHUNK_BYTES):
                if start:
                    await asyncio.sleep(0)  # a long message must not hold up the other calls
                piece = data[start : start + CHUNK_BYTES]
                np.copyto(self._target(first, done_bytes, len(piece)), piece)
                done_bytes += len(piece)
        if first is None or done_bytes != first.length:
            raise InvalidArgument(f"{done_bytes} bytes came of {first.length if first else 'none'} announced")
        return pb.WriteReply()

    def _target(self, first: pb.WriteChunk, skip: int, length: int) -> Any:
        return self._node.writable(first.session, first.generation, first.incarnation, first.offset + skip, length)

    async def Read(self, request: pb.ReadRequest, context: Any) -> AsyncIterator[bytes]:  # noqa: N802
        """Streams ranges in the order asked for; small neighbours share a chunk, and large ranges take several.

        Yields:
            Serialized ReadChunks: see `RawChunks`.
        """
        ranges = unpack_array(request.ranges, U64, what="ranges", columns=3).tolist()
        if len(ranges) > limits.READ_RANGES_MAX:
            raise InvalidArgument(f"{len(ranges)} ranges, at most {limits.READ_RANGES_MAX} in one Read")
        await self._node.wait_until_synced()
        for offset, length, generation in ranges:
            self._node.readable(offset, length, generation)
        parts: list[Any] = []
        room = CHUNK_BYTES
        for offset, length, generation in ranges:
            start = 0
            while start < length:
                size = min(room, length - start)
                parts.append(self._node.readable(offset + start, size, generation))
                start += size
                room -= size
                if not room:
                    yield encode_chunk(parts, CHUNK_BYTES)
                    parts, room = [], CHUNK_BYTES
        if parts:
            yield encode_chunk(parts, CHUNK_BYTES - room)


class RawChunks(grpc.aio.ServerInterceptor):
    """Sends what `Read` yields as it is. It stands before every other interceptor."""

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        """See grpc."""
        handler = await continuation(handler_call_details)
        raw = handler is not None and handler_call_details.method == READ_METHOD
        return handler._replace(response_serializer=None) if raw else handler
