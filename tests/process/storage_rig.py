"""A real `tq-storage` process, and a controller that says to it what the test wants."""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from tests.harness.supervisor import PATIENCE_SECONDS
from tqclient.limits import CHUNK_BYTES, MIB
from tqclient.wire.dialing import dial
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2, controller_pb2_grpc, storage_pb2, storage_pb2_grpc
from tqserver.local import Daemon

Extents = list[tuple[int, int, int, int]]  # offset, length, generation, partition


def wait_for(condition: Callable[[], bool], timeout: float = PATIENCE_SECONDS) -> float:
    """Waits until the condition holds; returns how long that took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout, "the condition did not come true"
        time.sleep(0.005)
    return time.monotonic() - start


class FakeController(controller_pb2_grpc.ControllerServicer):
    """Answers Attach alone."""

    def __init__(self, port: int = 0) -> None:
        self.hellos: queue.Queue[controller_pb2.NodeHello] = queue.Queue()
        self.gone: queue.Queue[int] = queue.Queue()
        self.usage = controller_pb2.NodeUsage()
        self.metadata: dict[str, str] = {}
        self.refuse: str | None = None
        self._orders: queue.Queue[controller_pb2.NodeOrder | None] = queue.Queue()
        self._executor = ThreadPoolExecutor(8)
        self._server = grpc.server(self._executor, options=[("grpc.so_reuseport", 0)])
        controller_pb2_grpc.add_ControllerServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self._server.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def Attach(self, reports: Iterator[controller_pb2.NodeReport], context: Any) -> Iterator[controller_pb2.NodeOrder]:  # noqa: N802
        self.metadata = dict(context.invocation_metadata())
        if self.refuse is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.refuse)
        hello = next(reports).hello
        orders = self._orders = queue.Queue()
        context.add_callback(lambda: orders.put(None))
        threading.Thread(target=self._listen, args=(reports,), daemon=True).start()
        self.hellos.put(hello)
        while (order := orders.get()) is not None:
            yield order

    def _listen(self, reports: Iterator[controller_pb2.NodeReport]) -> None:
        try:
            for report in reports:
                if report.HasField("writer_gone"):
                    self.gone.put(report.writer_gone.session)
                elif report.HasField("usage"):
                    self.usage = report.usage
        except grpc.RpcError:
            return  # the link broke

    def sync(self, extents: Extents = [], sessions: list[int] = [], sequence: int = 1, grace_ms: int = 0) -> None:  # noqa: B006
        packed = pack_array(extents, U64), pack_array(sessions, U64)
        sync = controller_pb2.NodeSync(extents=packed[0], sessions=packed[1], grace_ms=grace_ms)
        self._put(sequence, sync=sync)

    def sealed(self, extents: Extents, sequence: int = 2) -> None:
        self._put(sequence, sealed=controller_pb2.ExtentsSealed(extents=pack_array(extents, U64)))

    def freed(self, extents: Extents, sequence: int = 3) -> None:
        self._put(sequence, freed=controller_pb2.ExtentsFreed(extents=pack_array(extents, U64)))

    def sessions(self, opened: list[int] = [], ended: list[int] = [], sequence: int = 4) -> None:  # noqa: B006
        packed = pack_array(opened, U64), pack_array(ended, U64)
        self._put(sequence, sessions=controller_pb2.SessionsChanged(opened=packed[0], ended=packed[1]))

    def _put(self, sequence: int, **order: Any) -> None:
        self._orders.put(controller_pb2.NodeOrder(sequence=sequence, **order))

    def stop(self) -> None:
        self._orders.put(None)
        self._server.stop(0).wait()
        self._executor.shutdown()


class Rig(AbstractContextManager["Rig"]):
    """One node, attached to one fake controller."""

    def __init__(
        self, directory: Path, *arguments: str, arena: Path | None = None, arena_bytes: int = 16 * MIB
    ) -> None:
        self.controller = FakeController()
        self.arena = arena or directory / "node.arena"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        flags = (
            f"--controller={self.controller.address}",
            f"--arena-path={self.arena}",
            f"--arena-bytes={arena_bytes}",
            "--name=n0",
            *arguments,
        )
        self.daemon = Daemon("storage", "tqserver.storage.main", flags, directory, environ)

    def start(self, extents: Extents = [], sessions: list[int] = [], sequence: int = 1) -> controller_pb2.NodeHello:  # noqa: B006
        """Starts the node and brings it its first NodeSync."""
        self.launch()
        return self.attach(extents, sessions, sequence)

    def launch(self) -> None:
        self.daemon.launch()
        self.daemon.wait_serving(time.monotonic() + 15)
        self.channel = dial(self.daemon.address)
        self.stub = storage_pb2_grpc.StorageStub(self.channel)

    def attach(self, extents: Extents = [], sessions: list[int] = [], sequence: int = 1) -> controller_pb2.NodeHello:  # noqa: B006
        hello = self.controller.hellos.get(timeout=10)
        self.controller.sync(extents, sessions, sequence)
        wait_for(lambda: self.describe().attached)
        return hello

    def kill(self) -> None:
        self.channel.close()
        self.daemon.kill()

    def describe(self) -> storage_pb2.DescribeNodeReply:
        return self.stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=5)

    def wait_populated(self) -> None:
        """Waits until the whole arena has its pages; before, each `describe` tells of more of them."""
        wait_for(lambda: (node := self.describe()).prefaulted_bytes == node.capacity_bytes)

    def used(self) -> tuple[int, int, int]:
        """Returns sealed, reserved and quarantined bytes."""
        reply = self.describe()
        return reply.sealed_bytes, reply.reserved_bytes, reply.quarantined_bytes

    def wait_used(self, sealed: int, reserved: int, quarantined: int = 0, timeout: float = PATIENCE_SECONDS) -> float:
        return wait_for(lambda: self.used() == (sealed, reserved, quarantined), timeout)

    def reserve(
        self, session: int, length: int, *, partition: int = 1, mapped: bool = False, segment: str = ""
    ) -> storage_pb2.Window:
        request = storage_pb2.ReserveRequest(
            session=session, partition_id=partition, length=length, mapped=mapped, segment=segment
        )
        return self.call(self.stub.Reserve, request)

    def close_window(self, session: int, window: storage_pb2.Window, end: int) -> None:
        request = storage_pb2.CloseWindowRequest(session=session, generation=window.generation, end=end)
        self.call(self.stub.CloseWindow, request)

    def write(self, session: int, window: storage_pb2.Window, data: bytes, /, **changes: int) -> None:
        first = {
            "session": session,
            "generation": window.generation,
            "incarnation": window.incarnation,
            "offset": window.offset,
            "length": len(data),
            **changes,
        }
        chunks = [storage_pb2.WriteChunk(**first, data=data[:CHUNK_BYTES])]
        starts = range(CHUNK_BYTES, len(data), CHUNK_BYTES)
        chunks += [storage_pb2.WriteChunk(data=data[start : start + CHUNK_BYTES]) for start in starts]
        self.call(self.stub.Write, iter(chunks))

    def read(self, *ranges: tuple[int, int, int]) -> bytes:
        """Reads offset, length, generation triples."""
        try:
            chunks = list(self.stub.Read(storage_pb2.ReadRequest(ranges=pack_array(ranges, U64)), timeout=10))
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer="node") from None
        assert all(0 < len(chunk.data) <= CHUNK_BYTES for chunk in chunks)
        return b"".join(chunk.data for chunk in chunks)

    @staticmethod
    def call(method: Any, request: Any) -> Any:
        try:
            return method(request, timeout=10)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer="node") from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self, "channel"):
            self.channel.close()
        self.daemon.terminate()
        self.controller.stop()
        if error is not None:
            sys.stderr.write(self.daemon.log_tail())
