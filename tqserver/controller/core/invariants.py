"""What must hold of the state after every command. Counted anew from the rows; for tests."""

from __future__ import annotations

from collections import Counter

import msgpack
import numpy as np

from tqserver.controller.core import tags
from tqserver.controller.core.admission import bound
from tqserver.controller.core.consumer import GONE, LEASED, OPEN, STALE, STATES, Consumer
from tqserver.controller.core.groups import GroupIndex
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.state import State
from tqserver.controller.core.tags import TagFilter


def check(state: State) -> None:
    """Raises AssertionError with what does not hold."""
    references: Counter[int] = Counter()
    for partition in state.partitions.values():
        _check_samples(partition, references)
        _check_consumers(partition, state)
        _check_admission(partition, state)
    _check_blocks(state, references)
    producing = {(s.session, pid) for s in state.leases.sessions.values() for pid in s.producing}
    registered = {(session, p.partition_id) for p in state.partitions.values() for session in p.producers}
    _require(producing == registered, "sessions know what they produce for")
    placed = {(s.session, *key) for s in state.leases.sessions.values() for key in s.consumers}
    held = {
        (session, partition.partition_id, consumer.name)
        for partition in state.partitions.values()
        for consumer in partition.consumers.values()
        for session, _ in (consumer.ranks.holders.values() if consumer.ranks is not None else ())
    }
    _require(placed == held, "sessions know their places in topologies")
    for partition in state.partitions.values():
        _require(not partition.retired or not partition.samples.size, "a retired partition has no samples")
    _require(state.names == {p.name: p.partition_id for p in state.partitions.values()}, "names and partitions agree")


def _require(holds: object, what: str) -> None:
    if not holds:
        raise AssertionError(f"does not hold: {what}")


def _check_samples(partition: Partition, references: Counter[int]) -> None:
    samples, size = partition.samples, partition.samples.size
    alive = samples.alive[:size]
    _require(samples.live == int(alive.sum()) and len(samples.keys) == size, "live samples are counted")
    _require((np.diff(samples.ids[:size]) > 0).all(), "ids ascend")
    keyed = {key: slot for slot, key in enumerate(samples.keys) if key}
    ids = samples.ids.tolist()
    _require(samples.key_ids == {key: ids[slot] for key, slot in keyed.items()}, "keys are indexed")
    described = [slot for slot in range(size) if samples.keys[slot] or samples.tags[slot]]
    _require(len(samples.tags) == size and alive[described].all(), "cleared slots have no key and no tag")
    known = (samples.keyed or not any(samples.keys)) and (samples.tagged or not any(samples.tags))
    _require(known, "it is known whether there are keys and tags")
    members = Counter(samples.group[:size][alive].tolist())
    sizes = [members.get(index, 0) for index in range(len(samples.groups.values))]
    _require(samples.groups.sizes == sizes, "group members are counted")
    named = Counter(code - 1 for own in samples.tags if own and (code := tags.shard_code(msgpack.unpackb(own))))
    _require(samples.shards.sizes == named, "the samples of shards are counted")
    for name, column in samples.columns.items():
        written = column.block[:size] != 0
        _require(column.written == int(written.sum()), f"{name}: written samples are counted")
        _require(not (written & ~alive).any(), f"{name}: cleared slots point nowhere")
        references.update(column.block[:size][written].tolist())


def _check_admission(partition: Partition, state: State) -> None:
    admitted, samples, policy = partition.admitted, partition.samples, partition.policy
    permits = admitted.permits.values()
    _require(admitted.running == sum(permit.left for permit in permits), "running samples are counted")
    for permit in permits:
        holder = state.leases.sessions.get(permit.session)
        known = holder is not None and holder.permits.get(permit.permit) == partition.partition_id
        _require(known and permit.left > 0, "a permit with samples left is a live session's")
    held = sum(p == partition.partition_id for s in state.leases.sessions.values() for p in s.permits.values())
    _require(held == len(permits), "sessions hold the permits that there are")
    _require(admitted.accepted <= admitted.inserted, "what is accepted was inserted")
    if policy.staleness == "wait":
        within = admitted.accepted + admitted.running <= bound(partition)
        _require(within, "accepted and running samples are within the bound")
    if partition.live_versions is not None:
        versions = Counter(samples.version_max[samples.slots()].tolist())
        versions.pop(-1, None)
        _require(partition.live_versions.counts == versions, "live versions are counted")
        _require(len(versions) <= policy.capacity_versions, "no more versions are live than may be")


