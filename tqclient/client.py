"""The client: what connects, and what partitions are made and found with."""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient import lane, lane_search, limits
from tqclient.arguments import text_of
from tqclient.aside import Aside, Channel
from tqclient.channel import TLS, Access, Channels
from tqclient.codec import allocate
from tqclient.counters import Traffic
from tqclient.driver import run_sync
from tqclient.errors import InvalidArgument
from tqclient.info import ClusterInfo, PartitionInfo
from tqclient.limits import KIB
from tqclient.operations import cluster, partitions
from tqclient.operations.effects import Operation
from tqclient.operations.sessions import close_session
from tqclient.partition import Partition
from tqclient.policy import Policy, SamplesPerInsert
from tqclient.session import Chores, Heartbeat
from tqclient.state import ClientState
from tqclient.transport import BufferPool, NodeTransport, check_name, open_transport
from tqclient.wire.addresses import split_address
from tqclient.wire.v1 import controller_pb2

POOLED_BYTES_MIN: Final = 32 * KIB
"""Smaller values get memory of their own: a pooled buffer would be far larger than they are."""

T = TypeVar("T")


class Connection:
    """What a blocking and an asyncio client have in common: state, blocking channels, the threads behind it.

    Args:
        address: `host:port` of the controller; None takes TQ_CONTROLLER.
        transport: `auto`, or the name of the one that is required.
        token: bearer token; None takes TQ_TOKEN.
        tls: files for TLS, or the path of the CA; None takes TQ_TLS_CA, TQ_TLS_CERT and TQ_TLS_KEY.
        timeout: seconds; the default of every call.
    """

    def __init__(
        self,
        address: str | None,
        transport: str,
        token: str | None,
        tls: TLS | str | os.PathLike[str] | None,
        timeout: float,
    ) -> None:
        address = _controller_of(address)
        prefer = check_name(text_of(transport, what="transport"))
        if isinstance(tls, str | os.PathLike):
            tls = TLS(ca=tls)
        if tls is not None and not isinstance(tls, TLS):
            raise InvalidArgument(f"tls={tls!r:.80}: expected a tq.TLS, or the path of the CA's certificate")
        self.access = Access(address, _token_of(token), tls or TLS.from_environment())
        self._aside = Aside()
        self.channels = channels = Channels(address, self._open, lane=lane.Lane if lane_search.wanted() else None)
        self.transport = prefer
        self.required = prefer != "auto"
        pool = BufferPool()

        def buffer(size: int) -> NDArray[np.uint8]:
            return pool.take(size) if size >= POOLED_BYTES_MIN else allocate(size)

        def open_path(node: controller_pb2.Node, seconds: float) -> NodeTransport:
            channel = channels.channel(node.address)
            return open_transport(node, prefer, channel=channel, pool=pool, timeout=seconds)

        self.state = ClientState(address, timeout, open_path, buffer)
        self.state.deadline(None)  # refuses a timeout that is no number of seconds
        self.threads = Heartbeat(self.state, channels), Chores(self.state, channels)

    def start(self) -> None:
        """Starts the threads that keep the session and clean up behind it."""
        for thread in self.threads:
            thread.start()

    def run(self, operation: Operation[T]) -> T:
        """Runs an operation in this thread."""
        return run_sync(operation, self.channels)

    def close(self) -> None:
        """Ends the session, the threads, the transports and the channels. Repeatable; without effect after a fork."""
        if self.state.forked or not self.state.mark_closed():
            return
        try:  # an impatient Ctrl-C leaves the session to its lease, and never a channel to the interpreter's end
            for thread in self.threads:
                thread.join(limits.BACKOFF_MAX)
            self.state.run_forgotten()
            self.run(close_session(self.state))
        finally:
            try:
                self.state.paths.close()
            finally:
                self._aside.run(self._close_channels)
                self._aside.close()

    def __reduce__(self) -> NoReturn:
        self.state.__reduce__()

    def _open(self, address: str) -> Channel:
        return self._aside.channel(self.access.channel(address))

    def _close_channels(self) -> None:
        for channel in self.channels.take_all():
            channel.close()


def _controller_of(address: str | None) -> str:
    """Returns the address that was passed, or that of TQ_CONTROLLER."""
    name, given = "address", None if address is None else text_of(address, what="address")
    if not given:
        name, given = "TQ_CONTROLLER", os.environ.get("TQ_CONTROLLER")
    if not given:
        raise InvalidArgument("no controller: pass its address, tq.connect('host:7700'), or set TQ_CONTROLLER")
    try:
        split_address(given)
    except ValueError as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return given


def _token_of(token: str | None) -> str | None:
    """Returns the token that was passed, or that of TQ_TOKEN; no error shows it."""
    name, given = "token", token
    if token is None or (isinstance(token, str) and not token):
        name, given = "TQ_TOKEN", os.environ.get("TQ_TOKEN") or None
    if given is not None and not (
        isinstance(given, str) and given.isascii() and given.isprintable() and given == given.strip()
    ):
        raise InvalidArgument(f"{name}: expected printable ASCII, and no blank or line break around it")
    return given


