"""Claims: granted, settled, expired; and a consumer's progress otherwise changed."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

import numpy as np

from tqclient import limits as wire_limits
from tqclient.errors import ClaimTimeout, InvalidArgument, SampleNotFound, Sealed
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import effects, limits, validate
from tqserver.controller.core.consumer import CONSUMED, DEAD, LEASED, OPEN, STALE, Consumer
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.rows import blocks_of, rows_of
from tqserver.controller.core.samplers import Sampler, SampleRequest, sampler_of
from tqserver.controller.core.sessions import Claim
from tqserver.controller.core.state import Effects, State
from tqserver.controller.core.view import View


class Readiness(Enum):
    """What a claim would meet now."""

    READY = "ready"
    """It would be granted."""
    WAIT = "wait"
    """Too few samples are ready; more may become so."""
    DRAINED = "drained"
    """Nothing is left or leased, and the partition is sealed: it ends with Sealed."""


class _Wanted(NamedTuple):
    partition: Partition
    consumer: Consumer
    view: View
    sampler: Sampler
    sample: SampleRequest


def _wanted(state: State, request: pb.ClaimRequest) -> _Wanted:
    validate.claim(request)
    session = state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    partition.check_consumer(request.consumer)
    if len(session.claims) >= limits.CLAIMS_PER_SESSION_MAX:
        raise InvalidArgument(
            f"session {session.session} holds {limits.CLAIMS_PER_SESSION_MAX} claims, the most it can: settle some"
        )
    consumer = partition.tracked(request.consumer)
    view = partition.view(consumer, request.fields)
    sampler, params = sampler_of(request)
    final = partition.sealed and consumer.pending(view) == 0
    return _Wanted(partition, consumer, view, sampler, SampleRequest(request.batch_size, final, params))


def _readiness(wanted: _Wanted) -> Readiness:
    if wanted.sampler.has(wanted.view, wanted.sample):
        return Readiness.READY
    left = wanted.view.count or wanted.consumer.counts[LEASED]
    return Readiness.DRAINED if wanted.sample.final and not left else Readiness.WAIT


def readiness(state: State, request: pb.ClaimRequest) -> Readiness:
    """Says what a claim would meet now. Only the first look at a field set depends on the partition's size."""
    return _readiness(_wanted(state, request))


def ready_count(state: State, request: pb.ClaimRequest) -> int:
    """Returns how many samples are ready for a claim."""
    return _wanted(state, request).view.count


def is_outsized(state: State, request: pb.ClaimRequest) -> bool:
    """Returns whether a claim asks for more samples than its partition may hold."""
    partition = state.partitions.get(request.partition_id)
    if partition is None or not partition.policy.HasField("capacity_samples"):
        return False
    return request.batch_size > partition.policy.capacity_samples


def claim(state: State, request: pb.ClaimRequest, now: float, out: Effects) -> pb.ClaimReply:
    """Applies a ClaimRequest."""
    wanted = _wanted(state, request)
    partition = wanted.partition
    slots = wanted.sampler.sample(wanted.view, wanted.sample)
    if slots is None:
        if _readiness(wanted) is Readiness.DRAINED:
            raise Sealed(f"{partition} is sealed, and consumer {request.consumer!r} has had all of it")
        raise ClaimTimeout(
            f"{partition}: {wanted.view.count} samples are ready for consumer {request.consumer!r}, "
            f"{request.batch_size} are wanted, and {wanted.consumer.pending(wanted.view)} wait for a field"
        )
    consumer = partition.admit(request.consumer)
    consumer.last_fields = tuple(sorted(request.fields))
    consumer.attempts[slots] += 1
    consumer.move(slots, LEASED)
    fields = tuple(request.fields) or tuple(partition.samples.columns)
    blocks = blocks_of(partition.samples, slots, fields)
    state.blocks.claim(blocks)
    granted = Claim(
        claim_id=state.next_claim,
        session=request.mutation.session,
        partition_id=partition.partition_id,
        consumer=request.consumer,
        ids=partition.samples.ids[slots],
        blocks=blocks,
        lease_ms=partition.policy.lease_ms,
    )
    state.next_claim += 1
    state.leases.add_claim(granted, now)
    return pb.ClaimReply(
        claim_id=granted.claim_id,
        lease_ms=granted.lease_ms,
        rows=rows_of(partition.samples, slots, fields, consumer.attempts[slots]),
        fields=partition.fields(fields),
    )


