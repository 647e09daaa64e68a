"""Shares: what every member of one DP rank is given alike, each by its own claim, and settles together.

The ranks of a consumer stand in a `RankGroup`, one `Replica` for each DP rank. A replica's shares are numbered by step
and stay its own until they are consumed, given up, or dissolved. A released share is not delivered by itself again: all
that the replica has not consumed starts over, in order, so that its members never differ in what they saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import TopologyMismatch
from tqclient.wire.v1 import controller_pb2 as pb

ORPHAN_LEASES: Final = 10
"""A DP rank without a live member for so many leases gives its shares back, and is not waited for."""


class Sizes(NamedTuple):
    """What all ranks of a consumer must agree on; as in `Topology`."""

    dp: int
    tp: int
    pp: int
    cp: int
    ep: int
    members: int
    leader_acks: bool

    @classmethod
    def of(cls, topology: pb.Topology) -> Sizes:
        """Reads them off a rank's registration."""
        return cls(
            *(topology.dp, topology.tp, topology.pp, topology.cp, topology.ep, topology.members),
            topology.leader_acks,
        )

    def __str__(self) -> str:
        acks = ", leader_acks" if self.leader_acks else ""
        return f"dp={self.dp}, tp={self.tp}, pp={self.pp}, cp={self.cp}, ep={self.ep}{acks}"


@dataclass(slots=True)
class Share:
    """Rows of one DP rank for one step.

    Attributes:
        step: within the DP rank, from 0.
        ids: int64 [rows], in delivery order; some may have been cleared since.
        spec: what was asked for; every member asks alike.
        fields: that are delivered, in the order in which they were first asked for.
        rows: a serialized `Rows` while it is being delivered: the same for every member, whatever is cleared meanwhile.
        blocks: that the delivery covers, each once.
        claims: member → its live claim.
        done: members that acked the delivery.
        consumed: it is settled, and kept for the members that have not had it yet.
    """

    step: int
    ids: NDArray[np.int64]
    spec: bytes
    fields: tuple[str, ...] = ()
    rows: bytes = b""
    blocks: list[int] = field(default_factory=list)
    claims: dict[int, int] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)
    consumed: bool = False


@dataclass(slots=True)
class Replica:
    """One DP rank.

    Attributes:
        next_step: of the share that comes next.
        shares: step → share, ascending.
        positions: member that is live → the step that it has not been given yet.
        seen: members that ever registered; a consumed share is kept for the others, who are still on their way.
        gone: it gave its shares back for want of members: global batches are divided without it until one registers.
    """

    next_step: int = 0
    shares: dict[int, Share] = field(default_factory=dict)
    positions: dict[int, int] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    gone: bool = False

    def unsettled(self) -> list[Share]:
        """Returns the shares that are not consumed, ascending by step."""
        return [share for share in self.shares.values() if not share.consumed]

    def oldest(self) -> int:
        """Returns the step of the oldest share that is not consumed, or of the one that comes next."""
        return min((share.step for share in self.unsettled()), default=self.next_step)

    def start_of(self, member: int) -> int:
        """Returns the step that a member begins with that comes now: what it missed, if it comes for the first time."""
        return self.oldest() if member in self.seen else 0

    def next_of(self, member: int) -> Share | None:
        """Returns the share that a member is given next; None: it has yet to be made."""
        position = self.positions.get(member, self.start_of(member))
        shares = (share for step, share in self.shares.items() if step >= position)
        # One that is consumed does not start over with the others: who has it, or had it, is not given it again.
        had = (share for share in shares if not share.consumed or member not in share.done | share.claims.keys())
        return next(had, None)

    def had_by_all(self, share: Share, members: int) -> bool:
        """Whether every member, but those that died, had a share and settled it."""
        if share.claims:
            return False
        waiting = (member for member, position in self.positions.items() if position <= share.step)
        return share.done.issuperset(waiting) and self.seen.issuperset(range(members))


@dataclass(slots=True)
class RankGroup:
    """All ranks of one consumer.

    Attributes:
        sizes: of the topology.
        holders: (dp_rank, member) → (live session, world rank).
        replicas: dp_rank → replica, for those that were ever asked for or planned for.
        complete: no rank came or went for long: nobody waits for DP ranks without a live member.
    """

    sizes: Sizes
    holders: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    replicas: dict[int, Replica] = field(default_factory=dict)
    complete: bool = False

    def replica(self, dp_rank: int) -> Replica:
        """Returns a DP rank, made on first use."""
        return self.replicas.setdefault(dp_rank, Replica())

    def shares(self) -> list[Share]:
        """Returns the shares of all DP ranks."""
        return [share for replica in self.replicas.values() for share in replica.shares.values()]

    def active(self, asking: int) -> NDArray[np.int64]:
        """Returns the DP ranks that a global batch is divided over, ascending, with the one that asks: int64 [n].

        While no rank lives that is all of them: the one that asks is the first of a job that comes back.
        """
        is_active = np.ones(self.sizes.dp, dtype=np.bool_)
        is_active[[dp_rank for dp_rank, replica in self.replicas.items() if replica.gone and self.holders]] = False
        is_active[asking] = True
        return np.flatnonzero(is_active)

    def live(self, asking: int) -> NDArray[np.int64]:
        """Returns the DP ranks that have a live member, ascending, with the one that asks: int64 [n]."""
        live = {dp_rank for dp_rank, replica in self.replicas.items() if replica.positions}
        return np.array(sorted(live | {asking}))

    def check(self, topology: pb.Topology, session: int) -> None:
        """Raises TopologyMismatch when a rank does not fit those that are registered and live."""
        sizes = Sizes.of(topology)
        if not self.holders:
            return
        if sizes != self.sizes:
            live = ", ".join(str(rank) for _, rank in sorted(self.holders.values(), key=lambda held: held[1])[:8])
            raise TopologyMismatch(
                f"rank {topology.world_rank} registers with {sizes}, but {len(self.holders)} live ranks ({live}) "
                f"are registered with {self.sizes}"
            )
        holder = self.holders.get((topology.dp_rank, topology.member))
        if holder is not None and holder[0] != session:
            raise TopologyMismatch(
                f"rank {topology.world_rank} claims member {topology.member} of DP rank {topology.dp_rank}, "
                f"which live rank {holder[1]} (session {holder[0]}) holds"
            )

    def hold(self, topology: pb.Topology, session: int) -> None:
        """A rank takes its place; `check` has passed."""
        place = (topology.dp_rank, topology.member)
        replica = self.replica(topology.dp_rank)
        replica.gone = False
        if not self.holders:  # the first of a job that comes back: the others are as likely to come as at the start
            for each in self.replicas.values():
                each.gone = False
        if place in self.holders:
            return
        self.holders[place] = (session, topology.world_rank)
        self.complete = False
        replica.positions[topology.member] = replica.start_of(topology.member)
        if topology.member in replica.seen:  # in place of one that died: it has had none, and is given no consumed one
            for share in replica.shares.values():
                (share.done.add if share.consumed else share.done.discard)(topology.member)
        replica.seen.add(topology.member)

    def vacate(self, session: int) -> list[int]:
        """A session ended: its places are free. Returns the DP ranks that lost a member."""
        places = [place for place, (holder, _) in self.holders.items() if holder == session]
        for dp_rank, member in places:
            del self.holders[dp_rank, member]
            del self.replicas[dp_rank].positions[member]
            self.complete = False
        return list(dict.fromkeys(dp_rank for dp_rank, _ in places))
