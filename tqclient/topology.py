"""Where a process stands in a training job, and how GPUs make engines that have the expert parallelism asked for.

Ranks are numbered as Megatron-LM does it by default (`tp-cp-ep-dp-pp`): tensor parallelism varies fastest, then
context, data, and pipeline parallelism; expert parallelism lies within the data-parallel ranks and has no numbers of
its own.

    rank = tp_rank + tp × (cp_rank + cp × (dp_rank + dp × pp_rank))

A launcher with another order gives `coordinates`, and `rank` too if its messages should name that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tqclient import limits
from tqclient.arguments import flag, mapping_of
from tqclient.errors import InvalidArgument, TopologyMismatch
from tqclient.wire.v1 import controller_pb2

EP_TRIED_MAX: Final = 1024
"""Expert-parallel sizes that the message of a plan which cannot be had tries out."""
_AXES: Final = ("tp", "cp", "dp", "pp")  # the fastest first


def _size(value: object, what: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= limits.RANKS_MAX:
        raise InvalidArgument(f"{what}={value!r:.80}: expected an int from {least} to {limits.RANKS_MAX}")
    return value


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's place among `dp × tp × pp × cp` ranks.

    All tensor-, pipeline- and context-parallel ranks of one DP rank are its *members*. Each claims by itself, and all
    of them are given the same rows in the same order.

    Attributes:
        dp: data-parallel size.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        cp: context-parallel size.
        ep: expert-parallel size; the `dp × tp × cp` ranks of a pipeline stage are a multiple of it.
        rank: of this process; may be left out with `coordinates`, or where there is one rank only.
        coordinates: `{"dp": 1, "tp": 0, ...}`, for ranks in another order; an axis of size 1 may be left out.
        leader_acks: the ack of the leader (tp, pp and cp rank 0) consumes a batch, rather than those of all members.
        world_size: of the collective that this process really belongs to: `torch.distributed.get_world_size()`. With
            it, a launcher that started several small worlds instead of one is found out; None is not checked.

    Raises:
        InvalidArgument: a size, rank or coordinate is no number within its bounds.
        TopologyMismatch: the sizes contradict each other or the world; says which.
    """

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    rank: int | None = None
    coordinates: Mapping[str, int] | None = field(default=None, hash=False)
    leader_acks: bool = False
    world_size: int | None = None

    def __post_init__(self) -> None:
        for name in (*_AXES, "ep"):
            _size(getattr(self, name), f"Topology: {name}")
        _size(self.size, "Topology: dp × tp × pp × cp")
        flag(self.leader_acks, what="Topology: leader_acks")
        self._check_world()
        if self.stage_size % self.ep:
            raise TopologyMismatch(
                f"ep={self.ep} was asked for, but the dp={self.dp} × tp={self.tp} × cp={self.cp} ranks of a pipeline "
                f"stage are {self.stage_size}, no multiple of it: "
                f"at most ep={math.gcd(self.ep, self.stage_size)} is in effect"
            )
        self._check_place()

    def _check_world(self) -> None:
        if self.world_size is None or _size(self.world_size, "Topology: world_size") == self.size:
            return
        in_effect = math.gcd(self.ep, max(self.world_size // self.pp, 1))
        raise TopologyMismatch(
            f"dp={self.dp} × tp={self.tp} × pp={self.pp} × cp={self.cp} is {self.size} ranks, but this process belongs "
            f"to a world of {self.world_size}; ep={self.ep} was asked for, and at most ep={in_effect} is in effect"
        )

    def _check_place(self) -> None:
        if self.rank is None and self.coordinates is None and self.size > 1:
            raise InvalidArgument(f"Topology of {self.size} ranks: give the rank of this process, or its coordinates")
        if self.rank is not None and _size(self.rank, "Topology: rank", 0) >= self.size:
            raise TopologyMismatch(f"rank {self.rank} lies outside the {self.size} ranks of {self._sizes()}")
        given = {} if self.coordinates is None else mapping_of(self.coordinates, what="Topology: coordinates")
        unknown = sorted(map(str, given.keys() - set(_AXES)))
        if unknown:
            raise InvalidArgument(f"Topology: coordinates are named {', '.join(_AXES)}, not {', '.join(unknown)}")
        for axis in _AXES if self.coordinates is not None else ():
            size = getattr(self, axis)
            if axis not in given and size > 1:
                raise InvalidArgument(f"Topology: coordinates lack {axis!r}, whose size is {size}")
            if _size(given.get(axis, 0), f"Topology: coordinates[{axis!r}]", 0) >= size:
                raise TopologyMismatch(f"coordinates[{axis!r}]={given[axis]} lies outside {axis}={size}")

    def coordinate(self, axis: str) -> int:
        """Returns this rank's number along `tp`, `cp`, `dp` or `pp`."""
        if self.coordinates is not None:
            return self.coordinates.get(axis, 0)
        rest = self.rank or 0
        for slower in _AXES[: _AXES.index(axis)]:
            rest //= int(getattr(self, slower))
        return rest % int(getattr(self, axis))

    @property
    def world_rank(self) -> int:
        """Number among all ranks: the one that was given, or the one that belongs to the coordinates."""
        if self.rank is not None:
            return self.rank
        rank = 0
        for axis in reversed(_AXES):
            rank = rank * int(getattr(self, axis)) + self.coordinate(axis)
        return rank

    def _sizes(self) -> str:
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}, cp={self.cp}, ep={self.ep}"

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.dp * self.members

    @property
    def members(self) -> int:
        """Ranks of one DP rank."""
        return self.tp * self.pp * self.cp

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage, among which experts are divided."""
        return self.dp * self.tp * self.cp

    @property
    def dp_rank(self) -> int:
        """Which batch this rank gets."""
        return self.coordinate("dp")

    @property
    def member(self) -> int:
        """Number within the DP rank; 0 is the leader."""
        return self.coordinate("tp") + self.tp * (self.coordinate("cp") + self.cp * self.coordinate("pp"))

    def to_wire(self) -> controller_pb2.Topology:
        """Returns the place as a registration carries it."""
        return controller_pb2.Topology(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            ep=self.ep,
            dp_rank=self.dp_rank,
            member=self.member,
            members=self.members,
            leader_acks=self.leader_acks,
            world_rank=self.world_rank,
            world_size=self.world_size or 0,
        )

    def __str__(self) -> str:
        return f"rank {self.world_rank} (DP rank {self.dp_rank}, member {self.member}) of {self._sizes()}"


class Device(NamedTuple):
    """One GPU.

    Attributes:
        node: number of its host.
        gpu: within the host, as `CUDA_VISIBLE_DEVICES` counts.
    """

    node: int
    gpu: int


@dataclass(frozen=True, slots=True)
class EngineReplica:
    """One engine: a collective of its own.

    Attributes:
        index: among the replicas.
        devices: one per rank.
        dp, tp, pp, ep: sizes within the replica; `dp × tp × pp` is the number of its ranks.
    """

    index: int
    devices: tuple[Device, ...]
    dp: int
    tp: int
    pp: int
    ep: int

    @property
    def world_size(self) -> int:
        """Ranks of its collective."""
        return len(self.devices)

    @property
    def ranks(self) -> range:
        """Ranks within its collective; rank i runs on `devices[i]`."""
        return range(len(self.devices))

    @property
    def node(self) -> int:
        """The host of its rank 0, where its collective meets."""
        return self.devices[0].node

    @property
    def nodes(self) -> tuple[int, ...]:
        """All its hosts."""
        return tuple(dict.fromkeys(device.node for device in self.devices))

    def topology(self, rank: int) -> Topology:
        """Returns the place of one of its ranks, with the world that it must find itself in."""
        return Topology(dp=self.dp, tp=self.tp, pp=self.pp, ep=self.ep, rank=rank, world_size=self.world_size)


def plan_replicas(
    gpus_per_node: int, nodes: int, tp: int = 1, pp: int = 1, ep: int = 1, independent: bool = True
) -> list[EngineReplica]:
    """Divides GPUs among engines that really have the parallelism asked for.

    Experts are divided within one collective, among the ranks of a pipeline stage: `ep` takes `lcm(tp, ep)` of them,
    which are `lcm(tp, ep) / tp` data-parallel ranks inside of each engine. Eight engines of one rank each have ep=1,
    whatever their configuration says.

    Args:
        gpus_per_node: of each host.
        nodes: hosts.
        tp: tensor-parallel size; one TP group never spans hosts.
        pp: pipeline-parallel size.
        ep: expert-parallel size.
        independent: as many engines as there are, each the smallest that has `ep`, sharing no collective. False: one
            engine over all GPUs, in one collective.

    Returns:
        The replicas, which together use every GPU.

    Raises:
        InvalidArgument: a size is no number above 0.
        TopologyMismatch: no division gives this; says why, and which `ep` could be had.
    """
    sizes = {"gpus_per_node": gpus_per_node, "nodes": nodes, "tp": tp, "pp": pp, "ep": ep}
    for name, value in sizes.items():
        _size(value, f"plan_replicas: {name}")
    flag(independent, what="plan_replicas: independent")
    total = gpus_per_node * nodes
    why = _obstacle(gpus_per_node, nodes, tp, pp, ep, independent)
    if why is not None:
        able = [
            each
            for each in range(1, min(total, EP_TRIED_MAX) + 1)
            if _obstacle(gpus_per_node, nodes, tp, pp, each, independent) is None
        ]
        remedy = f"ep could be {', '.join(map(str, able))}" if able else f"no ep can be had with tp={tp}, pp={pp}"
        raise TopologyMismatch(f"{nodes} × {gpus_per_node} GPUs, tp={tp}, pp={pp}, ep={ep}: {why}; {remedy}")
    world = math.lcm(tp, ep) * pp if independent else total
    devices = [Device(node, gpu) for node in range(nodes) for gpu in range(gpus_per_node)]
    return [
        EngineReplica(start // world, tuple(devices[start : start + world]), world // (tp * pp), tp, pp, ep)
        for start in range(0, total, world)
    ]


def _obstacle(gpus_per_node: int, nodes: int, tp: int, pp: int, ep: int, independent: bool) -> str | None:
    """Returns why the GPUs cannot be divided so; None: they can."""
    total = gpus_per_node * nodes
    if gpus_per_node % tp:
        return f"the {gpus_per_node} GPUs of a node are no multiple of tp, so that a TP group would span nodes"
    if not independent:
        if total % (tp * pp):
            return f"{total} GPUs are no multiple of tp × pp = {tp * pp}"
        stage = total // pp
        return f"a pipeline stage has {stage} ranks, no multiple of ep" if stage % ep else None
    stage = math.lcm(tp, ep)
    world = stage * pp
    engine = f"an engine needs {world} GPUs (a pipeline stage of lcm(tp, ep) = {stage} ranks, × pp)"
    if world > total:
        return f"{engine}, and there are {total}"
    if world <= gpus_per_node:
        return (
            f"{engine}, and {gpus_per_node % world} of each node's would be left over"
            if gpus_per_node % world
            else None
        )
    if world % gpus_per_node:
        return f"{engine}, which is more than a node has, and not whole nodes"
    span = world // gpus_per_node
    return f"{engine}, which are {span} nodes, and {nodes} nodes are no multiple of that" if nodes % span else None