def connect(
    address: str | None = None,
    *,
    transport: str = "auto",
    token: str | None = None,
    tls: TLS | str | os.PathLike[str] | None = None,
    timeout: float = limits.CALL_TIMEOUT,
) -> Client:
    """Connects to a controller.

    Args:
        address: `host:port` of the controller; None takes TQ_CONTROLLER.
        transport: `auto`: the best that each storage node can be reached by. A name (`shm`, `grpc`, `rdma`, ...)
            requires that one.
        token: bearer token; None takes TQ_TOKEN.
        tls: a `TLS`, or the path of the CA's certificate; None takes TQ_TLS_CA, TQ_TLS_CERT and TQ_TLS_KEY, and speaks
            plain text when none of them is set.
        timeout: seconds; the default of every call of the client, and the deadline of this one.

    Returns:
        A client; use it as a context manager, or close it.

    Raises:
        InvalidArgument: no address, or an argument is off.
        Unavailable: the controller did not answer in time, or one side refused the other's certificate.
        Unauthenticated: it refused the token.
        UnsupportedVersion: it does not speak this client's version.
        TransportUnavailable: the transport that was required cannot be had; says why.
    """
    connection = Connection(address, transport, token, tls, timeout)
    try:
        connection.run(cluster.start(connection.state, connection.required))
    except BaseException:
        connection.close()
        raise
    connection.start()
    return Client(connection)


class Client:
    """A connection to the service. Its methods may be called from many threads at once.

    It does not survive a fork: a child process connects anew.
    """

    def __init__(self, connection: Connection) -> None:
        """Made by `connect`."""
        self._connection = connection
        self._state = connection.state
        self._finalizer = weakref.finalize(self, connection.close)

    def create_partition(
        self,
        name: str,
        *,
        consumers: Sequence[str] = (),
        max_staleness: int | None = None,
        staleness: str = "drop",
        capacity_samples: int | None = None,
        capacity_bytes: int | str | None = None,
        capacity_versions: int | None = None,
        samples_per_version: int | None = None,
        samples_per_insert: float | SamplesPerInsert | None = None,
        replicas: int = 1,
        max_attempts: int = 5,
        lease: float = 10.0,
        keep: bool = False,
        metadata: Mapping[str, Any] | None = None,
        exist_ok: bool = False,
    ) -> Partition:
        """Makes a partition.

        Args:
            name: of the partition, such as `train/0012`.
            consumers: who will read it; another name is then refused. Empty: any name, made at its first claim.
            max_staleness: weight versions that a sample may lag behind `Partition.set_version`; None: any.
            staleness: what becomes of one that lags more. `drop`: it is dropped for every consumer that did not have it
                yet, and with it its whole group for a consumer of whole groups. `wait`: none ever lags more, because
                new ones are held back: a put, or a `Partition.permit`, waits until
                `accepted + running <= (max_staleness + version + 1) * samples_per_version`, where `accepted` samples
                were put so far, `running` ones are out on permits, and `version` is 0 until `set_version`.
            capacity_samples: live samples at most; a put waits while there are more. None: no limit.
            capacity_bytes: of their blocks, such as `64GiB`; a put waits while there are more. None: no limit.
            capacity_versions: distinct weight versions (the newest of each span) of live samples at most; a put that
                would bring another one waits. None: no limit.
            samples_per_version: samples that the trainer consumes before it sets the next version; with `wait`.
            samples_per_insert: keeps puts and claims in pace: a ratio, or a `SamplesPerInsert`, which says how. None:
                no limit.
            replicas: storage nodes that hold each block, from 1 to 3; a put waits while fewer can be reached.
            max_attempts: deliveries of a sample to one consumer before it is listed as dead.
            lease: seconds that a claim lives without a sign of life from its client.
            keep: do not retire the partition once it is sealed and every one of its `consumers` is done with it.
            metadata: partition-level values to begin with.
            exist_ok: take a partition of that name that exists, when its policies are the same.

        Raises:
            PartitionExists: it exists, and `exist_ok` was not given or the policies differ.
        """
        policy = Policy.from_arguments(
            max_staleness=max_staleness,
            staleness=staleness,
            capacity_samples=capacity_samples,
            capacity_bytes=capacity_bytes,
            samples_per_insert=samples_per_insert,
            replicas=replicas,
            max_attempts=max_attempts,
            lease=lease,
            capacity_versions=capacity_versions,
            samples_per_version=samples_per_version,
            keep=keep,
        )
        ref = self._run(partitions.create_partition(self._state, name, consumers, policy, metadata, exist_ok))
        return Partition(self, ref)

    def partition(self, name: str) -> Partition:
        """Finds a partition.

        Raises:
            PartitionNotFound: there is none of that name.
        """
        return Partition(self, self._run(partitions.find_partition(self._state, name)))

    def partitions(self, prefix: str = "") -> list[PartitionInfo]:
        """Describes the partitions whose names begin with `prefix`."""
        return self._run(partitions.list_partitions(self._state, prefix))

    def delete_partition(self, name: str) -> None:
        """Removes a partition with all its samples; its bytes are freed once nobody reads them.

        Raises:
            PartitionNotFound: there is none of that name.
        """
        self._run(partitions.delete_partition(self._state, name))

    def describe(self) -> ClusterInfo:
        """Describes the service: its storage nodes, which transport serves each of them, and why."""
        return self._run(cluster.describe(self._state))

    @property
    def counters(self) -> dict[str, Traffic]:
        """What this client has moved so far, by the name of the transport that it took."""
        return self._state.counters.traffic()

    def close(self) -> None:
        """Ends the session: claims that it holds are released, what it reserved is returned. Repeatable."""
        self._finalizer()

    def _run(self, operation: Operation[T]) -> T:
        self._state.check_usable()
        return self._connection.run(operation)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Client of {self._state.address}{', closed' if self._state.closed else ''}>"
