"""Consumers and their batches, as blocking calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqclient.batch import BlockBatch
from tqclient.errors import ClaimTimeout, Sealed
from tqclient.operations import claims, consumers
from tqclient.operations.claims import ClaimHandle
from tqclient.operations.consumers import ConsumerRef
from tqclient.operations.ranges import Ranges
from tqclient.operations.read import Delivery
from tqclient.topology import Topology

if TYPE_CHECKING:
    from tqclient.client import Client


class Batch(BlockBatch):
    """A batch whose claim is settled by blocking calls.

    As a context manager a claimed batch is acked when the block ends normally, and released for redelivery when it ends
    by an exception, unless it was settled before. One that was read with `get` is closed. In a forked child the
    claim is left alone: it is the parent's.
    """

    def __init__(self, client: Client, delivery: Delivery, handle: ClaimHandle | None = None) -> None:
        super().__init__(client._state, delivery, handle)
        self._client = client

    def ack(self) -> None:
        """Consumes the samples: they are not delivered to this consumer again. Again: no effect.

        Raises:
            LeaseExpired: the claim is not held any more; its samples are, or will be, delivered again.
            InvalidArgument: the batch was released before.
            Unavailable: the controller was away until the deadline; call it again to try further.
        """
        handle = self._claimed()
        self._client._run(claims.settle(self._state, handle, "acked"))
        self.close()

    def release(self) -> None:
        """Gives the samples back, to be delivered again; a delivery attempt has been spent. Again: no effect.

        Raises:
            LeaseExpired: the claim is not held any more.
            InvalidArgument: the batch was acked before.
        """
        handle = self._claimed()
        self._client._run(claims.settle(self._state, handle, "released"))
        self.close()

    def renew(self) -> None:
        """Renews the claim now, for its whole lease; the heartbeat does so all the time.

        Raises:
            LeaseExpired: the claim is not held any more.
        """
        handle = self._claimed()
        self._client._run(claims.renew(self._state, handle))

    def _is_held(self) -> bool:
        return self._handle is not None and self._handle.verdict is None and not self._state.forked


class Consumer:
    """A named cursor over a partition. Its methods may be called from many threads at once."""

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

    def register(self, timeout: float | None = None) -> int:
        """Takes this rank's place among the consumer's ranks, until this client's session ends. Again: no effect.

        The first claim does it by itself. It waits for up to 1.5 leases of a session while another live rank holds the
        place, or live ranks have other sizes: they may be those of a job that was killed a moment ago.

        Args:
            timeout: seconds.

        Returns:
            How many ranks of the topology are registered and live, this one included.

        Raises:
            TopologyMismatch: the rank does not fit those that are live; says which sizes, and which ranks.
            InvalidArgument: the consumer has no topology.
        """
        return self._client._run(consumers.register(self._state, self._ref, timeout))

    def claim(
        self,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        ranges: Ranges | None = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Batch:
        """Claims the next samples, and waits on the server until there are `batch_size` of them.

        Once the partition is sealed and nothing is pending, what is left comes as a smaller batch. The claim is renewed
        by itself for as long as this process lives and holds the batch.

        With a topology, the batch is the next one of this process' DP rank, and the same for all of its members. It is
        consumed when all of them have acked (or the leader, with `leader_acks`), and delivered again, to all of them,
        when one releases it or dies: what the others still hold of it is then refused with LeaseExpired.

        Args:
            batch_size: samples; with a topology, those of each DP rank.
            max_tokens: samples are taken in the sampler's order until the next one would exceed this sum of the lengths
                of the consumer's `token_field`, or there are `batch_size` of them.
            ranges: as `Partition.get` has them. One that does not fit gives the samples back, an attempt spent.
            copy: False gives views where the path allows them: good until the batch is settled or closed.
                Never write to one: a store to a tensor that is a view ends the process (SIGSEGV); arrays raise.
            timeout: seconds to wait for samples. What was granted is read in what is left of them, or as long as its
                lease, and the client's `timeout`, allow.

        Returns:
            The batch; settle it, or use it as a context manager.

        Raises:
            ClaimTimeout: too few samples were ready in time; nothing was claimed.
            Sealed: the partition is sealed, and nothing is left to deliver.
            InvalidArgument: one sample alone exceeds `max_tokens`, or its field has no lengths; a range does not fit.
            TopologyMismatch: this rank does not fit those that are live; see `register`.
            CorruptBlock: stored bytes fail their checksums; the samples are given back.
            Unavailable: the controller, or a storage node, is away until then; the samples are given back.
            LeaseExpired: the claim ended while its samples were read, without its session; they are delivered again.
        """
        handle, delivery = self._client._run(
            claims.claim(self._state, self._ref, batch_size, copy, timeout, max_tokens=max_tokens, ranges=ranges)
        )
        return Batch(self._client, delivery, handle)

    def batches(
        self, batch_size: int | None = None, *, max_tokens: int | None = None, ranges: Ranges | None = None
    ) -> Iterator[Batch]:
        """Iterates over batches until the partition is sealed and drained; waits as long as that takes.

        A batch is acked when the next one is asked for, unless the loop's body settled it. When the loop is left early,
        by `break` or an exception, its last batch is released.

        Args:
            batch_size: samples; the last batch may be smaller.
            max_tokens: as in `claim`.
            ranges: as in `claim`.
        """
        while True:
            try:
                batch = self.claim(batch_size, max_tokens=max_tokens, ranges=ranges)
            except ClaimTimeout:
                continue
            except Sealed:
                return
            with batch:
                yield batch

    def reset(self) -> None:
        """Makes every sample of the partition unconsumed again for this consumer; its claims end."""
        self._client._run(claims.reset(self._state, self._ref))

    def dead(self) -> list[int]:
        """Returns the ids of samples that were given up after `max_attempts` deliveries."""
        return self._client._run(claims.dead(self._state, self._ref))

    def dropped(self) -> claims.Dropped:
        """Returns the ids of all samples that count as dropped for this consumer, and why they are."""
        return self._client._run(claims.dropped(self._state, self._ref))

    def requeue(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Makes dead samples ready again, with no attempt spent.

        Raises:
            SampleNotFound: one of them is not dead.
        """
        self._client._run(claims.requeue(self._state, self._ref, ids))

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of partition {self._ref.partition.name!r}>"
