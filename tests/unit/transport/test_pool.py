from __future__ import annotations

import gc
import os
import pickle
import resource
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tqclient.limits import KIB, MIB
from tqclient.transport import BufferPool
from tqclient.transport.pool import BUFFER_BYTES_MIN, size_class


@given(length=st.integers(0, 1 << 45))
def test_size_class_wastes_at_most_a_fifth(length: int) -> None:
    size = size_class(length)
    assert size >= length
    assert size_class(size) == size
    assert size % 4096 == 0
    assert size == BUFFER_BYTES_MIN or (size - length) * 5 < size


def test_array_is_writable_aligned_and_of_the_length_asked_for() -> None:
    array = BufferPool().take(100_001)
    assert (array.dtype, array.shape, array.flags.writeable) == (np.uint8, (100_001,), True)
    assert array.ctypes.data % 4096 == 0
    array[:] = 7


def keep_array(array: np.ndarray) -> object:
    return array


def keep_slice(array: np.ndarray) -> object:
    return array[10:20][::2]


def keep_memoryview(array: np.ndarray) -> object:
    return memoryview(array)[5:6]


def keep_tensor(array: np.ndarray) -> object:
    return torch.from_numpy(array)[8:16].view(torch.int64)


def keep_structured(array: np.ndarray) -> object:
    return array[:160].view(np.dtype([("a", "<i8"), ("b", "<f4", 2)]))["b"][3:]


def keep_jagged(array: np.ndarray) -> object:
    values = torch.from_numpy(array[:800]).view(torch.float32)
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 3, 200]))
    return nested.unbind()[2]


def keep_storage(array: np.ndarray) -> object:
    return torch.from_numpy(array).untyped_storage()


@pytest.mark.parametrize(
    "keep",
    [keep_array, keep_slice, keep_memoryview, keep_tensor, keep_structured, keep_jagged, keep_storage],
    ids=lambda keep: keep.__name__,
)
def test_a_buffer_comes_back_with_its_last_view_and_no_sooner(keep) -> None:
    pool = BufferPool()
    array = pool.take(BUFFER_BYTES_MIN)
    address = array.ctypes.data
    kept = keep(array)
    del array
    gc.collect()
    assert (pool.stats().live_bytes, pool.stats().idle_bytes) == (BUFFER_BYTES_MIN, 0)
    other = pool.take(BUFFER_BYTES_MIN)
    assert other.ctypes.data != address
    del kept
    gc.collect()
    assert (pool.stats().live_bytes, pool.stats().idle_bytes) == (BUFFER_BYTES_MIN, BUFFER_BYTES_MIN)
    assert pool.take(BUFFER_BYTES_MIN).ctypes.data == address
    assert (pool.stats().hits, pool.stats().misses) == (1, 2)


def test_a_pickled_view_is_a_copy() -> None:
    pool = BufferPool()
    array = pool.take(1000)
    array[:] = 42
    tensor = torch.from_numpy(array[100:200])
    pickled = pickle.dumps((array[:50], tensor))
    del array, tensor
    gc.collect()
    assert pool.stats().live_bytes == 0
    pool.take(1000)[:] = 1
    copied_array, copied_tensor = pickle.loads(pickled)
    assert copied_array.tolist() == [42] * 50
    assert copied_tensor.tolist() == [42] * 100


def test_the_second_take_of_a_size_faults_no_page_in() -> None:
    pool = BufferPool()
    length = 32 * MIB
    pages = length // 4096
    array = pool.take(length)
    array[:] = 1
    del array
    before = resource.getrusage(resource.RUSAGE_THREAD if hasattr(resource, "RUSAGE_THREAD") else 1).ru_minflt
    array = pool.take(length)
    array[:] = 2
    after = resource.getrusage(resource.RUSAGE_THREAD if hasattr(resource, "RUSAGE_THREAD") else 1).ru_minflt
    assert after - before < pages / 100
    assert pool.stats().hits == 1


def test_idle_bytes_are_bounded_and_the_longest_idle_go_first() -> None:
    pool = BufferPool(idle_bytes_max=3 * MIB)
    arrays = {size: pool.take(size * MIB) for size in (1, 2, 4)}
    addresses = {size: array.ctypes.data for size, array in arrays.items()}
    for size in (1, 2):
        del arrays[size]
    assert pool.stats().idle_bytes == 3 * MIB
    del arrays[4]  # alone over the bound: everything goes
    assert pool.stats().idle_bytes == 0

    first, second, third = pool.take(1 * MIB), pool.take(1 * MIB), pool.take(2 * MIB)
    addresses = [first.ctypes.data, second.ctypes.data]
    del second
    del third
    del first  # 4 MiB idle: `second`, the longest idle, goes
    assert pool.stats().idle_bytes == 3 * MIB
    assert pool.take(1 * MIB).ctypes.data == addresses[0]


def test_clear_returns_all_idle_buffers() -> None:
    pool = BufferPool()
    kept = pool.take(10)
    pool.take(1 * MIB)
    pool.clear()
    assert (pool.stats().live_bytes, pool.stats().idle_bytes) == (BUFFER_BYTES_MIN, 0)
    assert kept.shape == (10,)


def test_memory_that_cannot_be_had_is_a_memory_error_and_counted_as_none() -> None:
    pool = BufferPool()
    with pytest.raises(MemoryError, match="no buffer of"):
        pool.take(1 << 46)
    assert pool.stats().live_bytes == 0


def test_arrays_outlive_the_pool() -> None:
    array = BufferPool().take(1000)
    gc.collect()
    array[:] = 3
    assert int(array.sum()) == 3000


def test_no_two_threads_ever_share_a_buffer() -> None:
    pool = BufferPool(idle_bytes_max=512 * KIB)

    def churn(worker: int) -> int:
        wrong = 0
        for turn in range(200):
            array = pool.take(1 + (worker * 31 + turn * 17) % (200 * KIB))
            array[:] = worker
            view = array[len(array) // 2 :]
            del array
            wrong += int((view != worker).any())
        return wrong

    with ThreadPoolExecutor(8) as executor:
        assert sum(executor.map(churn, range(8))) == 0
    stats = pool.stats()
    assert stats.hits + stats.misses == 1600
    assert stats.live_bytes == 0
    assert stats.idle_bytes <= 512 * KIB


def test_an_array_that_dies_inside_the_pool_does_not_deadlock() -> None:
    """A cycle that holds an array may be collected anywhere, also while this thread holds the pool's lock."""
    pool = BufferPool()

    class Cycle:
        def __init__(self) -> None:
            self.me, self.array = self, pool.take(10)

    Cycle()
    with pool._lock:
        gc.collect()
    assert pool.stats().live_bytes == 0


def test_a_forked_child_has_an_empty_pool_and_keeps_what_it_saw() -> None:
    pool = BufferPool()
    kept = pool.take(BUFFER_BYTES_MIN)
    kept[:] = 9
    pool.take(1 * MIB)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    child = os.fork()  # while another thread holds the lock
    if child == 0:
        good = pool.stats().idle_bytes == 0 and bool((kept == 9).all()) and pool.take(1 * MIB).shape == (1 * MIB,)
        os._exit(0 if good else 1)
    release.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.stats().idle_bytes == 1 * MIB
