"""Consumers and their batches, with `await`; the docstrings of `tqclient.consumer` hold here."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqclient.batch import BatchData
from tqclient.errors import ClaimTimeout, Sealed, TQError
from tqclient.opening import Opening
from tqclient.operations import claims, consumers
from tqclient.operations.claims import ClaimHandle
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.effects import Operation
from tqclient.operations.ranges import Ranges
from tqclient.operations.read import Delivery
from tqclient.topology import Topology

if TYPE_CHECKING:
    from tqclient.aio import Client


class Batch(BatchData):
    """A batch whose claim is settled by awaitable calls; see `tqclient.Batch`."""

    def __init__(self, client: Client, delivery: Delivery, handle: ClaimHandle | None = None) -> None:
        super().__init__(client._state, delivery, handle)
        self._client = client

    async def ack(self) -> None:
        """Consumes the samples."""
        handle = self._claimed()
        await self._client._run(claims.settle(self._state, handle, "acked"))
        self.close()

    async def release(self) -> None:
        """Gives the samples back, to be delivered again."""
        handle = self._claimed()
        await self._client._run(claims.settle(self._state, handle, "released"))
        self.close()

    async def renew(self) -> None:
        """Renews the claim now."""
        handle = self._claimed()
        await self._client._run(claims.renew(self._state, handle))

    async def __aenter__(self) -> Batch:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None and self._handle.verdict is None and not self._state.forked:
            if error is None:
                await self.ack()
            else:
                await self._release_after(error)
        self.close()

    async def _release_after(self, error: BaseException) -> None:
        try:
            await self.release()
        except TQError as failure:
            # The block's own exception matters more; the samples come back by the chores, or when the lease ends.
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

    @property
    def topology(self) -> Topology | None:
        """Place of this process among the consumer's ranks; None when it has none."""
        return self._ref.topology

    async def register(self, timeout: float | None = None) -> int:
        """Takes this rank's place among the consumer's ranks, until this client's session ends."""
        return await self._client._run(consumers.register(self._state, self._ref, timeout))

    def claim(
        self,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        ranges: Ranges | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Opening[Batch]:
        """Claims the next samples, and waits on the server until there are `batch_size` of them."""
        claiming = claims.claim(self._state, self._ref, batch_size, copy, timeout, max_tokens=max_tokens, ranges=ranges)
        return Opening(self._claim(claiming))

    async def _claim(self, claiming: Operation[tuple[ClaimHandle, Delivery]]) -> Batch:
        handle, delivery = await self._client._run(claiming)
        return Batch(self._client, delivery, handle)

    async def batches(
        self, batch_size: int | None = None, *, max_tokens: int | None = None, ranges: Ranges | None = None
    ) -> AsyncIterator[Batch]:
        """Iterates over batches until the partition is sealed and drained."""
        while True:
            try:
                batch = await self.claim(batch_size, max_tokens=max_tokens, ranges=ranges)
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

    async def dropped(self) -> claims.Dropped:
        """Returns the ids of all samples that count as dropped for this consumer, and why they are."""
        return await self._client._run(claims.dropped(self._state, self._ref))

    async def requeue(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Makes dead samples ready again."""
        await self._client._run(claims.requeue(self._state, self._ref, ids))

    def __repr__(self) -> str:
        return f"<aio Consumer {self.name!r} of partition {self._ref.partition.name!r}>"
