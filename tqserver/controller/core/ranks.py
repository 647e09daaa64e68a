"""Claims of ranks: registration, and the life of shares (see `shares`)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, TopologyMismatch
from tqclient.wire.v1 import common_pb2, journal_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import effects, limits, validate
from tqserver.controller.core.consumer import CONSUMED, Consumer
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.rows import blocks_of, write_rows
from tqserver.controller.core.runs import shorten
from tqserver.controller.core.samplers import SeqlenBalanced, sampler_of
from tqserver.controller.core.samples import Slots
from tqserver.controller.core.sessions import Claim, Membership
from tqserver.controller.core.shares import ORPHAN_LEASES, RankGroup, Replica, Share, Sizes
from tqserver.controller.core.state import Effects, State
from tqserver.controller.core.wanted import Wanted

# Registration.


def register_rank(state: State, request: pb.RegisterRankRequest, now: float, out: Effects) -> pb.RegisterRankReply:
    """Applies a RegisterRankRequest."""
    validate.register_rank(request)
    session = state.session_of(request.mutation).session
    partition = state.partition(request.partition_id)
    partition.check_consumer(request.consumer)
    known = partition.tracked(request.consumer).ranks
    if known is not None:
        known.check(request.topology, session)
    consumer = partition.admit(request.consumer)
    if known is not None and known.sizes != Sizes.of(request.topology):
        disband(state, partition, consumer, now, out)
    _hold(state, partition, consumer, request.topology, session, now)
    out.append(effects.ReadinessChanged(partition.partition_id))
    return pb.RegisterRankReply(registered=len(_ranks(consumer).holders))


def _ranks(consumer: Consumer) -> RankGroup:
    if consumer.ranks is None:
        raise AssertionError(f"consumer {consumer.name!r} has no ranks")
    return consumer.ranks


def _hold(
    state: State, partition: Partition, consumer: Consumer, topology: pb.Topology, session: int, now: float
) -> RankGroup:
    if consumer.ranks is None:
        consumer.ranks = RankGroup(Sizes.of(topology))
    came, first = (topology.dp_rank, topology.member) not in consumer.ranks.holders, not consumer.ranks.holders
    consumer.ranks.hold(topology, session)
    if came:
        _watch_ranks(state, partition, consumer, now)
    # The others of a job that comes back have their whole time again.
    for dp_rank in list(consumer.ranks.replicas) if first else [topology.dp_rank]:
        state.orphans.pop((partition.partition_id, consumer.name, dp_rank), None)
        _watch_orphan(state, partition, consumer, dp_rank, now)
    state.leases.sessions[session].consumers[partition.partition_id, consumer.name] = None
    return consumer.ranks


def vacate(state: State, session: int, now: float, out: Effects) -> None:
    """A session's claims have ended, and now its places in topologies are free."""
    for partition_id, name in state.leases.sessions[session].consumers:
        partition = state.partitions.get(partition_id)
        consumer = None if partition is None else partition.consumers.get(name)
        if partition is None or consumer is None or consumer.ranks is None:
            continue
        for dp_rank in consumer.ranks.vacate(session):
            _drop_settled(state, consumer.ranks.replicas[dp_rank], consumer.ranks.sizes.members, now, out)
            _watch_orphan(state, partition, consumer, dp_rank, now)
        _watch_ranks(state, partition, consumer, now)


def _watch_orphan(state: State, partition: Partition, consumer: Consumer, dp_rank: int, now: float) -> None:
    """A DP rank that holds shares and has no member gives them back in a while."""
    key = (partition.partition_id, consumer.name, dp_rank)
    replica = _ranks(consumer).replicas[dp_rank]
    if replica.shares and not replica.positions and key not in state.orphans:
        state.orphans[key] = now + ORPHAN_LEASES * partition.policy.lease_ms / 1000


def _watch_ranks(state: State, partition: Partition, consumer: Consumer, now: float) -> None:
    """Those that live wait a while for the others, from the last time on that one came or went."""
    key = (partition.partition_id, consumer.name, None)
    state.orphans.pop(key, None)
    ranks = _ranks(consumer)
    if ranks.holders and not ranks.complete and not partition.retired:
        state.orphans[key] = now + ORPHAN_LEASES * partition.policy.lease_ms / 1000


