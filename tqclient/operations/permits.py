"""Permits: samples that a partition admits before they are generated."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tqclient import limits
from tqclient.errors import InvalidArgument, LeaseExpired, TQError
from tqclient.info import PartitionRef
from tqclient.operations.effects import CONTROLLER, UNKNOWN_OUTCOME, Call, Deadline, Operation, call
from tqclient.operations.sessions import CLOSE_TIMEOUT, in_session, settle_each, settle_lost
from tqclient.state import ClientState, LostPermit, Session
from tqclient.wire.v1 import controller_pb2 as pb

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class PermitHandle:
    """A permit as its client holds it.

    Attributes:
        partition: that admitted the samples.
        permit: its id.
        session: under which it was granted, and with which it ends.
        version: the partition's weight version when it was granted; None: none was set.
        samples: that it was granted for.
        returned: it is not held any more.
    """

    partition: PartitionRef
    permit: int
    session: int
    version: int | None
    samples: int
    returned: bool = False

    def check(self, partition_id: int) -> None:
        """Raises InvalidArgument when samples of this partition cannot be put under it."""
        if self.returned:
            raise InvalidArgument(
                f"the permit for {self.samples} samples of {self.partition.name!r} was returned already"
            )
        if self.partition.partition_id != partition_id:
            raise InvalidArgument(f"the permit is for samples of partition {self.partition.name!r}, not of this one")


def acquire(state: ClientState, ref: PartitionRef, samples: int, timeout: float | None) -> Operation[PermitHandle]:
    """Waits until the partition admits so many samples."""
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= limits.PERMIT_SAMPLES_MAX:
        raise InvalidArgument(f"samples={samples!r}: expected an int from 1 to {limits.PERMIT_SAMPLES_MAX}")
    deadline = state.deadline(timeout, waits=True)

    def attempt(session: Session) -> Operation[PermitHandle]:
        reply = yield from _ask(state, ref, samples, session, deadline)
        version = reply.version if reply.version >= 0 else None
        return PermitHandle(ref, reply.permit, session.session, version, samples)

    return (yield from in_session(state, deadline, attempt))


def _ask(
    state: ClientState, ref: PartitionRef, samples: int, session: Session, deadline: Deadline
) -> Operation[pb.AcquirePermitReply]:
    """Asks once. When it stays unknown whether there was a grant, the chores find out and give it back."""
    number = state.requests.take()
    request = pb.AcquirePermitRequest(partition_id=ref.partition_id, samples=samples)
    request.mutation.CopyFrom(state.mutation(number, session))

    def renew_wait() -> None:
        request.wait_ms = deadline.wait_ms()

    answered = False
    try:
        reply: pb.AcquirePermitReply = yield from call(
            CONTROLLER, "AcquirePermit", request, deadline, state.rng, before=renew_wait
        )
        answered = True
        return reply
    except TQError as error:
        answered = not isinstance(error, UNKNOWN_OUTCOME)
        raise
    finally:
        if answered:
            state.requests.settle(number)
        else:
            _lose(state, LostPermit(session.session, ref.partition_id, 0, request))


def _lose(state: ClientState, lost: LostPermit) -> None:
    state.lost_permits.append(lost)
    state.wake.set()


def give_back(state: ClientState, handle: PermitHandle) -> Operation[None]:
    """Returns what is left of a permit. When the controller is away, the chores do it once it is back."""
    if handle.returned:
        return
    handle.returned = True
    session = state.session
    if session is None or session.session != handle.session:
        return  # it ended with its session
    lost = LostPermit(handle.session, handle.partition.partition_id, handle.permit)
    try:
        yield from _return(state, lost, session)
    except UNKNOWN_OUTCOME:
        _lose(state, lost)
    except LeaseExpired:
        return  # the session ended meanwhile
    except BaseException:
        _lose(state, lost)
        raise


def _return(state: ClientState, lost: LostPermit, session: Session) -> Operation[None]:
    number = state.requests.take()
    try:
        request = pb.ReturnPermitRequest(
            mutation=state.mutation(number, session), partition_id=lost.partition_id, permit=lost.permit
        )
        yield Call(CONTROLLER, "ReturnPermit", request, CLOSE_TIMEOUT)
    finally:
        state.requests.settle(number)


def return_lost_permits(state: ClientState) -> Operation[None]:
    """Gives back permits that this client holds at the controller but nobody in it knows of any more."""
    yield from settle_each(state.lost_permits, lambda lost: settle_lost(state, lost, _return_lost(state, lost)))


def _return_lost(state: ClientState, lost: LostPermit) -> Operation[None]:
    session = state.session
    if session is None or session.session != lost.session:
        return  # it ended with its session
    if lost.request is not None and not lost.permit:
        lost.request.wait_ms = 0  # one that was not granted is granted now, or refused
        reply = yield Call(CONTROLLER, "AcquirePermit", lost.request, CLOSE_TIMEOUT)
        lost.permit = reply.permit
    yield from _return(state, lost, session)
