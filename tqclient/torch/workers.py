"""Fetching ahead in processes of their own, each with its own connection and its own claims.

What passes between the loader and a worker, over one pipe; tensors go through shared memory:

    loader → worker   ("more",)                fetch one batch
                      ("settle", n, verdict)   of batch n; answered with ("done", what, n, error or None)
                      ("renew", n)             answered likewise
                      ("give up", n)           as well, but unanswered
                      ("stop",)                let go of everything, and end
    worker → loader   ("batch", n, value)
                      ("ended", error or None) drained, or failed
"""

from __future__ import annotations

import pickle
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Final

import torch
import torch.multiprocessing

from tqclient.codec import load_jagged
from tqclient.errors import InternalError, InvalidArgument, LeaseExpired, TQError
from tqclient.operations.claims import ClaimHandle, Verdict
from tqclient.torch.dataset import Claimer, Options, Reach, StreamingDataset
from tqclient.torch.devices import Mover
from tqclient.torch.feed import Feed, Held

END_SECONDS: Final = 10.0
"""So long may workers that were told to end say nothing before they are killed."""

_Answer = tuple[str, int, "TQError | None"]
_NO_MORE: Final[_Answer] = ("", -1, None)


class WorkerFeed(Feed):
    """Fetches in worker processes.

    Args:
        dataset: whose batches.
        workers: processes.
        prefetch: batches ahead of the one that is worked on, for each worker.
        mover: puts values where they are wanted.
    """

    def __init__(self, dataset: StreamingDataset, workers: int, prefetch: int, mover: Mover) -> None:
        super().__init__(mover)
        reach = Reach.of(dataset.consumer)
        self._workers = [_Worker(reach, dataset, number) for number in range(workers)]
        self._running: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers}
        for worker in self._workers:
            for _ in range(prefetch):
                worker.send("more")
        self._thread = threading.Thread(target=self._run, name="tq-loader", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._running:
            pipes = wait(list(self._running), END_SECONDS)
            if self._stopped and not pipes:
                for worker in self._running.values():
                    worker.kill()
            for pipe in pipes:
                try:
                    self._receive(self._running[pipe])
                except Exception as error:  # raised by `take`
                    self.end(error)
        for worker in self._workers:
            worker.reap()
        self.end()

    def _receive(self, worker: _Worker) -> None:
        try:
            kind, *content = worker.pipe.recv()
        except (EOFError, OSError):  # also while it unpacks tensors that only a living worker can hand over
            del self._running[worker.pipe]
            worker.answers.put(_NO_MORE)
            if not worker.ended and not self._stopped:
                self.end(InternalError(f"{worker} ended unasked; its samples are delivered again after their lease"))
            return
        if kind == "batch":
            self._take_in(Held((worker, content[0])), content[1])
        elif kind == "done":
            worker.answers.put((content[0], content[1], content[2]))
        else:
            worker.ended = True
            if content[0] is not None:
                self.end(content[0])
            elif all(each.ended for each in self._workers):
                self.end()

    def _take_in(self, held: Held, value: Any) -> None:
        try:
            value, ready = self._mover.move(value)
        except BaseException:
            self.give_up(held)
            raise
        self.put(held, value, ready)

    def took(self, held: Held) -> None:
        """Has the worker that it came from fetch another one."""
        held.key[0].send("more")

    def holds(self, held: Held) -> bool:
        """Whether the worker lives; whether its session does, settling will tell."""
        return held.key[0].pipe in self._running

    def settle(self, held: Held, verdict: Verdict) -> None:
        """Has the worker settle, and waits for what came of it."""
        worker, number = held.key
        worker.ask("settle", number, verdict)
        held.verdict = verdict

    def renew(self, held: Held) -> None:
        """Has the worker renew, and waits for what came of it."""
        worker, number = held.key
        worker.ask("renew", number)

    def give_up(self, held: Held) -> None:
        """By the worker, which is not waited for."""
        worker, number = held.key
        worker.send("give up", number)

    def interrupt(self) -> None:
        """Tells the workers to end."""
        for worker in self._workers:
            worker.send("stop")

    def join(self) -> None:
        """Waits until all workers have ended."""
        self._thread.join()


class _Worker:
    """A worker process as the loader sees it."""

    def __init__(self, reach: Reach, dataset: StreamingDataset, number: int) -> None:
        context = torch.multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.answers: SimpleQueue[_Answer] = SimpleQueue()
        self.ended = False
        self._sending = threading.RLock()  # a finalizer may send inside any holder
        self._settling = threading.Lock()
        self._process = context.Process(
            target=work, args=(theirs, reach, dataset.options), name=f"tq-loader-{number}", daemon=True
        )
        try:
            self._process.start()
        except (pickle.PicklingError, AttributeError, TypeError) as error:  # nothing was started yet
            self.pipe.close()
            raise InvalidArgument(
                f"a loader with workers sends them `transform` and `ranges`, which cannot be pickled here ({error}): "
                "give functions of a module instead of lambdas and inner functions"
            ) from error
        finally:
            theirs.close()
        self._name = f"loader worker {number} (process {self._process.pid})"

    def send(self, *message: Any) -> None:
        """Tells the worker; one that has ended hears nothing."""
        with self._sending, suppress(OSError):
            self.pipe.send(message)

    def ask(self, kind: str, number: int, *more: Any) -> None:
        """Has a batch settled or renewed."""
        with self._settling:
            self.send(kind, number, *more)
            # An earlier caller may have been interrupted before it had its answer.
            while (answer := self.answers.get())[:2] != (kind, number):
                if answer is _NO_MORE:
                    self.answers.put(_NO_MORE)
                    raise LeaseExpired(f"{self} ended: the samples of its batch are delivered again")
        if answer[2] is not None:
            raise answer[2]

    def kill(self) -> None:
        """Ends one that hangs."""
        self._process.kill()

    def reap(self) -> None:
        """Takes leave of one that has ended, or is about to."""
        self._process.join()
        self._process.close()
        with self._sending:
            self.pipe.close()

    def __str__(self) -> str:
        return self._name


def work(pipe: Connection, reach: Reach, options: Options) -> None:
    """What a worker process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the loader's process decides
    torch.set_num_threads(1)
    load_jagged(reach.forms())  # not under a lease: on a busy machine, that takes longer than a short one
    try:
        consumer = reach.connect()
    except TQError as error:
        pipe.send(("ended", error))
        return
    # The end of the session releases what is held.
    with consumer._client:
        _Fetcher(pipe, Claimer(consumer, options)).run()


class _Fetcher:
    """Fetches in one thread, and does what the loader says in the other."""

    def __init__(self, pipe: Connection, claimer: Claimer) -> None:
        self._pipe = pipe
        self._claimer = claimer
        self._sending = threading.Lock()
        self._wanted = threading.Semaphore(0)
        self._held: dict[int, ClaimHandle] = {}
        self._stopped = False

    def run(self) -> None:
        """Returns once the loader says so, or is gone."""
        thread = threading.Thread(target=self._fetch, daemon=True)
        thread.start()
        with suppress(EOFError, OSError):
            while self._obey(*self._pipe.recv()):
                pass
        self._stopped = True
        self._claimer.stop()
        self._wanted.release()
        thread.join()

    def _obey(self, kind: str, number: int = 0, verdict: Verdict = "released") -> bool:
        if kind == "more":
            self._wanted.release()
        elif kind == "settle":
            self._send("done", kind, number, self._settle(number, verdict))
        elif kind == "renew":
            self._send("done", kind, number, self._try(self._claimer.renew, number))
        elif kind == "give up":
            self._claimer.give_up(self._held.pop(number))
        return kind != "stop"

    def _settle(self, number: int, verdict: Verdict) -> TQError | None:
        error = self._try(self._claimer.ack if verdict == "acked" else self._claimer.release, number)
        if error is None:
            del self._held[number]
        return error

    def _try(self, what: Callable[[ClaimHandle], None], number: int) -> TQError | None:
        try:
            what(self._held[number])
        except TQError as error:
            return error
        return None

    def _fetch(self) -> None:
        failure: BaseException | None = None
        number = 0
        try:
            while self._wanted.acquire() and not self._stopped:
                claimed = self._claimer.next()
                if claimed is None:
                    break
                number += 1
                self._held[number] = claimed[0]
                self._send("batch", number, claimed[1])
                del claimed
        except Exception as error:  # raised in the loader's process
            failure = portable(error)
        with suppress(OSError):  # nobody listens any more
            self._send("ended", failure)

    def _send(self, *message: Any) -> None:
        with self._sending:
            self._pipe.send(message)


def portable(error: Exception) -> Exception:
    """Returns an exception that another process can raise, with where it was raised here."""
    trace = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever its class does when it is packed or made
        error = InternalError(f"{type(error).__name__}: {error}")
    if hasattr(error, "add_note"):
        error.add_note(f"raised in a loader worker:\n{trace}")
    return error
