"""A real tq-controller, a client that speaks raw stubs to it, and a storage node that only listens."""

from __future__ import annotations

import itertools
import json
import queue
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from tests.harness import Child, Supervisor
from tests.harness.supervisor import PATIENCE_SECONDS
from tqclient import errors
from tqclient.schema import Form
from tqclient.wire.dialing import dial
from tqclient.wire.packing import pack_strings
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import common_pb2 as common
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1.controller_pb2_grpc import ControllerStub

GENERATIONS = itertools.count(1)
FORM = Form("dense", "torch", "float32", ()).to_bytes()
EXTENT_BYTES = 256
DIRECTORY = b"the codec's own"


class Controller:
    """Runs tq-controller on one data directory; may be killed and started again."""

    def __init__(self, supervisor: Supervisor, data_dir: Path) -> None:
        self._supervisor = supervisor
        self.data_dir = data_dir
        self.starts = 0
        self.address = ""
        self.child: Child
        self._channels: list[grpc.Channel] = []

    def spawn(self, *flags: str, env: dict[str, str] | None = None) -> Child:
        """Starts the daemon; it may refuse to serve."""
        self.starts += 1
        listen = self.address or "127.0.0.1:0"  # a restart takes its old port, so that clients find it again
        command = [sys.executable, "-m", "tqserver.controller.main", "--listen", listen]
        command += ["--data-dir", str(self.data_dir), "--session-lease", "60", *flags]
        self.child = self._supervisor.command(command, name=f"controller-{self.starts}", env=env)
        return self.child

    def start(self, *flags: str, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Starts the daemon and waits until it serves; returns its one line of stdout."""
        line: dict[str, Any] = json.loads(self.spawn(*flags, env=env).wait_for("serving"))
        self.address = line["serving"]
        return line

    def channel(self) -> grpc.Channel:
        """Opens a channel, closed with the test."""
        channel = dial(self.address)
        self._channels.append(channel)
        return channel

    def client(self) -> Client:
        """Opens a session on a channel of its own."""
        return Client(self.channel())

    def node(self, name: str = "node", arena: int = 7, seen: int = 0) -> Node:
        """Attaches a storage node."""
        return Node(self.channel(), name, arena, seen)

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels:
            channel.close()


class Client:
    """One client: numbers its requests, and turns failures into errors."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.stub = ControllerStub(channel)
        self.client_id = secrets.token_bytes(16)
        self.requests = 0
        self.session = 0
        self.generation = 0  # of the window of the latest put
        request = pb.OpenSessionRequest(mutation=self.mutation(), label="test", version="0", wire_version=1)
        self.session = self.call("OpenSession", request).session

    def mutation(self, *, settled_below: int = 0) -> common.Mutation:
        """Returns the next request number."""
        self.requests += 1
        return common.Mutation(
            client_id=self.client_id, request=self.requests, settled_below=settled_below, session=self.session
        )

    def call_again(self, method: str, request: Any) -> Any:
        """Calls as often as it takes to be answered: the end of the connection before may not be noticed yet."""
        end = time.monotonic() + PATIENCE_SECONDS
        while True:
            try:
                return self.call(method, request)
            except errors.Unavailable:
                if time.monotonic() >= end:
                    raise

    def call(self, method: str, request: Any, *, timeout: float = 20) -> Any:
        """Calls; raises the TQError that came back."""
        try:
            return getattr(self.stub, method)(request, timeout=timeout, wait_for_ready=True)
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer="controller") from error

    def create(self, name: str = "", *, consumers: tuple[str, ...] = ("c",), **policy: Any) -> int:
        """Creates a partition; returns its id."""
        name = name or secrets.token_hex(8)
        request = pb.CreatePartitionRequest(
            mutation=self.mutation(), name=name, consumers=consumers, policy=pb.Policy(**policy)
        )
        return int(self.call("CreatePartition", request).partition.partition_id)

    def commit_request(
        self, partition_id: int, rows: int, *, keys: list[str] | None = None, wait_ms: int = 0
    ) -> pb.CommitRequest:
        """Builds a put of one block with the field `x`, in a window of its own."""
        self.generation = next(GENERATIONS)
        extent = common.Extent(node="node", arena=7, offset=0, length=EXTENT_BYTES, generation=self.generation)
        return pb.CommitRequest(
            mutation=self.mutation(),
            partition_id=partition_id,
            rows=rows,
            keys=pack_strings(keys) if keys is not None else None,
            fields=[pb.Field(name="x", form=FORM)],
            blocks=[pb.BlockWrite(extents=[extent], directory=DIRECTORY, rows=rows)],
            wait_ms=wait_ms,
        )

    def commit(self, partition_id: int, rows: int, **options: Any) -> list[int]:
        """Puts; returns the ids."""
        reply = self.call("Commit", self.commit_request(partition_id, rows, **options))
        return ids_of(reply.ids)

    def claim_request(self, partition_id: int, batch_size: int, *, wait_ms: int = 0, **options: Any) -> pb.ClaimRequest:
        """Builds a claim for consumer `c`."""
        return pb.ClaimRequest(
            mutation=self.mutation(),
            partition_id=partition_id,
            consumer="c",
            batch_size=batch_size,
            wait_ms=wait_ms,
            **options,
        )

    def claim(self, partition_id: int, batch_size: int, **options: Any) -> pb.ClaimReply:
        """Claims."""
        reply: pb.ClaimReply = self.call("Claim", self.claim_request(partition_id, batch_size, **options))
        return reply

    def settle(self, claim_id: int, verdict: pb.Verdict = pb.VERDICT_ACK) -> None:
        """Acks or releases."""
        self.call("Settle", pb.SettleRequest(mutation=self.mutation(), claim_id=claim_id, verdict=verdict))

    def counts(self, partition_id: int) -> dict[str, int]:
        """Returns the counts of consumer `c`."""
        reply = self.call("DescribePartition", pb.DescribePartitionRequest(partition_id=partition_id))
        (counts,) = [each for each in reply.partition.consumers if each.name == "c"]
        return {state: getattr(counts, state) for state in ("pending", "ready", "leased", "consumed", "dropped")}