def watch_orphans(state: State, now: float) -> None:
    """After a start: every such rank has its whole time again."""
    state.orphans.clear()
    for partition in state.partitions.values():
        for consumer in partition.consumers.values():
            if consumer.ranks is None:
                continue
            for dp_rank in consumer.ranks.replicas:
                _watch_orphan(state, partition, consumer, dp_rank, now)
            _watch_ranks(state, partition, consumer, now)


def given_up(orphan: tuple[int, str, int | None]) -> journal_pb2.Command:
    """Returns what ends the time of one of `State.orphans`."""
    partition_id, consumer, dp_rank = orphan
    if dp_rank is None:
        complete = journal_pb2.CompleteRanks(partition_id=partition_id, consumer=consumer)
        return journal_pb2.Command(complete_ranks=complete)
    dissolved = journal_pb2.DissolveReplica(partition_id=partition_id, consumer=consumer, dp_rank=dp_rank)
    return journal_pb2.Command(dissolve_replica=dissolved)


# Claims.


def _place(wanted: Wanted) -> tuple[RankGroup, Replica, Share | None]:
    """Looks at where a rank stands, and changes nothing."""
    topology, session = wanted.request.topology, wanted.request.mutation.session
    ranks = wanted.consumer.ranks or RankGroup(Sizes.of(topology))
    ranks.check(topology, session)
    if ranks.sizes != Sizes.of(topology):
        raise TopologyMismatch(
            f"ranks of {ranks.sizes} were registered before; call RegisterRank to replace them by {Sizes.of(topology)}"
        )
    replica = ranks.replicas.get(topology.dp_rank) or Replica()
    share = replica.next_of(topology.member)
    if share is not None and share.spec != _spec(wanted.request):
        raise InvalidArgument(
            f"step {share.step} of DP rank {topology.dp_rank} was made for other fields, tags, sampler or batch size: "
            "all members of a DP rank ask alike"
        )
    return ranks, replica, share


def _spec(request: pb.ClaimRequest) -> bytes:
    """What all members must ask for alike."""
    asked = pb.ClaimRequest(
        fields=sorted(request.fields),
        batch_size=request.batch_size,
        sampler=request.sampler,
        where=request.where,
        max_tokens=request.max_tokens,
        token_field=request.token_field,
    )
    return asked.SerializeToString(deterministic=True)


def ready(wanted: Wanted) -> bool:
    """Whether a rank's claim would be granted now."""
    ranks, _, share = _place(wanted)
    return share is not None or _plan(wanted, ranks) is not None


def has_share(wanted: Wanted) -> bool:
    """Whether the share that a rank's claim is for is there already, so that nothing is chosen for it."""
    return _place(wanted)[2] is not None


def is_made(state: State, request: pb.ClaimRequest) -> bool:
    """Whether the share that a claim is given next is there already, at little cost; it may be refused all the same."""
    partition = state.partitions.get(request.partition_id) if request.HasField("topology") else None
    consumer = None if partition is None else partition.consumers.get(request.consumer)
    ranks = None if consumer is None else consumer.ranks
    replica = None if ranks is None else ranks.replicas.get(request.topology.dp_rank)
    return replica is not None and replica.next_of(request.topology.member) is not None


def rows_wanted(state: State, request: pb.ClaimRequest) -> int:
    """Returns how many samples must be ready for a claim that waits, at the least, while nothing changes but that.

    0: that cannot be told.
    """
    if request.max_tokens:
        return 0
    if not request.HasField("topology") or not isinstance(sampler_of(request)[0], SeqlenBalanced):
        return request.batch_size
    partition = state.partitions.get(request.partition_id)
    consumer = None if partition is None else partition.consumers.get(request.consumer)
    ranks = None if consumer is None else consumer.ranks
    dp_ranks = request.topology.dp if ranks is None else len(ranks.active(request.topology.dp_rank))
    return request.batch_size * dp_ranks


