"""shm, mooncake, grpc: this service, by whole API calls, and by its transport alone."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

from benchmarks.paths import Ends, Path, Setup
from benchmarks.paths.engine import OVER_TCP
from benchmarks.payload import Batch, Bytes, Payload, Rows, Shape, check
from benchmarks.workers import Worker, serve, stop_all
from tqclient.transport.base import NodeTransport, Place
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import common_pb2, storage_pb2
from tqclient.wire.v1.storage_pb2_grpc import StorageStub

FIELD: Final = "value"
TIMEOUT: Final = 60.0
CALL, TRANSPORT, FILLED = "API call", "transport", "transport, target filled"
"""What is timed: a call of `Partition`; the same bytes through `NodeTransport` alone; and without the copy into the
target that it yields, as the raw engine starts from a buffer that is filled."""

Read = tuple[common_pb2.Extent, Any]
Times = dict[str, float]


class Node:
    """The one storage node of a run, as one client reaches it, and its arena as this host sees it."""

    def __init__(self, client: Any) -> None:
        state = client._state
        (node,) = state.nodes.values()
        found = state.paths.get(node)
        if found is None:
            raise RuntimeError(f"no path to storage node {node.name!r} is open")
        self.transport: NodeTransport = found
        self._client = client
        self.stub: Any = StorageStub(dial(node.address))  # type: ignore[no-untyped-call]
        self._read = found.read
        self._arena: Bytes | None = None

    @property
    def session(self) -> int:
        """Of the client."""
        return int(self._client._state.session.session)

    def arena(self, offset: int, length: int) -> Bytes:
        """Views bytes of the arena file, past every transport."""
        if self._arena is None:
            path = self.stub.DescribeNode(storage_pb2.DescribeNodeRequest()).arena_path
            descriptor = os.open(path, os.O_RDONLY)
            try:
                self._arena = np.frombuffer(mmap.mmap(descriptor, 0, prot=mmap.PROT_READ), np.uint8)
            finally:
                os.close(descriptor)
        return self._arena[offset : offset + length]

    def write(self, values: Bytes, partition_id: int, expected: int) -> Times:
        """Times one write of bytes into a window of its own, which is given back."""
        self.transport.session_opened(self.session)
        request = storage_pb2.ReserveRequest(
            session=self.session,
            partition_id=partition_id,
            length=values.size,
            mapped=self.transport.mapped,
            segment=self.transport.segment,
        )
        window = self.stub.Reserve(request)
        place = Place.at(window, 0, values.size)
        try:
            start = time.perf_counter()
            with self.transport.write(place, session=self.session, timeout=TIMEOUT) as target:
                ready = time.perf_counter()
                np.copyto(target, values)
                filled = time.perf_counter()
            end = time.perf_counter()
            check(self.arena(place.offset, place.length), expected, f"{self.transport.name}, transport")
        finally:
            self.stub.CloseWindow(
                storage_pb2.CloseWindowRequest(session=self.session, generation=window.generation, end=window.offset)
            )
        times = {TRANSPORT: end - start}
        if not self.transport.mapped:  # there, the copy is all there is
            times[FILLED] = end - filled + ready - start
        return times

    def note_reads(self, reads: list[Read]) -> None:
        """Notes what API calls ask of the transport from now on, so that it can be asked for again, alone."""

        def noting(extent: common_pb2.Extent, ranges: Any, *, timeout: float | None) -> Any:
            reads.append((extent, ranges))
            return self._read(extent, ranges, timeout=timeout)

        transport: Any = self.transport
        transport.read = noting

    def read(self, reads: list[Read]) -> Times:
        """Times reads that an API call has made before."""
        start = time.perf_counter()
        fetched = [self._read(extent, ranges, timeout=TIMEOUT) for extent, ranges in reads]
        elapsed = time.perf_counter() - start
        for each, (extent, ranges) in zip(fetched, reads, strict=True):
            for offset, length in ranges.tolist():
                if not np.array_equal(each.view(offset, length), self.arena(extent.offset + offset, length)):
                    raise RuntimeError(f"{self.transport.name}: {length} bytes at {offset} differ from the arena's")
            each.close()
        return {} if self.transport.mapped else {TRANSPORT: elapsed}  # through a mapping, nothing was moved

    def registrations(self) -> dict[str, int]:
        """Returns the register calls so far, of this client's engine and of the node's; over mooncake only."""
        transport: Any = self.transport
        endpoint = self.stub.DescribeNode(storage_pb2.DescribeNodeRequest()).mooncake
        return {"client": transport.stats()["registrations"], "node": endpoint.registrations}


def _prepare(staging: str | None) -> None:
    os.environ.update(OVER_TCP)
    if staging is not None:
        os.environ["TQ_MOONCAKE_STAGING"] = staging


def _producer(
    pipe: Connection, shape: Shape, seed: int, address: str, transport: str, partition: str, staging: str | None
) -> None:
    _prepare(staging)
    import torch

    import tqclient as tq

    payload = Payload(shape, seed)
    values = {
        "large": [torch.from_numpy(value) for value in payload.large],
        "scattered": torch.from_numpy(payload.block),
        "small": torch.from_numpy(payload.small),
    }
    with tq.connect(address, transport=transport) as client:
        node = Node(client)
        parts = {batch: client.create_partition(f"{partition}/{batch}", exist_ok=True) for batch in values}

        def put(batch: Batch) -> tuple[Times, Any]:
            payload.renew(batch)
            start = time.perf_counter()
            ids = parts[batch].put({FIELD: values[batch]})
            times = {CALL: time.perf_counter() - start}
            flat = payload.values(batch).reshape(-1)
            partition_id = parts[batch]._ref.partition_id
            return times | node.write(flat, partition_id, payload.digest(batch)), (batch, ids)

        def drop(token: tuple[Batch, Rows]) -> None:
            parts[token[0]].clear(ids=token[1])

        def load() -> tuple[Batch, Rows]:
            return "scattered", parts["scattered"].put({FIELD: values["scattered"]})

        serve(
            pipe,
            {
                "load": load,
                "put": put,
                "digest": payload.digest,
                "drop": drop,
                "registrations": node.registrations,
            },
        )


def _consumer(pipe: Connection, address: str, transport: str, partition: str, staging: str | None) -> None:
    _prepare(staging)
    import tqclient as tq

    with tq.connect(address, transport=transport) as client:
        reads: list[Read] = []

        def get(batch: Batch, token: tuple[Batch, Rows], rows: Rows | None, expected: int) -> Times:
            ids = token[1] if rows is None else token[1][rows]
            part = client.partition(f"{partition}/{batch}")
            reads.clear()
            start = time.perf_counter()
            got = part.get(ids)
            value = got[FIELD]
            times = {CALL: time.perf_counter() - start}
            value = value.values() if value.is_nested else value
            check(value.numpy(), expected, f"{transport}, API call")
            return times | node.read(reads)

        node = Node(client)
        node.note_reads(reads)
        serve(pipe, {"get": get, "registrations": node.registrations})


def path(transport: str) -> Path:
    """Returns the path over one of this service's transports."""

    @contextmanager
    def start(setup: Setup) -> Iterator[Ends]:
        partition = f"bench/{transport}"
        workers = [Worker(_producer, setup.shape, setup.seed, setup.address, transport, partition, setup.staging)]
        try:
            workers.append(Worker(_consumer, setup.address, transport, partition, setup.staging))
            yield Ends(workers[0], workers[1])
        finally:
            stop_all(workers)

    return Path(transport, start, clustered=True)