class Node:
    """A storage node's end of the link."""

    def __init__(self, channel: grpc.Channel, name: str, arena: int, seen: int) -> None:
        self._reports: queue.SimpleQueue[pb.NodeReport | None] = queue.SimpleQueue()
        node = pb.Node(name=name, address="127.0.0.1:1", arena=arena, incarnation=1, capacity_bytes=1 << 30)
        self.report(hello=pb.NodeHello(node=node, seen_sequence=seen))
        self._orders = ControllerStub(channel).Attach(iter(self._reports.get, None), wait_for_ready=True)

    def report(self, **report: Any) -> None:
        """Sends a report."""
        self._reports.put(pb.NodeReport(**report))

    def next_order(self) -> pb.NodeOrder:
        """Waits for the next order."""
        try:
            order: pb.NodeOrder = next(self._orders)
            return order
        except grpc.RpcError as error:
            raise from_rpc_error(error, peer="controller") from error

    def close(self) -> None:
        """Ends the link."""
        self._reports.put(None)
        self._orders.cancel()


def ids_of(packed: bytes) -> list[int]:
    """Unpacks int64."""
    return np.frombuffer(packed, dtype="<i8").tolist()


def rows_of(packed: bytes) -> list[list[int]]:
    """Unpacks uint64 [n, 4]."""
    return np.frombuffer(packed, dtype="<u8").reshape(-1, 4).tolist()


@pytest.fixture
def daemon(supervisor: Supervisor, tmp_path: Path) -> Iterator[Controller]:
    """A controller that is not started yet."""
    controller = Controller(supervisor, tmp_path / "data")
    yield controller
    controller.close()


@pytest.fixture(scope="module")
def controller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Controller]:
    """A controller that serves all tests of a module."""
    directory = tmp_path_factory.mktemp("controller")
    with Supervisor(directory) as supervisor:
        running = Controller(supervisor, directory / "data")
        running.start()
        yield running
        running.close()


@pytest.fixture
def node(controller: Controller) -> Iterator[Node]:
    """A storage node, attached and synchronised."""
    attached = controller.node()
    assert attached.next_order().HasField("sync")
    yield attached
    attached.close()


@pytest.fixture
def client(controller: Controller, node: Node) -> Iterator[Client]:
    """A client whose session is closed with the test."""
    connected = controller.client()
    yield connected
    connected.call("CloseSession", pb.CloseSessionRequest(mutation=connected.mutation()))
