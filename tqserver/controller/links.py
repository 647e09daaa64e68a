"""The links to the storage nodes: what was applied goes out in order, what the nodes saw comes in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, LeaseExpired, TQError, Unavailable, UnsupportedVersion
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver import logs
from tqserver.controller.core import Effect, Freed, Outcome, Sealed, SessionEnded, SessionOpened
from tqserver.controller.pipeline import Pipeline

OUTBOX_ORDERS_MAX: Final = 65_536
"""Orders that wait for one node; one that does not drain them is cut off, and starts afresh with the next NodeSync."""
ORDER_EXTENTS_MAX: Final = 65_536
"""Extents that are gathered into one order."""
GATHER_S: Final = 0.005
"""So long may an order about extents wait for others: nobody waits for it, and what it takes to send one would delay
the replies to the very calls that brought it about."""
RETURN_S: Final = 3.0
"""So long may a node be away, after its link ended or the controller started, before another arena takes its name: it
tries again within `limits.LINK_BACKOFF_MAX`, and what lies in its arena is called lost by then."""
TOLD_MAX: Final = 1024
"""Arenas that are remembered because the refusal of their node was logged."""

_log = logs.get("controller.links")

_Order = tuple[str, NDArray[np.uint64]]
"""A field of NodeOrder (`sealed`, `freed`), or of its SessionsChanged (`opened`, `ended`), and its rows."""
_ABOUT_EXTENTS: Final = ("sealed", "freed")


class _Link:
    """One open link.

    Attributes:
        node: its name.
        arena: that it serves.
        usage: as last reported.
    """

    def __init__(self, node: str, arena: int) -> None:
        self.node = node
        self.arena = arena
        self.usage = pb.NodeUsage()
        self._sync: pb.NodeOrder | None = None
        self._extents: Iterator[NDArray[np.uint64]] = iter(())
        self._orders: list[_Order] = []
        self._sequence = 0
        self._awake = asyncio.Event()
        self._gathering: asyncio.TimerHandle | None = None
        self._end: TQError | None = None

    def start(self, sync: pb.NodeOrder, extents: Iterator[NDArray[np.uint64]]) -> None:
        self._sync, self._extents = sync, extents
        self._awake.set()

    def push(self, sequence: int, kind: str, rows: NDArray[np.uint64]) -> None:
        if self._end is not None:
            return
        if len(self._orders) >= OUTBOX_ORDERS_MAX:
            self.close(
                Unavailable(f"node {self.node!r} left {OUTBOX_ORDERS_MAX} orders unread, the most; attach again")
            )
            return
        self._orders.append((kind, rows))
        self._sequence = sequence
        if kind not in _ABOUT_EXTENTS:
            self._awake.set()  # a session is of use from then on
        elif self._gathering is None:
            self._gathering = asyncio.get_running_loop().call_later(GATHER_S, self._awake.set)

    def close(self, error: TQError) -> None:
        self._end = self._end or error
        self._orders.clear()
        self._awake.set()

    async def _packed_extents(self) -> bytes:
        """Returns those of the NodeSync; others go on while millions are written down."""
        packed = []
        for rows in self._extents:
            packed.append(pack_array(rows, U64))
            await asyncio.sleep(0)
        return b"".join(packed)

    async def orders(self) -> AsyncIterator[pb.NodeOrder]:
        """Yields what to send, neighbours of one kind gathered into one order.

        Raises:
            TQError: that the link was closed with.
        """
        while True:
            await self._awake.wait()
            self._awake.clear()
            if self._sync is not None:
                sync, self._sync = self._sync, None
                sync.sync.extents = await self._packed_extents()
                yield sync
            if self._gathering is not None:
                self._gathering.cancel()
                self._gathering = None
            gathered, self._orders = self._orders, []
            sequence = self._sequence
            for kind, rows in _runs(gathered):
                packed = pack_array(rows, U64)
                if kind == "sealed":
                    yield pb.NodeOrder(sequence=sequence, sealed=pb.ExtentsSealed(extents=packed))
                elif kind == "freed":
                    yield pb.NodeOrder(sequence=sequence, freed=pb.ExtentsFreed(extents=packed))
                else:
                    yield pb.NodeOrder(sequence=sequence, sessions=pb.SessionsChanged(**{kind: packed}))
            if self._end is not None:
                raise self._end


def _runs(orders: list[_Order]) -> Iterable[_Order]:
    start = 0
    while start < len(orders):
        kind, size, end = orders[start][0], 0, start
        while end < len(orders) and orders[end][0] == kind and size < ORDER_EXTENTS_MAX:
            size += len(orders[end][1])
            end += 1
        yield kind, np.concatenate([rows for _, rows in orders[start:end]])
        start = end


class Links:
    """All links.

    Args:
        pipeline: for what nodes report.
        lost_data: called when a node has seen more than this controller knows.
        clock: that of the core.
        accept_data_loss: let such a node in all the same.
    """

    def __init__(
        self, pipeline: Pipeline, lost_data: Callable[[], None], *, clock: Callable[[], float], accept_data_loss: bool
    ) -> None:
        self._clock = clock
        self._pipeline = pipeline
        self._core = pipeline.core
        self._lost_data = lost_data
        self._accept_data_loss = accept_data_loss
        self._links: dict[str, _Link] = {}
        self._began = clock()
        self._left: dict[str, float] = {}  # name → when its last link ended
        self._changes = 0
        self._told: set[int] = set()  # arenas of nodes that were refused, and that the log has
        self._closed = False

    @property
    def topology_version(self) -> int:
        """Changes whenever a node came, went or restarted."""
        return self._core.topology_version + self._changes

    def fill_in(self, nodes: Iterable[pb.Node]) -> None:
        """Sets what only the links know: who is attached, and how much is there and used."""
        for node in nodes:
            link = self._links.get(node.name)
            node.attached = link is not None
            usage = link.usage if link is not None else pb.NodeUsage()
            node.used_bytes = usage.used_bytes
            node.capacity_bytes = usage.capacity_bytes or node.capacity_bytes

    def check_reachable(self, request: pb.CommitRequest) -> None:
        """Raises LeaseExpired when a replica lies on a node that is away: it may never come back with those bytes."""
        for block in request.blocks:
            away = [extent.node for extent in block.extents if extent.node not in self._links]
            if away and len(block.extents) > 1:
                raise LeaseExpired(f"storage node {away[0]!r} is not attached: reserve on another one and write again")

    def effect(self, effect: Effect) -> None:
        """Passes on what storage nodes have to know."""
        sequence = self._core.sequence
        if isinstance(effect, Sealed | Freed):
            link = self._links.get(effect.node)
            if link is not None and link.arena == effect.arena:
                link.push(sequence, "sealed" if isinstance(effect, Sealed) else "freed", effect.extents)
        elif isinstance(effect, SessionOpened | SessionEnded):
            kind = "opened" if isinstance(effect, SessionOpened) else "ended"
            for link in self._links.values():
                link.push(sequence, kind, np.array([effect.session], dtype=np.uint64))

    async def attach(self, reports: AsyncIterator[pb.NodeReport]) -> AsyncIterator[pb.NodeOrder]:
        """Serves one link until it ends.

        Raises:
            InvalidArgument: the node does not introduce itself properly.
            UnsupportedVersion: what its arena was told is not of this controller's journal; see `_check_history`.
            Unavailable: another node of that name is attached, or another link of this node replaced this one, or it
                did not keep up, or the controller ends.
        """
        hello = await self._hello(reports)
        link = _Link(hello.node.name, hello.node.arena)
        if self._closed:
            raise Unavailable("the controller is shutting down")
        attached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def applied(outcome: Outcome) -> None:
            if attached.done():
                return  # the node went away meanwhile
            if outcome.error is not None:
                attached.set_exception(outcome.error)
                return
            self._open(link, hello)  # right here: the next effect belongs to this link already
            attached.set_result(None)

        try:
            self._pipeline.submit(journal_pb2.Command(attach_node=hello), applied)
            await attached
            reader = asyncio.create_task(self._read(link, reports))
            try:
                async for order in link.orders():
                    yield order
            finally:
                reader.cancel()
        finally:  # the link may be open although `attached` was never seen: the call was cancelled in between
            self._remove(link)

    async def _hello(self, reports: AsyncIterator[pb.NodeReport]) -> pb.NodeHello:
        first = await anext(reports, None)
        if first is None or first.WhichOneof("report") != "hello":
            raise InvalidArgument("the first report of a link must be a NodeHello")
        hello = first.hello
        self._core.check(journal_pb2.Command(attach_node=hello))
        self._refuse_namesake(hello.node)
        if hello.seen_sequence:
            self._check_history(hello)
        return hello

    def _check_history(self, hello: pb.NodeHello) -> None:
        """Refuses a node whose arena was told more than this controller knows, or was told it by another one.

        When the journal must be an older one, the controller ends, too. A node of another controller is refused alone:
        it would free all of its blocks, of which this one knows nothing.
        """
        known = self._core.arenas
        is_known = hello.node.arena in known
        if is_known and hello.seen_sequence <= self._core.sequence:
            return
        message = (
            f"node {hello.node.name!r} has seen sequence {hello.seen_sequence}, but this controller's journal ends "
            f"with {self._core.sequence}"
        )
        if known and not is_known:
            reason = (
                ", and it knows nothing of that arena: this is another controller's node, or this one was restored "
                "from a file of before the node came. Correct its --controller, or remove its arena file"
            )
        else:
            reason = ": it was restored from an older file" if is_known else " and knows of no arena: it is a new file"
            if not self._accept_data_loss:
                self._lost_data()
        self._log_once(hello.node, message + reason, accepted=self._accept_data_loss)
        if not self._accept_data_loss:
            raise UnsupportedVersion(
                f"{message}{reason}. Start the controller with --accept-data-loss to go on without the rest"
            )

    def _refuse_namesake(self, node: pb.Node) -> None:
        """Refuses another arena under the name of a node that is attached, or that may come back with what it holds.

        A node that was started anew has its former arena, or its former life's link has ended, or will soon.
        """
        former = self._core.node(node.name)
        if former is None or former.arena == node.arena:
            return
        if node.name in self._links:
            state = "is attached already,"
        elif self._clock() < self._left.get(node.name, self._began) + RETURN_S and self._core.is_used(former.arena):
            state = "was attached until just now, or until this controller was restarted,"
        else:
            return
        message = (
            f"a node {node.name!r} {state} at {former.address} with another arena: give each node a name of its own; "
            f"if that one is gone, this one is let in {RETURN_S:g} s after its link has ended"
        )
        self._log_once(node, message)
        raise Unavailable(message)

    def _log_once(self, node: pb.Node, message: str, **facts: object) -> None:
        """Logs why a node is refused, once: it tries twice a second."""
        if node.arena not in self._told:
            if len(self._told) >= TOLD_MAX:
                self._told.clear()
            self._told.add(node.arena)
            _log.error(message, address=node.address, **facts)

    def _open(self, link: _Link, hello: pb.NodeHello) -> None:
        if self._closed:
            link.close(Unavailable("the controller is shutting down"))
        former = self._links.get(link.node)
        if former is not None:
            former.close(Unavailable(f"another link of node {link.node!r} replaced this one"))
        self._links[link.node] = link
        self._told.discard(link.arena)
        self._changes += 1
        extents, sessions = self._core.node_sync(link.node, link.arena)
        sync = pb.NodeSync(
            sessions=pack_array(sessions, U64),
            committed=pack_array(self._core.committed(link.arena), U64),
            grace_ms=self._core.grace_ms(self._clock()),
        )
        link.start(pb.NodeOrder(sequence=self._core.sequence, sync=sync), extents)
        _log.info("attached", node=link.node, address=hello.node.address, sessions=len(sessions))

    def _remove(self, link: _Link) -> None:
        if self._links.get(link.node) is link:
            del self._links[link.node]
            self._left[link.node] = self._clock()
            self._changes += 1
            _log.info("detached", node=link.node)

    async def _read(self, link: _Link, reports: AsyncIterator[pb.NodeReport]) -> None:
        try:
            async for report in reports:
                kind = report.WhichOneof("report")
                if kind == "usage":
                    link.usage = report.usage
                elif kind == "writer_gone":
                    await self._end_session(report.writer_gone.session)
                else:
                    raise InvalidArgument(f"a report of kind {kind!r} within a link")
        except TQError as error:
            link.close(error)
        else:
            link.close(Unavailable(f"node {link.node!r} closed its link"))

    async def _end_session(self, session: int) -> None:
        command = journal_pb2.Command(end_session=journal_pb2.EndSession(session=session))
        outcome = await self._pipeline.execute(command)
        if outcome.error is not None:
            raise outcome.error  # cuts the link: the node reports it again

    def close(self) -> None:
        """Ends every link."""
        self._closed = True
        for link in self._links.values():
            link.close(Unavailable("the controller is shutting down"))
