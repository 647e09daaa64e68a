"""The samples of a consumer as an IterableDataset, and the claims that feed it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final, NoReturn

import grpc
from torch.utils.data import IterableDataset, get_worker_info

import tqclient
from tqclient.channel import TLS
from tqclient.consumer import Consumer
from tqclient.driver import Stubs, run_sync
from tqclient.errors import ClaimTimeout, InvalidArgument, LeaseExpired, Sealed, UnsupportedValue
from tqclient.operations.claims import ClaimHandle, abandon, claim, claim_request, renew, settle
from tqclient.operations.consumers import ConsumerRef, Registration
from tqclient.operations.ranges import Ranges, wanted_ranges
from tqclient.schema import Form
from tqclient.torch.batch import LoadedBatch

Transform = Callable[[LoadedBatch], Any]
NO_WORKERS: Final = "DataLoader workers cannot ack after the step: use tq.torch.StreamingLoader, which has workers, too"


class Interrupted(Exception):
    """The call was given up because its caller was stopped."""


class InterruptibleStubs:
    """Blocking stubs of which another thread can cut short the call that runs, and all later ones."""

    def __init__(self, stubs: Stubs) -> None:
        self._stubs = stubs
        self._lock = threading.RLock()  # `stop` may run in a finalizer, inside any holder
        self._call: Any = None
        self.stopped = False

    def stub(self, target: str) -> Any:
        """Returns the stub of a daemon."""
        return _Methods(self, self._stubs.stub(target))

    def call(self, method: Any, request: Any, timeout: float) -> Any:
        """Calls; raises Interrupted once `stop` was called."""
        with self._lock:
            if self.stopped:
                raise Interrupted
            running = self._call = method.future(request, timeout=timeout)
        try:
            return running.result()
        except grpc.FutureCancelledError:
            raise Interrupted from None
        finally:
            self._call = None

    def stop(self) -> None:
        """Cuts short the call that runs. Repeatable."""
        with self._lock:
            self.stopped = True
            running = self._call
        if running is not None:
            running.cancel()


class _Methods:
    def __init__(self, owner: InterruptibleStubs, stub: Any) -> None:
        self._owner = owner
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._stub, name)
        return lambda request, timeout: self._owner.call(method, request, timeout)


@dataclass(frozen=True)
class Reach:
    """How another process gets at the same consumer.

    Attributes:
        address: of the controller.
        transport: as in `connect`.
        token: as in `connect`.
        tls: as in `connect`.
        timeout: as in `connect`.
        partition: its name.
        consumer: of it; without the place of a rank.
    """

    address: str
    transport: str
    token: str | None
    tls: TLS | None
    timeout: float
    partition: str
    consumer: ConsumerRef

    @classmethod
    def of(cls, consumer: Consumer) -> Reach:
        """Takes over what the consumer's client was connected with."""
        connection, ref = consumer._client._connection, consumer._ref
        access = connection.access
        return cls(
            access.address,
            connection.transport,
            access.token,
            access.tls,
            connection.state.timeout,
            ref.partition.name,
            replace(ref, registration=Registration()),
        )

    def forms(self) -> Iterator[Form]:
        """Yields the forms of the fields that it reads, as far as they were known."""
        partition = self.consumer.partition
        for field in self.consumer.fields or partition.fields:
            form = partition.form(field)
            if form is not None:
                yield form

    def connect(self) -> Consumer:
        """Connects anew; the consumer's client is the caller's to close.

        Raises:
            PartitionNotFound: the partition is gone, or another one has its name.
        """
        client = tqclient.connect(
            self.address, transport=self.transport, token=self.token, tls=self.tls, timeout=self.timeout
        )
        try:
            partition = client.partition(self.partition)._ref
            if partition.partition_id != self.consumer.partition.partition_id:
                raise tqclient.PartitionNotFound(f"partition {self.partition!r} was deleted and made anew meanwhile")
        except BaseException:
            client.close()
            raise
        return Consumer(client, replace(self.consumer, partition=partition))


@dataclass(frozen=True)
class Options:
    """What a dataset is told beside its consumer; it travels to workers.

    Attributes:
        batch_size: as in `Consumer.claim`.
        max_tokens: as in `Consumer.claim`.
        ranges: as in `Consumer.claim`.
        transform: makes of a `LoadedBatch` what is yielded.
    """

    batch_size: int | None
    max_tokens: int | None = None
    ranges: Ranges | None = None
    transform: Transform | None = None

    def __post_init__(self) -> None:
        """Looks at the ranges, as far as that can be done without rows, and at the function.

        Raises:
            InvalidArgument: one of them is none.
        """
        wanted_ranges(self.ranges)
        if self.transform is not None and not callable(self.transform):
            raise InvalidArgument(f"transform={self.transform!r:.80}: expected a function of a LoadedBatch")


