"""Large copies on several threads: one core moves about a third of what a socket's memory can.

numpy, torch and xxhash release the GIL for the pieces that are handed out here. The pool is made at the first
large copy.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

from tqclient.limits import MIB

THREADS_MAX: Final = 4
TASK_BYTES: Final = 2 * MIB
"""What one task copies at most."""
SERIAL_BYTES_MAX: Final = 4 * MIB
"""Up to this, a copy stays on the caller's thread: waking others, and taking turns with them, takes what they save."""

Task = Callable[[], None]


class _Threads:
    """Threads with disjoint shares of the CPUs that the process may use.

    They wake one another with every turn at the interpreter's lock, and a kernel likes to put who was woken beside its
    waker: without shares, two of them often spend a whole copy on one CPU while another one is idle.
    """

    def __init__(self) -> None:
        cpus = sorted(os.sched_getaffinity(0))
        self.count = min(THREADS_MAX, len(cpus))
        self._shares = deque(cpus[index :: self.count] for index in range(self.count))
        self._pool = ThreadPoolExecutor(self.count, "tq-copy", initializer=self._take_share)

    def _take_share(self) -> None:
        try:
            os.sched_setaffinity(threading.get_native_id(), self._shares.popleft())
        except OSError:  # the CPUs were taken away meanwhile, or a sandbox forbids it: as right, perhaps slower
            return

    def run(self, tasks: Sequence[Task]) -> None:
        """Runs the tasks, each on the thread that is free next; raises what the first failing one raised."""
        left = deque(tasks)
        workers = [self._pool.submit(_work_off, left) for _ in range(self.count)]
        try:
            for worker in workers:
                worker.result()
        finally:
            # Whatever ended the loop: once the caller goes on, nobody may write into its memory any more.
            left.clear()
            wait(workers)


def _work_off(left: deque[Task]) -> None:
    while True:
        try:
            task = left.popleft()
        except IndexError:
            return
        try:
            task()
        except BaseException:
            left.clear()
            raise


_lock = threading.Lock()
_threads: _Threads | None = None


def _forget() -> None:
    """A forked child has the object, but not the threads."""
    global _lock, _threads
    _lock, _threads = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


class Later:
    """Tasks that are gathered, to be run all at once: each run costs the time in which the threads wake up."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.size_bytes = 0

    def add(self, tasks: Iterable[Task], size_bytes: int) -> None:
        """Takes in independent tasks that together move `size_bytes`."""
        self.tasks.extend(tasks)
        self.size_bytes += size_bytes

    def take(self) -> list[Task]:
        """Returns the tasks and lets go of them: they may hold what holds this object."""
        tasks, self.tasks = self.tasks, []
        return tasks

    def run(self) -> None:
        """Runs them; raises what the first failing one raised."""
        run(self.take(), self.size_bytes)


def run(tasks: Sequence[Task], size_bytes: int) -> None:
    """Runs independent tasks that together move `size_bytes`; raises what the first failing one raised."""
    global _threads  # noqa: PLW0603
    if size_bytes <= SERIAL_BYTES_MAX or len(tasks) <= 1:
        for task in tasks:
            task()
        return
    with _lock:
        if _threads is None:
            _threads = _Threads()
        threads = _threads
    threads.run(tasks)
