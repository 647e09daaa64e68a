"""Large copies on several threads: one core moves about a third of what a socket's memory can.

numpy, torch and xxhash release the GIL for the pieces that are handed out here. The pool is made at the first
large copy.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

from tqclient.limits import MIB

THREADS_MAX: Final = 4
TASK_BYTES: Final = 4 * MIB
"""What one task copies at most."""
SHARES_PER_THREAD: Final = 8
"""Tasks are handed over in this many shares a thread: each hand-over costs both sides the interpreter's lock."""
SERIAL_BYTES_MAX: Final = 16 * MIB
"""Below this, a copy stays on the caller's thread."""

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def _forget() -> None:
    """A forked child has the object, but not the threads."""
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)


def _thread_count() -> int:
    return min(THREADS_MAX, os.cpu_count() or 1)


def _threads() -> ThreadPoolExecutor:
    global _pool  # noqa: PLW0603
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_thread_count(), "tq-copy")
        return _pool


def run(tasks: Sequence[Callable[[], None]], size_bytes: int) -> None:
    """Runs independent tasks that together move `size_bytes`; raises what the first failing one raised."""
    if size_bytes <= SERIAL_BYTES_MAX or len(tasks) <= 1:
        _run_all(tasks)
        return
    pool = _threads()
    step = -(-len(tasks) // (_thread_count() * SHARES_PER_THREAD))
    futures = [pool.submit(_run_all, tasks[start : start + step]) for start in range(0, len(tasks), step)]
    try:
        for future in futures:
            future.result()
    finally:
        # Whatever ended the loop: once the caller goes on, nobody may write into its memory any more.
        for future in futures:
            future.cancel()
        wait(futures)


def _run_all(tasks: Sequence[Callable[[], None]]) -> None:
    for task in tasks:
        task()