class StreamingDataset(IterableDataset[Any]):
    """Batches of a consumer, one after the other, until its partition is sealed and drained.

    It is what lies beneath `StreamingLoader`. By itself it claims when a batch is asked for, and acks it when the next
    one is; below a `DataLoader(dataset, batch_size=None)` that has no workers it does the same.
    """

    def __init__(
        self,
        consumer: Consumer,
        batch_size: int | None = 64,
        *,
        max_tokens: int | None = None,
        ranges: Ranges | None = None,
        transform: Transform | None = None,
    ) -> None:
        """Makes no call.

        Args:
            consumer: of a blocking client; whoever shares its name shares the samples, each of which goes to one.
            batch_size: as in `Consumer.claim`.
            max_tokens: as in `Consumer.claim`.
            ranges: as in `Consumer.claim`.
            transform: makes of a `LoadedBatch` what is yielded.

        Raises:
            InvalidArgument: it is no consumer of a blocking client, or claims would be refused, whatever there is.
        """
        if not isinstance(consumer, Consumer):
            raise InvalidArgument(f"consumer={consumer!r}: expected what Partition.consumer of tq.connect() returns")
        claim_request(consumer._ref, batch_size, max_tokens)  # refuses what is out of bounds
        self.consumer = consumer
        self.options = Options(batch_size, max_tokens, ranges, transform)

    def __reduce__(self) -> NoReturn:
        raise UnsupportedValue(f"a dataset is of the process that connected; {NO_WORKERS}")

    def __iter__(self) -> Iterator[Any]:
        if get_worker_info() is not None:
            # Its batches would be acked when they are fetched ahead, and lost with the process.
            raise InvalidArgument(NO_WORKERS)
        claimer = Claimer(self.consumer, self.options)
        while (held := claimer.next()) is not None:
            handle, value = held
            settled = False
            try:
                yield value
                claimer.ack(handle)
                settled = True
            finally:
                if not settled:
                    claimer.give_up(handle)


class Claimer:
    """Claims the batches of a dataset, one after the other; another thread may stop it."""

    def __init__(self, consumer: Consumer, options: Options) -> None:
        self._options = options
        self._client = consumer._client
        self._state = consumer._state
        self._ref = consumer._ref
        self._stubs = InterruptibleStubs(self._client._connection.channels)

    def next(self) -> tuple[ClaimHandle, Any] | None:
        """Returns the next batch, transformed, with its claim; None: drained, or stopped."""
        how = self._options
        while True:
            operation = claim(
                self._state, self._ref, how.batch_size, True, None, max_tokens=how.max_tokens, ranges=how.ranges
            )
            try:
                handle, delivery = run_sync(operation, self._stubs)
            except ClaimTimeout:
                continue
            except (Sealed, Interrupted):
                return None
            try:
                value: Any = LoadedBatch(delivery.rows, delivery.columns, handle.step)
                if how.transform is not None:
                    value = how.transform(value)
            except BaseException as error:
                self.give_up(handle)
                if isinstance(error, StopIteration):  # which would end the loop, as if all samples had been delivered
                    raise RuntimeError("transform raised StopIteration") from error
                raise
            return handle, value

    def ack(self, handle: ClaimHandle) -> None:
        """Consumes a batch."""
        self._client._run(settle(self._state, handle, "acked"))

    def release(self, handle: ClaimHandle) -> None:
        """Gives a batch back."""
        self._client._run(settle(self._state, handle, "released"))

    def renew(self, handle: ClaimHandle) -> None:
        """Renews the claim of a batch."""
        self._client._run(renew(self._state, handle))

    def give_up(self, handle: ClaimHandle) -> None:
        """Has the chores give a batch back, now. For finalizers, too."""
        if self._state.forked:
            return
        abandon(self._state, handle)
        self._state.wake.set()

    def holds(self, handle: ClaimHandle) -> bool:
        """Whether a claim is still held. It ends with its session; a rank's, when another member releases the share."""
        session = self._state.session
        if session is None or session.session != handle.session:
            return False
        if self._ref.topology is not None:
            try:
                self.renew(handle)
            except LeaseExpired:
                return False
        return True

    def stop(self) -> None:
        """Cuts short the claim that waits. Repeatable; for finalizers, too."""
        self._stubs.stop()
