"""Operations on the paths to storage nodes: opening them, and reserving room behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tqclient.errors import InvalidArgument, LeaseExpired, StorageFull, TQError, TransportUnavailable, Unavailable
from tqclient.limits import MIB
from tqclient.operations.effects import UNKNOWN_OUTCOME, Call, Deadline, Operation, Work, pause
from tqclient.operations.sessions import close_windows, pause_and_refresh, session_is_live
from tqclient.state import ClientState, Session
from tqclient.transport.base import NodeTransport
from tqclient.windows import WHOLE_MIN, Cut, Spot, aligned
from tqclient.wire.v1 import controller_pb2, storage_pb2

FULL_SECONDS: Final = 1.0
"""How long a put goes on trying full nodes: bytes that were freed come back with a delay."""
NODE_SECONDS: Final = 2.0
SLOW_BYTES_PER_SECOND: Final = 4 * MIB
"""How long one node may take before a call turns to another: a while, and what the bytes take on a slow network."""
PROBE_SECONDS: Final = 0.5
"""The same for a node that failed the last time: it is asked for its description before anything is entrusted to it."""

Ways: TypeAlias = Sequence[Callable[[], Sequence[int]]]
"""The lengths of a put's blocks, by each way to cut it: the first for where a node has room for all in one piece."""
Refusal: TypeAlias = "StorageFull | Unavailable | TransportUnavailable"


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """Room for one replica of a block.

    Attributes:
        transport: to its node.
        cut: the extent.
    """

    transport: NodeTransport
    cut: Cut


@dataclass(frozen=True, slots=True)
class Placed:
    """Room for the blocks of one put.

    Attributes:
        way: which of the ways to cut the put into blocks was taken.
        targets: for each block, one per replica, each on another node.
    """

    way: int
    targets: list[list[Target]]

    def all(self) -> list[Target]:
        """Returns every replica of every block, in order."""
        return [target for replicas in self.targets for target in replicas]

    def cuts(self) -> list[Cut]:
        """Returns where all of them lie."""
        return [target.cut for target in self.all()]


@dataclass(slots=True)
class _Round:
    """One round of asking nodes for room.

    Attributes:
        state: of the client.
        session: that reserves.
        partition_id: that the samples belong to.
        replicas: of each block.
        deadline: of the call.
        refusals: what nodes answered, by name.
        too_long: the shortest piece that a node had no room for.
    """

    state: ClientState
    session: Session
    partition_id: int
    replicas: int
    deadline: Deadline
    refusals: dict[str, Refusal] = field(default_factory=dict)
    too_long: dict[str, int] = field(default_factory=dict)

    def worth_asking(self, node: controller_pb2.Node, length: int) -> bool:
        """Whether the node may have room for a piece of this length, after what it said in this round."""
        if isinstance(self.refusals.get(node.name), Unavailable | TransportUnavailable):
            return False
        return length < self.too_long.get(node.name, length + 1)

    def give_up(self, found: list[list[Target]]) -> None:
        """Returns what was found in vain; where it lay, there may be room for something shorter now."""
        targets = [target for each in found for target in each]
        for target in targets:
            self.too_long.pop(target.cut.window.spot.node, None)
        give_up(self.state, targets)


def patience(state: ClientState, node: str, deadline: Deadline, size_bytes: int = 0) -> float:
    """Returns the seconds that a node may take for a call: all that are left when no other node could do it."""
    others = (other for other in state.nodes.values() if other.attached and other.name != node)
    if all(state.placement.aside(other.name) for other in others):
        return deadline.remaining()
    return turn_seconds(deadline, size_bytes)


def turn_seconds(deadline: Deadline, size_bytes: int) -> float:
    """Returns after how many seconds a call should turn to another node, so that it has time left for that one."""
    remaining = deadline.remaining()
    return min(remaining, min(NODE_SECONDS, remaining / 2) + size_bytes / SLOW_BYTES_PER_SECOND)


def open_path(state: ClientState, node: controller_pb2.Node, deadline: Deadline) -> Operation[NodeTransport]:
    """Returns the path to a node, opened on first use, and anew when it is broken or a better one may be had.

    Raises:
        TransportUnavailable: the transport that the user requires cannot be had; says why.
        Unavailable: the node is away.
    """
    if state.paths.take_better_due(node):
        yield from _try_better(state, node, deadline)
    transport = state.paths.get(node)
    if transport is not None:
        return transport
    seconds = PROBE_SECONDS if state.placement.suspect(node.name) else NODE_SECONDS
    seconds = min(seconds, patience(state, node.name, deadline))
    try:
        # Booked where it is opened: a caller that is cancelled meanwhile would leave it open.
        opened: NodeTransport = yield Work(lambda: state.paths.opened(node, state.open_transport(node, seconds)))
    except TransportUnavailable as error:
        state.paths.refused(node, error.message)
        raise
    except Unavailable:
        state.placement.failed(node.name)
        raise
    state.placement.answered(node.name)
    return opened


