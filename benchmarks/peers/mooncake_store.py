"""Mooncake Store: a process that lends memory, registered buffers on both sides, one key for each array.

What is no array goes, with every array's dtype and shape, into one more key. The consumer reads that first.
"""

from __future__ import annotations

import math
import pickle
from typing import Any, Final

import numpy as np

from benchmarks.peers import forms, host, mooncake_master
from benchmarks.peers.daemons import HOST
from benchmarks.workers import warm_private
from benchmarks.workloads import ROLLOUT_SOURCE, ROLLOUT_VALUES, Columns

STAGING_BYTES: Final = 64 << 20
"""Of a client's own, for the key that is not read into a registered buffer."""
SPARE_BYTES: Final = 512 << 20
ALIGNMENT: Final = 64
Array = np.ndarray[Any, Any]


def _connect(master: str, lent_bytes: int) -> Any:
    mooncake_master.tune()
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    if status := store.setup(HOST, "P2PHANDSHAKE", lent_bytes, STAGING_BYTES, "tcp", "", master):
        raise RuntimeError(f"no connection to the master: {status}")
    return store


def _check(answers: Any, expected: Any, what: str) -> None:
    if answers != expected:
        raise RuntimeError(f"{what} answered {str(answers)[:100]}")


class Storage(host.Storage):
    """The master, and this process, which lends its memory. It evicts long before it is full: it lends plenty."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._master, self._address = mooncake_master.start(setup.directory)
        self._store = _connect(self._address, 3 * setup.size_bytes + SPARE_BYTES)

    def where(self) -> dict[str, Any]:
        """Returns the master's address."""
        return {"address": self._address}

    def close(self) -> None:
        """Stops both."""
        self._store.close()
        self._master.stop()


class _End:
    """A client with one warm, registered buffer, in which arrays lie at aligned places."""

    def __init__(self, master: str, size: int) -> None:
        self.store = _connect(master, 0)
        self.buffer = warm_private(size)
        _check(self.store.register_buffer(self.buffer.ctypes.data, size), 0, "register_buffer")

    def lay(self, value: Any) -> Any:
        """Copies the arrays of a value into the buffer; returns the same value, of these."""
        arrays: list[Array] = []
        skeleton = forms.split(value, arrays)
        views = self._views(skeleton, 0)[0]
        for view, array in zip(views, arrays, strict=True):
            np.copyto(view, array)
        return forms.fill(skeleton, views)

    def put(self, prefix: str, value: Any) -> int:
        """Puts a value whose arrays lie in the buffer; returns the number of its keys beside the first."""
        arrays: list[Array] = []
        skeleton = forms.split(value, arrays)
        keys, sizes = _keys(prefix, len(arrays)), [array.nbytes for array in arrays]
        answers = self.store.batch_put_from(keys, [array.ctypes.data for array in arrays], sizes)
        _check(answers, [0] * len(keys), "batch_put_from")
        _check(self.store.put(prefix, pickle.dumps(skeleton, protocol=5)), 0, "put")
        return len(keys)

    def get(self, prefix: str, start: int = 0) -> tuple[Any, int]:
        """Returns a value whose arrays it reads into the buffer from a place on, and where they end."""
        data = self.store.get(prefix)
        if not data:
            raise RuntimeError(f"no key {prefix}")
        skeleton = pickle.loads(data)
        views, end = self._views(skeleton, start)
        sizes = [view.nbytes for view in views]
        answers = self.store.batch_get_into(_keys(prefix, len(views)), [view.ctypes.data for view in views], sizes)
        _check(answers, sizes, "batch_get_into")
        return forms.fill(skeleton, views), end

    def remove(self, prefix: str, count: int) -> None:
        """Removes a value."""
        keys = [prefix, *_keys(prefix, count)]
        _check(self.store.batch_remove(keys, True), [0] * len(keys), "batch_remove")

    def _views(self, skeleton: Any, start: int) -> tuple[list[Array], int]:
        views = []
        for dtype, shape in forms.slots(skeleton):
            size = math.prod(shape) * np.dtype(dtype).itemsize
            views.append(self.buffer[start : start + size].view(dtype).reshape(shape))
            start += -(-size // ALIGNMENT) * ALIGNMENT
        return views, start


def _keys(prefix: str, count: int) -> list[str]:
    return [f"{prefix}/{number}" for number in range(count)]


def _buffer_bytes(setup: host.Setup) -> int:
    return 2 * setup.size_bytes + STAGING_BYTES


class Source(host.Source):
    """Puts values that lie in registered memory already."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._end = _End(setup.storage["address"], _buffer_bytes(setup))
        self._laid: Any = None
        self._counts: dict[int, int] = {}

    def prepare(self, way: str, number: int) -> None:
        """Lays the batch into registered memory."""
        self._laid = self._end.lay(forms.numpy_columns(self.columns))

    def put(self, way: str, number: int) -> None:
        """One `batch_put_from`, and one `put` of what is no array."""
        self._counts[number] = self._end.put(str(number), self._laid)

    def drop(self, way: str, number: int) -> None:
        """Removes the keys."""
        self._end.remove(str(number), self._counts.pop(number))

    def close(self) -> None:
        """Leaves."""
        self._end.store.close()
        super().close()


class Target(host.Target):
    """Gets into registered memory."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._end = _End(setup.storage["address"], _buffer_bytes(setup))
        self._written: int | None = None
        self._read = 0

    def take(self, way: str, number: int) -> Columns:
        """One `get` of what is no array, and one `batch_get_into`."""
        values, self._read = self._end.get(str(number))
        columns: Columns = forms.from_numpy_columns(values)
        return columns

    def write_back(self, way: str, number: int, values: Columns) -> None:
        """Puts one column from where it was read to."""
        self._written = self._end.put(f"{number}/values", values[ROLLOUT_SOURCE])

    def retake(self, way: str, number: int) -> Columns:
        """Gets both."""
        taken = self.take(way, number)
        written, _ = self._end.get(f"{number}/values", self._read)
        return {**taken, ROLLOUT_VALUES: written}

    def drop(self, way: str, number: int) -> None:
        """Removes what was written back."""
        if self._written is not None:
            self._end.remove(f"{number}/values", self._written)
            self._written = None

    def close(self) -> None:
        """Leaves."""
        self._end.store.close()
        super().close()