class _Plan(NamedTuple):
    """The rows of the next step, and the DP ranks that get some of them, ascending."""

    slots: Slots
    dp_ranks: list[int]


def _plan(wanted: Wanted, ranks: RankGroup) -> _Plan | None:
    """Chooses the rows of the next step. None: the claim waits, or nothing is left for this rank."""
    dp_rank = wanted.request.topology.dp_rank
    _check_apart(ranks, dp_rank)
    if not isinstance(wanted.sampler, SeqlenBalanced):
        slots = wanted.choose()
        return None if slots is None else _Plan(slots, [dp_rank])
    plan = _global_batch(wanted, wanted.sampler, ranks)
    return plan if plan is not None and dp_rank in plan.dp_ranks else None


def _global_batch(wanted: Wanted, sampler: SeqlenBalanced, ranks: RankGroup) -> _Plan | None:
    """Chooses the rows of a global batch. The last one may have none for the highest ranks.

    A rank that it has none for waits for the others, in case one of them dies; for those without a live member, not for
    ever.
    """
    if wanted.budget is not None:
        raise InvalidArgument(
            "the seqlen_balanced sampler divides batch_size rows for each DP rank: leave max_tokens out"
        )
    dp_rank = wanted.request.topology.dp_rank
    plan = _global_batch_of(wanted, sampler, ranks.active(dp_rank))
    if plan is not None and ranks.complete and dp_rank not in plan.dp_ranks:
        plan = _global_batch_of(wanted, sampler, ranks.live(dp_rank))
    return plan


def _global_batch_of(wanted: Wanted, sampler: SeqlenBalanced, dp_ranks: NDArray[np.int64]) -> _Plan | None:
    sample = wanted.sample.of_size(wanted.request.batch_size * len(dp_ranks))
    slots = sampler.sample(wanted.view, sample)
    if slots is None or wanted.rate_lacks(slots):
        return None
    return _Plan(slots, dp_ranks[: len(sampler.weights(slots, sample))].tolist())


def turn_note(wanted: Wanted) -> str:
    """Returns that what is ready is for other DP ranks, to end a message with; empty: that is not so."""
    if not wanted.request.HasField("topology") or not isinstance(wanted.sampler, SeqlenBalanced):
        return ""
    plan = _global_batch(wanted, wanted.sampler, _place(wanted)[0])
    if plan is None or wanted.request.topology.dp_rank in plan.dp_ranks:
        return ""
    return f"; they are the last ones, and DP ranks {plan.dp_ranks[: limits.LISTED_MAX]} have yet to claim and ack them"


def _check_apart(ranks: RankGroup, dp_rank: int) -> None:
    """Refuses another step while too many are kept for members that do not keep up, or never come."""
    shares = ranks.replica(dp_rank).shares if dp_rank in ranks.replicas else {}
    if len(shares) >= limits.SHARES_PER_DP_RANK_MAX:
        oldest = next(iter(shares.values()))
        behind = sorted(set(range(ranks.sizes.members)) - oldest.done)
        raise InvalidArgument(
            f"DP rank {dp_rank} is {len(shares)} steps, the most there can be, ahead of its members "
            f"{behind[: limits.LISTED_MAX]}: every member claims and acks every step"
        )


