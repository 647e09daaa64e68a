"""The path to a fake node: it writes to and reads from the node's arena."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import allocate
from tqclient.errors import SampleNotFound
from tqclient.transport.base import Place, Read
from tqclient.wire.v1 import common_pb2

if TYPE_CHECKING:
    from tests.unit.client.fakes import FakeNode


class FakeFetched:
    owned_bytes = 0

    def __init__(self, source: NDArray[np.uint8], extent: common_pb2.Extent, ranges: NDArray[np.uint64]) -> None:
        self._source, self._extent, self._ranges = source, extent, ranges.tolist()
        self.closed = False

    @property
    def memory(self) -> tuple[NDArray[np.uint8], int]:
        return self._source, self._extent.offset

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        assert any(start <= offset and offset + length <= start + size for start, size in self._ranges)
        begin = self._extent.offset + offset
        view = self._source[begin : begin + length]
        view.flags.writeable = False
        return view

    def locate(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        for offset, length in zip(offsets.tolist(), lengths.tolist(), strict=True):
            self.view(offset, length)
        return self._source, offsets + self._extent.offset

    def close(self) -> None:
        self.closed = True


class FakeLent:
    def __init__(self, target: NDArray[np.uint8]) -> None:
        self.array = target
        self.taken_back = self.ended = 0

    def take_back(self) -> NDArray[np.uint8]:
        self.taken_back += 1
        return self.array

    def end(self) -> None:
        self.ended += 1


class FakeTransport:
    """Writes to and reads from the arena of a fake node."""

    reason = "a fake"

    def __init__(self, node: FakeNode) -> None:
        self._node = node
        self.name = node.path
        self.mapped = node.path == "shm"
        self.segment = node.segment if node.path == "mooncake" else ""
        self.usable = self.quiet = True
        self.better_after: float | None = None
        self.closed = False
        self.arena = node.node.arena
        self.sessions: list[int] = []
        self.fetched: list[FakeFetched] = []
        self.lent: list[FakeLent] = []
        self.together: list[int] = []
        self.alone = 0

    def session_opened(self, session: int) -> None:
        self.sessions.append(session)

    def admits(self, session: int) -> bool:
        return session in self.sessions

    def session_closed(self, session: int) -> None:
        self.sessions = [each for each in self.sessions if each != session]

    @contextmanager
    def write(self, place: Place, *, session: int, timeout: float | None) -> Iterator[NDArray[np.uint8]]:
        self._node.service.take_fault("write")
        assert session in self.sessions
        target = self._node.memory[place.offset : place.offset + place.length]
        if self.mapped:
            yield target
            return
        staging = allocate(place.length)
        yield staging
        self._node.answer(timeout)
        target[:] = staging

    def lend(self, place: Place, *, session: int) -> FakeLent | None:
        if not self.mapped:
            return None
        assert session in self.sessions
        self.lent.append(FakeLent(self._node.memory[place.offset : place.offset + place.length]))
        return self.lent[-1]

    def read(self, extent: common_pb2.Extent, ranges: NDArray[np.uint64], *, timeout: float | None) -> FakeFetched:
        self.alone += 1
        return self.bring(extent, ranges, timeout)

    def bring(self, extent: common_pb2.Extent, ranges: NDArray[np.uint64], timeout: float | None) -> FakeFetched:
        self._node.service.take_fault("read")
        if not self.mapped:
            self._node.answer(timeout)
        assert extent.arena == self.arena
        if self.arena != self._node.node.arena:
            raise SampleNotFound("the ranges lie in no extent of that generation")
        self.fetched.append(FakeFetched(self._node.memory, extent, ranges))
        return self.fetched[-1]

    def read_many(self, reads: Sequence[Read], *, timeout: float | None) -> list[FakeFetched]:
        self.together.append(len(reads))
        return [self.bring(extent, ranges, timeout) for extent, ranges in reads]

    def close(self) -> None:
        self.closed = True
