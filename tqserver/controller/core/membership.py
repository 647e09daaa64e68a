"""Who is there: sessions, storage nodes, and the controller's own starts."""

from __future__ import annotations

from tqclient.errors import InvalidArgument, Unavailable
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import effects, limits, ranks, validate
from tqserver.controller.core.admission import end_permits
from tqserver.controller.core.claims import end_claim
from tqserver.controller.core.producers import end_producer
from tqserver.controller.core.sessions import Session
from tqserver.controller.core.state import Effects, State


def open_session(state: State, request: pb.OpenSessionRequest, now: float, out: Effects) -> pb.OpenSessionReply:
    """Applies an OpenSessionRequest."""
    validate.open_session(request)
    if len(state.leases.sessions) >= limits.SESSIONS_MAX:
        raise Unavailable(f"{limits.SESSIONS_MAX} sessions are open, the most there can be")
    client_id = request.mutation.client_id
    session = Session(state.next_session, client_id, request.label, request.version)
    state.next_session += 1
    state.leases.open_session(session, now)
    state.replies.session_opened(client_id)
    out.append(effects.SessionOpened(session.session))
    return pb.OpenSessionReply(
        session=session.session,
        lease_ms=int(state.leases.session_lease * 1000),
        epoch=state.epoch,
        nodes=state.nodes.values(),
        narrow_lengths=True,
    )


def close_session(state: State, request: pb.CloseSessionRequest, now: float, out: Effects) -> pb.CloseSessionReply:
    """Applies a CloseSessionRequest; a session that has ended by now stays so."""
    session = request.mutation.session
    if session == 0:
        raise InvalidArgument("mutation.session: is 0, which is no session")
    if session in state.leases.sessions:
        state.session_of(request.mutation)
        _end(state, session, now, out, died=False)
    return pb.CloseSessionReply()


def end_session(state: State, command: journal_pb2.EndSession, now: float, out: Effects) -> None:
    """Applies an EndSession; a session that has ended by now is passed over."""
    if command.session in state.leases.sessions:
        _end(state, command.session, now, out, died=True)


def _end(state: State, session: int, now: float, out: Effects, *, died: bool) -> None:
    found = state.leases.sessions[session]
    for claim_id in list(found.claims):
        if claim_id in found.claims:  # the end of one claim on a share ends the others
            end_claim(state, claim_id, now, out, consumed=False)
    ranks.vacate(state, session, now, out)
    end_permits(state, session, out)
    end_producer(state, session, out, died=died)
    for block_ids in found.pins.values():
        out += state.blocks.unpin(block_ids, now)
    state.leases.end_session(session)
    state.replies.session_ended(found.client_id)
    out.append(effects.SessionEnded(session))


def attach_node(state: State, hello: pb.NodeHello, now: float, out: Effects) -> None:
    """Applies a NodeHello."""
    validate.attach_node(hello)
    name, arena = hello.node.name, hello.node.arena
    owner = state.arenas.get(arena)
    if owner not in (None, name):
        raise InvalidArgument(f"node {name!r} brings the arena of node {owner!r}: a node keeps its name")
    node = pb.Node(
        name=name,
        address=hello.node.address,
        arena=arena,
        incarnation=hello.node.incarnation,
        capacity_bytes=hello.node.capacity_bytes,
    )
    if state.nodes.get(name) != node:
        state.topology_version += 1
    state.nodes[name] = node
    state.arenas[arena] = name
    out.append(effects.NodeAttached(name))


def start(state: State, command: journal_pb2.Start, now: float, out: Effects) -> None:
    """Applies a Start: every lease begins anew, and readers of before get one lease until bytes are freed."""
    state.epoch += 1
    state.last_pin = 0
    state.leases.restart(now)
    ranks.watch_orphans(state, now)
    # Before its first start nobody can have held a pin.
    state.blocks.start(now + state.leases.session_lease if state.epoch > 1 else now)