def end_claim(state: State, claim_id: int, now: float, out: Effects, *, consumed: bool) -> None:
    """Ends a claim: its samples are consumed, or ready again unless they are stale or were delivered too often."""
    ended = state.leases.end_claim(claim_id)
    partition = state.partitions.get(ended.partition_id)
    if partition is not None:
        consumer = partition.consumers[ended.consumer]
        slots = partition.samples.find(ended.ids)
        slots = slots[slots >= 0]
        if consumed:
            consumer.move(slots, CONSUMED)
        else:
            spent = consumer.attempts[slots] >= partition.policy.max_attempts
            stale = partition.stale(slots) & ~spent
            consumer.move(slots[spent], DEAD)
            consumer.move(slots[stale], STALE)
            consumer.move(slots[~(spent | stale)], OPEN)
        out.append(effects.ReadinessChanged(ended.partition_id))
    out += state.blocks.retire(state.blocks.unclaim(ended.blocks), now)


def settle(state: State, request: pb.SettleRequest, now: float, out: Effects) -> pb.SettleReply:
    """Applies a SettleRequest."""
    validate.settle(request)
    session = state.session_of(request.mutation)
    state.leases.claim_of(request.claim_id, session.session)
    end_claim(state, request.claim_id, now, out, consumed=request.verdict == pb.VERDICT_ACK)
    return pb.SettleReply()


def expire_claim(state: State, command: journal_pb2.ExpireClaim, now: float, out: Effects) -> None:
    """Applies an ExpireClaim; a claim that has ended by now is passed over."""
    if command.claim_id in state.leases.claims:
        end_claim(state, command.claim_id, now, out, consumed=False)


def reset_consumer(state: State, request: pb.ResetConsumerRequest, now: float, out: Effects) -> pb.ResetConsumerReply:
    """Applies a ResetConsumerRequest."""
    validate.reset_consumer(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    partition.check_consumer(request.consumer)
    consumer = partition.consumers.get(request.consumer)
    if consumer is None:  # it was never granted anything
        return pb.ResetConsumerReply()
    key = (partition.partition_id, request.consumer)
    held = [c.claim_id for c in state.leases.claims.values() if (c.partition_id, c.consumer) == key]
    for claim_id in held:
        end_claim(state, claim_id, now, out, consumed=False)
    slots = partition.samples.slots()
    stale = partition.stale(slots)
    consumer.attempts[slots] = 0
    consumer.move(slots[stale], STALE)
    consumer.move(slots[~stale], OPEN)
    out.append(effects.ReadinessChanged(partition.partition_id))
    return pb.ResetConsumerReply()


def requeue(state: State, request: pb.RequeueRequest, now: float, out: Effects) -> pb.RequeueReply:
    """Applies a RequeueRequest."""
    ids = validate.requeue(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    partition.check_consumer(request.consumer)
    slots = partition.samples.find(ids)
    consumer = partition.consumers.get(request.consumer)
    dead = slots >= 0 if consumer is not None else np.zeros(len(ids), dtype=np.bool_)
    if consumer is not None:
        dead[dead] = consumer.state[slots[dead]] == DEAD
    rows = np.flatnonzero(~dead)[: wire_limits.ERROR_IDS_MAX]
    if len(rows) or consumer is None:
        if not len(ids):
            return pb.RequeueReply()
        raise SampleNotFound(
            f"{partition}: {int(np.count_nonzero(~dead))} of {len(ids)} samples are not dead for consumer "
            f"{request.consumer!r}, the first is {ids[rows[0]]}",
            ids=ids[rows].tolist(),
            rows=rows.tolist(),
        )
    stale = partition.stale(slots)
    consumer.attempts[slots] = 0
    consumer.move(slots[stale], STALE)
    consumer.move(slots[~stale], OPEN)
    out.append(effects.ReadinessChanged(partition.partition_id))
    return pb.RequeueReply()
