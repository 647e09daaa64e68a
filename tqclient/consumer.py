"""Consumers and their batches, as blocking calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tqclient.batch import BatchData
from tqclient.errors import ClaimTimeout, Sealed, TQError
from tqclient.operations import claims
from tqclient.operations.claims import ClaimHandle, ConsumerRef
from tqclient.operations.read import Delivery, check_supported

if TYPE_CHECKING:
    from tqclient.client import Client


class Batch(BatchData):
    """A batch whose claim is settled by blocking calls.

    As a context manager a claimed batch is acked when the block ends normally, and released for redelivery when it ends
    by an exception, unless it was settled before. One that was read with `get` is closed.
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
        self._client._run(claims.settle(self._state, self._claimed(), "acked"))
        self.close()

    def release(self) -> None:
        """Gives the samples back, to be delivered again; a delivery attempt has been spent. Again: no effect.

        Raises:
            LeaseExpired: the claim is not held any more.
            InvalidArgument: the batch was acked before.
        """
        self._client._run(claims.settle(self._state, self._claimed(), "released"))
        self.close()

    def renew(self) -> None:
        """Renews the claim now, for its whole lease; the heartbeat does so all the time.

        Raises:
            LeaseExpired: the claim is not held any more.
        """
        self._client._run(claims.renew(self._state, self._claimed()))

    def __enter__(self) -> Batch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None and self._handle.verdict is None:
            if error is None:
                self.ack()
            else:
                self._release_after(error)
        self.close()

    def _release_after(self, error: BaseException) -> None:
        try:
            self.release()
        except TQError as failure:
            # The block's own exception matters more; the samples come back by the heartbeat, or when the lease ends.
            if hasattr(error, "add_note"):
                error.add_note(f"the batch could not be released at once: {failure}")


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

    def claim(
        self,
        batch_size: int | None = None,
        *,
        max_tokens: int | None = None,
        ranges: Any = None,
        copy: bool = True,
        timeout: float | None = None,
    ) -> Batch:
        """Claims the next samples, and waits on the server until there are `batch_size` of them.

        Once the partition is sealed and nothing is pending, what is left comes as a smaller batch. The claim is renewed
        by itself for as long as this process lives and holds the batch.

        Args:
            batch_size: samples.
            max_tokens: not supported yet.
            ranges: not supported yet.
            copy: False gives views where the path allows them: good until the batch is settled or closed.
            timeout: seconds.

        Returns:
            The batch; settle it, or use it as a context manager.

        Raises:
            ClaimTimeout: too few samples were ready in time; nothing was claimed.
            Sealed: the partition is sealed, and nothing is left to deliver.
            CorruptBlock: stored bytes fail their checksums; the samples are given back.
        """
        check_supported(max_tokens=max_tokens, ranges=ranges)
        handle, delivery = self._client._run(claims.claim(self._state, self._ref, batch_size, copy, timeout))
        return Batch(self._client, delivery, handle)

    def batches(self, batch_size: int) -> Iterator[Batch]:
        """Iterates over batches until the partition is sealed and drained; waits as long as that takes.

        A batch is acked when the next one is asked for, unless the loop's body settled it. When the loop is left early,
        by `break` or an exception, its last batch is released.

        Args:
            batch_size: samples; the last batch may be smaller.
        """
        while True:
            try:
                batch = self.claim(batch_size)
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

    def requeue(self, ids: Sequence[int] | NDArray[np.int64]) -> None:
        """Makes dead samples ready again, with no attempt spent.

        Raises:
            SampleNotFound: one of them is not dead.
        """
        self._client._run(claims.requeue(self._state, self._ref, ids))

    def __repr__(self) -> str:
        return f"<Consumer {self.name!r} of partition {self._ref.partition.name!r}>"
