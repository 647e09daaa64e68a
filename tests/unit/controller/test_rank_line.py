"""Ranks that wait: as few turns as there are shares to make, each member in its order, and nothing promised twice."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.model.driver import Driver, claim_request, client_id, unpack
from tests.unit.controller.lines_bench import Bench
from tests.unit.controller_core.test_shares import place
from tqclient.errors import ClaimTimeout, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import ReadinessChanged
from tqserver.controller.lines import Waiter
from tqserver.controller.waiters import Waiters

DP, TP = 8, 4


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

    def put(self, rows: int) -> None:
        self.driver.put(self.session, self.p, rows)
        self.waiters.readiness_changed(self.p)
        self.waiters.serve()

    def turn(self) -> int:
        """What was granted takes effect; returns how much that was."""
        granted, self.granted = self.granted, []
        for waiter in granted:
            outcome = self.driver.send("claim", waiter.request, session=self.session)
            self.waiters.settled(waiter)
            if isinstance(outcome.error, ClaimTimeout):
                self.void += 1
                self.waiters.wait(waiter, 10)
            else:
                topology = waiter.request.topology
                self.replies.setdefault((topology.dp_rank, topology.member), []).append(outcome.reply)
            if any(isinstance(effect, ReadinessChanged) for effect in outcome.effects):
                self.waiters.readiness_changed(self.p)
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
