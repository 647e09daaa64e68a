"""A storage node for tests: a real arena file, and a small server of the Storage service over it."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tqclient.errors import LeaseExpired, SampleNotFound, TQError
from tqclient.limits import MIB
from tqclient.transport import BufferPool, NodeTransport, open_transport
from tqclient.wire.arena import ArenaHeader
from tqclient.wire.dialing import dial
from tqclient.wire.status import DETAIL_KEY, status_of, to_detail
from tqclient.wire.v1 import common_pb2, controller_pb2, storage_pb2, storage_pb2_grpc

DATA_OFFSET = 8192
FILE_BYTES = 16 * MIB
ARENA = 0xA1B2C3D4E5F60718
GENERATION = 5
INCARNATION = 9


@dataclass
class FakeNode(storage_pb2_grpc.StorageServicer):
    """Serves one arena file. Knows extents by generation alone, and misbehaves when told to."""

    path: Path
    arena: int = ARENA
    generations: set[int] = field(default_factory=lambda: {GENERATION})
    chunk_bytes: int = 1 * MIB
    extra_bytes: int = 0  # of every Read: sent too many, or, negative, too few
    stalled: threading.Event | None = None  # Read and Write wait for it before they answer
    writes: list[storage_pb2.WriteChunk] = field(default_factory=list)
    reads: list[list[list[int]]] = field(default_factory=list)
    mooncake: dict[str, Any] = field(default_factory=dict)  # what it tells of its engine

    def DescribeNode(self, request, context):  # noqa: N802
        return storage_pb2.DescribeNodeReply(
            name="n0",
            arena=self.arena,
            incarnation=INCARNATION,
            arena_path=str(self.path),
            arena_bytes=FILE_BYTES,
            data_offset=DATA_OFFSET,
            **self.mooncake,
        )

    def Write(self, chunks, context):  # noqa: N802
        first = next(chunks)
        self.writes.append(first)
        if first.generation not in self.generations:
            self._abort(context, LeaseExpired(f"window {first.generation} is gone"))
        data = first.data + b"".join(chunk.data for chunk in chunks)
        self._stall()
        if len(data) != first.length:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "length")
        with self.path.open("r+b") as file:
            file.seek(first.offset)
            file.write(data)
        return storage_pb2.WriteReply()

    def Read(self, request, context):  # noqa: N802
        ranges = np.frombuffer(request.ranges, "<u8").reshape(-1, 3).tolist()
        self.reads.append(ranges)
        if any(generation not in self.generations for _, _, generation in ranges):
            self._abort(context, SampleNotFound("no such extent", ids=[17]))
        data = self.path.read_bytes()
        answer = b"".join(data[offset : offset + length] for offset, length, _ in ranges)
        answer = answer[: self.extra_bytes] if self.extra_bytes < 0 else answer + bytes(self.extra_bytes)
        self._stall()
        for start in range(0, len(answer), self.chunk_bytes):
            yield storage_pb2.ReadChunk(data=answer[start : start + self.chunk_bytes])

    def _stall(self) -> None:
        if self.stalled is not None:
            self.stalled.wait(10)

    def _abort(self, context, error: TQError) -> None:
        context.set_trailing_metadata(((DETAIL_KEY, to_detail(error).SerializeToString()),))
        context.abort(status_of(error), error.message)


def make_arena(path: Path, arena: int = ARENA, *, file_bytes: int = FILE_BYTES, cut_bytes: int = 0) -> Path:
    """Makes an arena file as a storage node does; `cut_bytes` shorter than its header says."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, file_bytes - cut_bytes)
        header = ArenaHeader(arena, file_bytes, DATA_OFFSET, 1 * MIB, "n0")
        os.pwrite(descriptor, header.to_bytes(), 0)
    finally:
        os.close(descriptor)
    return path


class Opener:
    """Opens transports to the fake node, and closes them with the test."""

    def __init__(self, node: FakeNode, pool: BufferPool) -> None:
        self._pool = pool
        self._executor = ThreadPoolExecutor(8)
        self._server = grpc.server(self._executor)
        storage_pb2_grpc.add_StorageServicer_to_server(node, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()
        self._channel = dial(self.address)
        self._opened: list[NodeTransport] = []

    def __call__(self, prefer: str = "auto", *, arena: int = ARENA) -> NodeTransport:
        node = controller_pb2.Node(name="n0", address=self.address, arena=arena, incarnation=INCARNATION)
        transport = open_transport(node, prefer, channel=self._channel, pool=self._pool, timeout=5)
        self._opened.append(transport)
        return transport

    def stop_node(self) -> None:
        self._server.stop(None).wait()

    def close(self) -> None:
        for transport in self._opened:
            transport.close()
        self._channel.close()
        self.stop_node()
        self._executor.shutdown()


def extent(offset: int, length: int, *, arena: int = ARENA, generation: int = GENERATION) -> common_pb2.Extent:
    return common_pb2.Extent(node="n0", arena=arena, offset=offset, length=length, generation=generation)


def ranges(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array(pairs, dtype=np.uint64).reshape(-1, 2)
