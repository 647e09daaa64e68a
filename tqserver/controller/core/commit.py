"""The commit command: written blocks become visible, all of them or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tqclient import limits as wire_limits
from tqclient.arrays import spread
from tqclient.errors import DuplicateKey, InvalidArgument, LeaseExpired, Sealed
from tqclient.schema import join
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import admission, changes, effects, forms, validate
from tqserver.controller.core.blocks import BlockRecord, sealed_effects
from tqserver.controller.core.partition import Partition
from tqserver.controller.core.runs import write_ids
from tqserver.controller.core.samples import LENGTH_UNKNOWN, Slots, compact_index
from tqserver.controller.core.state import Effects, State

T = TypeVar("T")
N = TypeVar("N", bound=np.generic)


@dataclass(slots=True)
class _Plan:
    """Which row goes where.

    Attributes:
        slots: int64 [rows]: of samples that exist; -1: a new sample, until it is made.
        written: bool [rows]: false where the sample that exists is left as it is; None: it is nowhere.
        new_rows: int64 [new samples]: rows that become samples.
    """

    slots: NDArray[np.int64]
    written: NDArray[np.bool_] | None
    new_rows: NDArray[np.int64]

    @property
    def all_new(self) -> bool:
        """Whether every row becomes a sample, as a rule: then their slots follow each other."""
        return len(self.new_rows) == len(self.slots)

    def of_written(self, values: NDArray[N]) -> NDArray[N]:
        """Returns the values, [rows], of the rows that are written."""
        return values if self.written is None else values[self.written]

    @property
    def where(self) -> Slots | slice:
        """What selects the samples that are written, in the order of their rows; once the new ones are made."""
        if self.all_new:
            return slice(int(self.slots[0]), int(self.slots[-1]) + 1)
        return compact_index(self.of_written(self.slots))


def commit(state: State, request: pb.CommitRequest, now: float, out: Effects) -> pb.CommitReply:
    """Applies a CommitRequest."""
    put = state.checked.pop(request) or validate.commit(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    plan = _plan(partition, put)
    _check_columns(partition, put, plan)
    _check_extents(state, partition, put)
    rows = plan.of_written(np.arange(put.rows))
    tags = None if put.tags is None else partition.samples.merged_tags(plan.slots[rows], put.tags, rows)
    new_rows = plan.new_rows
    if len(new_rows) and partition.sealed:
        raise Sealed(f"{partition} is sealed: it takes no more samples")
    permit = admission.permit_of(partition, request.permit, request.mutation.session, len(new_rows))
    if admission.is_limited(partition):
        lacks = admission.demand(partition, _incoming(partition, put, plan, permitted=permit is not None)).lacks
        if lacks:
            raise admission.held_back(partition, lacks)
    _append(state, partition, put, plan)
    admission.put(state, partition, len(new_rows), permit)
    moved, left = _describe(partition, put, plan.slots[rows], rows, tags)
    _write(state, partition, put, plan, now, out)
    _note_changes(partition, put, plan)
    _refresh(partition, plan, moved, left)
    out.append(partition.rows_changed())
    if partition.live_versions is not None and len(rows) > len(new_rows):
        out.append(effects.RoomChanged(partition.partition_id))  # a version may have gone
    reply = pb.CommitReply()
    write_ids(reply, partition.samples.ids[plan.slots], runs=request.runs)
    partition.write_fields(reply.fields)
    return reply


def _incoming(partition: Partition, put: validate.Commit, plan: _Plan, *, permitted: bool) -> admission.Incoming:
    versions = None
    if put.versions is not None and partition.live_versions is not None:
        replace = put.ids is None or put.upsert
        written = np.ones(put.rows, dtype=np.bool_) if plan.written is None else plan.written
        versions = admission.versions_after(partition, plan.slots, put.versions[1], written, replace=replace)
    return admission.Incoming(len(plan.new_rows), put.size_bytes, permitted, plan.slots, versions)


def _plan(partition: Partition, put: validate.Commit) -> _Plan:
    if put.ids is not None:
        return _Plan(partition.find(put.ids), None, np.empty(0, dtype=np.int64))
    if put.keys is None:
        return _Plan(np.full(put.rows, -1, dtype=np.int64), None, np.arange(put.rows))
    slots = partition.samples.find_keys(put.keys)
    # A sample that was cleared after the client compared it is put anew: its row is in the block all the same.
    written = None if put.skip is None else ~(put.skip & (slots >= 0))
    exists = slots >= 0
    clashing = np.flatnonzero(exists if written is None else exists & written)
    if len(clashing) and not put.upsert:
        listed = clashing[: wire_limits.ERROR_IDS_MAX]
        raise DuplicateKey(
            f"{partition}: {len(clashing)} of {put.rows} keys exist already, "
            f"the first is {put.keys[int(clashing[0])]!r}; pass upsert=True to replace the fields of those samples",
            rows=listed.tolist(),
            existing_ids=partition.samples.ids[slots[listed]].tolist(),
        )
    return _Plan(slots, written, np.flatnonzero(~exists))


def _check_columns(partition: Partition, put: validate.Commit, plan: _Plan) -> None:
    columns = partition.samples.columns
    added = [name for name in put.fields if name not in columns]
    if len(columns) + len(added) > wire_limits.FIELDS_MAX:
        raise InvalidArgument(f"{partition}: {len(columns) + len(added)} fields, at most {wire_limits.FIELDS_MAX}")
    for name, (form, _) in put.fields.items():
        column = columns.get(name)
        if column is None:
            continue
        join(name, column.form, form)
        if put.ids is not None and not put.upsert:
            clashing = np.flatnonzero(column.block[plan.slots] != 0)
            if len(clashing):
                listed = clashing[: wire_limits.ERROR_IDS_MAX]
                ids = put.ids[listed].tolist()
                raise DuplicateKey(
                    f"{partition}: field {name!r} is written already for {len(clashing)} of {put.rows} samples, "
                    f"the first is {ids[0]}; pass upsert=True to replace it",
                    ids=ids,
                    rows=listed.tolist(),
                    existing_ids=ids,
                )


def _check_extents(state: State, partition: Partition, put: validate.Commit) -> None:
    extents = [extent for block in put.blocks for extent in block.extents]
    for block in put.blocks:
        if len(block.extents) != partition.policy.replicas:
            raise InvalidArgument(
                f"a block with {len(block.extents)} extents, but replicas={partition.policy.replicas}"
            )
    for node_name, arena in dict.fromkeys((extent.node, extent.arena) for extent in extents):
        node = state.nodes.get(node_name)
        if node is not None and node.arena != arena and state.arenas.get(arena) == node_name:
            raise LeaseExpired(
                f"arena {arena:#x} of node {node_name!r} was replaced by another; reserve and write again"
            )
        if node is None or node.arena != arena:
            raise InvalidArgument(
                f"an extent in arena {arena:#x} of node {node_name!r}, which no storage node has attached"
            )
    state.blocks.windows.check(extents)


def _append(state: State, partition: Partition, put: validate.Commit, plan: _Plan) -> None:
    """Makes the new samples, without fields, and fills in their slots in the plan."""
    new_rows = plan.new_rows
    count = len(new_rows)
    if count:
        partition.reserve(count)
        ids = np.arange(state.next_sample, state.next_sample + count, dtype=np.int64)
        state.next_sample += count
        keys = None if put.keys is None else _chosen(put.keys, new_rows)
        slots = partition.samples.append(ids, keys)
        plan.slots[new_rows] = np.arange(slots.start, slots.stop)
        for consumer in partition.everyone():
            consumer.extend(slots.start, slots.stop)


def _describe(
    partition: Partition,
    put: validate.Commit,
    slots: NDArray[np.int64],
    rows: NDArray[np.int64],
    tags: list[bytes] | None,
) -> tuple[Slots, NDArray[np.int64]]:
    """Sets groups, versions and tags. A column that joins existing samples widens their version span.

    Returns:
        The samples that are in another group now, and the indexes of the groups that they left, each once.
    """
    samples = partition.samples
    replace = put.ids is None or put.upsert
    moved = left = np.empty(0, dtype=np.int64)
    if put.groups is not None:
        moved, left = samples.set_groups(slots, _chosen(put.groups, rows))
    if tags is not None:
        samples.set_tags(slots, tags)
    if put.versions is not None:
        low, high = put.versions[:, rows]
        given = low >= 0
        slots, low, high = slots[given], low[given], high[given]
        own_low, own_high = samples.version_min[slots], samples.version_max[slots]
        keep = (own_low >= 0) & (not replace)
        if partition.live_versions is not None:
            partition.live_versions.discard(slots)
        samples.version_min[slots] = np.where(keep, np.minimum(own_low, low), low)
        samples.version_max[slots] = np.where(keep, np.maximum(own_high, high), high)
        if partition.live_versions is not None:
            partition.live_versions.add(slots)
    return moved, left


def _chosen(values: list[T], rows: NDArray[np.int64]) -> list[T]:
    return values if len(rows) == len(values) else [values[row] for row in rows.tolist()]


def _write(state: State, partition: Partition, put: validate.Commit, plan: _Plan, now: float, out: Effects) -> None:
    """Makes the blocks, and points the fields of the written rows to them."""
    samples = partition.samples
    for name, (form, form_bytes) in put.fields.items():
        if name not in samples.columns:
            samples.add_column(name, form, form_bytes)
    rows_of_blocks = np.array([block.rows for block in put.blocks], dtype=np.int64)
    index = plan.of_written(np.repeat(np.arange(len(put.blocks)), rows_of_blocks))
    row_in_block = plan.of_written(spread(np.zeros_like(rows_of_blocks), rows_of_blocks))
    references = np.bincount(index, minlength=len(put.blocks)) * len(put.fields)
    records = [
        BlockRecord(state.next_block + i, partition.partition_id, block.rows, block.extents, block.directory, count)
        for i, (block, count) in enumerate(zip(put.blocks, references.tolist(), strict=True))
    ]
    for record in records:
        state.blocks.add(record)
        partition.size_bytes += record.size_bytes
    block_ids = index.astype(np.uint64) + np.uint64(state.next_block)
    state.next_block += len(records)
    where = plan.where
    _set_lengths(partition, put, where, plan)
    replaced = [samples.write(name, where, block_ids, row_in_block) for name in put.fields]
    out += sealed_effects(records)
    emptied = state.blocks.drop_references(np.concatenate(replaced))
    # A block of which every row was skipped is sealed and freed in one go.
    emptied += [record for record in records if record.references == 0]
    if emptied:
        state.emptied(emptied, now, out)
        out.append(effects.RoomChanged(partition.partition_id))


def _set_lengths(partition: Partition, put: validate.Commit, slots: Slots | slice, plan: _Plan) -> None:
    samples = partition.samples
    for field, (form, _) in put.fields.items():
        dense = dict(forms.dense_lengths(field, form))
        for path in forms.ragged_paths(field, samples.columns[field].form):
            if path in put.lengths:
                samples.set_lengths(path, slots, plan.of_written(put.lengths[path]))
            elif path in dense:  # rows of one tensor joined a jagged column
                samples.set_lengths(path, slots, dense[path])
            elif path in samples.lengths:
                samples.set_lengths(path, slots, LENGTH_UNKNOWN)


def _note_changes(partition: Partition, put: validate.Commit, plan: _Plan) -> None:
    replaced = np.ones(put.rows, dtype=np.bool_) if plan.written is None else plan.written.copy()
    replaced[plan.new_rows] = False
    for added, slots in ((True, plan.slots[plan.new_rows]), (False, plan.slots[replaced])):
        if len(slots):
            partition.changes.add(*changes.written(partition.samples, slots, put.fields, added=added))


def _refresh(partition: Partition, plan: _Plan, moved: Slots, left: NDArray[np.int64]) -> None:
    """Brings consumers up to date; `moved` and `left` as `_describe` returned them."""
    where = plan.where
    existed = partition.samples.size - len(plan.new_rows)
    regrouped = bool((moved < existed).any())
    for consumer in partition.everyone():
        if regrouped:
            consumer.forget_groups()
        consumer.refresh(where)
    if len(moved):
        partition.drop_late(moved)
    partition.apply_staleness(plan.of_written(plan.slots), left)
    if regrouped:
        partition.compact_groups()
