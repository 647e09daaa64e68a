"""What must hold of the state after every command. Counted anew from the rows; for tests."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tqserver.controller.core.consumer import GONE, LEASED, OPEN, STATES
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.state import State


def check(state: State) -> None:
    """Raises AssertionError with what does not hold."""
    references: Counter[int] = Counter()
    for partition in state.partitions.values():
        _check_samples(partition, references)
        _check_consumers(partition, state)
    _check_blocks(state, references)
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
    members = Counter(samples.group[:size][alive].tolist())
    sizes = [members.get(index, 0) for index in range(len(samples.group_values))]
    _require(samples.group_sizes == sizes, "group members are counted")
    for name, column in samples.columns.items():
        written = column.block[:size] != 0
        _require(column.written == int(written.sum()), f"{name}: written samples are counted")
        _require(not (written & ~alive).any(), f"{name}: cleared slots point nowhere")
        references.update(column.block[:size][written].tolist())


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
        _require(int(consumer.counts[:GONE].sum()) == samples.live, "the states add up to the samples")
        for fields, view in consumer.views.items():
            ready = (states == OPEN) & samples.written(fields, slice(0, size))
            _require((view.ready[:size] == ready).all() and not view.ready[size:].any(), f"view {fields} is up to date")
            _require(view.count == int(ready.sum()), f"view {fields} is counted")
            _require(not view.ready[: view.head].any(), f"view {fields}: nothing below the head is ready")
        held = [
            claim.ids
            for claim in state.leases.claims.values()
            if (claim.partition_id, claim.consumer) == (partition.partition_id, consumer.name)
        ]
        ids = np.concatenate(held) if held else np.empty(0, dtype=np.int64)
        _require(len(np.unique(ids)) == len(ids), "no sample is in two claims of a consumer")
        leased = samples.ids[:size][states == LEASED]
        _require(np.isin(leased, ids).all(), "leased samples are in a claim")
        _require(not np.isin(samples.ids[:size][(states != LEASED) & alive], ids).any(), "claimed samples are leased")


def _check_blocks(state: State, references: Counter[int]) -> None:
    blocks, leases = state.blocks, state.leases
    claimed = Counter(block_id for claim in leases.claims.values() for block_id in claim.blocks)
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
