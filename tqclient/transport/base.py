"""What every transport offers: to put bytes in place at one storage node, and to fetch them from there.

One object serves one node for one client. Its calls block; they are safe to use from many threads at once.
To add a transport: implement `NodeTransport` in a module of its own and name it in `select.OPENERS`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, Unavailable
from tqclient.limits import EXTENT_ALIGN
from tqclient.transport.pool import BufferPool
from tqclient.wire.v1 import common_pb2, storage_pb2


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client is about to write: a run of bytes at the front of what is left of its window.

    Attributes:
        offset: bytes from the start of the arena file; a multiple of `limits.EXTENT_ALIGN`.
        length: bytes.
        generation: of the window.
        incarnation: of the node that handed the window out.
    """

    offset: int
    length: int
    generation: int
    incarnation: int

    @classmethod
    def at(cls, window: storage_pb2.Window, used_bytes: int, length: int) -> Place:
        """Returns the place of `length` bytes behind the first `used_bytes` of a window."""
        return cls(window.offset + used_bytes, length, window.generation, window.incarnation)


@dataclass(frozen=True, slots=True)
class NodeContact:
    """What a transport is made from.

    Attributes:
        address: host:port of the node's Storage service.
        description: what the node told of itself.
        stub: blocking stub of its Storage service.
        pool: where receive and staging buffers come from.
        deadline: monotonic seconds by which the path must be open.
        refusals: why each better transport cannot serve the node.
        rdma: whether a path must really run over RDMA.
        better_after: seconds after which a better transport is expected to serve the node; None: none is.
    """

    address: str
    description: storage_pb2.DescribeNodeReply
    stub: Any
    pool: BufferPool
    deadline: float = math.inf
    refusals: tuple[str, ...] = ()
    rdma: bool = False
    better_after: float | None = None

    @property
    def remaining(self) -> float:
        """Seconds that are left for opening the path; 0 when there are none."""
        return max(self.deadline - time.monotonic(), 0.0)

    @property
    def peer(self) -> str:
        """The node, for error messages."""
        return f"storage node {self.description.name!r} ({self.address})"

    def check_place(self, place: Place) -> None:
        """Checks a place against the arena's bounds, so that no transport touches what lies outside.

        Raises:
            InvalidArgument: it is out of bounds.
        """
        if place.offset % EXTENT_ALIGN or not self._within(place.offset, place.length):
            raise InvalidArgument(f"{place} is no place of the arena of {self.peer}")

    def check_extent(self, extent: common_pb2.Extent) -> None:
        """Checks an extent, likewise.

        Raises:
            InvalidArgument: it is out of bounds.
            Unavailable: it lies in another arena: this transport is out of date.
        """
        if extent.arena != self.description.arena:
            raise Unavailable(f"the extent lies in arena {extent.arena:016x}, not in the one that {self.peer} had")
        if not self._within(extent.offset, extent.length):
            raise InvalidArgument(
                f"an extent of {extent.length} bytes at {extent.offset} is out of the arena of {self.peer}"
            )

    def _within(self, offset: int, length: int) -> bool:
        return (
            self.description.data_offset <= offset and offset + length <= self.description.arena_bytes and length >= 0
        )


class Read(NamedTuple):
    """What is wanted of one extent.

    Attributes:
        extent: of the transport's arena.
        ranges: uint64 `[n, 2]`: offset from the start of the extent, length; any order, overlaps allowed.
    """

    extent: common_pb2.Extent
    ranges: NDArray[np.uint64]


