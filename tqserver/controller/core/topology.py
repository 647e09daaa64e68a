"""What a rank's registration must be by itself, whoever else is registered."""

from __future__ import annotations

import math

from tqclient import limits
from tqclient.errors import InvalidArgument, TopologyMismatch
from tqclient.wire.v1 import controller_pb2


def check_topology(value: controller_pb2.Topology) -> None:
    """Checks a rank's place against the sizes that it says.

    Raises:
        InvalidArgument: a size is 0.
        TopologyMismatch: the sizes contradict each other, or the world.
    """
    sizes = {name: getattr(value, name) for name in ("dp", "tp", "pp", "cp", "ep", "members")}
    ranks = math.prod((value.dp, value.tp, value.pp, value.cp))
    if not all(1 <= size <= limits.RANKS_MAX for size in (*sizes.values(), ranks)):
        raise InvalidArgument(f"topology: sizes from 1 to {limits.RANKS_MAX}, and no more ranks in all, not {sizes}")
    rank = f"rank {value.world_rank} (DP rank {value.dp_rank}, member {value.member})"
    members, stage = value.tp * value.pp * value.cp, value.dp * value.tp * value.cp
    world = value.dp * members
    if value.members != members:
        raise TopologyMismatch(
            f"{rank}: tp × pp × cp is {members}, but a DP rank is said to have {value.members} members"
        )
    if value.dp_rank >= value.dp or value.member >= members or value.world_rank >= world:
        raise TopologyMismatch(f"{rank} lies outside dp={value.dp} × {members} members")
    if value.world_size and value.world_size != world:
        in_effect = math.gcd(value.ep, max(value.world_size // value.pp, 1))
        raise TopologyMismatch(
            f"{rank}: dp={value.dp} × tp={value.tp} × pp={value.pp} × cp={value.cp} is {world} ranks, but its "
            f"process belongs to a world of {value.world_size}; ep={value.ep} was asked for, and at most "
            f"ep={in_effect} is in effect"
        )
    if stage % value.ep:
        raise TopologyMismatch(
            f"{rank}: ep={value.ep} was asked for, but a pipeline stage has {stage} ranks, no multiple of it: "
            f"at most ep={math.gcd(value.ep, stage)} is in effect"
        )
