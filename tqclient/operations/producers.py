"""Producers: clients that say they make samples for a partition, so that nobody waits for them once they died."""

from __future__ import annotations

from tqclient.errors import LeaseExpired, PartitionNotFound
from tqclient.info import PartitionRef
from tqclient.operations.effects import Operation
from tqclient.operations.sessions import mutate
from tqclient.state import ClientState
from tqclient.wire.v1 import controller_pb2 as pb


def register(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[None]:
    """Registers this client; from here on the heartbeat does so again whenever its session was lost."""
    yield from _register(state, ref.partition_id, state.deadline(timeout).timeout)
    state.producing[ref.partition_id] = state.producing.get(ref.partition_id, 0) + 1


def unregister(state: ClientState, ref: PartitionRef, timeout: float | None = None) -> Operation[None]:
    """Takes back one registration; with the last one, the client is no producer any more."""
    left = state.producing[ref.partition_id] - 1
    if left:
        state.producing[ref.partition_id] = left
        return
    del state.producing[ref.partition_id]
    state.produced_in.pop(ref.partition_id, None)
    request = pb.UnregisterProducerRequest(partition_id=ref.partition_id)
    try:
        yield from mutate(state, state.deadline(timeout), "UnregisterProducer", request)
    except PartitionNotFound:
        return  # it was deleted meanwhile, and its producers with it


def renew_producers(state: ClientState, timeout: float) -> Operation[None]:
    """Registers again for the partitions whose registration ended with an earlier session."""
    for partition_id in list(state.producing):
        session = state.session
        if session is not None and state.produced_in.get(partition_id) == session.session:
            continue
        try:
            yield from _register(state, partition_id, timeout)
        except (LeaseExpired, PartitionNotFound):
            continue  # the next beat tries again; or there is nothing to produce for any more


def _register(state: ClientState, partition_id: int, timeout: float) -> Operation[None]:
    request = pb.RegisterProducerRequest(partition_id=partition_id)
    yield from mutate(state, state.deadline(timeout), "RegisterProducer", request)
    session = state.session
    if session is not None:
        state.produced_in[partition_id] = session.session
