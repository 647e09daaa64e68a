"""First looks at all samples of a partition by tags: a second for a million, so they are taken in steps beforehand."""

from __future__ import annotations

from collections.abc import Iterator

from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import tags
from tqserver.controller.core.samplers import sampler_of
from tqserver.controller.core.state import State


def steps(state: State, request: pb.ClaimRequest | pb.ClearRequest) -> Iterator[None]:
    """Takes the first look that a request would take, by and by; what it would find is known already, as a rule.

    It ends, whatever becomes of the partition: a request that comes before its time takes the rest of the look itself.

    Args:
        state: of the controller; it may change between two steps. Nothing durable is touched.
        request: that was checked.

    Yields:
        After some milliseconds each.
    """
    found = state.partitions.get(request.partition_id)
    if found is None or not found.samples.tagged:
        return
    if isinstance(request, pb.ClaimRequest):
        sampler, params = sampler_of(request)
        where, numbers = request.where, sampler.ranked_by(params)
    else:
        where, numbers = request.tags, None
    if not where and numbers is None:
        return
    values = tags.TagFilter(where, False).plain
    for _ in range(0, found.samples.size, tags.CHUNK_ROWS):
        found = state.partitions.get(request.partition_id)
        if found is None or not found.samples.prepare(values, numbers):
            return
        yield