def _try_better(state: ClientState, node: controller_pb2.Node, deadline: Deadline) -> Operation[None]:
    """Opens another path beside the one in use, which stays when there is no better one."""
    seconds = min(deadline.remaining(), PROBE_SECONDS)

    def open_another() -> None:
        found: NodeTransport | None = None
        try:
            found = state.open_transport(node, seconds)
        finally:
            state.paths.better_tried(node, found)

    try:
        yield Work(open_another)
    except (TransportUnavailable, Unavailable) as error:
        state.paths.refused(node, error.message)


def probe(node: controller_pb2.Node, deadline: Deadline) -> Operation[None]:
    """Asks a node that failed for its description, before anything is entrusted to it.

    Raises:
        Unavailable: it does not answer soon.
    """
    seconds = min(deadline.remaining(), PROBE_SECONDS)
    yield Call(node.address, "DescribeNode", storage_pb2.DescribeNodeRequest(), seconds)


def reserve(
    state: ClientState, session: Session, partition_id: int, replicas: int, ways: Ways, deadline: Deadline
) -> Operation[Placed]:
    """Finds room for the blocks of one put: on this host if possible, else where most bytes are free.

    Args:
        state: of the client.
        session: that reserves.
        partition_id: that the samples belong to.
        replicas: of each block, on as many nodes.
        ways: to cut the put into blocks. The later ones are taken where no node has room in one piece: then the blocks
            may lie on several nodes.
        deadline: of the call.

    Raises:
        StorageFull: too few nodes have room; names each with its free bytes.
        LeaseExpired: the session has ended.
        Unavailable: too few nodes could be reached until the deadline.
        TransportUnavailable: the required transport cannot be had.
    """
    backoff = state.backoff()
    full_end = state.clock() + FULL_SECONDS
    while True:
        asked = _Round(state, session, partition_id, replicas, deadline)
        placed = yield from _place(asked, ways)
        if placed is not None:
            return placed
        failure = _failure(asked, sum(map(aligned, ways[-1]())))
        if isinstance(failure, TransportUnavailable) or (
            isinstance(failure, StorageFull) and state.clock() >= full_end
        ):
            raise failure
        if isinstance(failure, StorageFull):
            state.windows.retire()  # what this client holds ahead may be all that is missing
            yield from close_windows(state, state.windows.take_closing(), deadline=deadline)
        yield from pause_and_refresh(state, backoff, deadline, failure)


def give_up(state: ClientState, targets: Iterable[Target]) -> None:
    """Returns room that was never committed to."""
    cuts = [target.cut for target in targets]
    for cut in cuts:
        state.placement.placed(cut.window.spot.node, -aligned(cut.length))
    state.windows.settle(cuts, "refused")


def _failure(asked: _Round, size_bytes: int) -> Refusal:
    state, replicas = asked.state, asked.replicas
    nodes = state.nodes_text(asked.refusals)
    attached = sum(node.attached for node in state.nodes.values())
    if not attached:
        return Unavailable(f"no storage node is attached to controller {state.address} ({nodes}); start tq-storage")
    kinds = {type(error) for error in asked.refusals.values()}
    copies = f", {replicas} times on different nodes" if replicas > 1 else ""
    if StorageFull in kinds:
        return StorageFull(
            f"no storage node has room for {size_bytes} bytes{copies} ({nodes}); clear samples that were "
            "consumed, limit the partition with capacity_bytes, or add storage"
        )
    if kinds == {TransportUnavailable}:
        return next(iter(asked.refusals.values()))
    if replicas > 1:
        return Unavailable(f"too few storage nodes can be reached for replicas={replicas} ({nodes})")
    return Unavailable(f"no storage node could be reached: {nodes}")


def _place(asked: _Round, ways: Ways) -> Operation[Placed | None]:
    state = asked.state
    nodes = state.preferred_nodes()
    if len(nodes) < asked.replicas:
        return None
    near = [node for node in nodes if state.paths.mapped(node) and not state.placement.aside(node.name)]
    tiers = [near, nodes] if asked.replicas <= len(near) < len(nodes) else [nodes]
    for tier in tiers:
        for way, lengths_of in enumerate(ways):
            find = _apart if way else _in_one_piece
            targets = yield from find(asked, tier, lengths_of())
            if targets is not None:
                return Placed(way, targets)
            # What was found in vain is room for the next try.
            yield from close_windows(state, state.windows.take_closing(), deadline=asked.deadline)
    return None


