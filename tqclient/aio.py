"""The same API with `await`: a facade over the operations that the blocking client runs.

    async with tq.aio.connect("tq-controller:7700") as client:
        part = await client.create_partition("train/0012", exist_ok=True)
        ids = await part.put({"tokens": [...]})
        async with part.consumer("actor_train").claim(64) as batch:
            ...

Waiting calls wait on the event loop; memory copies run in threads. Arguments, results and errors are those
of the blocking classes; their docstrings hold here. Two threads per client, as there, keep the session and clean up.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient import lane_search, limits, threads
from tqclient.aio_consumer import Batch, Consumer
from tqclient.aio_lane import AioLane
from tqclient.aio_permit import Permit
from tqclient.aio_producer import Producer
from tqclient.aio_watch import watch
from tqclient.aio_writer import Writer
from tqclient.arguments import Group, RowArguments, Tags, WeightVersion
from tqclient.changes import Change
from tqclient.channel import TLS, Channels
from tqclient.client import Connection
from tqclient.counters import Traffic
from tqclient.driver import run_async
from tqclient.errors import InvalidArgument
from tqclient.info import ClusterInfo, PartitionInfo, PartitionRef
from tqclient.opening import Opening
from tqclient.operations import cluster, partitions, permits
from tqclient.operations.allocate import allocate
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.effects import Operation
from tqclient.operations.put import put
from tqclient.operations.ranges import Ranges
from tqclient.operations.read import get
from tqclient.operations.watch import Watcher
from tqclient.permit import PermitData, handle_of
from tqclient.policy import Policy, SamplesPerInsert
from tqclient.samplers import Sampler
from tqclient.spec import Spec
from tqclient.topology import Topology

__all__ = ["Batch", "Client", "Consumer", "Metadata", "Opening", "Partition", "Permit", "Writer", "connect"]

T = TypeVar("T")


def connect(
    address: str | None = None,
    *,
    transport: str = "auto",
    token: str | None = None,
    tls: TLS | str | os.PathLike[str] | None = None,
    timeout: float = limits.CALL_TIMEOUT,
) -> Opening[Client]:
    """Connects to a controller; see `tqclient.connect`. It belongs to the running event loop, and refuses others."""
    return Opening(_connect(address, transport, token, tls, timeout))


async def _connect(
    address: str | None, transport: str, token: str | None, tls: TLS | str | os.PathLike[str] | None, timeout: float
) -> Client:
    connection = Connection(address, transport, token, tls, timeout)
    client = Client(connection)
    try:
        await client._run(cluster.start(connection.state, connection.required))
    except BaseException:
        await client.close()
        raise
    connection.start()
    return client


async def _close_all(channels: Sequence[Any]) -> None:
    for channel in channels:
        await channel.close()


class Client:
    """A connection to the service; see `tqclient.Client`."""

    def __init__(self, connection: Connection) -> None:
        """Made by `connect`."""
        self._connection = connection
        self._state = connection.state
        self._loop = asyncio.get_running_loop()
        by_lane = AioLane if lane_search.wanted() else None
        self._channels = Channels(connection.access.address, connection.access.aio_channel, lane=by_lane)
        self._finalizer = weakref.finalize(self, connection.close)

    async def create_partition(
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
        """Makes a partition."""
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
        ref = await self._run(partitions.create_partition(self._state, name, consumers, policy, metadata, exist_ok))
        return Partition(self, ref)

    async def partition(self, name: str) -> Partition:
        """Finds a partition."""
        return Partition(self, await self._run(partitions.find_partition(self._state, name)))

    async def partitions(self, prefix: str = "") -> list[PartitionInfo]:
        """Describes the partitions whose names begin with `prefix`."""
        return await self._run(partitions.list_partitions(self._state, prefix))

    async def delete_partition(self, name: str) -> None:
        """Removes a partition with all its samples."""
        await self._run(partitions.delete_partition(self._state, name))

    async def describe(self) -> ClusterInfo:
        """Describes the service: its storage nodes, which transport serves each of them, and why."""
        return await self._run(cluster.describe(self._state))

    @property
    def counters(self) -> dict[str, Traffic]:
        """What this client has moved so far, by the name of the transport that it took."""
        return self._state.counters.traffic()

    async def close(self) -> None:
        """Ends the session: claims that it holds are released, what it reserved is returned. Repeatable.

        Any event loop may do so: where that of the client has ended, nothing is under way in it any more.
        """
        if self._state.forked:
            return  # the event loop is the parent's, too
        try:
            await asyncio.shield(threads.begin(self._finalizer))
        finally:
            closing = _close_all(self._channels.take_all())
            if asyncio.get_running_loop() is self._loop:
                await closing
            elif self._loop.is_running():  # in another thread, which may wait for this one
                asyncio.run_coroutine_threadsafe(closing, self._loop)
            else:
                closing.close()  # they are closed when nobody refers to them

    async def _run(self, operation: Operation[T]) -> T:
        self._state.check_usable()
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument(
                "this client belongs to the event loop that ran when it connected, and another one runs now: call "
                "tq.aio.connect() in this one, or share a client of tq.connect(), which any thread may use"
            )
        for former in self._channels.take_former(self._state.nodes.values()):
            await former.close()
        try:
            return await run_async(operation, self._channels)
        except asyncio.CancelledError:
            cancelling = getattr(asyncio.current_task(), "cancelling", lambda: 0)  # not in Python 3.10
            if not cancelling():  # a channel that is closed cancels its calls, whoever waits for them
                self._state.check_usable()
            raise

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"<aio Client of {self._state.address}{', closed' if self._state.closed else ''}>"


class Metadata:
    """Partition-level values; a mapping cannot be awaited, so its accesses are methods here."""

    def __init__(self, client: Client, ref: PartitionRef, shard: int | None = None) -> None:
        """Made by `Partition.metadata` and `Shard.metadata`."""
        self._client = client
        self._ref = ref
        self._shard = shard

    async def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or the default when there is none of that name."""
        return (await self.to_dict()).get(name, default)

    async def update(self, values: Mapping[str, Any]) -> None:
        """Sets several values at once: a reader sees all of them or none."""
        operation = partitions.change_metadata(self._client._state, self._ref, values, (), self._shard)
        await self._client._run(operation)

    async def delete(self, names: Iterable[str]) -> None:
        """Deletes values; names without one are passed over."""
        operation = partitions.change_metadata(self._client._state, self._ref, {}, names, self._shard)
        await self._client._run(operation)

    async def to_dict(self) -> dict[str, Any]:
        """Returns all values, taken at one instant."""
        return await self._client._run(partitions.get_metadata(self._client._state, self._ref, self._shard))