def claim(state: State, wanted: Wanted, now: float, out: Effects) -> pb.ClaimReply:
    """Grants a rank's claim.

    Raises:
        TQError: it is not granted, and nothing has changed.
    """
    request, partition = wanted.request, wanted.partition
    topology = request.topology
    ranks, replica, share = _place(wanted)
    plan = None if share is not None else _plan(wanted, ranks)
    if share is None and plan is None:
        raise wanted.unmet()
    consumer = partition.admit(request.consumer)
    ranks = _hold(state, partition, consumer, topology, request.mutation.session, now)
    replica = ranks.replica(topology.dp_rank)
    if plan is not None:
        _make(state, wanted, ranks, plan, now)
        if wanted.limiter is not None:
            out.append(effects.RoomChanged(partition.partition_id))
    share = replica.next_of(topology.member)
    if share is None:
        raise AssertionError("a share was made, and is not there")
    if not share.rows:
        _deliver(state, partition, consumer, share)
    granted = Claim(
        claim_id=state.next_claim,
        session=request.mutation.session,
        partition_id=partition.partition_id,
        consumer=request.consumer,
        ids=np.empty(0, dtype=np.int64),
        blocks=[],
        lease_ms=partition.policy.lease_ms,
        membership=Membership(topology.dp_rank, share.step, topology.member),
    )
    state.next_claim += 1
    state.leases.add_claim(granted, now)
    share.claims[topology.member] = granted.claim_id
    replica.positions[topology.member] = share.step + 1
    reply = pb.ClaimReply(claim_id=granted.claim_id, lease_ms=granted.lease_ms, step=share.step)
    reply.rows.ParseFromString(share.rows)
    if request.runs:
        shorten(reply.rows)
    partition.write_fields(reply.fields, share.fields)
    return reply


def _make(state: State, wanted: Wanted, ranks: RankGroup, plan: _Plan, now: float) -> None:
    """Makes the shares of a step."""
    partition, sampler = wanted.partition, wanted.sampler
    if isinstance(sampler, SeqlenBalanced):
        step = max(replica.next_step for replica in ranks.replicas.values())  # a global batch has one, new to all
        parts = sampler.divide(plan.slots, wanted.sample, len(plan.dp_ranks))
    else:
        step, parts = ranks.replica(plan.dp_ranks[0]).next_step, [plan.slots]
    consumer = wanted.take(plan.slots)
    spec, fields = _spec(wanted.request), wanted.fields or tuple(partition.samples.columns)
    for dp_rank, slots in zip(plan.dp_ranks, parts, strict=True):
        replica = ranks.replica(dp_rank)
        replica.next_step = step + 1
        replica.shares[step] = Share(step, partition.samples.ids[slots], spec, fields)
        _watch_orphan(state, partition, consumer, dp_rank, now)


def _deliver(state: State, partition: Partition, consumer: Consumer, share: Share) -> None:
    """Begins another delivery of a share."""
    slots = partition.samples.find(share.ids)
    consumer.attempts[slots] += 1
    share.blocks = blocks_of(partition.samples, slots, share.fields)
    state.blocks.claim(share.blocks)
    rows = common_pb2.Rows()
    write_rows(rows, partition.samples, slots, share.fields, consumer.attempts[slots], runs=False)
    share.rows = rows.SerializeToString(deterministic=True)


# Ends.


def end_membership(state: State, ended: Claim, now: float, out: Effects, *, consumed: bool) -> None:
    """One member's claim, which has left the leases, was acked, or released."""
    partition, place = state.partitions[ended.partition_id], ended.membership
    consumer = partition.consumers[ended.consumer]
    if place is None:
        raise AssertionError(f"claim {ended.claim_id} is no rank's")
    ranks = _ranks(consumer)
    replica = ranks.replicas[place.dp_rank]
    share = replica.shares[place.step]
    del share.claims[place.member]
    if not consumed and not share.consumed:
        _release(state, partition, consumer, replica, now, out)
    else:
        share.done.add(place.member)
        by_leader = ranks.sizes.leader_acks and 0 in share.done
        if not share.consumed and (by_leader or len(share.done) == ranks.sizes.members):
            share.consumed = True
            slots = partition.samples.find(share.ids)
            consumer.move(slots[slots >= 0], CONSUMED)
    _drop_settled(state, replica, ranks.sizes.members, now, out)
    out.append(partition.rows_changed() if consumed else effects.ReadinessChanged(partition.partition_id))


def _drop_settled(state: State, replica: Replica, members: int, now: float, out: Effects) -> None:
    """Forgets the consumed shares that all live members have had."""
    for share in [share for share in replica.shares.values() if share.consumed and replica.had_by_all(share, members)]:
        del replica.shares[share.step]
        out += state.blocks.retire(state.blocks.unclaim(share.blocks), now)


