"""Ranks that wait: as few turns as there are shares to make, each member in its order, and nothing promised twice."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import msgpack
import pytest

from tests.model.driver import Driver, claim_request, client_id, ids, unpack
from tests.unit.controller.lines_bench import Bench
from tests.unit.controller_core.test_shares import place
from tqclient.errors import ClaimTimeout, TQError
from tqclient.schema import Form
from tqclient.wire.packing import pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Outcome, ReadinessChanged, SessionEnded
from tqserver.controller.lines import Waiter
from tqserver.controller.waiters import Waiters

DP, TP = 8, 4
RAGGED = Form("ragged", "torch", "int64", ()).to_bytes()


class Ranks:
    """Waiters over a core, whose grants take effect a turn later, all at once, as those of one append do."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.waiters = Waiters(self.driver.core, lambda seconds, callback: lambda: None)
        self.session = self.driver.open()
        self.p = self.driver.partition(self.session)
        self.granted: list[Waiter] = []
        self.replies: dict[tuple[int, int], list[Any]] = {}
        self.void = 0

    def wait(self, dp_rank: int, member: int, batch: int, **options: Any) -> None:
        request = claim_request(self.p, batch, topology=place(dp_rank, member, dp=DP, tp=TP), **options)
        request.mutation.session, request.mutation.client_id = self.session, client_id(1)
        waiter = Waiter(request, lambda: self.granted.append(waiter), self._refuse)
        self.waiters.wait(waiter, 10)

    @staticmethod
    def _refuse(error: TQError) -> None:
        raise error

    def put(self, rows: int, **options: Any) -> None:
        self.heed(self.driver.send("commit", self.driver.commit(self.p, rows, **options), session=self.session))
        self.waiters.serve()

    def heed(self, outcome: Outcome) -> None:
        """Passes on what a command changed for those who wait."""
        for effect in outcome.effects:
            if isinstance(effect, ReadinessChanged):
                self.waiters.readiness_changed(effect.partition_id, by_count=effect.by_count)
            elif isinstance(effect, SessionEnded):
                self.waiters.session_ended()

    def turn(self) -> int:
        """What was granted takes effect; returns how much that was."""
        granted, self.granted = self.granted, []
        for waiter in granted:
            outcome = self.driver.send("claim", waiter.request, session=waiter.request.mutation.session)
            self.waiters.settled(waiter)
            if isinstance(outcome.error, ClaimTimeout):
                self.void += 1
                self.waiters.wait(waiter, 10)
            elif outcome.error is None:
                topology = waiter.request.topology
                self.replies.setdefault((topology.dp_rank, topology.member), []).append(outcome.reply)
            self.heed(outcome)
        self.waiters.serve()
        return len(granted)


@pytest.mark.parametrize(("sampler", "turns_max"), [("", DP + 1), ("seqlen_balanced", 2)])
def test_all_ranks_are_granted_in_as_many_turns_as_shares_are_made(sampler: str, turns_max: int) -> None:
    ranks, options = Ranks(), {"sampler": sampler, "params": {"field": "a"} if sampler else {}}
    for dp_rank in range(DP):
        for member in range(TP):
            ranks.wait(dp_rank, member, 2, **options)
    ranks.put(2 * DP)
    turns = [ranks.turn() for _ in range(turns_max)]
    assert sum(turns) == DP * TP
    assert not ranks.void
    delivered = [tuple(unpack(reply.rows.ids)) for replies in ranks.replies.values() for reply in replies]
    assert Counter(delivered) == {tuple(sorted(rows)): TP for rows in set(delivered)}
    assert sorted(i for rows in set(delivered) for i in rows) == list(range(1, 2 * DP + 1))
    ranks.driver.core.check_invariants()


def test_a_member_that_waits_for_several_steps_has_them_one_after_the_other() -> None:
    ranks = Ranks()
    for _ in range(3):
        ranks.wait(0, 0, 2)
    ranks.put(6)
    while ranks.turn():
        pass
    for _ in range(3):
        ranks.wait(0, 1, 2)
    assert len(ranks.granted) == 1  # what comes behind it is known once it took effect
    ranks.put(2)
    assert len(ranks.granted) == 1
    while ranks.turn():
        pass
    assert not ranks.void
    first, second = ranks.replies[0, 0], ranks.replies[0, 1]
    assert [reply.step for reply in first] == [reply.step for reply in second] == [0, 1, 2]
    assert [reply.rows.ids for reply in first] == [reply.rows.ids for reply in second]


def test_a_member_that_waits_is_granted_what_starts_over() -> None:
    ranks = Ranks()
    for member in (0, 1, 1):
        ranks.wait(0, member, 2)
    ranks.put(2)
    while ranks.turn():
        pass
    assert [len(replies) for replies in ranks.replies.values()] == [1, 1]
    release = pb.SettleRequest(claim_id=ranks.replies[0, 0][0].claim_id, verdict=pb.VERDICT_RELEASE)
    ranks.heed(ranks.driver.send("settle", release, session=ranks.session))
    ranks.waiters.serve()
    assert ranks.turn() == 1
    again = ranks.replies[0, 1]
    assert [reply.step for reply in again] == [0, 0]
    assert again[0].rows.ids == again[1].rows.ids


