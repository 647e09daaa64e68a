"""Claiming samples for a consumer, and settling the claim."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from tqclient import limits
from tqclient.arguments import flag, int_of, row_ids
from tqclient.errors import ClaimTimeout, CorruptBlock, InvalidArgument, LeaseExpired, TQError
from tqclient.info import PartitionRef
from tqclient.operations.ahead import ReadAhead, read_ahead
from tqclient.operations.consumers import ConsumerRef, register_under
from tqclient.operations.effects import CONTROLLER, UNKNOWN_OUTCOME, Deadline, Operation, call
from tqclient.operations.ranges import Wanted, check_ranges, wanted_ranges
from tqclient.operations.read import Delivery, Holdings, fetch
from tqclient.operations.replicas import ExtentGone
from tqclient.operations.sessions import in_session, mutate, notice_end, refresh_nodes
from tqclient.rows import RowSet
from tqclient.state import ClientState, LostClaim, Session
from tqclient.wire.packing import I64, pack_array, unpack_array
from tqclient.wire.v1 import controller_pb2 as pb

SLICE_SECONDS: Final = 20.0
"""The longest wait of one request: the controller keeps every later reply of this client until it has its answer."""
TOKENS_MAX: Final = (1 << 63) - 1
Verdict = Literal["acked", "released"]
_WIRE: dict[Verdict, pb.Verdict] = {"acked": pb.VERDICT_ACK, "released": pb.VERDICT_RELEASE}


@dataclass(slots=True, eq=False)
class ClaimHandle:
    """A claim that this client holds.

    Attributes:
        session: that it was granted to.
        claim_id: never reused.
        where: for messages.
        step: number of the batch within its DP rank; None without a topology.
        verdict: how it was settled; None while it is held.
        numbers: of the settling requests, so that one which is tried again has one effect.
    """

    session: int
    claim_id: int
    where: str
    step: int | None = None
    verdict: Verdict | None = None
    numbers: dict[Verdict, int] = field(default_factory=dict)


def claim(
    state: ClientState,
    consumer: ConsumerRef,
    batch_size: int | None,
    copy: bool,
    timeout: float | None,
    *,
    max_tokens: int | None = None,
    ranges: Any = None,
) -> Operation[tuple[ClaimHandle, Delivery]]:
    """Claims the next batch and reads it. See `Consumer.claim`."""
    deadline = state.deadline(timeout, waits=True)
    wanted = wanted_ranges(ranges)
    check_ranges(wanted, consumer.partition, consumer.fields)
    copy = flag(copy, what="copy")
    request = claim_request(consumer, batch_size, max_tokens)
    ahead = read_ahead(state, consumer, request, wanted, copy, deadline)
    request.preview = ahead is not None
    try:
        while True:
            session, reply = yield from _granted(state, consumer, request, deadline, ahead)
            try:
                return (yield from _read_claimed(state, consumer, session, reply, copy, deadline, wanted, ahead))
            except LeaseExpired:
                # The claim ended with its session while it was read; its samples are delivered again, perhaps to us.
                if state.is_live(session) or deadline.wait_ms() == 0:
                    raise
    finally:
        if ahead is not None:
            ahead.drop()


def claim_rows(
    state: ClientState, consumer: ConsumerRef, batch_size: int, timeout: float | None
) -> Operation[tuple[ClaimHandle, RowSet]]:
    """Claims the next batch and reads nothing of it: for callers that pass on which samples they were given."""
    request = claim_request(consumer, batch_size, None)
    session, reply = yield from _granted(state, consumer, request, state.deadline(timeout, waits=True))
    state.lease_seen(reply.lease_ms)
    consumer.partition.fields_changed(reply.fields)
    handle = ClaimHandle(session.session, reply.claim_id, consumer.label)
    try:
        return handle, RowSet.from_wire(reply.rows, consumer.fields or [each.name for each in reply.fields])
    except BaseException:
        abandon(state, handle)
        raise


def _read_claimed(
    state: ClientState,
    consumer: ConsumerRef,
    session: Session,
    reply: pb.ClaimReply,
    copy: bool,
    deadline: Deadline,
    wanted: Sequence[Wanted],
    ahead: ReadAhead | None,
) -> Operation[tuple[ClaimHandle, Delivery]]:
    state.lease_seen(reply.lease_ms)
    consumer.partition.fields_changed(reply.fields)
    step = None if consumer.topology is None else reply.step
    handle = ClaimHandle(session.session, reply.claim_id, consumer.label, step)
    holdings = Holdings()
    try:
        # What was granted is worth its lease, or any other call's time: a wait that took the whole timeout must not
        # cost the batch. A lease may be hours, and its storage node away.
        worth = min(reply.lease_ms / 1000, state.timeout)
        reading = Deadline(max(deadline.remaining(), worth), state.clock)
        rows = RowSet.from_wire(reply.rows, consumer.fields or [each.name for each in reply.fields])
        columns = None if ahead is None else ahead.take(rows, holdings)
        if columns is None:
            columns = yield from _fetch_twice(
                state, consumer.partition, rows, handle, session, copy, holdings, reading, wanted
            )
    except BaseException:
        holdings.close()
        abandon(state, handle)
        state.wake.set()
        raise
    return handle, Delivery(rows, columns, holdings)


def claim_request(consumer: ConsumerRef, batch_size: int | None, max_tokens: int | None) -> pb.ClaimRequest:
    """Returns the claim, without mutation and wait.

    Raises:
        InvalidArgument: it says neither how many rows nor how many tokens, or something out of bounds.
    """
    if batch_size is None and max_tokens is None:
        raise InvalidArgument("claim: give batch_size, max_tokens, or both")
    request = pb.ClaimRequest(
        partition_id=consumer.partition.partition_id,
        consumer=consumer.name,
        fields=consumer.fields,
        sampler=consumer.sampler.to_wire(),
        where=consumer.where,
        runs=True,
    )
    if batch_size is not None:
        request.batch_size = int_of(batch_size, what="batch_size", least=1, most=limits.ROWS_PER_CLAIM_MAX)
    if max_tokens is not None:
        if not consumer.token_field:
            raise InvalidArgument(f"{consumer.label}: max_tokens needs to know of what: give the consumer token_field=")
        request.max_tokens = int_of(max_tokens, what="max_tokens", least=1, most=TOKENS_MAX)
        request.token_field = consumer.token_field
    if consumer.topology is not None:
        request.topology.CopyFrom(consumer.topology.to_wire())
    return request


def _granted(
    state: ClientState,
    consumer: ConsumerRef,
    request: pb.ClaimRequest,
    deadline: Deadline,
    ahead: ReadAhead | None = None,
) -> Operation[tuple[Session, pb.ClaimReply]]:
    """Waits for the grant, one slice after the other."""

    def attempt(session: Session) -> Operation[tuple[Session, pb.ClaimReply]]:
        if consumer.topology is not None and consumer.registration.session != session.session:
            yield from register_under(state, consumer, session, deadline)
        return (yield from _ask(state, request, session, deadline, ahead))

    while True:
        try:
            return (yield from in_session(state, deadline, attempt))
        except ClaimTimeout:
            if deadline.wait_ms() == 0:
                raise


def _ask(
    state: ClientState, request: pb.ClaimRequest, session: Session, deadline: Deadline, ahead: ReadAhead | None
) -> Operation[tuple[Session, pb.ClaimReply]]:
    """Asks once. When it stays unknown whether there was a grant, the chores find out and give it back."""
    number = state.requests.take()
    request.mutation.CopyFrom(state.mutation(number, session))
    slice_end = state.clock() + SLICE_SECONDS

    def renew_wait() -> None:
        left_ms = max(0, int((slice_end - state.clock()) * 1000))
        request.wait_ms = min(deadline.wait_ms(), left_ms)

    answered = False
    try:
        preview = None if ahead is None else ahead.preview
        reply = yield from call(CONTROLLER, "Claim", request, deadline, state.rng, before=renew_wait, preview=preview)
        answered = True
        return session, reply
    except TQError as error:
        answered = not isinstance(error, UNKNOWN_OUTCOME)
        raise
    finally:
        if answered:
            state.requests.settle(number)
        else:
            state.lost_claims.append(LostClaim(session.session, 0, request))
            state.wake.set()


def _fetch_twice(
    state: ClientState,
    ref: PartitionRef,
    rows: RowSet,
    handle: ClaimHandle,
    session: Session,
    copy: bool,
    holdings: Holdings,
    deadline: Deadline,
    wanted: Sequence[Wanted],
) -> Operation[dict[str, Any]]:
    """A claim pins its blocks, so what fails once may only have been damaged on the way."""
    try:
        return (yield from fetch(state, ref, rows, session, copy, holdings, deadline, wanted))
    except (CorruptBlock, ExtentGone):
        yield from _check_held(state, handle, session, deadline)
        yield from refresh_nodes(state, deadline)  # it may have been lost with its node, too
    try:
        return (yield from fetch(state, ref, rows, session, copy, holdings, deadline, wanted))
    except ExtentGone as error:
        raise CorruptBlock(error.message) from None


def _check_held(state: ClientState, handle: ClaimHandle, session: Session, deadline: Deadline) -> Operation[None]:
    """Renews a claim of which the bytes were not there: if it has ended, others may lie there by right.

    Raises:
        LeaseExpired: it has.
    """
    try:
        yield from _renew(state, handle.claim_id, session, deadline)
    except LeaseExpired as error:
        yield from notice_end(state, session, deadline)
        raise LeaseExpired(
            f"{handle.where}: claim {handle.claim_id} ended while its samples were read ({error.message}); they are "
            "delivered again"
        ) from None


def abandon(state: ClientState, handle: ClaimHandle) -> None:
    """Has the chores give a claim back. For finalizers, too: it takes no lock that its thread may hold."""
    if state.forked:
        return
    for number in handle.numbers.values():
        state.requests.settle(number)  # nobody is left to repeat it
    if handle.verdict is None and not state.closed:
        state.lost_claims.append(LostClaim(handle.session, handle.claim_id))


def settle(state: ClientState, handle: ClaimHandle, verdict: Verdict, timeout: float | None = None) -> Operation[None]:
    """Acks or releases a claim. The first verdict stands; giving it again has no effect.

    Raises:
        InvalidArgument: the other verdict was given before.
        LeaseExpired: the claim is not held any more; its samples are redelivered.
    """
    if handle.verdict == verdict:
        return
    if handle.verdict is not None:
        raise InvalidArgument(f"{handle.where}: this batch was {handle.verdict} already")
    deadline = state.deadline(timeout)
    # An earlier try may have been applied: then its recorded answer counts, whatever became of the session.
    tried = verdict in handle.numbers
    session = Session(handle.session, 0) if tried else _holding_session(state, handle)
    number = _number(state, handle, verdict)
    request = pb.SettleRequest(
        mutation=state.mutation(number, session), claim_id=handle.claim_id, verdict=_WIRE[verdict]
    )
    try:
        yield from call(CONTROLLER, "Settle", request, deadline, state.rng)
    except UNKNOWN_OUTCOME:
        raise  # the number stays open: the caller may try again
    except TQError as error:
        handle.numbers.pop(verdict, None)
        state.requests.settle(number)
        if isinstance(error, LeaseExpired) and handle.step is not None:
            raise LeaseExpired(
                f"{handle.where}, step {handle.step}: another member of this DP rank released the batch or died, or "
                f"this claim's lease ran out; it is delivered again, whole, to all members: claim it anew ({error})"
            ) from None
        raise
    handle.verdict = verdict
    for taken in handle.numbers.values():
        state.requests.settle(taken)


def _number(state: ClientState, handle: ClaimHandle, verdict: Verdict) -> int:
    """Returns the request number of a verdict, one however many threads and tries there are."""
    number = handle.numbers.get(verdict)
    if number is None:
        taken = state.requests.take()
        number = handle.numbers.setdefault(verdict, taken)
        if number != taken:
            state.requests.settle(taken)
    return number


def renew(state: ClientState, handle: ClaimHandle, timeout: float | None = None) -> Operation[None]:
    """Renews a claim now.

    Raises:
        LeaseExpired: it is not held any more.
    """
    if handle.verdict is not None:
        raise InvalidArgument(f"{handle.where}: this batch was {handle.verdict} already")
    yield from _renew(state, handle.claim_id, _holding_session(state, handle), state.deadline(timeout))


def _renew(state: ClientState, claim_id: int, session: Session, deadline: Deadline) -> Operation[None]:
    request = pb.RenewClaimRequest(session=session.session, claim_id=claim_id)
    reply = yield from call(CONTROLLER, "RenewClaim", request, deadline, state.rng)
    state.lease_seen(reply.lease_ms)


def _holding_session(state: ClientState, handle: ClaimHandle) -> Session:
    session = state.session
    if session is None or session.session != handle.session:
        raise LeaseExpired(
            f"{handle.where}: claim {handle.claim_id} ended with its session (this process was not heard of for a "
            "lease); its samples are delivered again"
        )
    return session


def reset(state: ClientState, consumer: ConsumerRef, timeout: float | None = None) -> Operation[None]:
    """Makes every sample unconsumed again for this consumer."""
    request = pb.ResetConsumerRequest(partition_id=consumer.partition.partition_id, consumer=consumer.name)
    yield from mutate(state, state.deadline(timeout), "ResetConsumer", request)


def dead(state: ClientState, consumer: ConsumerRef, timeout: float | None = None) -> Operation[list[int]]:
    """Lists the ids of the samples that were given up."""
    request = pb.ListDeadRequest(partition_id=consumer.partition.partition_id, consumer=consumer.name)
    reply = yield from call(CONTROLLER, "ListDead", request, state.deadline(timeout), state.rng)
    ids: list[int] = unpack_array(reply.ids, I64, what="ids").tolist()
    return ids


@dataclass(frozen=True, slots=True)
class Dropped:
    """Samples that one consumer is not given any more.

    Attributes:
        dead: given up after `max_attempts` deliveries; `Consumer.requeue` makes them ready again.
        stale: ruled out by `max_staleness`, or with a member of their group that is.
        surplus: members of groups that were granted without them.
    """

    dead: list[int]
    stale: list[int]
    surplus: list[int]


def dropped(state: ClientState, consumer: ConsumerRef, timeout: float | None = None) -> Operation[Dropped]:
    """Lists the ids of the samples that were dropped."""
    request = pb.ListDeadRequest(partition_id=consumer.partition.partition_id, consumer=consumer.name)
    reply = yield from call(CONTROLLER, "ListDead", request, state.deadline(timeout), state.rng)
    return Dropped(
        *(unpack_array(getattr(reply, name), I64, what=name).tolist() for name in ("ids", "stale", "surplus"))
    )


def requeue(state: ClientState, consumer: ConsumerRef, ids: Any, timeout: float | None = None) -> Operation[None]:
    """Makes dead samples ready again."""
    request = pb.RequeueRequest(
        partition_id=consumer.partition.partition_id, consumer=consumer.name, ids=pack_array(row_ids(ids), I64)
    )
    yield from mutate(state, state.deadline(timeout), "Requeue", request)
