"""Fetching ahead: batches wait here, claimed and on their device, until the training loop asks for them."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from tqclient.errors import TQError, Unavailable
from tqclient.operations.claims import ClaimHandle, Verdict
from tqclient.torch.dataset import Claimer, StreamingDataset
from tqclient.torch.devices import Mover, Ready


@dataclass(eq=False)
class Held:
    """A claim that a feed holds.

    Attributes:
        key: what the feed knows it by.
        verdict: how it was settled; None: it is held.
    """

    key: Any
    verdict: Verdict | None = None


class Fetched(NamedTuple):
    """A batch that was fetched ahead."""

    held: Held
    value: Any
    ready: Ready


class Feed(ABC):
    """Batches in the order in which they came.

    Attributes:
        drained: whether `take` said that there is none any more because it is so, and not because it was stopped.
    """

    def __init__(self, mover: Mover) -> None:
        """Args: `mover`: puts values where they are wanted."""
        self._mover = mover
        # `stop` may run in a finalizer, inside any holder of the lock.
        self._changed = threading.Condition(threading.RLock())
        self._fetched: deque[Fetched] = deque()
        self._takers = 0
        self._ended = False
        self._failure: BaseException | None = None
        self._stopped = False
        self.drained = False

    @abstractmethod
    def holds(self, held: Held) -> bool:
        """Whether a claim is held still, as far as its client knows."""

    @abstractmethod
    def settle(self, held: Held, verdict: Verdict) -> None:
        """Settles a claim; the first verdict stands. Raises what `Batch.ack` and `Batch.release` raise."""

    @abstractmethod
    def renew(self, held: Held) -> None:
        """Renews a claim. Raises what `Batch.renew` raises."""

    @abstractmethod
    def give_up(self, held: Held) -> None:
        """Has a claim given back soon. For finalizers, too."""

    @abstractmethod
    def interrupt(self) -> None:
        """Has claims that wait given up. For finalizers, too."""

    @abstractmethod
    def join(self) -> None:
        """Waits until nothing of it runs any more."""

    @abstractmethod
    def took(self, held: Held) -> None:
        """A batch was taken: there is room for one more."""

    def take(self) -> Fetched | None:
        """Waits for the next batch; None: there is none any more, or it was stopped."""
        while True:
            fetched = self._take()
            if fetched is None:
                return None
            try:
                self.took(fetched.held)
                if self.holds(fetched.held):
                    self._mover.arrived(fetched.value, fetched.ready)
                    return fetched
            except BaseException:  # nobody else knows of it any more
                self.give_up(fetched.held)
                raise
            # Its samples are delivered again already: the process was not heard of for a lease.

    def _take(self) -> Fetched | None:
        with self._changed:
            self._takers += 1
            self._changed.notify_all()
            try:
                while not self._fetched:
                    if self._failure is not None:
                        raise self._failure
                    if self._ended or self._stopped:
                        self.drained = not self._stopped
                        return None
                    self._changed.wait()
            finally:
                self._takers -= 1
            fetched = self._fetched.popleft()
            self._changed.notify_all()
            return fetched

    def put(self, held: Held, value: Any, ready: Ready) -> None:
        """Takes in a batch; gives it up at once when nobody will take it any more."""
        with self._changed:
            if not self._stopped:
                self._fetched.append(Fetched(held, value, ready))
                self._changed.notify_all()
                return
        self.give_up(held)

    def end(self, failure: BaseException | None = None) -> None:
        """No more batches come: `take` hands out what is there, and then says so or raises the failure."""
        with self._changed:
            self._ended = True
            self._failure = self._failure or failure
            self._changed.notify_all()
            stopped = self._stopped
        if stopped:
            self.stop()  # a finalizer may have stopped it in the middle of `put`

    def stop(self, others: Iterable[Held] = ()) -> None:
        """Gives up what was fetched, and these besides; fetches no more. Repeatable; for finalizers, too."""
        left = self._stop(others)
        self.interrupt()
        for held in left:
            self.give_up(held)

    def close(self, others: Iterable[Held] = ()) -> None:
        """Releases what was fetched, and these besides; returns when that is done and nothing runs any more."""
        left = self._stop(others)
        self.interrupt()
        self.join()  # or a claim that still waits is granted what is released
        silent = False
        for held in left:
            try:
                if not silent:
                    self.settle(held, "released")
                    continue
            except TQError as error:
                silent = isinstance(error, Unavailable)  # the others are not waited for one after the other
            self.give_up(held)

    def _stop(self, others: Iterable[Held]) -> list[Held]:
        with self._changed:
            self._stopped = True
            left = [*others, *(fetched.held for fetched in self._fetched)]
            self._fetched.clear()
            self._changed.notify_all()
        return left


class ThreadFeed(Feed):
    """Fetches in a thread of this process.

    Args:
        dataset: whose batches.
        prefetch: batches ahead of the one that is worked on; 0: fetch when one is asked for.
        mover: puts values where they are wanted.
    """

    def __init__(self, dataset: StreamingDataset, prefetch: int, mover: Mover) -> None:
        super().__init__(mover)
        self._prefetch = prefetch
        self._claimer = Claimer(dataset.consumer, dataset.options)
        self._thread = threading.Thread(target=self._run, name="tq-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            while self._wait_for_room() and (claimed := self._claimer.next()) is not None:
                handle, value = claimed
                held = Held(handle)
                try:
                    value, ready = self._mover.move(value)
                except BaseException:
                    self.give_up(held)
                    raise
                self.put(held, value, ready)
                del handle, value, held, ready, claimed
        except BaseException as error:  # raised by `take`
            failure = error
        self.end(failure)

    def _wait_for_room(self) -> bool:
        with self._changed:
            while not self._stopped and len(self._fetched) >= max(self._prefetch, self._takers):
                self._changed.wait()
            return not self._stopped

    def took(self, held: Held) -> None:
        """The thread was told when it was taken."""

    def holds(self, held: Held) -> bool:
        """Whether its session lives."""
        return self._claimer.holds(held.key)

    def settle(self, held: Held, verdict: Verdict) -> None:
        """Settles a claim."""
        handle: ClaimHandle = held.key
        (self._claimer.ack if verdict == "acked" else self._claimer.release)(handle)
        held.verdict = verdict

    def renew(self, held: Held) -> None:
        """Renews a claim."""
        self._claimer.renew(held.key)

    def give_up(self, held: Held) -> None:
        """By the chores."""
        self._claimer.give_up(held.key)

    def interrupt(self) -> None:
        """Cuts the wait short."""
        self._claimer.stop()

    def join(self) -> None:
        """Waits for the thread."""
        self._thread.join()