def _check_stale(partition: Partition, consumer: Consumer) -> None:
    samples, slots = partition.samples, partition.samples.slots()
    slots = slots[(consumer.state[slots] == OPEN) | (consumer.state[slots] == STALE)]
    stale, groups = partition.stale(slots), samples.group[slots]
    if consumer.granted_groups:
        breaking = stale & samples.matching(TagFilter(b"", True), slots) & (groups >= 0)
        stale |= np.isin(groups, groups[breaking])
    dropped = consumer.state[slots] == STALE
    _require(
        (dropped == stale).all(), "what is stale is dropped, with its group where groups are granted, and nothing else"
    )


def _check_consumers(partition: Partition, state: State) -> None:
    samples, size = partition.samples, partition.samples.size
    alive = samples.alive[:size]
    for consumer in partition.waiting():
        fresh = partition.fresh(consumer.name)
        _require((consumer.state[:size] == fresh.state[:size]).all(), "who waits for a first claim is as good as new")
    for consumer in partition.everyone():
        states = consumer.state[:size]
        _require((np.bincount(states, minlength=STATES) == consumer.counts).all(), "states are counted")
        _require(((states == GONE) == ~alive).all(), "cleared slots are gone")
        _require(int(consumer.counts.sum() - consumer.counts[GONE]) == samples.live, "the states add up to the samples")
        _check_views(partition, consumer)
        _check_stale(partition, consumer)
        held = [
            claim.ids
            for claim in state.leases.claims.values()
            if (claim.partition_id, claim.consumer) == (partition.partition_id, consumer.name)
        ]
        held += [share.ids for share in consumer.shares() if not share.consumed]
        ids = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
        _require(len(np.unique(ids)) == len(ids), "no sample is in two claims of a consumer")
        leased = samples.ids[:size][states == LEASED]
        _require(np.isin(leased, ids).all(), "leased samples are in a claim")
        _require(not np.isin(samples.ids[:size][(states != LEASED) & alive], ids).any(), "claimed samples are leased")


def _check_views(partition: Partition, consumer: Consumer) -> None:
    samples, size = partition.samples, partition.samples.size
    for key, view in consumer.views.items():
        is_open = consumer.state[:size] == OPEN
        if view.filter is not None and view.open is not None:
            passes = TagFilter(key.where, key.unaborted)
            is_open &= np.array([passes(own) for own in samples.tags], dtype=np.bool_)
            _require((view.open.ready[:size] == is_open).all(), f"view {key} knows who matches")
            _require(view.open.count == int(is_open.sum()), f"view {key}: who matches is counted")
        ready = is_open & samples.written(key.fields, slice(0, size))
        _require((view.ready[:size] == ready).all() and not view.ready[size:].any(), f"view {key} is up to date")
        _require(view.count == int(ready.sum()), f"view {key} is counted")
        _require(not view.ready[: view.head].any(), f"view {key}: nothing below the head is ready")
        _require(not view.ready[view.tail :].any(), f"view {key}: nothing from the tail on is ready")
        for group_size, index in view.group_indexes.items():
            fresh = GroupIndex(samples, view.ready, group_size)
            _require(set(index.complete.first(size).tolist()) == set(fresh.complete.first(size).tolist()), "groups")
            _require(index.rows == fresh.rows, "rows of complete groups are counted")


def _check_blocks(state: State, references: Counter[int]) -> None:
    blocks, leases = state.blocks, state.leases
    claimed = Counter(block_id for claim in leases.claims.values() for block_id in claim.blocks)
    consumers = [consumer for partition in state.partitions.values() for consumer in partition.consumers.values()]
    shares = [share for consumer in consumers for share in consumer.shares()]
    claimed.update(block_id for share in shares for block_id in share.blocks)
    held = {claim_id for share in shares for claim_id in share.claims.values()}
    members = {claim_id for claim_id, claim in leases.claims.items() if claim.membership is not None}
    _require(held == members, "a member's claim and its share know each other")
    pinned = Counter(
        block_id for session in leases.sessions.values() for pin in session.pins.values() for block_id in pin
    )
    _require(set(references) | set(claimed) == set(blocks.live), "rows and claims keep the blocks, and nothing else")
    _require(not set(blocks.live) & set(blocks.lingering), "a lingering block has left")
    _require(set(pinned) <= set(blocks.live) | set(blocks.lingering), "pinned blocks are there")
    for table in (blocks.live, blocks.lingering):
        for block_id, record in table.items():
            _require(record.references == references[block_id], "references are counted")
            _require(record.claims == claimed[block_id], "claims are counted")
            _require(record.pins == pinned[block_id], "pins are counted")
    for partition in state.partitions.values():
        size_bytes = sum(
            record.size_bytes
            for record in blocks.live.values()
            if record.partition_id == partition.partition_id and record.references
        )
        _require(partition.size_bytes == size_bytes, "bytes are counted")
    _require(
        all(claim_id in leases.sessions[claim.session].claims for claim_id, claim in leases.claims.items()),
        "sessions know their claims",
    )