class Shard:
    """The part of a partition that is meant for one DP rank; see `tqclient.partition.Shard`."""

    def __init__(self, client: Client, ref: PartitionRef, shard: int) -> None:
        """Made by `Partition.shard`."""
        self._client = client
        self._ref = ref
        self._shard = shard

    @property
    def metadata(self) -> Metadata:
        """The shard's own values."""
        return Metadata(self._client, self._ref, self._shard)


class Partition:
    """A set of samples; see `tqclient.Partition`."""

    def __init__(self, client: Client, ref: PartitionRef) -> None:
        """Made by `Client.partition` and `Client.create_partition`."""
        self._client = client
        self._state = client._state
        self._ref = ref

    @property
    def name(self) -> str:
        """Name of the partition."""
        return self._ref.name

    @property
    def metadata(self) -> Metadata:
        """Partition-level values."""
        return Metadata(self._client, self._ref)

    def shard(self, shard: int) -> Shard:
        """Returns a part of the partition, by number; makes no call."""
        return Shard(self._client, self._ref, partitions.shard_of(shard))

    def producer(self) -> Producer:
        """Registers this client as one that makes samples, as an asynchronous context manager."""
        return Producer(self._client, self._ref)

    async def put(
        self,
        values: Any,
        *,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        keys: Sequence[str | None] | None = None,
        groups: Sequence[Group | None] | None = None,
        weight_version: WeightVersion | None = None,
        tags: Tags | Sequence[Tags] | None = None,
        upsert: bool = False,
        permit: PermitData | None = None,
        timeout: float | None = None,
    ) -> NDArray[np.int64]:
        """Puts samples, or adds fields to samples that exist. The values must not change until it is done."""
        arguments = RowArguments(ids, keys, groups, weight_version, tags, upsert)
        return await self._client._run(put(self._state, self._ref, values, arguments, timeout, handle_of(permit)))

    def allocate(
        self,
        rows: int,
        spec: Spec,
        *,
        keys: Sequence[str | None] | None = None,
        groups: Sequence[Group | None] | None = None,
        weight_version: WeightVersion | None = None,
        tags: Tags | Sequence[Tags] | None = None,
        timeout: float | None = None,
    ) -> Opening[Writer]:
        """Makes room for new samples, to be filled in where they will lie; also for `async with`."""
        return Opening(self._allocate(rows, spec, RowArguments(None, keys, groups, weight_version, tags), timeout))

    async def _allocate(self, rows: int, spec: Spec, arguments: RowArguments, timeout: float | None) -> Writer:
        operation = allocate(self._state, self._ref, rows, spec, arguments, timeout)
        return Writer(self._client, await self._client._run(operation))

    def permit(self, samples: int, *, timeout: float | None = None) -> Opening[Permit]:
        """Waits until the partition admits samples that are about to be generated; also for `async with`."""
        return Opening(self._permit(samples, timeout))

    async def _permit(self, samples: int, timeout: float | None) -> Permit:
        return Permit(self._client, await self._client._run(permits.acquire(self._state, self._ref, samples, timeout)))

    async def get(
        self,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        keys: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        ranges: Ranges | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Batch:
        """Reads samples by id or by key, in the order asked for."""
        delivery = await self._client._run(get(self._state, self._ref, ids, keys, fields, copy, timeout, ranges))
        return Batch(self._client, delivery)

    def consumer(
        self,
        name: str,
        *,
        fields: Sequence[str] | None = None,
        sampler: Sampler | None = None,
        topology: Topology | None = None,
        where: Tags | None = None,
        token_field: str | None = None,
    ) -> Consumer:
        """Returns a cursor over the partition; makes no call, so there is nothing to await."""
        ref = ConsumerRef.from_arguments(
            self._ref,
            name,
            fields=fields,
            sampler=sampler,
            topology=topology,
            where=where,
            token_field=token_field,
        )
        return Consumer(self._client, ref)

    async def describe(self) -> PartitionInfo:
        """Describes the partition."""
        return await self._client._run(partitions.partition_info(self._state, self._ref))

    async def set_tags(self, ids: Sequence[int] | NDArray[np.int64], tags: Tags | Sequence[Tags]) -> None:
        """Merges tags into those of samples; None deletes a tag."""
        await self._client._run(partitions.set_tags(self._state, self._ref, ids, tags))

    async def set_version(self, version: int) -> None:
        """Sets the current weight version."""
        await self._client._run(partitions.set_version(self._state, self._ref, version))

    async def seal(self) -> None:
        """Says that no more samples come."""
        await self._client._run(partitions.seal(self._state, self._ref))

    async def clear(
        self,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        keys: Sequence[str] | None = None,
        groups: Sequence[Group] | None = None,
        tags: Mapping[str, Any] | None = None,
        prefix: str | None = None,
    ) -> NDArray[np.int64]:
        """Removes samples for every consumer."""
        return await self._client._run(partitions.clear(self._state, self._ref, ids, keys, groups, tags, prefix))

    def watch(self, from_seq: int = 0, timeout: float | None = None) -> AsyncGenerator[Change, None]:
        """Follows what changes in the partition, as an asynchronous iterator."""
        return watch(self._client, Watcher(self._state, self._ref, from_seq, timeout))

    def __repr__(self) -> str:
        return f"<aio Partition {self.name!r}>"
