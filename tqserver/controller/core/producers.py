"""Who makes samples for a partition, and whether all of them died."""

from __future__ import annotations

from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import effects
from tqserver.controller.core.state import Effects, State


def register_producer(
    state: State, request: pb.RegisterProducerRequest, now: float, out: Effects
) -> pb.RegisterProducerReply:
    """Applies a RegisterProducerRequest."""
    session = state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    partition.producers[session.session] = None
    partition.producers_died = False
    session.producing[partition.partition_id] = None
    return pb.RegisterProducerReply(registered=len(partition.producers))


def unregister_producer(
    state: State, request: pb.UnregisterProducerRequest, now: float, out: Effects
) -> pb.UnregisterProducerReply:
    """Applies an UnregisterProducerRequest; one that is not registered is passed over."""
    session = state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    session.producing.pop(partition.partition_id, None)
    partition.producers.pop(session.session, None)
    return pb.UnregisterProducerReply()


def end_producer(state: State, session: int, out: Effects, *, died: bool) -> None:
    """A session ends. When it was the last producer of a partition and died, claims there wait no longer."""
    for partition_id in state.leases.sessions[session].producing:
        partition = state.partitions[partition_id]
        del partition.producers[session]
        if died and not partition.producers:
            partition.producers_died = True
            out.append(effects.ReadinessChanged(partition_id))
