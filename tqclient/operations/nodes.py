"""Operations on the paths to storage nodes: opening them, and reserving room behind them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from tqclient.errors import LeaseExpired, StorageFull, TransportUnavailable, Unavailable
from tqclient.operations.effects import Deadline, Operation, Work, call, pause
from tqclient.operations.sessions import close_windows, refresh_nodes, session_is_live
from tqclient.state import ClientState, Session
from tqclient.transport.base import NodeTransport
from tqclient.windows import WHOLE_MIN, Cut, Spot, aligned
from tqclient.wire.v1 import controller_pb2, storage_pb2

FULL_SECONDS: Final = 1.0
"""How long a put goes on trying full nodes: bytes that were freed come back with a delay."""
RESERVE_SECONDS: Final = 5.0
"""How long one node may take to answer a reservation before a put turns to the others."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Room for the blocks of one put, all on one node.

    Attributes:
        transport: to that node.
        way: which of the ways to cut the put into blocks was taken.
        cuts: one for each block.
    """

    transport: NodeTransport
    way: int
    cuts: list[Cut]


def open_path(state: ClientState, node: controller_pb2.Node, deadline: Deadline) -> Operation[NodeTransport]:
    """Returns the path to a node, opened on first use.

    Raises:
        TransportUnavailable: the transport that the user requires cannot be had; says why.
        Unavailable: the node is away.
    """
    transport = state.transport(node.address)
    if transport is not None and transport.arena == node.arena:
        return transport
    if transport is not None:
        state.drop_transport(node.address)
    seconds = min(deadline.remaining(), RESERVE_SECONDS)
    try:
        # Booked where it is opened: a caller that is cancelled meanwhile would leave it open.
        opened: NodeTransport = yield Work(
            lambda: state.transport_opened(node.address, state.open_transport(node, seconds))
        )
    except TransportUnavailable as error:
        state.transport_refused(node.address, error.message)
        raise
    return opened


def reserve(
    state: ClientState, session: Session, partition_id: int, ways: Sequence[Sequence[int]], deadline: Deadline
) -> Operation[Placed]:
    """Finds room for the blocks of one put: on this host if possible, else where most bytes are free.

    Args:
        state: of the client.
        session: that reserves.
        partition_id: that the samples belong to.
        ways: the lengths of the put's blocks, by each way to cut it. The first is taken where a node has room in one
            piece, the last where it does not.
        deadline: of the call.

    Raises:
        StorageFull: no node has room; names each with its free bytes.
        LeaseExpired: the session has ended.
        Unavailable: no node could be reached until the deadline.
        TransportUnavailable: the required transport cannot be had.
    """
    backoff = state.backoff()
    full_end = state.clock() + FULL_SECONDS
    while True:
        refusals: dict[str, StorageFull | Unavailable] = {}
        for node in state.preferred_nodes():
            try:
                return (yield from _reserve_on(state, session, node, partition_id, ways, deadline))
            except (StorageFull, Unavailable) as error:
                refusals[node.name] = error
        failure = _refused(state, ways[-1], refusals)
        if isinstance(failure, StorageFull):
            if state.clock() >= full_end:
                raise failure
            state.windows.retire()  # what this client holds ahead may be all that is missing
            yield from close_windows(state, state.windows.take_closing())
        yield from pause(backoff, deadline, failure)
        yield from refresh_nodes(state, deadline)


def _refused(
    state: ClientState, lengths: Sequence[int], refusals: dict[str, StorageFull | Unavailable]
) -> StorageFull | Unavailable:
    if not refusals:
        known = ", ".join(sorted(state.nodes)) or "none is known"
        return Unavailable(f"no storage node is attached to controller {state.address} ({known}); start tq-storage")
    reasons = "; ".join(f"{name}: {error.message}" for name, error in refusals.items())
    if any(isinstance(error, StorageFull) for error in refusals.values()):
        return StorageFull(
            f"no storage node has room for {sum(map(aligned, lengths))} bytes ({reasons}); clear samples that were "
            "consumed, limit the partition with capacity_bytes, or add storage"
        )
    return Unavailable(f"no storage node could be reached: {reasons}")


def _reserve_on(
    state: ClientState,
    session: Session,
    node: controller_pb2.Node,
    partition_id: int,
    ways: Sequence[Sequence[int]],
    deadline: Deadline,
) -> Operation[Placed]:
    transport = yield from open_path(state, node, deadline)
    spot = Spot(session.session, node.address, node.name, node.arena, node.incarnation, partition_id)
    lengths = ways[0]
    total = sum(map(aligned, lengths))
    if total < WHOLE_MIN and len(lengths) == 1:
        cut = state.windows.cut(spot, lengths[0])
        if cut is None:
            yield Work(lambda: transport.session_opened(session.session))
            cut = yield from _cut_ahead(state, spot, transport, lengths[0], deadline)
        return Placed(transport, 0, [cut])
    yield Work(lambda: transport.session_opened(session.session))
    try:
        window = yield from _reserve_window(state, spot, transport, total, deadline)
        return Placed(transport, 0, state.windows.add(spot, window, list(lengths), whole=True))
    except StorageFull:
        if len(ways[-1]) == 1:
            raise
    return Placed(transport, len(ways) - 1, (yield from _cut_apart(state, spot, transport, ways[-1], deadline)))


def _cut_ahead(
    state: ClientState, spot: Spot, transport: NodeTransport, length: int, deadline: Deadline
) -> Operation[Cut]:
    """Reserves for this put and the next ones; a node that has no room for those may have room for this one."""
    try:
        window = yield from _reserve_window(state, spot, transport, state.windows.ahead_bytes(spot, length), deadline)
    except StorageFull:
        window = yield from _reserve_window(state, spot, transport, aligned(length), deadline)
    return state.windows.add(spot, window, [length], whole=False)[0]


def _cut_apart(
    state: ClientState, spot: Spot, transport: NodeTransport, lengths: Sequence[int], deadline: Deadline
) -> Operation[list[Cut]]:
    """Reserves a window for each block: together they do not fit in one piece."""
    cuts: list[Cut] = []
    try:
        for length in lengths:
            window = yield from _reserve_window(state, spot, transport, aligned(length), deadline)
            cuts += state.windows.add(spot, window, [length], whole=True)
    except BaseException:
        state.windows.settle(cuts, "refused")
        raise
    return cuts


def _reserve_window(
    state: ClientState, spot: Spot, transport: NodeTransport, length: int, deadline: Deadline
) -> Operation[storage_pb2.Window]:
    request = storage_pb2.ReserveRequest(
        session=spot.session, partition_id=spot.partition_id, length=length, mapped=transport.mapped
    )
    backoff = state.backoff()
    while True:
        brief = Deadline(min(deadline.remaining(), RESERVE_SECONDS), state.clock)
        try:
            window: storage_pb2.Window = yield from call(spot.address, "Reserve", request, brief, state.rng)
            return window
        except LeaseExpired as error:
            # Nodes hear of a new session from the controller, a little later than the client does.
            if not (yield from session_is_live(state, spot.session, deadline)):
                raise
            yield from pause(backoff, deadline, Unavailable(f"does not know session {spot.session}: {error.message}"))
