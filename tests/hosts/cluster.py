"""A service that is spread over hosts: a controller, two storage nodes, and two hosts that clients run on."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import grpc

import tqclient as tq
from tests.faults.probe import ANSWER_SECONDS, LEASE, NodeProbe
from tests.harness import Child, wait_until
from tests.harness.hosts import Host, Network
from tests.harness.remote import Remote
from tests.harness.supervisor import stop_processes
from tqclient.limits import MIB
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import storage_pb2, storage_pb2_grpc

CONTROLLER: Final = "controller"
STORAGE: Final = ("storage-a", "storage-b")
CLIENTS: Final = ("client-a", "client-b")
QUARANTINE_SECONDS: Final = 1.0
"""How long a node keeps bytes that a one-sided writer may still write to, before it replaces its engine."""
RECLAIM_SECONDS: Final = LEASE + QUARANTINE_SECONDS + 2.0
"""Until the bytes of a writer that vanished are free: its lease, the quarantine, and a new engine."""
SERVING_SECONDS: Final = 20.0
TRANSPORT: Final = "mooncake"
"""That the faults are met over."""


class Daemon:
    """A daemon on a host of its own; comes back on the same port, with the same data.

    Attributes:
        host: that it runs on.
        address: as the other hosts reach it.
        life: its present process.
    """

    life: Child

    def __init__(self, host: Host, module: str, port: int, arguments: Sequence[str]) -> None:
        self.host = host
        self.address = f"{host.address}:{port}"
        listen = f"--listen=0.0.0.0:{port}"
        self._command = [sys.executable, "-m", module, listen, *arguments]
        self._lives = 0

    def launch(self) -> None:
        """Starts it, and does not wait."""
        self.life = self.host.run(self._command, name=f"life-{self._lives}")
        self._lives += 1

    def wait_serving(self) -> None:
        """Waits until it says that it serves."""
        self.life.wait_for('"serving"', timeout=SERVING_SECONDS)

    def restart(self) -> None:
        """Starts it again and waits until it serves."""
        self.launch()
        self.wait_serving()

    def kill(self) -> None:
        """SIGKILL to the daemon alone: what it started has to end by itself."""
        self.life.kill()

    def stop(self) -> None:
        """SIGSTOP to the daemon and every process that it started: the host hangs."""
        stop_processes(*self.pids())

    def resume(self) -> None:
        """SIGCONT, likewise."""
        for pid in self.pids():
            os.kill(pid, signal.SIGCONT)

    def pids(self) -> list[int]:
        """The daemon, and the processes that it started."""
        tasks = Path(f"/proc/{self.life.pid}/task")
        started = [int(pid) for task in tasks.iterdir() for pid in (task / "children").read_text().split()]
        return [self.life.pid, *started]


class Nodes:
    """Asks the storage nodes; lives on the controller's host."""

    def __init__(self, addresses: dict[str, str]) -> None:
        self._channels = {name: dial(address) for name, address in addresses.items()}

    def describe(self, name: str) -> bytes:
        """What a node says of itself, on the wire."""
        stub = storage_pb2_grpc.StorageStub(self._channels[name])
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            try:
                reply = stub.DescribeNode(
                    storage_pb2.DescribeNodeRequest(), timeout=ANSWER_SECONDS, wait_for_ready=True
                )
            except grpc.RpcError:  # a connection of before the fault
                if time.monotonic() > deadline:
                    raise
            else:
                data: bytes = reply.SerializeToString()
                return data

    def close(self) -> None:
        """Closes the channels."""
        for channel in self._channels.values():
            channel.close()


class HostCluster(AbstractContextManager["HostCluster"]):
    """The daemons, each on its host.

    Attributes:
        network: with the hosts `CONTROLLER`, `STORAGE` and `CLIENTS`.
        controller: daemon.
        storage: daemons, by name.
    """

    def __init__(self, directory: Path, *, arena_bytes: int, lease: float = LEASE) -> None:
        self.network = Network([CONTROLLER, *STORAGE, *CLIENTS], directory, shm_bytes=arena_bytes + 16 * MIB)
        self._directory = directory
        self._arena_bytes = arena_bytes
        self._lease = lease
        self._users = 0

    def __enter__(self) -> HostCluster:
        self.network.__enter__()
        try:
            self._start()
        except BaseException:
            self.network.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.network.__exit__(kind, error, trace)

    def _start(self) -> None:
        arguments = [f"--data-dir={self._directory / 'journal'}", f"--session-lease={self._lease}"]
        self.controller = Daemon(self.network[CONTROLLER], "tqserver.controller.main", 7700, arguments)
        self.storage = {name: self._node(name) for name in STORAGE}
        for daemon in (self.controller, *self.storage.values()):
            daemon.launch()
        self._nodes = self.network[CONTROLLER].remote(
            Nodes, {name: node.address for name, node in self.storage.items()}, name="nodes"
        )
        for daemon in (self.controller, *self.storage.values()):
            daemon.wait_serving()
        for name in STORAGE:
            self.wait_ready(name)

    def _node(self, name: str) -> Daemon:
        host = self.network[name]
        arguments = [
            f"--name={name}",
            f"--controller={self.controller.address}",
            f"--advertise={host.address}:7701",
            f"--arena-bytes={self._arena_bytes}",
            "--mooncake=on",
            f"--quarantine-seconds={QUARANTINE_SECONDS}",
        ]
        return Daemon(host, "tqserver.storage.main", 7701, arguments)

    def describe(self, name: str) -> storage_pb2.DescribeNodeReply:
        """What a storage node says of itself."""
        return storage_pb2.DescribeNodeReply.FromString(self._nodes.call(Nodes.describe, name))

    def probe(self, name: str) -> NodeProbe:
        """What tells how full a storage node is."""
        return NodeProbe(partial(self.describe, name))

    def wait_ready(self, name: str) -> None:
        """Waits until a storage node is in touch with the controller, and has an engine."""

        def ready() -> bool:
            node = self.describe(name)
            return node.attached and node.HasField("mooncake")

        wait_until(ready, timeout=SERVING_SECONDS, what=f"{name} is attached and has an engine")

    def arena(self, name: str) -> Path:
        """The arena file of a storage node, as this process sees it."""
        return self.network[name].shm / f"tq-{name}.arena"

    def user(self, host: str, *, transport: str, timeout: float = 20.0) -> Remote:
        """Connects a client on a host; it ends with the cluster."""
        self._users += 1
        return self.network[host].remote(
            tq.connect,
            self.controller.address,
            transport=transport,
            timeout=timeout,
            name=f"user-{self._users}",
        )

    def script(self, host: str, source: str, *arguments: Any, name: str, env: Mapping[str, str] | None = None) -> Child:
        """Starts a Python program on a host."""
        command = [sys.executable, "-u", "-c", source, *map(str, arguments)]
        return self.network[host].run(command, name=name, env=env)

    @contextmanager
    def only(self, name: str) -> Iterator[None]:
        """Every other storage node is down, in good order, for as long as the context lasts."""
        others = [other for other in STORAGE if other != name]
        for other in others:
            self.storage[other].life.terminate()
        for other in others:
            assert self.storage[other].life.wait(timeout=15) == 0
        try:
            yield
        finally:
            for other in others:
                self.storage[other].restart()
                self.wait_ready(other)


def wait_seconds(seconds: float, *, since: float | None = None) -> None:
    """Waits until so much time has passed; for faults that last."""
    end = (time.monotonic() if since is None else since) + seconds
    wait_until(lambda: time.monotonic() >= end, timeout=seconds + 5, what="time passes")
