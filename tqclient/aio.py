"""The same API with `await`: a facade over the operations that the blocking client runs.

    async with tq.aio.connect("tq-controller:7700") as client:
        part = await client.create_partition("train/0012", exist_ok=True)
        ids = await part.put({"tokens": [...]})
        async with part.consumer("actor_train").claim(64) as batch:
            ...

Waiting calls wait on the event loop; memory copies run in its default executor. Arguments, results and errors are those
of the blocking classes; their docstrings hold here. One thread per client, as there, sends the heartbeat.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import AsyncIterator, Coroutine, Generator, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arguments import Group, RowArguments, Tags, WeightVersion
from tqclient.batch import BatchData
from tqclient.channel import TLS, Channels
from tqclient.client import Connection
from tqclient.driver import run_async
from tqclient.errors import ClaimTimeout, Sealed, TQError
from tqclient.info import ClusterInfo, PartitionInfo, PartitionRef, Policy
from tqclient.operations import claims, cluster, partitions
from tqclient.operations.claims import ClaimHandle, ConsumerRef
from tqclient.operations.effects import Operation
from tqclient.operations.put import put
from tqclient.operations.read import Delivery, check_supported, get
from tqclient.samplers import Sampler

T = TypeVar("T")


class _Enterable(Protocol):
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...


Opened = TypeVar("Opened", bound=_Enterable)


class Opening(Coroutine[Any, Any, Opened]):
    """What `connect` and `claim` return: a coroutine that can also be entered with `async with`."""

    def __init__(self, coroutine: Coroutine[Any, Any, Opened]) -> None:
        self._coroutine = coroutine
        self._opened: Opened | None = None

    def __await__(self) -> Generator[Any, Any, Opened]:
        return self._coroutine.__await__()

    def send(self, value: Any) -> Any:
        """Resumes it; for the event loop."""
        return self._coroutine.send(value)

    def throw(self, *error: Any) -> Any:
        """Raises an exception in it; for the event loop."""
        return self._coroutine.throw(*error)

    def close(self) -> None:
        """Ends it without a result."""
        self._coroutine.close()

    async def __aenter__(self) -> Opened:
        self._opened = opened = await self._coroutine
        return opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is not None:
            await self._opened.__aexit__(kind, error, traceback)


def connect(
    address: str | None = None,
    *,
    transport: str = "auto",
    token: str | None = None,
    tls: TLS | str | os.PathLike[str] | None = None,
    timeout: float = limits.CALL_TIMEOUT,
) -> Opening[Client]:
    """Connects to a controller; see `tqclient.connect`. The client belongs to the running event loop."""
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
    connection.heartbeat.start()
    return client


class Client:
    """A connection to the service; see `tqclient.Client`."""

    def __init__(self, connection: Connection) -> None:
        """Made by `connect`."""
        self._connection = connection
        self._state = connection.state
        self._channels = Channels(connection.access.address, connection.access.aio_channel)
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
        samples_per_insert: float | None = None,
        replicas: int = 1,
        max_attempts: int = 5,
        lease: float = 10.0,
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

    async def close(self) -> None:
        """Ends the session: claims that it holds are released, what it reserved is returned. Repeatable."""
        await asyncio.to_thread(self._finalizer)
        for channel in self._channels.take_all():
            await channel.close()

    async def _run(self, operation: Operation[T]) -> T:
        self._state.check_usable()
        return await run_async(operation, self._channels)

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

    def __init__(self, client: Client, ref: PartitionRef) -> None:
        """Made by `Partition.metadata`."""
        self._client = client
        self._ref = ref

    async def get(self, name: str, default: Any = None) -> Any:
        """Returns a value, or the default when there is none of that name."""
        return (await self.to_dict()).get(name, default)

    async def update(self, values: Mapping[str, Any]) -> None:
        """Sets several values at once: a reader sees all of them or none."""
        await self._client._run(partitions.change_metadata(self._client._state, self._ref, values))

    async def delete(self, names: Iterable[str]) -> None:
        """Deletes values; names without one are passed over."""
        await self._client._run(partitions.change_metadata(self._client._state, self._ref, {}, names))

    async def to_dict(self) -> dict[str, Any]:
        """Returns all values, taken at one instant."""
        return await self._client._run(partitions.get_metadata(self._client._state, self._ref))


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
        timeout: float | None = None,
    ) -> NDArray[np.int64]:
        """Puts samples, or adds fields to samples that exist. The values must not change until it is done."""
        arguments = RowArguments(ids, keys, groups, weight_version, tags, upsert)
        return await self._client._run(put(self._state, self._ref, values, arguments, timeout))

    async def get(
        self,
        ids: Sequence[int] | NDArray[np.int64] | None = None,
        *,
        keys: Sequence[str] | None = None,
        fields: Sequence[str] | None = None,
        ranges: Any = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Batch:
        """Reads samples by id or by key, in the order asked for."""
        check_supported(ranges=ranges)
        delivery = await self._client._run(get(self._state, self._ref, ids, keys, fields, copy, timeout))
        return Batch(self._client, delivery)

    def consumer(
        self,
        name: str,
        *,
        fields: Sequence[str] | None = None,
        sampler: Sampler | None = None,
        topology: Any = None,
        where: Any = None,
    ) -> Consumer:
        """Returns a cursor over the partition; makes no call, so there is nothing to await."""
        ref = ConsumerRef.from_arguments(
            self._ref, name, fields=fields, sampler=sampler, topology=topology, where=where
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

    def __repr__(self) -> str:
        return f"<aio Partition {self.name!r}>"


class Batch(BatchData):
    """A batch whose claim is settled by awaitable calls; see `tqclient.Batch`."""

    def __init__(self, client: Client, delivery: Delivery, handle: ClaimHandle | None = None) -> None:
        super().__init__(client._state, delivery, handle)
        self._client = client

    async def ack(self) -> None:
        """Consumes the samples."""
        await self._client._run(claims.settle(self._state, self._claimed(), "acked"))
        self.close()

    async def release(self) -> None:
        """Gives the samples back, to be delivered again."""
        await self._client._run(claims.settle(self._state, self._claimed(), "released"))
        self.close()

    async def renew(self) -> None:
        """Renews the claim now."""
        await self._client._run(claims.renew(self._state, self._claimed()))

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None and self._handle.verdict is None:
            if error is None:
                await self.ack()
            else:
                await self._release_after(error)
        self.close()

    async def _release_after(self, error: BaseException) -> None:
        try:
            await self.release()
        except TQError as failure:
            # The block's own exception matters more; the samples come back by the heartbeat, or when the lease ends.
            if hasattr(error, "add_note"):
                error.add_note(f"the batch could not be released at once: {failure}")


class Consumer:
    """A named cursor over a partition; see `tqclient.Consumer`."""

    def __init__(self, client: Client, ref: ConsumerRef) -> None:
        """Made by `Partition.consumer`."""
        self._client = client
        self._state = client._state
        self._ref = ref

    @property
    def name(self) -> str:
        """Name of the consumer."""
        return self._ref.name

    def claim(
        self,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        ranges: Any = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Opening[Batch]:
        """Claims the next samples, and waits on the server until there are `batch_size` of them."""
        check_supported(max_tokens=max_tokens, ranges=ranges)
        return Opening(self._claim(batch_size, copy, timeout))

    async def _claim(self, batch_size: int | None, copy: bool, timeout: float | None) -> Batch:
        handle, delivery = await self._client._run(claims.claim(self._state, self._ref, batch_size, copy, timeout))
        return Batch(self._client, delivery, handle)

    async def batches(self, batch_size: int) -> AsyncIterator[Batch]:
        """Iterates over batches until the partition is sealed and drained."""
        while True:
            try:
                batch = await self.claim(batch_size)
            except ClaimTimeout:
                continue
            except Sealed:
                return
            async with batch:
                yield batch

    async def reset(self) -> None:
        """Makes every sample of the partition unconsumed again for this consumer."""
        await self._client._run(claims.reset(self._state, self._ref))

    async def dead(self) -> list[int]:
        """Returns the ids of samples that were given up after `max_attempts` deliveries."""
        return await self._client._run(claims.dead(self._state, self._ref))

    async def requeue(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Makes dead samples ready again."""
        await self._client._run(claims.requeue(self._state, self._ref, ids))

    def __repr__(self) -> str:
        return f"<aio Consumer {self.name!r} of partition {self._ref.partition.name!r}>"