def test_what_was_made_is_granted_beside_what_is_promised() -> None:
    bench = Bench()
    bench.core.ready = 4
    plain = bench.claim("plain", 4)
    bench.core.made = {(0, 1), (0, 2)}
    made = [
        bench.claim(f"member {m}", 4, topology=pb.Topology(dp_rank=0, member=m), sampler=pb.Sampler(name="group"))
        for m in (1, 2, 3)
    ]
    assert bench.granted == ["plain", "member 1", "member 2"]
    assert [waiter.promised for waiter in made] == [0, 0, 0]
    bench.core.made.clear()
    for waiter in made[:2]:
        bench.waiters.settled(waiter)
    bench.applied(plain, 0)  # it failed: its rows are the next one's
    bench.waiters.serve()
    assert bench.granted == ["plain", "member 1", "member 2", "member 3"]


def test_a_put_that_is_too_small_for_those_who_wait_has_none_of_them_looked_at() -> None:
    bench = Bench()
    for number in range(100):
        bench.claim(f"rank {number}", 8, topology=pb.Topology(dp_rank=number), sampler=pb.Sampler(name="group"))
    bench.core.ready, bench.core.looks = 7, 0
    bench.waiters.readiness_changed(1, by_count=True)
    bench.waiters.serve()
    assert bench.core.looks == 1  # how many are ready
    bench.waiters.readiness_changed(1, by_count=True)
    bench.waiters.readiness_changed(1)  # and more changed
    bench.waiters.serve()
    assert bench.core.looks > 100
    bench.core.ready = 8
    bench.waiters.readiness_changed(1, by_count=True)
    bench.waiters.serve()
    assert bench.granted == ["rank 0"]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tokens": {"max_tokens": 9, "token_field": "a"},
    "groups": {"sampler": "group", "params": {"size": 2}},
    "tagged": {"sampler": "group"},
    "ranks": {},
    "balanced": {"sampler": "seqlen_balanced", "params": {"field": "a"}},
}


class Anybody(Ranks):
    """Consumers of all kinds, and everything that may happen to them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.drawn = random.Random(seed)
        self.p = self.driver.partition(self.session, "q", consumers=list(KINDS), max_attempts=50)
        self.sessions: dict[tuple[str, int, int], int] = {}

    def claim(self) -> None:
        kind = self.drawn.choice(sorted(KINDS))
        ranked = kind in ("ranks", "balanced")
        where = (kind, self.drawn.randrange(2), self.drawn.randrange(2)) if ranked else (kind, 0, 0)
        if where not in self.sessions:
            self.sessions[where] = self.driver.open()
        options: dict[str, Any] = {"topology": place(*where[1:], dp=2, tp=2)} if ranked else {}
        request = claim_request(self.p, self.drawn.choice((2, 2, 4)), consumer=kind, **KINDS[kind], **options)
        request.mutation.session, request.mutation.client_id = self.sessions[where], client_id(1)
        waiter = Waiter(request, lambda: self.granted.append(waiter), lambda error: None)
        self.waiters.wait(waiter, 10)

    def settle(self) -> None:
        claims = list(self.driver.core._state.leases.claims.values())
        if claims:
            claim, verdict = self.drawn.choice(claims), self.drawn.choice((pb.VERDICT_ACK, pb.VERDICT_RELEASE))
            request = pb.SettleRequest(claim_id=claim.claim_id, verdict=verdict)
            self.heed(self.driver.send("settle", request, session=claim.session))

    def change(self) -> None:
        given, live = self.drawn.randint(1, 6), self.driver.core._state.partition(self.p).samples
        groups, tags = [self.drawn.randrange(9) for _ in range(given)], [{"group_size": 2}] * given
        what = self.drawn.choice(["put"] * 6 + ["clear", "tag", "die", "pass", "seal"])
        if what == "put":
            lengths = {"a": [self.drawn.randint(1, 4) for _ in range(given)]}
            self.put(given, groups=groups, tags=tags, form=RAGGED, lengths=lengths)
        elif what in ("clear", "tag") and live.live:
            chosen = ids(*self.drawn.sample(live.ids[live.slots()].tolist(), 1))
            aborted = pack_blobs([msgpack.packb({"aborted": self.drawn.random() < 0.5})])
            request: Any = pb.ClearRequest(partition_id=self.p, ids=chosen)
            if what == "tag":
                request = pb.SetTagsRequest(partition_id=self.p, ids=chosen, tags=aborted)
            self.heed(self.driver.send("clear" if what == "clear" else "set_tags", request, session=self.session))
        elif what == "die" and self.sessions:
            session = self.sessions.pop(self.drawn.choice(sorted(self.sessions)))
            self.heed(self.driver.send("end_session", journal_pb2.EndSession(session=session)))
        elif what == "pass":
            self.driver.now += 200
            for session in list(self.driver.core._state.leases.sessions):
                self.driver.core.heartbeat(session, (), self.driver.now)
            for command in self.driver.core.due(self.driver.now):
                self.heed(self.driver.journal(command))
        elif what == "seal" and self.drawn.random() < 0.1:
            self.heed(
                self.driver.send("seal_partition", pb.SealPartitionRequest(partition_id=self.p), session=self.session)
            )


@pytest.mark.parametrize("seed", range(12))
def test_whoever_is_not_looked_at_could_not_have_been_granted(seed: int) -> None:
    anybody = Anybody(seed)
    granted = 0
    for _ in range(250):
        anybody.drawn.choice([anybody.claim, anybody.claim, anybody.settle, anybody.change, anybody.change])()
        anybody.waiters.serve()
        before = len(anybody.granted)
        anybody.waiters.session_ended()  # all are looked at
        anybody.waiters.serve()
        assert len(anybody.granted) == before
        if anybody.drawn.random() < 0.7:
            granted += anybody.turn()
    anybody.driver.core.check_invariants()
    assert granted > 20
