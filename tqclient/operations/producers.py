"""Producers: clients that say they make samples for a partition, so that nobody waits for them once they died."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from tqclient.errors import LeaseExpired, PartitionNotFound, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.effects import Operation, Sleep
from tqclient.operations.sessions import mutate
from tqclient.state import ClientState
from tqclient.wire.v1 import controller_pb2 as pb

RETRACTING_POLL: Final = 0.005
"""Seconds between looks whether the chores have ended an earlier registration."""


def register(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[None]:
    """Registers this client; from here on the chores do so again whenever its session was lost."""
    # Counted before: who is cancelled meanwhile may be registered.
    state.producing[ref.partition_id] = state.producing.get(ref.partition_id, 0) + 1
    done = False
    try:
        deadline = state.deadline(timeout)
        while ref.partition_id in state.retracting:  # what is under way would take this one back as well
            if deadline.remaining() <= RETRACTING_POLL:
                raise Unavailable(
                    f"partition {ref.name!r}: the end of an earlier registration of this client was not confirmed "
                    f"within {deadline.timeout} s; try again"
                )
            yield Sleep(RETRACTING_POLL)
        yield from _register(state, ref.partition_id, deadline.remaining())
        done = True
    finally:
        if not done and _is_last(state, ref.partition_id):
            state.retracting.add(ref.partition_id)
            state.wake.set()


def unregister(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[None]:
    """Takes back one registration; with the last one, the client is no producer any more."""
    if _is_last(state, ref.partition_id):
        state.retracting.add(ref.partition_id)
        try:
            yield from _unregister(state, ref.partition_id, state.deadline(timeout).timeout)
        finally:
            if ref.partition_id in state.retracting:
                state.wake.set()


def _is_last(state: ClientState, partition_id: int) -> bool:
    """Counts one registration less; returns whether none is left."""
    left = state.producing[partition_id] - 1
    if left:
        state.producing[partition_id] = left
        return False
    del state.producing[partition_id]
    return True


def retract_producers(state: ClientState, timeout: float) -> Operation[None]:
    """Ends registrations that nobody wants any more, and of which nobody else says so."""
    for partition_id in list(state.retracting):
        try:
            yield from _unregister(state, partition_id, timeout)
        except LeaseExpired:
            continue  # the next turn tries again


def _unregister(state: ClientState, partition_id: int, timeout: float) -> Operation[None]:
    state.produced_in.pop(partition_id, None)
    request = pb.UnregisterProducerRequest(partition_id=partition_id)
    with suppress(PartitionNotFound):  # it was deleted meanwhile, and its producers with it
        yield from mutate(state, state.deadline(timeout), "UnregisterProducer", request)
    state.retracting.discard(partition_id)
    if partition_id in state.producing:  # another one came meanwhile: the chores register it again
        state.produced_in.pop(partition_id, None)
        state.wake.set()


def renew_producers(state: ClientState, timeout: float) -> Operation[None]:
    """Registers again for the partitions whose registration ended with an earlier session."""
    for partition_id in list(state.producing):
        session = state.session
        if session is not None and state.produced_in.get(partition_id) == session.session:
            continue
        try:
            yield from _register(state, partition_id, timeout)
        except (LeaseExpired, PartitionNotFound):
            continue  # the next turn tries again; or there is nothing to produce for any more


def _register(state: ClientState, partition_id: int, timeout: float) -> Operation[None]:
    request = pb.RegisterProducerRequest(partition_id=partition_id)
    yield from mutate(state, state.deadline(timeout), "RegisterProducer", request)
    session = state.session
    if session is not None:
        state.produced_in[partition_id] = session.session
