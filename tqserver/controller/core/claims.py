"""Claims: granted, settled, expired; and a consumer's progress otherwise changed."""

from __future__ import annotations

from enum import Enum

import numpy as np

from tqclient import limits as wire_limits
from tqclient.errors import SampleNotFound
from tqclient.wire.packing import I64, pack_array
from tqclient.wire.v1 import common_pb2, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import effects, limits, ranks, validate
from tqserver.controller.core.consumer import CONSUMED, DEAD
from tqserver.controller.core.retire import check_not_retired
from tqserver.controller.core.rows import blocks_of, write_rows
from tqserver.controller.core.samplers import Custom, sampler_of
from tqserver.controller.core.samples import compact_index
from tqserver.controller.core.sessions import Claim
from tqserver.controller.core.state import Effects, State
from tqserver.controller.core.wanted import Wanted


class Readiness(Enum):
    """What a claim would meet now."""

    READY = "ready"
    """It would be granted."""
    WAIT = "wait"
    """Too few samples are ready; more may become so."""
    DRAINED = "drained"
    """Nothing is left or leased, and the partition is sealed: it ends with Sealed."""


def _readiness(wanted: Wanted) -> Readiness:
    if ranks.ready(wanted) if wanted.request.HasField("topology") else wanted.has():
        return Readiness.READY
    if wanted.orphaned:
        raise wanted.unmet()
    return Readiness.DRAINED if wanted.drained else Readiness.WAIT


def readiness(state: State, request: pb.ClaimRequest) -> Readiness:
    """Says what a claim would meet now. Only the first look at a field set depends on the partition's size."""
    return _readiness(Wanted.of(state, request))


def ready_count(state: State, request: pb.ClaimRequest) -> int:
    """Returns how many samples are ready for a claim."""
    return Wanted.of(state, request).view.count


def rate_note(state: State, request: pb.ClaimRequest) -> str:
    """Says how a rate limit holds a claim back, or that it is other DP ranks' turn."""
    wanted = Wanted.of(state, request)
    return wanted.rate_note() or ranks.turn_note(wanted)


def choice(state: State, request: pb.ClaimRequest) -> bytes:
    """Returns the ids that a user's sampler chooses for a claim now; nothing for the controller's own samplers.

    Nothing, too, when the claim must wait after all: the sampler need not answer as it did to `readiness`.
    """
    if not isinstance(sampler_of(request)[0], Custom):
        return b""
    wanted = Wanted.of(state, request)
    if request.HasField("topology") and ranks.has_share(wanted):
        return b""  # another member's claim made it
    slots = wanted.choose()
    return b"" if slots is None else pack_array(wanted.partition.samples.ids[slots], I64)


def foretell(state: State, request: pb.ClaimRequest) -> pb.BlockWrite | None:
    """Returns the block that a claim would be granted now, if it is all of one, in its order."""
    partition = state.partition(request.partition_id)
    samples = partition.samples
    if partition.size_bytes * request.batch_size < limits.FORETOLD_BYTES_MIN * samples.live:
        return None  # small claims are many: this is all that they pay
    wanted = Wanted.of(state, request)
    fields = wanted.fields or tuple(samples.columns)
    slots = wanted.choose()
    if slots is None or not len(slots) or not fields:
        return None
    record = state.blocks.get(int(samples.columns[fields[0]].block[slots[0]]))
    if record is None or record.rows != len(slots) or record.size_bytes < limits.FORETOLD_BYTES_MIN:
        return None
    where, rows = compact_index(slots), np.arange(record.rows)
    columns = [samples.columns[name] for name in fields]
    if not all((each.block[where] == record.block_id).all() and (each.row[where] == rows).all() for each in columns):
        return None
    extents = [common_pb2.Extent(**extent._asdict()) for extent in record.extents]
    return pb.BlockWrite(extents=extents, directory=record.directory, rows=record.rows)


def countable(state: State, request: pb.ClaimRequest) -> bool:
    """Whether any `batch_size` ready samples meet a claim."""
    sampler, _ = sampler_of(request)
    if not sampler.countable or isinstance(sampler, Custom):  # which chooses among samples that it can see
        return False
    partition = state.partitions.get(request.partition_id)
    free = partition is None or not partition.policy.HasField("rate_limit")
    return free and not request.max_tokens and not request.HasField("topology")


def is_outsized(state: State, request: pb.ClaimRequest) -> bool:
    """Returns whether a claim asks for more samples than its partition may hold."""
    partition = state.partitions.get(request.partition_id)
    if partition is None or not partition.policy.HasField("capacity_samples"):
        return False
    return request.batch_size > partition.policy.capacity_samples


def claim(state: State, request: pb.ClaimRequest, now: float, out: Effects) -> pb.ClaimReply:
    """Applies a ClaimRequest."""
    wanted = Wanted.of(state, request)
    if request.HasField("topology"):
        return ranks.claim(state, wanted, now, out)
    slots = wanted.choose()
    if slots is None:
        raise wanted.unmet()
    partition, consumer = wanted.partition, wanted.take(slots)
    attempts = consumer.attempts[slots] + 1
    consumer.attempts[slots] = attempts
    fields = wanted.fields or tuple(partition.samples.columns)
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
    if wanted.limiter is not None:
        out.append(effects.RoomChanged(partition.partition_id))
    reply = pb.ClaimReply(claim_id=granted.claim_id, lease_ms=granted.lease_ms)
    write_rows(reply.rows, partition.samples, slots, fields, attempts, runs=request.runs)
    partition.write_fields(reply.fields, fields)
    return reply


def end_claim(state: State, claim_id: int, now: float, out: Effects, *, consumed: bool) -> None:
    """Ends a claim: its samples are consumed, or ready again unless they are stale or were delivered too often."""
    ended = state.leases.end_claim(claim_id)
    if ended.membership is not None:
        ranks.end_membership(state, ended, now, out, consumed=consumed)
        return
    partition = state.partitions.get(ended.partition_id)
    if partition is not None:
        consumer = partition.consumers[ended.consumer]
        slots = partition.samples.find(ended.ids)
        slots = slots[slots >= 0]
        if consumed:
            consumer.move(slots, CONSUMED)
        else:
            partition.reopen(consumer, partition.give_up(consumer, slots))
        out.append(partition.rows_changed())
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
    check_not_retired(partition)
    consumer = partition.consumers.get(request.consumer)
    if consumer is None:  # it was never granted anything
        return pb.ResetConsumerReply()
    key = (partition.partition_id, request.consumer)
    if consumer.ranks is not None:
        ranks.dissolve(state, partition, consumer, list(consumer.ranks.replicas), now, out)
    held = [c.claim_id for c in state.leases.claims.values() if (c.partition_id, c.consumer) == key]
    for claim_id in held:
        end_claim(state, claim_id, now, out, consumed=False)
    slots = partition.samples.slots()
    consumer.granted_groups.clear()
    consumer.attempts[slots] = 0
    partition.reopen(consumer, slots)
    out.append(effects.ReadinessChanged(partition.partition_id))
    return pb.ResetConsumerReply()


def requeue(state: State, request: pb.RequeueRequest, now: float, out: Effects) -> pb.RequeueReply:
    """Applies a RequeueRequest."""
    ids = validate.requeue(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    partition.check_consumer(request.consumer)
    check_not_retired(partition)
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
    consumer.attempts[slots] = 0
    partition.reopen(consumer, slots)
    out.append(effects.ReadinessChanged(partition.partition_id))
    return pb.RequeueReply()
