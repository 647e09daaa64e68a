"""Operations that keep a client known to the controller: its session, its heartbeat, and what they clean up."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from typing import Any, Final, TypeVar

from tqclient import limits
from tqclient.errors import BackpressureTimeout, ClaimTimeout, LeaseExpired, Sealed, TQError, Unavailable
from tqclient.operations.effects import CONTROLLER, Backoff, Call, Deadline, Operation, Sleep, call, pause
from tqclient.state import ClientState, LostClaim, LostPermit, Session
from tqclient.windows import Unanswered, Window
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import storage_pb2

OPENING_POLL: Final = 0.01
"""Seconds between looks at a session that another thread is opening."""
CLOSE_TIMEOUT: Final = 2.0
"""Seconds that closing a client, or giving back what nobody waits for, may take."""
HELD_BLOCKS_MAX: Final = 1 << 16
"""Blocks of read pins that one heartbeat takes again, and those of one pin beyond."""

Closing = Window | Unanswered
T = TypeVar("T")

_log = logging.getLogger(__name__)


def live_session(state: ClientState, deadline: Deadline) -> Operation[Session]:
    """Returns the session, and opens one first where there is none (any more).

    Raises:
        Unavailable: the controller is away until the deadline.
        UnsupportedVersion: it does not speak this client's version.
    """
    while True:
        session = state.session
        if session is not None:
            return session
        if state.opening.acquire(blocking=False):
            try:
                return state.session or (yield from _open_session(state, deadline))
            finally:
                state.opening.release()
        if deadline.remaining() <= OPENING_POLL:
            raise Unavailable(f"controller {state.address}: no session could be opened in {deadline.timeout} s")
        yield Sleep(OPENING_POLL)


def _open_session(state: ClientState, deadline: Deadline) -> Operation[Session]:
    state.check_usable()  # who has waited while another thread closed the client
    number = state.requests.take()
    try:
        request = pb.OpenSessionRequest(
            mutation=state.mutation(number, None),
            label=f"{socket.gethostname()} {os.getpid()} {os.path.basename(sys.argv[0])}"[: limits.NAME_BYTES_MAX // 4],
            version=_version(),
            wire_version=limits.WIRE_VERSION,
        )
        reply = yield from call(CONTROLLER, "OpenSession", request, deadline, state.rng)
        return state.session_opened(reply)
    finally:
        state.requests.settle(number)


def _version() -> str:
    try:
        return version("tq-dataplane")
    except PackageNotFoundError:  # run from a source tree
        return "0"


def in_session(state: ClientState, deadline: Deadline, attempt: Callable[[Session], Operation[T]]) -> Operation[T]:
    """Runs `attempt` under a live session, and once more under a new one each time it turns out to have ended.

    Raises:
        LeaseExpired: sessions kept ending until the deadline.
    """
    backoff = state.backoff()
    while True:
        session = yield from live_session(state, deadline)
        try:
            return (yield from attempt(session))
        except LeaseExpired as error:
            yield from notice_end(state, session, deadline)
            yield from pause(backoff, deadline, error)


def mutate(
    state: ClientState, deadline: Deadline, method: str, request: Any, *, renews: Callable[[], None] | None = None
) -> Operation[Any]:
    """Sends a change to the controller, so that it has one effect however often it must be sent.

    Args:
        state: of the client.
        deadline: of all tries.
        method: name of the RPC.
        request: its message; `mutation` is filled in here.
        renews: run before each try.
    """
    number = state.requests.take()

    def attempt(session: Session) -> Operation[Any]:
        request.mutation.CopyFrom(state.mutation(number, session))
        return (yield from call(CONTROLLER, method, request, deadline, state.rng, before=renews))

    try:
        return (yield from in_session(state, deadline, attempt))
    finally:
        state.requests.settle(number)


def session_is_live(state: ClientState, session: int, deadline: Deadline) -> Operation[bool]:
    """Asks the controller whether a session lives, when a storage node said that it does not know it."""
    request = pb.HeartbeatRequest(session=session)
    try:
        yield from call(CONTROLLER, "Heartbeat", request, deadline, state.rng)
    except LeaseExpired:
        return False
    return True


def notice_end(state: ClientState, session: Session, deadline: Deadline) -> Operation[None]:
    """Books that a session has ended, if it has, after something was refused for a lease.

    Not every lease is the session's: to drop a live one would cost this client all that it holds.
    """
    if not (yield from session_is_live(state, session.session, deadline)):
        state.session_ended(session)


def heartbeat(state: ClientState, timeout: float) -> Operation[bool]:
    """Renews the session once, delivers what was dropped, and notices what changed.

    Returns:
        Whether there are other storage nodes than before.

    Raises:
        Unavailable: the controller is away; nothing is lost by that.
    """
    session = state.session
    if session is None:
        return False
    pins = state.take_dropped_pins()
    request = pb.HeartbeatRequest(session=session.session, dropped_pins=pack_array(pins, U64))
    try:
        reply = yield Call(CONTROLLER, "Heartbeat", request, timeout)
    except LeaseExpired:
        state.session_ended(session)
        return False
    except TQError:
        state.return_dropped_pins(session, pins)
        raise
    if reply.epoch != state.epoch:
        yield from _hold_pins(state, session, reply.epoch, timeout)
    state.lease_ms = reply.lease_ms or session.lease_ms
    changed: bool = reply.topology_version != state.topology_version
    if changed or state.usage_due():
        yield from refresh_nodes(state, Deadline(timeout, state.clock))
    return changed


def _hold_pins(state: ClientState, session: Session, epoch: int, timeout: float) -> Operation[None]:
    """Takes the read pins again: those of before died with the controller that gave them."""
    state.epoch = epoch  # first: a look-up of before that ends from here on undoes it, and the next beat takes its pin
    held = state.held_pins(session)
    try:
        for pairs in _portions(held):
            request = pb.HeartbeatRequest(session=session.session, held_pins=pack_array(pairs, U64))
            yield Call(CONTROLLER, "Heartbeat", request, timeout)
    except BaseException:
        state.epoch = 0
        raise
    finally:
        still = state.held_pins(session)  # what was dropped meanwhile may have been taken behind its drop
        state.return_dropped_pins(session, [pin for pin in held if pin not in still])


def _portions(held: dict[int, list[int]]) -> Iterator[list[tuple[int, int]]]:
    """Yields (pin, block) in messages that hold up nobody; those of one pin are in the same one."""
    pairs: list[tuple[int, int]] = []
    for pin, block_ids in held.items():
        pairs += [(pin, block_id) for block_id in block_ids]
        if len(pairs) >= HELD_BLOCKS_MAX:
            yield pairs
            pairs = []
    if pairs:
        yield pairs


def refresh_nodes(state: ClientState, deadline: Deadline) -> Operation[pb.DescribeClusterReply]:
    """Learns which storage nodes there are."""
    reply: pb.DescribeClusterReply = yield from call(
        CONTROLLER, "DescribeCluster", pb.DescribeClusterRequest(), deadline, state.rng
    )
    state.nodes_changed(list(reply.nodes), reply.topology_version)
    return reply


def pause_and_refresh(state: ClientState, backoff: Backoff, deadline: Deadline, cause: Exception) -> Operation[None]:
    """Waits for the next try and learns which nodes there are for it.

    Raises:
        The cause, when the deadline comes first, or the controller does not answer until then.
    """
    yield from pause(backoff, deadline, cause)
    try:
        yield from refresh_nodes(state, deadline)
    except Unavailable as silent:
        raise cause from silent


def settle_each(lost: deque[T], settle: Callable[[T], Operation[None]]) -> Operation[None]:
    """Settles what nobody in this client holds any more. While the controller is away, the rest is kept."""
    for _ in range(len(lost)):
        each = lost.popleft()
        try:
            yield from settle(each)
        except Unavailable:
            lost.append(each)
            return


def settle_lost(state: ClientState, lost: LostClaim | LostPermit, give_back: Operation[None]) -> Operation[None]:
    """Gives back what was lost; who is refused has nothing to give back."""
    try:
        yield from give_back
    except Unavailable:
        raise
    except (LeaseExpired, ClaimTimeout, BackpressureTimeout, Sealed):
        _log.debug("%s was never granted, or has ended", lost)
    except TQError as error:
        _log.warning("%s is left to its lease, or the end of that session: %s", lost, error)
    if lost.request is not None:
        state.requests.settle(lost.request.mutation.request)


def release_lost_claims(state: ClientState) -> Operation[None]:
    """Gives back claims that this client holds at the controller but nobody in it knows of any more."""
    yield from settle_each(state.lost_claims, lambda lost: settle_lost(state, lost, _release_lost(state, lost)))


def _release_lost(state: ClientState, lost: LostClaim) -> Operation[None]:
    session = state.session
    if session is None or session.session != lost.session:
        return  # it ended with its session
    claim_id = lost.claim_id
    if lost.request is not None:
        lost.request.abandoned = True  # a claim that was not granted yet must not be granted now
        reply = yield Call(CONTROLLER, "Claim", lost.request, CLOSE_TIMEOUT)
        claim_id = reply.claim_id
    number = state.requests.take()
    try:
        request = pb.SettleRequest(
            mutation=state.mutation(number, session), claim_id=claim_id, verdict=pb.VERDICT_RELEASE
        )
        yield Call(CONTROLLER, "Settle", request, CLOSE_TIMEOUT)
    finally:
        state.requests.settle(number)


def close_windows(
    state: ClientState, closing: list[Closing], timeout: float = CLOSE_TIMEOUT, deadline: Deadline | None = None
) -> Operation[None]:
    """Tells the nodes that nothing more will be cut from these windows. One that does not answer is told later.

    Args:
        state: of the client.
        closing: what is to be closed.
        timeout: seconds that a node may take to answer.
        deadline: of the call that this is done for, if any.
    """
    by_writer: dict[tuple[str, int, int], list[Closing]] = {}
    for each in closing:
        by_writer.setdefault((each.spot.node, each.spot.arena, each.spot.session), []).append(each)
    silent: set[str] = set()
    try:
        for (name, arena, session), theirs in list(by_writer.items()):
            node = state.nodes.get(name)
            if node is not None and node.arena == arena:
                if name in silent or state.placement.aside(name):
                    continue
                seconds = timeout if deadline is None else min(timeout, deadline.remaining())
                try:
                    yield from _close_at(node.address, session, theirs, seconds)
                except Unavailable:
                    silent.add(name)
                    continue
            # else they went with their arena; another one there may have their numbers
            for each in theirs:
                if isinstance(each, Unanswered):
                    state.tickets.settle(each.ticket)
            del by_writer[name, arena, session]
    finally:
        state.windows.return_closing(chain.from_iterable(by_writer.values()))


def _close_at(address: str, session: int, closing: Sequence[Closing], seconds: float) -> Operation[None]:
    """Closes windows of one session at a node, by one call if the node knows how."""
    rows = [(each.generation, each.offset + each.used) for each in closing if isinstance(each, Window)]
    tickets = [each.ticket for each in closing if isinstance(each, Unanswered)]
    while rows or tickets:
        (generation, end), *more = rows or [(0, 0)]
        request = storage_pb2.CloseWindowRequest(
            session=session,
            generation=generation,
            end=end,
            more=pack_array(more, U64),
            tickets=pack_array(tickets, U64),
        )
        try:
            reply = yield Call(address, "CloseWindow", request, seconds)
        except Unavailable:
            raise
        except TQError as error:
            _log.debug("windows of node %s are left to the node: %s", address, error)
            return
        rows, tickets = ([], []) if reply.all else (more, [])


def close_session(state: ClientState) -> Operation[None]:
    """Ends the session in good order; an unreachable controller ends it by itself, a lease later."""
    session = state.session
    if session is None:
        return
    state.windows.retire()
    yield from close_windows(state, state.windows.take_closing(), timeout=CLOSE_TIMEOUT / 2)
    number = state.requests.take()
    try:
        request = pb.CloseSessionRequest(mutation=state.mutation(number, session))
        yield Call(CONTROLLER, "CloseSession", request, CLOSE_TIMEOUT)
    except (Unavailable, LeaseExpired):
        return
    finally:
        state.requests.settle(number)
        state.session_ended(session)  # only now, or a node would take the dropped lock for a writer that died