class Fetched(Protocol):
    """The bytes that one `NodeTransport.read` brought."""

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """Views fetched bytes.

        Args:
            offset: bytes from the start of the extent.
            length: bytes; the run must lie within the ranges that were read (adjacent ones count as one).

        Returns:
            A view, uint8 `[length]`, whose address is congruent to `offset` modulo 64. It keeps its memory alive. Over
            shm it is read-only and shows the arena itself: it is good while the block stays pinned or claimed.

        Raises:
            InvalidArgument: the run was not read.
        """
        ...

    def locate(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Finds many fetched stretches at once, as `view` does one.

        Args:
            offsets: int64 `[n]`: bytes from the start of the extent.
            lengths: int64 `[n]`: bytes, at least 1 each.

        Returns:
            A view that holds them all, and where in it each begins, int64 `[n]`.

        Raises:
            InvalidArgument: a stretch was not read.
        """
        ...

    @property
    def memory(self) -> tuple[NDArray[np.uint8], int] | None:
        """What `view` shows parts of, and where in it the extent begins; another read may have brought it as well.

        Only what was asked for may be looked at. None: its runs do not lie as they do in the extent, or it is closed.
        """
        ...

    @property
    def owned_bytes(self) -> int:
        """Bytes of the private memory that a view keeps alive; 0 where views show the arena."""
        ...

    def close(self) -> None:
        """Lets go of the memory; views that were handed out stay good. Repeatable."""
        ...


class Lent(Protocol):
    """The bytes of a place, in the hands of a user: one write in progress until `end`."""

    @property
    def array(self) -> NDArray[np.uint8]:
        """uint8 `[length]`, on a 64-byte boundary. Views of it may live on, and be written to, for ever."""
        ...

    def take_back(self) -> NDArray[np.uint8]:
        """Takes the bytes out of the user's reach; repeatable.

        Returns:
            The same bytes, uint8 `[length]`, as they are from now on: no store to `array` changes them.

        Raises:
            Unavailable: it cannot be done now; nothing has changed.
        """
        ...

    def end(self) -> None:
        """Ends the write, taking back first; repeatable, but by one thread at a time.

        Raises:
            Unavailable: as `take_back`.
        """
        ...


class NodeTransport(Protocol):
    """The path between one client and one storage node."""

    @property
    def name(self) -> str:
        """`shm`, `grpc`, ...: as a user requires it by name."""
        ...

    @property
    def reason(self) -> str:
        """Why this path was taken, and why the better ones were not; for people."""
        ...

    @property
    def arena(self) -> int:
        """Identity of the arena that it reaches; a node that answers with another needs another transport."""
        ...

    @property
    def mapped(self) -> bool:
        """Whether writes go through a mapping of this process, so that Reserve must be told `mapped`."""
        ...

    @property
    def segment(self) -> str:
        """The node's engine that writes go to one-sided, as Reserve must be told; empty for every other path."""
        ...

    @property
    def usable(self) -> bool:
        """False once this path is broken for good: close it and open another one."""
        ...

    @property
    def quiet(self) -> bool:
        """Whether no transfer that was given up is still under way: no byte comes from here unless it is sent anew."""
        ...

    @property
    def better_after(self) -> float | None:
        """Seconds from its opening after which a better path is worth a try; None when this is the best to be had."""
        ...

    def session_opened(self, session: int) -> None:
        """Prepares for the session's writes; before its first Reserve. Repeatable.

        Raises:
            Unavailable: the node cannot be told that this process writes for the session.
        """
        ...

    def admits(self, session: int) -> bool:
        """Says whether `session_opened` was told of the session, which was not closed since."""
        ...

    def session_closed(self, session: int) -> None:
        """Ends the session's writes; repeatable.

        No new write starts. Those in progress go on, and what `session_opened` took is given back when the last of
        them has ended: at once when there is none.
        """
        ...

    def write(self, place: Place, *, session: int, timeout: float | None) -> AbstractContextManager[NDArray[np.uint8]]:
        """Writes one run of bytes.

        Args:
            place: within a window of this session.
            session: one that `session_opened` was told of.
            timeout: seconds to move the bytes in, counted from the moment the target was filled; None: no bound.

        Returns:
            A context manager that yields the target, uint8 `[place.length]`, of arbitrary content and on a 64-byte
            boundary. When its block ends normally, every byte is in place at the node. When it ends by an exception,
            or this raises, nothing is known about the bytes at the place, and they may be written again from the
            start. The target must not be used afterwards.

        Raises:
            InvalidArgument: the place is out of the arena's bounds.
            LeaseExpired: the session is closed, or the node does not know the window.
            Unavailable: the node is away, or the time was up.
        """
        ...

    def lend(self, place: Place, *, session: int) -> Lent | None:
        """Lends the bytes of a place themselves, to be filled in by the caller's caller.

        Args:
            place: within a window of this session.
            session: one that `session_opened` was told of.

        Returns:
            None where this path has no such bytes: what it writes is copied.

        Raises:
            InvalidArgument, LeaseExpired, Unavailable: as `write`.
        """
        ...

    def read(self, extent: common_pb2.Extent, ranges: NDArray[np.uint64], *, timeout: float | None) -> Fetched:
        """Fetches byte ranges of one extent.

        Args:
            extent: of this transport's arena.
            ranges: uint64 `[n, 2]`: offset from the start of the extent, length; any order, overlaps allowed.
            timeout: seconds; None: no bound.

        Raises:
            InvalidArgument: a range is out of the extent's bounds, or the extent out of the arena's.
            SampleNotFound: the node knows no such extent any more (not every transport can tell: verify checksums).
            Unavailable: the node is away, sent too little, serves another arena by now, or the time was up.
        """
        ...

    def read_many(self, reads: Sequence[Read], *, timeout: float | None) -> list[Fetched]:
        """Fetches byte ranges of several extents, for one round trip where that is faster.

        Args:
            reads: small ones: together some MiB.
            timeout: seconds for all of them; None: no bound.

        Returns:
            What was fetched of each. Views of one may keep the bytes of all alive.

        Raises:
            InvalidArgument, SampleNotFound, Unavailable: as `read`, of any one of them; it is not said which.
        """
        ...

    def close(self) -> None:
        """Ends every session's writes and lets go of what is not in use. Views stay good. Repeatable."""
        ...
