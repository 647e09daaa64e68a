"""Retirement: a partition that every consumer named at its creation is done with gives its bytes back."""

from __future__ import annotations

from tqclient.errors import Sealed
from tqserver.controller.core import effects, ranks
from tqserver.controller.core.consumer import DEAD, LEASED, OPEN
from tqserver.controller.core.partition import Partition, partition_changed
from tqserver.controller.core.state import Effects, State


def is_done(partition: Partition) -> bool:
    """Whether nothing will be asked of the samples any more. A dead one can be requeued, so it keeps them."""
    policy = partition.policy
    may_go = policy.HasField("keep") and not policy.keep  # one that says nothing is older than retirement
    if not partition.sealed or partition.accepts_any or not may_go or partition.retired:
        return False
    left = (consumer.counts[[OPEN, LEASED, DEAD]].any() for consumer in partition.consumers.values())
    return not any(left)


def retire(state: State, partition: Partition, now: float, out: Effects) -> None:
    """Removes the samples of a partition that is done; its description stays, with the last counts, and no more."""
    final = partition.describe()
    final.retired = True
    final.bytes = 0
    blocks = partition.remove(partition.samples.slots())
    state.emptied(state.blocks.drop_references(blocks), now, out)
    for consumer in partition.consumers.values():
        ranks.forget(partition, consumer)
    partition.final = final
    partition.give_up_room()
    partition.changes.add(partition_changed(partition))
    out += (effects.RoomChanged(partition.partition_id), effects.ReadinessChanged(partition.partition_id))


def check_not_retired(partition: Partition) -> None:
    """Raises Sealed when the samples went with the partition's retirement."""
    if partition.retired:
        raise Sealed(
            f"{partition} is retired: every consumer was done with it, and its samples are gone; "
            "create_partition(..., keep=True) keeps them"
        )
