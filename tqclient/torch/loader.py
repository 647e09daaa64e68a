"""The loader: what a training loop iterates over."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch

from tqclient.arguments import int_of, is_int, text_of
from tqclient.consumer import Consumer
from tqclient.errors import InvalidArgument, LeaseExpired
from tqclient.operations.claims import Verdict
from tqclient.operations.ranges import Ranges
from tqclient.state import ClientState
from tqclient.torch.batch import LoadedBatch
from tqclient.torch.dataset import StreamingDataset, Transform
from tqclient.torch.devices import Mover
from tqclient.torch.feed import Feed, Held, ThreadFeed
from tqclient.torch.workers import WorkerFeed

STATE_VERSION: Final = 1
PREFETCH_MAX: Final = 4096
"""Batches ahead: all of them are claimed, and their leases renewed."""
WORKERS_MAX: Final = 256
COUNT_MAX: Final = (1 << 63) - 1


class StreamingLoader:
    """Batches of a consumer, fetched ahead while the training step runs, and acked after it.

        with tq.torch.StreamingLoader(consumer, batch_size=64, device="cuda") as loader:
            for batch in loader:                    # a LoadedBatch, on the device
                step(batch["tokens"])

    A batch is acked when the next one is asked for: its step is done then, and not before. `ack()` does it earlier, and
    `batch.release()` gives it back instead. The loop ends when the partition is sealed and drained; that ends the
    epoch. Leaving it early, by `break` or an exception, releases the last batch and all that was fetched ahead: they
    are delivered again, with a delivery attempt spent.

    What was fetched ahead is claimed: nobody else of the consumer's name gets it, it is as old as the claim, and its
    lease is renewed for as long as this process lives.

    With a topology every rank has a loader of its own, without workers: all members of a DP rank see the same batches.
    When one of them releases or dies, what the others have unacked is delivered to all of them again: asking for the
    next batch then raises LeaseExpired, and asking once more gives the first of those.

    Attributes:
        dataset: the `StreamingDataset` beneath.
        prefetch: batches ahead of the one that is worked on; for each worker, if there are any.
        num_workers: processes that fetch.
    """

    def __init__(
        self,
        consumer: Consumer,
        batch_size: int | None = 64,
        *,
        prefetch: int = 2,
        device: str | torch.device | int | None = None,
        num_workers: int = 0,
        pin_memory: bool | None = None,
        max_tokens: int | None = None,
        ranges: Ranges | None = None,
        transform: Transform | None = None,
    ) -> None:
        """Makes no call; the first batches are fetched when it is iterated over.

        Args:
            consumer: of a blocking client.
            batch_size: samples of a batch; the last one may be smaller. None: as many as `max_tokens` allows.
            prefetch: batches to fetch ahead; 0: fetch when one is asked for.
            device: where tensors go, such as `cuda:0`; None leaves them in host memory. Arrays and text stay there.
            num_workers: processes to fetch in, each with its own connection; no sample is delivered twice for that.
                They pay where `transform` is slow. 0: a thread of this process, which suffices for fetching.
            pin_memory: fetch into pinned memory, so that copies to the device go on beside the step; None: where the
                device is CUDA. True without a device yields pinned tensors.
            max_tokens: as in `Consumer.claim`.
            ranges: as in `Consumer.claim`; functions are picklable if there are workers.
            transform: makes of a `LoadedBatch`, still in host memory, what is yielded; picklable if there are workers.

        Raises:
            InvalidArgument: out of bounds, no range, or no function; no such device; workers for a consumer that has a
                topology.
        """
        self.dataset = StreamingDataset(consumer, batch_size, max_tokens=max_tokens, ranges=ranges, transform=transform)
        self.prefetch = int_of(prefetch, what="prefetch", least=0, most=PREFETCH_MAX)
        self.num_workers = int_of(num_workers, what="num_workers", least=0, most=WORKERS_MAX)
        if self.num_workers and consumer.topology is not None:
            raise InvalidArgument("a rank is one process: give a consumer that has a topology num_workers=0")
        if self.num_workers and not self.prefetch:
            raise InvalidArgument("workers fetch ahead: give prefetch=1 or more")
        self._mover = Mover(device, pin_memory)
        self._stream: weakref.ref[_Stream] | None = None
        self._epoch = 0
        self._step = 0

    @property
    def device(self) -> torch.device | None:
        """Where tensors go; None: they stay in host memory."""
        return self._mover.device

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0: how often the partition was found sealed and drained."""
        return self._epoch

    @property
    def step(self) -> int:
        """Batches of this epoch that were acked."""
        return self._step

    def __iter__(self) -> Iterator[Any]:
        """Begins to fetch. An iteration that is still under way is closed."""
        self.dataset.consumer._state.check_process()
        self.close()
        if self.num_workers:
            feed: Feed = WorkerFeed(self.dataset, self.num_workers, self.prefetch, self._mover)
        else:
            feed = ThreadFeed(self.dataset, self.prefetch, self._mover)
        stream = _Stream(self, feed)
        self._stream = weakref.ref(stream)
        return stream

    def ack(self) -> None:
        """Acks the batch that was yielded last, so that a checkpoint made now has it done. Again: no effect.

        Raises:
            LeaseExpired: the claim is not held any more; its samples are, or will be, delivered again.
            InvalidArgument: it was released before.
            Unavailable: the controller was away until the deadline; call it again to try further.
        """
        stream = None if self._stream is None else self._stream()
        if stream is not None:
            stream.settle_last("acked")

    def state_dict(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps of the loader, as `StatefulDataLoader` does: plain values.

        It is a count, not a position: what was acked is the controller's knowledge, and outlives this process. After a
        restart with the same consumer the loader goes on with whatever was not acked, the batch that was worked on
        included, unless `ack` was called before the checkpoint was made. What was acked after it does not come again
        by itself: `Consumer.reset` begins anew.
        """
        consumer = self.dataset.consumer
        return {
            "version": STATE_VERSION,
            "partition": consumer._ref.partition.name,
            "consumer": consumer.name,
            "epoch": self._epoch,
            "step": self._step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on counting where a checkpoint left off.

        Args:
            state: what `state_dict` returned. That of another partition is taken, too: the next one of a series.

        Raises:
            InvalidArgument: it is none of this version, or of another consumer.
        """
        version = state.get("version") if isinstance(state, dict) else None
        if not is_int(version) or version != STATE_VERSION:
            raise InvalidArgument(f"expected what state_dict() returns in version {STATE_VERSION}, not {state!r:.200}")
        name = self.dataset.consumer.name
        partition, consumer = (text_of(state.get(each), what=each) for each in ("partition", "consumer"))
        if consumer != name:
            raise InvalidArgument(f"the state is of consumer {consumer!r}, and this one is {name!r}")
        same = partition == self.dataset.consumer._ref.partition.name
        epoch, step = (int_of(state.get(each), what=each, least=0, most=COUNT_MAX) for each in ("epoch", "step"))
        self._epoch, self._step = epoch, step if same else 0

    def close(self) -> None:
        """Ends the iteration that is under way: releases its last batch and all that was fetched ahead.

        Repeatable; without effect after a fork.
        """
        stream = None if self._stream is None else self._stream()
        self._stream = None
        if stream is not None:
            stream.close()

    def __enter__(self) -> StreamingLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _acked(self) -> None:
        self._step += 1

    def _epoch_ended(self) -> None:
        self._epoch += 1
        self._step = 0


class _Stream(Iterator[Any]):
    """One iteration. Whoever forgets it gives back what it holds."""

    def __init__(self, loader: StreamingLoader, feed: Feed) -> None:
        self._loader = loader
        self._state = loader.dataset.consumer._state
        self._feed = feed
        self._last: list[Held] = []  # at most one; shared with the finalizer
        self._closed = threading.Event()
        self._taking = threading.RLock()  # a Ctrl-C may leave it taken: by the thread that goes on
        self._finalizer = weakref.finalize(self, _forget, self._state, feed, self._last)
        self._finalizer.atexit = False

    def __next__(self) -> Any:
        if not self._taking.acquire(blocking=False):
            raise InvalidArgument(
                "another thread is asking this iterator for a batch, and asking for the next one acks the last: give "
                "each thread a loader of its own; those of one consumer share its samples"
            )
        try:
            return self._next()
        finally:
            self._taking.release()

    def _next(self) -> Any:
        if self._closed.is_set():
            raise StopIteration
        self._state.check_process()
        self._finish_last()
        try:
            fetched = self._feed.take()
        except BaseException:
            self.close()
            raise
        if fetched is None:
            self.close()
            if self._feed.drained:  # and not closed by another thread
                self._loader._epoch_ended()
            raise StopIteration
        self._last.append(fetched.held)
        if self._closed.is_set():  # meanwhile, by another thread, which did not see this one
            self.close()
            raise StopIteration
        if isinstance(fetched.value, LoadedBatch):
            fetched.value._claim = _Claim(weakref.ref(self), fetched.held)
        return fetched.value

    def _finish_last(self) -> None:
        try:
            if self._last and self._last[0].verdict is None:
                self.settle_last("acked")
        except LeaseExpired:
            self._last.clear()  # whoever asks for the next one all the same shall have it
            raise
        self._last.clear()

    def settle_last(self, verdict: Verdict) -> None:
        """Settles the batch that was yielded last."""
        if self._last:
            self.settle(self._last[0], verdict)

    def settle(self, held: Held, verdict: Verdict) -> None:
        """Settles a batch; the first verdict stands."""
        self._state.check_process()
        if held.verdict is not None and held.verdict != verdict:
            raise InvalidArgument(f"this batch was {held.verdict} already")
        if held.verdict is None:
            self._feed.settle(held, verdict)
            if verdict == "acked":
                self._loader._acked()

    def renew(self, held: Held) -> None:
        """Renews the claim of a batch."""
        self._state.check_process()
        if held.verdict is not None:
            raise InvalidArgument(f"this batch was {held.verdict} already")
        self._feed.renew(held)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that iterates."""
        return self._state.forked

    def close(self) -> None:
        """Releases what is held."""
        self._closed.set()
        self._finalizer.detach()
        if self._state.forked:
            return  # workers, claims and connections are the parent's
        last = [held for held in self._last if held.verdict is None]
        self._last.clear()
        self._feed.close(last)


@dataclass(frozen=True)
class _Claim:
    """What a batch has of the iteration that yielded it, which ends when it is forgotten."""

    stream: weakref.ref[_Stream]
    held: Held

    def is_held(self) -> bool:
        stream = self.stream()
        return self.held.verdict is None and (stream is None or not stream.forked)

    def settle(self, verdict: Verdict) -> None:
        if self.held.verdict != verdict or self.stream() is not None:
            self._alive().settle(self.held, verdict)

    def renew(self) -> None:
        self._alive().renew(self.held)

    def _alive(self) -> _Stream:
        stream = self.stream()
        if stream is None:
            if self.held.verdict is not None:
                raise InvalidArgument(f"this batch was {self.held.verdict} already")
            raise InvalidArgument("the loop that yielded this batch has ended, which released it")
        return stream


def _forget(state: ClientState, feed: Feed, last: list[Held]) -> None:
    if not state.forked:
        feed.stop([held for held in last if held.verdict is None])