def _in_one_piece(
    asked: _Round, nodes: list[controller_pb2.Node], lengths: Sequence[int]
) -> Operation[list[list[Target]] | None]:
    """Finds, for each replica, a node that takes all blocks side by side."""
    found: list[list[Target]] = []
    complete = False
    try:
        for node in nodes:
            found += yield from _ask(asked, node, lengths)
            if len(found) == asked.replicas:
                complete = True
                return [list(replicas) for replicas in zip(*found, strict=True)]
        return None
    finally:
        if not complete:
            asked.give_up(found)


def _apart(
    asked: _Round, nodes: list[controller_pb2.Node], lengths: Sequence[int]
) -> Operation[list[list[Target]] | None]:
    """Finds nodes for each block by itself."""
    names = {node.name for node in nodes}
    placed: list[list[Target]] = []
    complete = False
    try:
        for length in lengths:
            placed.append([])
            for node in asked.state.preferred_nodes():  # what was placed up to now changes their order
                if node.name in names and len(placed[-1]) < asked.replicas:
                    for targets in (yield from _ask(asked, node, [length])):
                        placed[-1] += targets
            if len(placed[-1]) < asked.replicas:
                return None
        complete = True
        return placed
    finally:
        if not complete:
            asked.give_up(placed)


def _ask(asked: _Round, node: controller_pb2.Node, lengths: Sequence[int]) -> Operation[list[list[Target]]]:
    """Asks a node for room for blocks side by side; returns it, or nothing, and notes why."""
    state = asked.state
    total = sum(map(aligned, lengths))
    if not asked.worth_asking(node, total):
        return []
    try:
        transport = yield from open_path(state, node, asked.deadline)
        try:
            cuts = yield from _cuts_over(asked, node, transport, list(lengths))
        except (Unavailable, InvalidArgument) as error:
            # Its engine may have been replaced, or, where it does not know of a mapping's lock, its arena.
            if not (transport.segment if isinstance(error, Unavailable) else transport.mapped):
                raise
            state.paths.drop(node, transport)
            transport = yield from open_path(state, node, asked.deadline)
            cuts = yield from _cuts_over(asked, node, transport, list(lengths))
    except StorageFull as error:
        asked.refusals[node.name] = error
        asked.too_long[node.name] = total
        return []
    except TransportUnavailable as error:
        asked.refusals[node.name] = error
        return []
    except Unavailable as error:
        asked.refusals[node.name] = error
        state.placement.failed(node.name)
        return []
    state.placement.placed(node.name, total)
    return [[Target(transport, cut) for cut in cuts]]


def _cuts_over(
    asked: _Round, node: controller_pb2.Node, transport: NodeTransport, lengths: list[int]
) -> Operation[list[Cut]]:
    state, session = asked.state, asked.session.session
    how = transport.mapped, transport.segment
    spot = Spot(session, node.address, node.name, node.arena, node.incarnation, asked.partition_id, *how)
    total = sum(map(aligned, lengths))
    small = total < WHOLE_MIN and len(lengths) == 1
    # A path that was opened anew since the window was reserved is told of the session first.
    if small and transport.admits(session) and (cut := state.windows.cut(spot, lengths[0])) is not None:
        return [cut]
    if state.placement.suspect(node.name):
        yield from probe(node, asked.deadline)
    yield Work(lambda: transport.session_opened(session))
    if not small:
        window = yield from _reserve_window(state, spot, total, asked.deadline)
        return state.windows.add(spot, window, lengths, whole=True)
    try:
        window = yield from _reserve_window(state, spot, state.windows.ahead_bytes(spot, total), asked.deadline)
    except StorageFull:  # it has no room for the puts to come, but perhaps for this one
        window = yield from _reserve_window(state, spot, total, asked.deadline)
    return state.windows.add(spot, window, lengths, whole=False)


def _reserve_window(state: ClientState, spot: Spot, length: int, deadline: Deadline) -> Operation[storage_pb2.Window]:
    ticket = state.tickets.take()
    request = storage_pb2.ReserveRequest(
        session=spot.session,
        partition_id=spot.partition_id,
        length=length,
        mapped=spot.mapped,
        segment=spot.segment,
        ticket=ticket,
        tickets_below=state.tickets.settled_below(),
    )
    backoff = state.backoff()
    answered = False
    try:
        while True:
            answered = False
            try:
                window: storage_pb2.Window = yield Call(
                    spot.address, "Reserve", request, patience(state, spot.node, deadline)
                )
            except UNKNOWN_OUTCOME:
                raise
            except LeaseExpired as error:
                answered = True
                # Nodes hear of a new session from the controller, a little later than the client does.
                if not (yield from session_is_live(state, spot.session, deadline)):
                    raise
                cause = Unavailable(f"does not know session {spot.session}: {error.message}")
                yield from pause(backoff, deadline, cause)
            except TQError:
                answered = True
                raise
            else:
                answered = True
                state.placement.answered(spot.node)
                return window
    finally:
        if answered:
            state.tickets.settle(ticket)
        else:
            state.windows.unanswered(spot, ticket)
            state.wake.set()