def _stop(state: State, share: Share, now: float, out: Effects) -> bool:
    """Ends the delivery of a share, if one is under way; says so."""
    for claim_id in share.claims.values():
        state.leases.end_claim(claim_id)
    share.claims.clear()
    share.done.clear()
    if not share.rows:
        return False
    share.rows = b""
    out += state.blocks.retire(state.blocks.unclaim(share.blocks), now)
    share.blocks = []
    return True


def _release(
    state: State, partition: Partition, consumer: Consumer, replica: Replica, now: float, out: Effects
) -> None:
    """Starts everything over that a replica has not consumed."""
    for share in replica.unsettled():
        if not _stop(state, share, now, out):
            continue
        slots = partition.samples.find(share.ids)
        slots = slots[slots >= 0]
        slots = partition.give_back(consumer, partition.give_up(consumer, slots))
        share.ids = partition.samples.ids[slots]
        if not len(share.ids):
            del replica.shares[share.step]
    oldest = replica.oldest()
    for member, position in replica.positions.items():
        replica.positions[member] = min(position, oldest)


def forget(partition: Partition, consumer: Consumer) -> None:
    """Samples were cleared: shares that wait for their next delivery lose them, and go when nothing is left."""
    for replica in consumer.ranks.replicas.values() if consumer.ranks is not None else ():
        for share in replica.unsettled():
            if share.rows:
                continue
            share.ids = share.ids[partition.samples.find(share.ids) >= 0]
            if not len(share.ids):
                del replica.shares[share.step]


def dissolve(
    state: State, partition: Partition, consumer: Consumer, dp_ranks: Iterable[int], now: float, out: Effects
) -> None:
    """Takes the shares of DP ranks back: what was not consumed is ready again for any, or was delivered too often."""
    for dp_rank in dp_ranks:
        replica = _ranks(consumer).replicas[dp_rank]
        for share in list(replica.shares.values()):
            _stop(state, share, now, out)
            del replica.shares[share.step]
            if not share.consumed:
                slots = partition.samples.find(share.ids)
                slots = slots[slots >= 0]
                partition.count_delivered(consumer, slots, -1)
                partition.reopen(consumer, partition.give_up(consumer, slots))
        for member in replica.positions:
            replica.positions[member] = replica.next_step
        state.orphans.pop((partition.partition_id, consumer.name, dp_rank), None)
    out.append(effects.ReadinessChanged(partition.partition_id))


def disband(state: State, partition: Partition, consumer: Consumer, now: float, out: Effects) -> None:
    """Takes the shares of all DP ranks back, and forgets the topology with who has a place in it."""
    if consumer.ranks is not None:
        dissolve(state, partition, consumer, consumer.ranks.replicas, now, out)
        for session in {session for session, _ in consumer.ranks.holders.values()}:
            del state.leases.sessions[session].consumers[partition.partition_id, consumer.name]
        state.orphans.pop((partition.partition_id, consumer.name, None), None)
        consumer.ranks = None


def dissolve_replica(state: State, command: journal_pb2.DissolveReplica, now: float, out: Effects) -> None:
    """Applies a DissolveReplica; a DP rank that has a member by now is passed over."""
    state.orphans.pop((command.partition_id, command.consumer, command.dp_rank), None)
    partition = state.partitions.get(command.partition_id)
    consumer = None if partition is None else partition.consumers.get(command.consumer)
    if partition is None or consumer is None or consumer.ranks is None:
        return
    replica = consumer.ranks.replicas.get(command.dp_rank)
    if replica is not None and not replica.positions:
        replica.gone = True
        dissolve(state, partition, consumer, [command.dp_rank], now, out)


def complete_ranks(state: State, command: journal_pb2.CompleteRanks, now: float, out: Effects) -> None:
    """Applies a CompleteRanks."""
    state.orphans.pop((command.partition_id, command.consumer, None), None)
    partition = state.partitions.get(command.partition_id)
    consumer = None if partition is None else partition.consumers.get(command.consumer)
    if partition is not None and consumer is not None and consumer.ranks is not None:
        consumer.ranks.complete = True
        out.append(effects.ReadinessChanged(partition.partition_id))
