"""Commands on samples that exist: clear and tags."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tqclient.wire.packing import I64, pack_array
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import changes, effects, ranks, validate
from tqserver.controller.core.arrays import distinct
from tqserver.controller.core.samples import SampleTable
from tqserver.controller.core.state import Effects, State


def clear(state: State, request: pb.ClearRequest, now: float, out: Effects) -> pb.ClearReply:
    """Applies a ClearRequest."""
    validate.clear(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    slots = _select(partition.samples, request)
    if not len(slots):
        return pb.ClearReply()
    ids = partition.samples.ids[slots]
    state.emptied(state.blocks.drop_references(partition.remove(slots)), now, out)
    for consumer in partition.consumers.values():
        ranks.forget(partition, consumer)
    out += (effects.RoomChanged(partition.partition_id), partition.rows_changed())
    return pb.ClearReply(ids=pack_array(ids, I64))


def _select(samples: SampleTable, request: pb.ClearRequest) -> NDArray[np.int64]:
    """Returns the slots that a request selects, each once, ascending."""
    if request.HasField("keys"):
        slots = samples.find_keys(validate.sample_keys(request.keys))
    elif request.HasField("groups"):
        return samples.in_groups(validate.group_values(request.groups))
    elif request.tags:
        return samples.with_tags(request.tags)
    elif request.HasField("prefix"):
        return samples.with_prefix(request.prefix)
    else:
        slots = samples.find(validate.sample_ids(request.ids))
    return distinct(slots[slots >= 0])


def set_tags(state: State, request: pb.SetTagsRequest, now: float, out: Effects) -> pb.SetTagsReply:
    """Applies a SetTagsRequest."""
    ids, tags = validate.set_tags(request)
    state.session_of(request.mutation)
    partition = state.partition(request.partition_id)
    slots = partition.find(ids)
    partition.samples.set_tags(slots, partition.samples.merged_tags(slots, tags, np.arange(len(slots))))
    partition.changes.add(*changes.tagged(partition.samples, slots))
    for consumer in partition.everyone():
        consumer.refresh(slots)
        partition.drop_broken_groups(consumer, slots)
    out.append(partition.rows_changed())
    return pb.SetTagsReply()
