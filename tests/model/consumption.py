"""What consumers were promised: a ledger of what they were given and what they acked. Shares no code with the core."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.model.driver import claim_request
from tests.model.histories import promise
from tqclient.wire.v1 import controller_pb2 as pb

ATTEMPTS_MAX = 2
Place = tuple[int, int]
"""(dp_rank, member)."""


@dataclass
class Kind:
    """How one consumer consumes; ranks are dp × members, and 0 × 0 is none."""

    batch: int
    sampler: str = ""
    params: dict[str, Any] = field(default_factory=dict)
    where: dict[str, Any] | None = None
    max_tokens: int = 0
    group: int = 0
    dp: int = 0
    members: int = 0
    leader_acks: bool = False

    def request(self, partition: int, consumer: str, place: Place | None) -> pb.ClaimRequest:
        """A claim of a consumer, or of one of its ranks."""
        request = claim_request(
            partition, self.batch, consumer=consumer, sampler=self.sampler, params=self.params, where=self.where
        )
        if self.max_tokens:
            request.max_tokens, request.token_field = self.max_tokens, "a"
        if place is not None:
            sizes = pb.Topology(dp=self.dp, tp=self.members, pp=1, cp=1, ep=1, members=self.members)
            sizes.leader_acks = self.leader_acks
            sizes.dp_rank, sizes.member = place
            request.topology.CopyFrom(sizes)
        return request


KINDS = {
    "fifo": Kind(2),
    "lifo": Kind(3, "lifo"),
    "random": Kind(2, "random", {"seed": 3}),
    "prioritized": Kind(2, "prioritized", {"tag": "w"}),
    "tokens": Kind(0, max_tokens=9),
    "finished": Kind(1, where={"w": 1}),
    "groups": Kind(4, "group", {"size": 2}, group=2),
    "ranks": Kind(2, dp=2, members=2),
    "led": Kind(1, dp=1, members=2, leader_acks=True),
    "grouped_ranks": Kind(2, "group", {"size": 2}, group=2, dp=2, members=2),
    "balanced": Kind(1, "seqlen_balanced", {"field": "a"}, dp=2, members=2),
    "balanced_groups": Kind(2, "seqlen_balanced", {"field": "a", "groups": 2}, group=2, dp=2, members=2),
}
PLAIN = [name for name, kind in KINDS.items() if not kind.dp]
RANKED = [name for name, kind in KINDS.items() if kind.dp]
GROUPED = [name for name, kind in KINDS.items() if kind.group]


@dataclass
class Held:
    """A claim that was granted and, as far as its holder knows, lives."""

    claim: int
    session: int
    ids: list[int]
    place: Place | None = None
    step: int = 0


class Ledger:
    """Deliveries to one consumer; each check is named after the promise that it holds the core to."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.acked: dict[int, tuple[int, int] | None] = {}  # id → (dp_rank, step) of the share that it was in
        self.held: dict[int, Held] = {}
        self.acks: dict[tuple[int, int], set[int]] = {}  # (dp_rank, step) → members that acked this delivery
        self.settled: set[tuple[int, int, int]] = set()  # (dp_rank, step, member)
        self.deliveries: dict[tuple[int, int], tuple[bytes, list[int]]] = {}  # (dp_rank, step) → attempts, ids
        self.last: dict[Place, int] = {}
        self.sessions: dict[Place, int] = {}
        self.granted: dict[str, set[int]] = {}  # group → those that it was first delivered with

    def delivered(self, held: Held, attempts: bytes, groups: dict[int, str], gone: set[int], too_old: set[int]) -> None:
        if held.place is not None and self.sessions.setdefault(held.place, held.session) != held.session:
            self._replaced(held.place)
            self.sessions[held.place] = held.session
        self.no_sample_comes_again_after_its_ack(held)
        self.no_sample_is_delivered_too_often(held, attempts)
        if self.kind.group:
            self.groups_are_never_split(held, groups, gone)
            self.a_stale_member_takes_its_group_with_it(held, groups, too_old)
        if held.place is not None:
            self.members_of_a_dp_rank_see_the_same(held, attempts)
        self.held[held.claim] = held

    @promise
    def no_sample_comes_again_after_its_ack(self, held: Held) -> None:
        again = [i for i in held.ids if i in self.acked]
        if again and self.kind.leader_acks and held.place is not None:
            dp_rank, member = held.place
            first_time = (dp_rank, held.step, member) not in self.settled
            again = [i for i in again if not (first_time and self.acked[i] == (dp_rank, held.step))]
        assert not again, f"delivered after their ack: {again}"

    @promise
    def no_sample_is_delivered_too_often(self, held: Held, attempts: bytes) -> None:
        often = [i for i, each in zip(held.ids, np.frombuffer(attempts, "<u4"), strict=True) if each > ATTEMPTS_MAX]
        assert not often, f"delivered more than {ATTEMPTS_MAX} times: {often}"

    @promise
    def groups_are_never_split(self, held: Held, groups: dict[int, str], gone: set[int]) -> None:
        counts = Counter(groups[i] for i in held.ids)
        for group, count in counts.items():
            lost = sum(groups[i] == group for i in gone) if held.place is not None else 0
            whole = self.kind.group - lost <= count <= self.kind.group
            assert group, "samples of no group were delivered as one"
            assert whole, f"{count} members of group {group!r} were delivered"
            late = {i for i in held.ids if groups[i] == group} - self.granted.get(group, set(held.ids))
            assert not late, f"{late} were delivered after their group {group!r}"

    @promise
    def a_stale_member_takes_its_group_with_it(self, held: Held, groups: dict[int, str], too_old: set[int]) -> None:
        new = {groups[i] for i in held.ids} - self.granted.keys()
        broken = new & {groups[i] for i in too_old}
        # What a DP rank is given may have been chosen for it before the version rose.
        assert not (broken and self.granted and held.place is None), f"groups with a stale member: {broken}"
        self.granted |= {group: {i for i in held.ids if groups[i] == group} for group in new}

    @promise
    def members_of_a_dp_rank_see_the_same(self, held: Held, attempts: bytes) -> None:
        assert held.place is not None
        dp_rank, _ = held.place
        known = self.deliveries.setdefault((dp_rank, held.step), (attempts, held.ids))
        assert known == (attempts, held.ids), f"step {held.step} of DP rank {dp_rank}: {held.ids} after {known[1]}"
        assert held.step > self.last.get(held.place, -1), "a member goes back although nothing was released"
        done, last = set(self.acked.values()), self.last.get(held.place, -1)
        skipped = [s for r, s in self.deliveries if r == dp_rank and last < s < held.step and (r, s) not in done]
        assert not skipped, f"member {held.place[1]} of DP rank {dp_rank} is given step {held.step} before {skipped}"
        self.last[held.place] = held.step

    def acknowledged(self, claim: int) -> None:
        held = self.held.pop(claim)
        if held.place is None:
            self._consumed(held.ids, None)
            return
        (dp_rank, member), share = held.place, (held.place[0], held.step)
        self.settled.add((dp_rank, held.step, member))
        acks = self.acks.setdefault(share, set())
        was_settled = share in self.acked.values()
        acks.add(member)
        if not was_settled and (len(acks) == self.kind.members or (self.kind.leader_acks and 0 in acks)):
            self._consumed(held.ids, share)

    @promise
    def acked_once(self, ids: list[int]) -> None:
        twice = [i for i in ids if i in self.acked]
        assert not twice, f"acked twice: {twice}"

    def _consumed(self, ids: list[int], share: tuple[int, int] | None) -> None:
        self.acked_once(ids)
        self.acked.update(dict.fromkeys(ids, share))

    def released(self, claim: int) -> None:
        """A claim ended otherwise: with a share, all that its DP rank has not consumed starts over."""
        held = self.held.pop(claim)
        if held.place is None:
            return
        dp_rank, member = held.place
        share = (dp_rank, held.step)
        if share in self.acked.values():
            self.settled.add((dp_rank, held.step, member))
        else:
            self.start_over(dp_rank)

    def start_over(self, dp_rank: int) -> None:
        done = set(self.acked.values())
        for claim in [c for c, h in self.held.items() if h.place and h.place[0] == dp_rank]:
            if (dp_rank, self.held[claim].step) not in done:
                del self.held[claim]
        for share in [share for share in self.acks if share[0] == dp_rank and share not in done]:
            del self.acks[share]
        self.settled -= {end for end in self.settled if end[0] == dp_rank and end[:2] not in done}
        for share in [share for share in self.deliveries if share[0] == dp_rank and share not in done]:
            del self.deliveries[share]
        for place in [place for place in self.last if place[0] == dp_rank]:
            del self.last[place]

    def _replaced(self, place: Place) -> None:
        """Another session has the place of one that ended: it acks for itself what is not consumed."""
        done = set(self.acked.values())
        for share, members in self.acks.items():
            if share[0] == place[0] and share not in done:
                members.discard(place[1])
                self.settled.discard((*share, place[1]))
        self.last.pop(place, None)

    def reset(self) -> None:
        self.acked.clear()
        self.held.clear()
        self.acks.clear()
        self.last.clear()
        self.deliveries.clear()
        self.settled.clear()
        self.granted.clear()
