"""Random histories of consumers of every kind: what was promised to them holds after every step."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.model.consumption import ATTEMPTS_MAX, GROUPED, KINDS, PLAIN, RANKED, Held, Ledger
from tests.model.driver import LEASE, Driver, client_id, ids, unpack
from tests.model.histories import Machine, promise, run_many, run_seeds
from tests.model.test_core_histories import durable
from tqclient.errors import ClaimTimeout, ProducersGone, SampleNotFound, Sealed, TQError
from tqclient.schema import Form
from tqclient.wire.packing import pack_blobs, unpack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, Outcome, Readiness

RAGGED = Form("ragged", "torch", "int64", ()).to_bytes()
PICK = st.integers(0, 1 << 16)


class Consumption(Machine):
    """One partition, consumers of every kind, ranks and producers that die."""

    @initialize(keep=st.booleans())
    def begin(self, keep: bool) -> None:
        self.driver = Driver()
        self.session = self.sessions = self.driver.open()  # clients are numbered as their sessions
        policy = {"max_attempts": ATTEMPTS_MAX, "max_staleness": 2, "keep": keep}
        self.p = self.driver.partition(self.session, consumers=list(KINDS), **policy)
        self.version = 0
        self.keep = keep
        self.producers: dict[int, None] = {}  # sessions
        self.died = False  # the last of them
        self.permits: dict[int, list[int]] = {}  # permit → session, samples left
        self.ledgers = {name: Ledger(kind) for name, kind in KINDS.items()}
        self.ranks: dict[tuple[str, int, int], int] = {}  # (consumer, dp_rank, member) → session
        self.groups: dict[int, str] = {}
        self.keys: dict[int, str] = {}
        self.live: set[int] = set()
        self.made: dict[int, int] = {}  # id → weight version
        self.lengths: dict[int, int] = {}
        self.weights: dict[int, int | None] = {}  # tag w
        self.aborted: set[int] = set()
        self.lacking: list[int] = []
        for first in ("g0", "h0", "i0"):
            self.put(
                [(first, 3, 0, True), ("g1", 1, 0, True), (first, 2, 1, True), ("g1", 4, 1, True), ("", 5, 2, True)]
            )

    # Producers.

    @rule(
        rows=st.lists(
            st.tuples(
                st.sampled_from(["", *(f"g{i}" for i in range(12))]),
                st.integers(0, 5),
                st.integers(0, 2),
                st.just(True),
            ),
            min_size=2,
            max_size=8,
        ),
        complete=st.booleans(),
        twice=st.booleans(),
    )
    def put_rows(self, rows: list[tuple[str, int, int, bool]], complete: bool, twice: bool) -> None:
        """Often with another member of each group, for groups that are complete at once."""
        self.put([(group, length, weight, complete) for group, length, weight, _ in rows * (1 + twice)])

    def put(self, rows: list[tuple[str, int, int, bool]], session: int = 1, permit: int = 0) -> None:
        complete = rows[0][3]
        request = self.driver.commit(
            self.p,
            len(rows),
            ["a"],
            form=RAGGED,
            lengths={"a": [length for _, length, _, _ in rows]},
            keys=[f"{len(self.driver.log)}-{row}" for row in range(len(rows))],
            groups=[group for group, _, _, _ in rows],
            versions=(versions := [max(self.version - weight, 0) for _, _, weight, _ in rows]),
            tags=[{"w": weight} if weight else {} for _, _, weight, _ in rows],
        )
        request.permit = permit
        outcome = self.driver.send("commit", request, client=session, session=session)
        assert isinstance(outcome.error, Sealed) == self.described.sealed, outcome.error
        if isinstance(outcome.error, Sealed):
            return
        assert outcome.error is None
        added = unpack(outcome.reply.ids)  # type: ignore[union-attr]
        self.live.update(added)
        self.made.update(zip(added, versions, strict=True))
        self.groups.update(zip(added, (group for group, _, _, _ in rows), strict=True))
        self.keys.update(zip(added, unpack_strings(request.keys, what="keys"), strict=True))
        self.lengths.update(zip(added, (length for _, length, _, _ in rows), strict=True))
        self.weights.update(zip(added, (weight or None for _, _, weight, _ in rows), strict=True))
        if permit:
            self.permits[permit][1] -= len(rows)
        if complete:
            self.driver.put(self.session, self.p, len(added), ["b"], ids=added)
        else:
            self.lacking += added

    @precondition(lambda self: self.lacking)
    @rule(pick=PICK)
    def add_column(self, pick: int) -> None:
        chosen = [i for i in self.lacking[: 1 + pick % 4] if i in self.live]
        self.lacking = self.lacking[1 + pick % 4 :]
        if chosen:
            request = self.driver.commit(self.p, len(chosen), ["b"], ids=chosen)
            self.refused_if_retired(SampleNotFound, "commit", request, session=self.session)

    @rule(pick=PICK, group=st.sampled_from(["g0", "g1", "h0", "g2"]), step=st.integers(0, 2), newer=st.booleans())
    def take_to_another_group(self, pick: int, group: str, step: int, newer: bool) -> None:
        """By an upsert, while groups age. What is leased or dead stays: it may be delivered again, whole or not."""
        self.claim_alone("groups")
        self.put([(f"h{pick % 4}", 1, 2, False), (f"h{pick % 4}", 1, 0, False)])
        self.bump_version(step)
        free = sorted(self.live - self.driver.handed_out(self.p, GROUPED)) if not self.described.retired else []
        chosen = free[-2 - pick % 6 if pick % 2 else pick % 64 :][: 1 + pick % 3]
        if not chosen:
            return
        keys, lengths = [self.keys[i] for i in chosen], {"a": [self.lengths[i] for i in chosen]}
        groups, versions = [group] * len(chosen), [self.version] * len(chosen) if newer else None
        request = self.driver.commit(
            self.p, len(chosen), form=RAGGED, lengths=lengths, keys=keys, groups=groups, versions=versions, upsert=True
        )
        assert unpack(self.driver.ok("commit", request, session=1).ids) == chosen
        self.groups.update(dict.fromkeys(chosen, group))
        self.made.update(dict.fromkeys(chosen, self.version) if newer else {})
        self.claim_alone("groups")

    @property
    def described(self) -> pb.Partition:
        return self.driver.describe(self.p)

    def refused_if_retired(self, refusal: type[TQError], kind: str, request: Any, session: int = 1) -> bool:
        """Sends a command, which may well be what retires the partition; says whether it was refused."""
        retired = self.described.retired
        error = self.driver.send(kind, request, session=session).error
        assert isinstance(error, refusal) if retired else error is None, error
        return retired

    @rule(pick=PICK, tags=st.sampled_from([{"w": 9}, {"w": 1}, {"w": None}, {"aborted": True}, {"aborted": None}]))
    def tag(self, pick: int, tags: dict[str, Any]) -> None:
        if self.live:
            chosen = sorted(self.live)[pick % len(self.live)]
            packed = pack_blobs([msgpack.packb(tags)])
            request = pb.SetTagsRequest(partition_id=self.p, ids=ids(chosen), tags=packed)
            if self.refused_if_retired(SampleNotFound, "set_tags", request):
                return
            if "w" in tags:
                self.weights[chosen] = tags["w"]
            if "aborted" in tags:
                (self.aborted.add if tags["aborted"] else self.aborted.discard)(chosen)

    @rule(pick=PICK)
    def clear(self, pick: int) -> None:
        if self.live:
            self.remove(sorted(self.live)[pick % len(self.live) :][: 1 + pick % 3])

    def remove(self, chosen: list[int]) -> None:
        reply = self.driver.ok("clear", pb.ClearRequest(partition_id=self.p, ids=ids(*chosen)), session=1)
        if unpack(reply.ids):  # a retired partition has the last counts
            assert unpack(reply.ids) == chosen
            self.live.difference_update(chosen)

    @rule(step=st.integers(0, 1))
    def bump_version(self, step: int) -> None:
        self.version += step
        self.driver.ok("set_version", pb.SetVersionRequest(partition_id=self.p, version=self.version), session=1)

    @precondition(lambda self: len(self.driver.log) > 60)
    @rule(pick=PICK)
    def seal(self, pick: int) -> None:
        if pick % 4 == 0:
            self.close()

    def close(self) -> None:
        self.died = self.died and self.described.sealed
        self.driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=self.p), session=1)

    @precondition(lambda self: len(self.driver.log) > 60)
    @rule(pick=PICK)
    def finish(self, pick: int) -> None:
        """The end: what somebody is not done with is handed out, and what nobody wants is cleared."""
        if pick % 2:
            return
        self.close()
        left: set[int] = set()
        for name in KINDS:
            self.drain(name)
            self.nothing_is_kept_from_anybody(name)
            dead = unpack(self.driver.core.list_dead(self.p, name).ids)  # they can be requeued
            left |= self.left(name).union(() if pick % 4 else self.live.intersection(dead))
        if left and not self.described.retired:
            self.remove(sorted(left))

    # Producers that register, and what they are admitted with.

    def producer_starts(self) -> None:
        self.sessions += 1
        session = self.driver.open(client=self.sessions)
        request = pb.RegisterProducerRequest(partition_id=self.p)
        for _ in range(2):  # once more changes nothing
            reply = self.driver.ok("register_producer", request, client=session, session=session)
            self.producers[session], self.died = None, False
            assert reply.registered == len(self.producers)

    @rule(pick=PICK, group=st.integers(0, 11), complete=st.booleans())
    def produce(self, pick: int, group: int, complete: bool) -> None:
        """Generation under a permit, of which a part may be left when it ends."""
        if len(self.producers) < 1 + pick % 3:
            self.producer_starts()
        session = sorted(self.producers)[pick % len(self.producers)]
        request = pb.AcquirePermitRequest(partition_id=self.p, samples=2 + pick % 2)
        outcome = self.driver.send("acquire_permit", request, client=session, session=session)
        assert isinstance(outcome.error, Sealed) == self.described.sealed
        if outcome.error is not None:
            return
        reply: Any = outcome.reply
        assert reply.version == self.described.version
        self.permits[reply.permit] = [session, request.samples]
        self.put([(f"g{group}", 1 + pick % 5, 0, complete)] * 2, session, reply.permit)
        if pick % 3 == 0:
            back = pb.ReturnPermitRequest(partition_id=self.p, permit=reply.permit)
            self.driver.ok("return_permit", back, client=session, session=session)
            del self.permits[reply.permit]

    @rule(pick=PICK, how=st.sampled_from(["unregister", "close", "die", "die"]), name=st.sampled_from(sorted(KINDS)))
    def producers_go(self, pick: int, how: str, name: str) -> None:
        """One of them or all; whoever waits for the last ones is told."""
        while len(self.producers) < 1 + pick % 3:
            self.producer_starts()
        for _ in range(len(self.producers) if pick % 2 else 1):
            self.producer_goes(pick, how)
        if name in PLAIN:
            self.claim_alone(name)
        else:
            self.claim_as_rank(name, 0, pick % 2, 1)

    def producer_goes(self, pick: int, how: str) -> None:
        session = sorted(self.producers)[pick % len(self.producers)]
        del self.producers[session]
        if how == "unregister":
            request = pb.UnregisterProducerRequest(partition_id=self.p)
            self.driver.ok("unregister_producer", request, client=session, session=session)
            return
        self.permits = {permit: held for permit, held in self.permits.items() if held[0] != session}
        if how == "close":
            self.driver.ok("close_session", pb.CloseSessionRequest(), client=session, session=session)
        else:
            self.driver.send("end_session", journal_pb2.EndSession(session=session))
            self.died = not self.producers

    # Consumers.

    def claim(self, name: str, session: int, place: tuple[int, int] | None) -> None:
        request = self.ledgers[name].kind.request(self.p, name, place)
        before = durable(self.driver.core)
        request.mutation.session = session
        request.mutation.client_id = client_id(session)
        met = self.met(request)
        outcome = self.driver.send("claim", request, client=session, session=session)
        assert {ProducersGone: None, ClaimTimeout: Readiness.WAIT, Sealed: Readiness.DRAINED}.get(
            type(outcome.error), Readiness.READY
        ) == met, outcome.error
        if outcome.error is not None:
            self.the_last_producer_is_missed(outcome)
            assert durable(self.driver.core) == before
            if isinstance(outcome.error, Sealed):
                self.nobody_is_sent_away_early(name)
            return
        reply: Any = outcome.reply
        held = Held(reply.claim_id, session, unpack(reply.rows.ids), place, reply.step)
        gone = self.groups.keys() - self.live
        settled = {*self.ledgers[name].acked, *unpack(self.driver.core.list_dead(self.p, name).surplus)}
        too_old = {i for i in self.live - self.aborted - settled if self.version - self.made[i] > 2}
        self.ledgers[name].delivered(held, reply.rows.attempts, self.groups, gone, too_old)

    def met(self, request: pb.ClaimRequest) -> Readiness | None:
        """What whoever waits is told; None: that the producers died."""
        try:
            return self.driver.core.readiness(request)
        except ProducersGone:
            return None

    @rule(name=st.sampled_from(PLAIN))
    def claim_alone(self, name: str) -> None:
        self.claim(name, self.session, None)

    @rule(name=st.sampled_from(RANKED), dp_rank=st.integers(0, 1), member=st.integers(0, 1), times=st.integers(1, 2))
    def claim_as_rank(self, name: str, dp_rank: int, member: int, times: int) -> None:
        dp_rank %= self.ledgers[name].kind.dp
        for _ in range(times):
            session = self.ranks.get((name, dp_rank, member))
            if session is None:
                self.sessions += 1
                session = self.ranks[name, dp_rank, member] = self.driver.open(client=self.sessions)
                assert session == self.sessions
            self.claim(name, session, (dp_rank, member))

    @rule(name=st.sampled_from(RANKED), dp_rank=st.integers(0, 1), members=st.permutations([0, 1, 0, 1]), pick=PICK)
    def train(self, name: str, dp_rank: int, members: list[int], pick: int) -> None:
        """A DP rank at work: its members claim, in any order and one ahead, and most of them ack."""
        for at, member in enumerate(members):
            self.claim_as_rank(name, dp_rank, member, 1)
            if at > 1:
                self.settle(name, pick + at, "ack")
        for at in range(pick % 4):
            self.settle(name, (pick >> at), "release" if (pick >> at) % 16 == 0 else "ack")

    @rule(name=st.sampled_from(PLAIN), pick=PICK)
    def work(self, name: str, pick: int) -> None:
        """A consumer at work."""
        for at in range(1 + pick % 4):
            self.claim_alone(name)
            self.settle(name, pick >> at, "release" if (pick >> at) % 3 == 0 else "ack")

    @rule(
        name=st.sampled_from(sorted(KINDS)), pick=PICK, how=st.sampled_from(["ack", "ack", "ack", "release", "expire"])
    )
    def settle(self, name: str, pick: int, how: str) -> None:
        ledger = self.ledgers[name]
        if not ledger.held:
            return
        claim = sorted(ledger.held)[pick % len(ledger.held)]
        if how == "expire":
            self.driver.send("expire_claim", journal_pb2.ExpireClaim(claim_id=claim))
            ledger.released(claim)
            return
        verdict = pb.VERDICT_ACK if how == "ack" else pb.VERDICT_RELEASE
        session = ledger.held[claim].session
        self.driver.ok("settle", pb.SettleRequest(claim_id=claim, verdict=verdict), client=session, session=session)
        (ledger.acknowledged if how == "ack" else ledger.released)(claim)

    @precondition(lambda self: self.ranks)
    @rule(pick=PICK)
    def rank_dies(self, pick: int) -> None:
        name, dp_rank, member = sorted(self.ranks)[pick % len(self.ranks)]
        session = self.ranks.pop((name, dp_rank, member))
        self.driver.send("end_session", journal_pb2.EndSession(session=session))
        ledger = self.ledgers[name]
        for claim in [c for c, held in ledger.held.items() if held.session == session]:
            if claim in ledger.held:
                ledger.released(claim)

    @rule(name=st.sampled_from(RANKED), dp_rank=st.integers(0, 1))
    def dissolve(self, name: str, dp_rank: int) -> None:
        complete = journal_pb2.CompleteRanks(partition_id=self.p, consumer=name)
        assert self.driver.send("complete_ranks", complete).error is None
        if dp_rank >= self.ledgers[name].kind.dp or any(r[:2] == (name, dp_rank) for r in self.ranks):
            return
        command = journal_pb2.DissolveReplica(partition_id=self.p, consumer=name, dp_rank=dp_rank)
        assert self.driver.send("dissolve_replica", command).error is None
        self.ledgers[name].start_over(dp_rank)

    @rule(name=st.sampled_from(sorted(KINDS)), pick=PICK)
    def reset(self, name: str, pick: int) -> None:
        if pick % 8 == 0:
            request = pb.ResetConsumerRequest(partition_id=self.p, consumer=name)
            if not self.refused_if_retired(Sealed, "reset_consumer", request):
                self.ledgers[name].reset()

    @rule(name=st.sampled_from(sorted(KINDS)))
    def requeue(self, name: str) -> None:
        dead = self.driver.core.list_dead(self.p, name).ids
        request = pb.RequeueRequest(partition_id=self.p, consumer=name, ids=dead)
        self.refused_if_retired(Sealed, "requeue", request)

    @rule(name=st.sampled_from(RANKED), dp_rank=st.integers(0, 1), ahead=st.integers(1, 2), pick=PICK)
    def fail(self, name: str, dp_rank: int, ahead: int, pick: int) -> None:
        """A DP rank at work, of which one member gives up."""
        for member in (0, 1):
            self.claim_as_rank(name, dp_rank, member, ahead)
        self.settle(name, pick, ("release", "expire", "ack")[pick % 3])
        self.settle(name, pick >> 1, "release")

    @rule(name=st.sampled_from([*PLAIN, *RANKED, *RANKED]), pick=PICK)
    def drain_one(self, name: str, pick: int) -> None:
        if pick % 2 == 0:
            self.drain(name)
            self.nothing_is_kept_from_anybody(name)

    def drain(self, name: str) -> None:
        """Claims and acks as long as there is something, the last rank first: what it waits for is the others'."""
        ledger, kind, delivered = self.ledgers[name], self.ledgers[name].kind, True
        places = [(rank, member) for rank in reversed(range(kind.dp)) for member in range(kind.members)]
        while delivered:
            for place in places:
                self.claim_as_rank(name, *place, 1)
            if not places:
                self.claim_alone(name)
            delivered = bool(ledger.held)
            while ledger.held:
                self.settle(name, 0, "ack")

    @promise
    def the_last_producer_is_missed(self, outcome: Outcome) -> None:
        told = type(outcome.error) is ProducersGone
        if self.described.sealed:  # what misses them is a field
            assert not told or (self.died and self.lacking), outcome.error
        else:
            assert told == self.died, outcome.error

    @promise
    def nobody_is_sent_away_early(self, name: str) -> None:
        """What others have leased may be delivered again."""
        counts = next(each for each in self.described.consumers if each.name == name)
        assert self.described.sealed, "Sealed, and it is not"
        assert not counts.leased, f"{name} is told Sealed, although {counts.leased} samples are leased"
        assert self.described.retired or not (left := self.handed_out(name)), f"{name} is told Sealed before {left}"

    @promise
    def nothing_is_kept_from_anybody(self, name: str) -> None:
        """Whoever goes on claiming and acking has everything in the end, less than a batch: nothing stays leased."""
        kind, described = self.ledgers[name].kind, self.described
        leased = next(each.leased for each in described.consumers if each.name == name)
        assert leased == 0, f"{leased} samples stay leased to {name}, and nobody has them"
        if described.retired:
            return
        ready = self.handed_out(name)
        rows, wanted = len(ready), kind.batch * (kind.dp if kind.sampler == "seqlen_balanced" else 1)
        if described.sealed and self.left(name).isdisjoint(self.lacking):
            wanted = 1
        elif kind.max_tokens:
            rows, wanted = sum(self.lengths[i] for i in ready), kind.max_tokens + 1
        assert rows < wanted, f"{name} is refused, although {rows} are ready and {wanted} wanted"

    def left(self, name: str) -> set[int]:
        """What a consumer neither acked nor was told is dropped."""
        listed = self.driver.core.list_dead(self.p, name)
        dropped = {*unpack(listed.ids), *unpack(listed.surplus), *unpack(listed.stale)}
        return self.live - self.ledgers[name].acked.keys() - dropped

    def handed_out(self, name: str) -> set[int]:
        """What would be, of what is left; of each group as many as a claim takes."""
        kind, ready = self.ledgers[name].kind, self.left(name).difference(self.lacking)
        if kind.where:
            ready = {i for i in ready if self.weights[i] == kind.where["w"]}
        if kind.group:
            members: dict[str, list[int]] = {}
            for i in sorted(ready - self.aborted):
                members.setdefault(self.groups[i], []).append(i)
            whole = (each[: kind.group] for group, each in members.items() if group and len(each) >= kind.group)
            return set().union(*whole)
        return ready

    @rule()
    def restart(self) -> None:
        before = self.driver.core.snapshot()
        self.driver.core = Core.restore(before, self.driver.now, session_lease=LEASE)
        assert self.driver.core.snapshot() == before

    # What holds after every step.

    @invariant()
    @promise
    def counts_always_add_up(self) -> None:
        described = self.described
        for counts in described.consumers:
            five = counts.pending + counts.ready + counts.leased + counts.consumed + counts.dropped
            assert five == described.samples, f"{counts} of {described.samples} samples"
            assert counts.consumed == len(self.ledgers[counts.name].acked.keys() & self.live), counts
        assert described.samples == len(self.live)
        assert described.running == sum(left for _, left in self.permits.values())
        assert described.producers == len(self.producers)

    @invariant()
    @promise
    def it_retires_when_all_are_done(self) -> None:
        described = self.described
        left = any(counts.pending + counts.ready + counts.leased for counts in described.consumers)
        dead = any(self.driver.core.list_dead(self.p, name).ids for name in KINDS)
        assert described.retired == (described.sealed and not self.keep and not left and not dead)
        if described.retired and not any(ledger.held for ledger in self.ledgers.values()):
            assert described.bytes == 0
            assert not self.driver.sealed, "nobody reads them, and their bytes are kept"


@pytest.mark.timeout(600)  # of processor time it takes a fraction; a busy machine may not give it
def test_random_histories() -> None:
    run_many(Consumption, 60)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_long_range_of_seeds(seed: int, rounds: int | None) -> None:
    run_seeds(Consumption, seed, rounds)
