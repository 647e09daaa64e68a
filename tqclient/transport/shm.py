"""shm: reads and writes through this process' own mapping of the arena of a node on the same host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import TransportUnavailable, Unavailable
from tqclient.transport.base import Fetched, Lent, NodeContact, Place, Read
from tqclient.transport.mapping import ArenaMapping, close_arena, open_arena
from tqclient.transport.moving import MovedPages
from tqclient.transport.ranges import Runs, merge_ranges
from tqclient.transport.sessions import SessionWriter, WriteSessions
from tqclient.wire.v1 import common_pb2


class ShmFetched:
    """A read-only view of an extent, of which some runs may be used."""

    owned_bytes = 0

    def __init__(self, arena: NDArray[np.uint8], offset: int, runs: Runs) -> None:
        """Args: `arena`: all of it; `offset`: of the extent."""
        self._arena: NDArray[np.uint8] | None = arena
        self._offset = offset
        self._runs = runs

    @property
    def memory(self) -> tuple[NDArray[np.uint8], int] | None:
        """See `Fetched.memory`."""
        return None if self._arena is None else (self._arena, self._offset)

    def view(self, offset: int, length: int) -> NDArray[np.uint8]:
        """See `Fetched.view`."""
        if self._arena is None:
            raise Unavailable("the fetched bytes were closed")
        self._runs.locate(offset, length)
        start = self._offset + offset
        return self._arena[start : start + length]

    def locate(
        self, offsets: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """See `Fetched.locate`."""
        if self._arena is None:
            raise Unavailable("the fetched bytes were closed")
        self._runs.locate_all(offsets, lengths)
        return self._arena, offsets + self._offset

    def close(self) -> None:
        """See `Fetched.close`."""
        self._arena = None


class ShmLent:
    """A place of the arena whose pages are out on loan; see `Lent`."""

    def __init__(self, mapping: ArenaMapping, place: Place, pages: MovedPages, writing: AbstractContextManager[None]):
        """Takes over the write in progress."""
        self._mapping = mapping
        self._place = place
        self._pages = pages
        self._writing: AbstractContextManager[None] | None = writing

    @property
    def array(self) -> NDArray[np.uint8]:
        """See `Lent.array`."""
        return self._pages.array

    def take_back(self) -> NDArray[np.uint8]:
        """See `Lent.take_back`."""
        self._take_back()
        return self._mapping.target(self._place.offset, self._place.length)

    def end(self) -> None:
        """See `Lent.end`."""
        self._take_back()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.__exit__(None, None, None)

    def _take_back(self) -> None:
        try:
            self._pages.take_back()
        except OSError as error:
            raise Unavailable(f"{self._mapping.path}: {error.strerror}") from None


class ShmTransport(SessionWriter):
    """See `NodeTransport`. Writing costs the copy, reading nothing."""

    name = "shm"
    mapped = True
    segment = ""
    usable = True
    quiet = True
    better_after: float | None = None

    def __init__(self, contact: NodeContact, mapping: ArenaMapping) -> None:
        self._contact = contact
        self._mapping = mapping
        self._sessions = WriteSessions(
            take=mapping.lock_session, drop=mapping.unlock_session, end=lambda: close_arena(mapping)
        )
        self.arena = mapping.header.arena
        name = contact.description.name  # without an address: the mapping outlives it
        self.reason = "; ".join(
            (f"same host: {mapping.path} holds the arena {self.arena:016x} of storage node {name!r}", *contact.refusals)
        )

    @contextmanager
    def write(self, place: Place, *, session: int, timeout: float | None) -> Iterator[NDArray[np.uint8]]:
        """See `NodeTransport.write`."""
        self._contact.check_place(place)
        with self._sessions.writing(session):
            yield self._mapping.target(place.offset, place.length)

    def lend(self, place: Place, *, session: int) -> Lent | None:
        """See `NodeTransport.lend`."""
        self._contact.check_place(place)
        with ExitStack() as stack:
            writing = self._sessions.writing(session)
            stack.enter_context(writing)
            pages = self._mapping.move_out(place.offset, place.length)
            if pages is None:
                return None
            stack.pop_all()  # it goes on until the loan ends
            return ShmLent(self._mapping, place, pages, writing)

    def read(self, extent: common_pb2.Extent, ranges: NDArray[np.uint64], *, timeout: float | None) -> Fetched:
        """See `NodeTransport.read`."""
        self._contact.check_extent(extent)
        if self._sessions.closed:
            raise Unavailable("the transport is closed")
        runs = merge_ranges(ranges, extent.length)
        return ShmFetched(self._mapping.source(extent.offset, runs), extent.offset, Runs(runs))

    def read_many(self, reads: Sequence[Read], *, timeout: float | None) -> list[Fetched]:
        """See `NodeTransport.read_many`."""
        return [self.read(extent, ranges, timeout=timeout) for extent, ranges in reads]

    def close(self) -> None:
        """See `NodeTransport.close`."""
        self._sessions.close()


def open_shm(contact: NodeContact) -> ShmTransport:
    """Maps the arena of a node on this host.

    Raises:
        TransportUnavailable: the node is on another host, or its arena may not be opened, or was removed.
    """
    described = contact.description
    if described.arena_removed:
        raise TransportUnavailable(f"the arena's file {described.arena_path} was removed while the node serves it")
    mapping = open_arena(described.arena_path, described.arena)
    if mapping.header.file_bytes < described.arena_bytes:
        close_arena(mapping)
        raise TransportUnavailable(
            f"{described.arena_path} has {mapping.header.file_bytes} bytes, but the node says {described.arena_bytes}"
        )
    return ShmTransport(contact, mapping)
