"""What this client has reserved in the arenas, and how it cuts extents from it.

A storage node hands out windows; the client cuts extents from a window's front to its back, so that a small put needs
no reservation of its own. A window is closed once nothing more will be cut from it: then the node takes the rest back.
Nothing here talks to anybody: `take_closing` says what is to be closed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final, Literal

from tqclient.limits import EXTENT_ALIGN, KIB, MIB
from tqclient.transport.base import NodeTransport, Place
from tqclient.wire.v1 import common_pb2, storage_pb2

AHEAD_FIRST: Final = 256 * KIB
AHEAD_MAX: Final = 8 * MIB
"""Bytes that are reserved ahead for small puts: at first, and for a client that goes on putting."""
WHOLE_MIN: Final = 2 * MIB
"""Bytes from which on a put reserves a window of its own."""
AHEAD_SPOTS_MAX: Final = 256
"""So many spots are remembered, the latest ones: a producer may see a partition for each step."""
WINDOWS_MAX: Final = 4
"""Open windows of one partition on one node; more would only hold bytes."""

Fate = Literal["committed", "refused", "unknown"]


@dataclass(frozen=True, slots=True)
class Spot:
    """Whose windows may serve a put.

    Attributes:
        session: that reserves.
        address: of the storage node.
        node: its name.
        arena: its arena's identity.
        incarnation: of the node.
        partition_id: that the samples belong to; segments are cut by partition.
        mapped: the session writes through a mapping: what was reserved for one way to write is written in no other.
        segment: the engine that it writes through one-sided; empty when it does not.
    """

    session: int
    address: str
    node: str
    arena: int
    incarnation: int
    partition_id: int
    mapped: bool = False
    segment: str = ""


@dataclass(slots=True, eq=False)
class Window:
    """A run of an arena that this session may write to.

    Attributes:
        spot: where it belongs.
        offset, length, generation, incarnation: as the node granted it.
        used: bytes that were cut so far.
        pending: extents whose put is still under way.
        holes: (offset, length) of extents whose put was refused: they were never committed and may be cut again.
        whole: reserved for one put, after which nothing more is cut from it.
    """

    spot: Spot
    offset: int
    length: int
    generation: int
    incarnation: int
    whole: bool
    last_used: float
    used: int = 0
    pending: int = 0
    retired: bool = False
    holes: list[tuple[int, int]] = field(default_factory=list)

    @property
    def one_sided(self) -> bool:
        """Whether it is written through the node's engine, which takes no notice of the end of a session."""
        return bool(self.spot.segment)

    @property
    def keeps_room(self) -> bool:
        """Whether closing it gives anything back, or tells of the end of a one-sided writer.

        A window that was cut to its end is no more once all of that is committed.
        """
        return self.used < self.length or self.one_sided

    def cut(self, length: int) -> Cut | None:
        """Takes an extent from a hole or from the rest; None when neither is long enough."""
        taken = aligned(length)
        for index, (offset, room) in enumerate(self.holes):
            if room >= taken:
                self.holes[index : index + 1] = [(offset + taken, room - taken)] if room > taken else []
                return self._cut(offset, length)
        if self.retired or self.length - self.used < length:
            return None
        offset, self.used = self.used, min(self.length, self.used + taken)
        return self._cut(offset, length)

    def _cut(self, offset: int, length: int) -> Cut:
        self.pending += 1
        return Cut(self, offset, length)

    def settle(self, cut: Cut, fate: Fate) -> None:
        """Books the end of an extent's put. What may have been committed is never cut again."""
        self.pending -= 1
        if fate != "refused":
            return
        if min(self.length, cut.offset + aligned(cut.length)) == self.used:
            self.used = cut.offset
            while (last := next((hole for hole in self.holes if sum(hole) == self.used), None)) is not None:
                self.holes.remove(last)
                self.used = last[0]
        else:
            self.holes.append((cut.offset, aligned(cut.length)))


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """An extent that was cut and not yet settled; `offset` counts from the window's start."""

    window: Window
    offset: int
    length: int

    def place(self) -> Place:
        """Returns where a transport is to write it."""
        window = self.window
        return Place(window.offset + self.offset, self.length, window.generation, window.incarnation)

    def extent(self) -> common_pb2.Extent:
        """Returns it as a commit carries it."""
        window = self.window
        return common_pb2.Extent(
            node=window.spot.node,
            arena=window.spot.arena,
            offset=window.offset + self.offset,
            length=self.length,
            generation=window.generation,
        )


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A reservation whose reply never came: what it may have been granted is closed by its ticket.

    Attributes:
        spot: where it was asked for.
        ticket: its number.
    """

    spot: Spot
    ticket: int


def aligned(length: int) -> int:
    """Returns the bytes that an extent of this length takes: the next one begins on a multiple of `EXTENT_ALIGN`."""
    return -(-length // EXTENT_ALIGN) * EXTENT_ALIGN


class WindowPool:
    """The windows of one client. Safe to use from many threads; nothing in it blocks.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open: dict[Spot, list[Window]] = {}
        self._ahead: dict[Spot, int] = {}
        self._closing: list[Window | Unanswered] = []
        self._drifting: list[tuple[Cut, NodeTransport]] = []

    def cut(self, spot: Spot, length: int) -> Cut | None:
        """Cuts an extent from a window that was reserved ahead; None when there is none with room."""
        with self._lock:
            for window in reversed(self._open.get(spot, ())):
                cut = window.cut(length)
                if cut is not None:
                    window.last_used = self._clock()
                    return cut
        return None

    def ahead_bytes(self, spot: Spot, length: int) -> int:
        """Returns how much to reserve for this and the puts to come; it doubles with each call, up to `AHEAD_MAX`."""
        with self._lock:
            size = max(self._ahead.pop(spot, AHEAD_FIRST), aligned(length))
            self._ahead[spot] = min(size * 2, AHEAD_MAX)
            while len(self._ahead) > AHEAD_SPOTS_MAX:
                del self._ahead[next(iter(self._ahead))]
        return size

    def add(self, spot: Spot, granted: storage_pb2.Window, lengths: list[int], *, whole: bool) -> list[Cut]:
        """Takes a window in and cuts the extents that it was reserved for; they fit."""
        place = granted.offset, granted.length, granted.generation, granted.incarnation
        with self._lock:
            window = Window(spot, *place, whole, self._clock())
            cuts = [cut for length in lengths if (cut := window.cut(length)) is not None]
            if not whole:
                siblings = self._open.setdefault(spot, [])
                siblings.append(window)
                for stale in siblings[:-WINDOWS_MAX]:
                    self._retire(stale)
        if len(cuts) != len(lengths):
            raise ValueError(f"a window of {granted.length} bytes was granted for extents of {sum(lengths)} bytes")
        return cuts

    def settle(self, cuts: list[Cut], fate: Fate) -> None:
        """Books the end of a put. A repeated call must not happen."""
        with self._lock:
            for cut in reversed(cuts):  # the last one first: then a refused put leaves no hole
                cut.window.settle(cut, fate)
            for window in {id(cut.window): cut.window for cut in cuts}.values():
                window.retired |= window.whole
                self._close_if_done(window)

    def drift(self, cut: Cut, transport: NodeTransport) -> None:
        """Leaves the end of a put open: it was given up, and a one-sided transfer to the extent may be under way.

        The window is not closed before the transport is quiet, for a node takes the closing as the word that no byte
        comes any more. The extent was never committed; it may be cut again then.
        """
        with self._lock:
            self._drifting.append((cut, transport))

    def retire(
        self, *, node: str | None = None, partition_id: int | None = None, idle_since: float | None = None
    ) -> None:
        """Cuts no more from the windows on a node, of a partition, or last used before `idle_since`; or from any."""
        with self._lock:
            for windows in list(self._open.values()):
                for window in list(windows):
                    mine = partition_id in (None, window.spot.partition_id) and node in (None, window.spot.node)
                    if mine and (idle_since is None or (window.last_used < idle_since and window.pending == 0)):
                        self._retire(window)

    def _retire(self, window: Window) -> None:
        window.retired = True
        window.holes.clear()
        self._open[window.spot].remove(window)
        if not self._open[window.spot]:
            del self._open[window.spot]
        self._close_if_done(window)

    def _close_if_done(self, window: Window) -> None:
        if window.retired and window.pending == 0 and window.keeps_room:
            self._closing.append(window)

    @property
    def wants_closing(self) -> bool:
        """Whether there are windows to be closed now; those that puts have drifted from may follow."""
        return bool(self._closing)

    def unanswered(self, spot: Spot, ticket: int) -> None:
        """Has what a reservation may have been granted closed; its reply never came."""
        with self._lock:
            self._closing.append(Unanswered(spot, ticket))

    def take_closing(self) -> list[Window | Unanswered]:
        """Returns the windows that are done with; they are the caller's to close."""
        with self._lock:
            landed = [cut for cut, transport in self._drifting if transport.quiet]
            self._drifting = [each for each in self._drifting if each[0] not in landed]
        self.settle(landed, "refused")
        with self._lock:
            closing, self._closing = self._closing, []
        return closing

    def return_closing(self, windows: Iterable[Window | Unanswered]) -> None:
        """Takes back windows that could not be closed now."""
        with self._lock:
            self._closing.extend(windows)

    def forget(self, session: int) -> bool:
        """Drops the windows of a session that ended: the nodes take them back by themselves.

        Returns:
            Whether some are to be closed all the same: a node cannot tell when the transfers of a one-sided writer end.
            One whose put is under way follows when that has ended.
        """
        with self._lock:
            for spot in [spot for spot in self._open if spot.session == session]:
                for window in list(self._open[spot]):
                    self._retire(window)
            for spot in [spot for spot in self._ahead if spot.session == session]:
                del self._ahead[spot]
            self._closing = [
                each
                for each in self._closing
                if isinstance(each, Unanswered) or each.spot.session != session or each.one_sided
            ]
            return any(each.spot.session == session for each in self._closing)
