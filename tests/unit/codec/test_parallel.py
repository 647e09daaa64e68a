from __future__ import annotations

import os
import threading

import pytest

from tqclient.codec import parallel
from tqclient.codec.parallel import SERIAL_BYTES_MAX

LARGE = SERIAL_BYTES_MAX + 1


def test_each_task_runs_once() -> None:
    done = [0] * 1000

    def task(index: int) -> None:
        done[index] += 1

    parallel.run([lambda index=index: task(index) for index in range(1000)], LARGE)
    assert done == [1] * 1000


def test_threads_never_share_a_cpu_and_leave_the_callers_alone() -> None:
    allowed = os.sched_getaffinity(0)
    threads = min(parallel.THREADS_MAX, len(allowed))
    together = threading.Barrier(threads)
    shares: dict[int, set[int]] = {}

    def task() -> None:
        together.wait(timeout=30)  # so that each thread has one of them
        shares[threading.get_ident()] = os.sched_getaffinity(threading.get_native_id())

    parallel.run([task] * threads + [lambda: None], LARGE)
    assert len(shares) == threads
    assert sorted(cpu for share in shares.values() for cpu in share) == sorted(allowed)
    assert os.sched_getaffinity(0) == allowed


def test_a_failure_is_raised_and_nothing_runs_afterwards() -> None:
    ran: list[int] = []

    def task(index: int) -> None:
        ran.append(index)
        if index == 3:
            raise RuntimeError("task 3")

    with pytest.raises(RuntimeError, match="task 3"):
        parallel.run([lambda index=index: task(index) for index in range(10_000)], LARGE)
    count = len(ran)
    assert count < 10_000
    parallel.run([lambda: None] * 64, LARGE)  # had anything been left over, it would have run before these
    assert len(ran) == count


def test_small_copies_stay_on_the_callers_thread() -> None:
    seen: set[int] = set()
    parallel.run([lambda: seen.add(threading.get_ident())] * 4, SERIAL_BYTES_MAX)
    assert seen == {threading.get_ident()}
