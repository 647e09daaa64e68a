"""The floor: one `np.copyto` of the batch's bytes into shared memory is a put, one out of it is a get."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.peers import host
from benchmarks.workers import warm_private
from benchmarks.workloads import ROLLOUT_SOURCE, ROLLOUT_VALUES, Columns

Bytes = np.ndarray[Any, Any]


def _map(path: str, size: int) -> Bytes:
    descriptor = os.open(path, os.O_RDWR)
    try:
        return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)
    finally:
        os.close(descriptor)


class Storage(host.Storage):
    """Shared memory without a name, which ends with its processes. Who copies touches its pages first."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._descriptor = os.memfd_create("tq-bench")
        os.truncate(self._descriptor, _shared_bytes(setup))

    def where(self) -> dict[str, Any]:
        """Returns a path that leads there."""
        return {"shared": f"/proc/{os.getpid()}/fd/{self._descriptor}"}

    def close(self) -> None:
        """Lets go of it."""
        os.close(self._descriptor)


def _shared_bytes(setup: host.Setup) -> int:
    return 2 * setup.size_bytes  # the critic's values are never more than the batch that they are of


class Source(host.Source):
    """Copies in, out of one private buffer."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        self._shared = _map(setup.storage["shared"], _shared_bytes(setup))[: setup.size_bytes]
        self._private = warm_private(setup.size_bytes)

    def prepare(self, way: str, number: int) -> None:
        """Lays the bytes of every value side by side."""
        np.concatenate(workloads.pieces(self.columns), out=self._private)

    def put(self, way: str, number: int) -> None:
        """Copies them."""
        np.copyto(self._shared, self._private)


class Target(host.Target):
    """Copies out, into one private buffer."""

    def __init__(self, setup: host.Setup) -> None:
        super().__init__(setup)
        # Bytes say nothing of values: what was read is checked through a batch of the same build.
        self._template = workloads.build(setup.workload, setup.seed, setup.scale)
        self._written = self._span(self._template)
        size = setup.size_bytes
        self._shared = _map(setup.storage["shared"], _shared_bytes(setup))
        self._shared = self._shared[: size + self._written.stop - self._written.start]
        self._private = warm_private(self._shared.size)

    @staticmethod
    def _span(columns: Columns) -> slice:
        """Returns where in the bytes the critic's source lies; nothing where there is none."""
        start = 0
        for name, column in columns.items():
            size = workloads.size_bytes({name: column})
            if name == ROLLOUT_SOURCE:
                return slice(start, start + size)
            start += size
        return slice(0, 0)

    def take(self, way: str, number: int) -> Bytes:
        """Copies the batch."""
        size = self.setup.size_bytes
        np.copyto(self._private[:size], self._shared[:size])
        return self._private[:size]

    def write_back(self, way: str, number: int, values: Bytes) -> None:
        """Copies one column in, behind the batch."""
        np.copyto(self._shared[self.setup.size_bytes :], values[self._written])

    def retake(self, way: str, number: int) -> Bytes:
        """Copies the batch and what lies behind it."""
        np.copyto(self._private, self._shared)
        return self._private

    def columns(self, way: str, values: Bytes) -> Columns:
        """Fills a batch of the same build with the bytes."""
        columns = dict(self._template)
        if values.size > self.setup.size_bytes:
            columns[ROLLOUT_VALUES] = [row.clone() for row in columns[ROLLOUT_SOURCE]]
        end = 0
        for piece in workloads.pieces(columns):
            begin, end = end, end + piece.size
            if piece.flags.writeable:
                np.copyto(piece, values[begin:end])
            elif not np.array_equal(piece, values[begin:end]):
                raise RuntimeError("text was read that differs from what was put")
        return columns
