"""Random histories of producers under limits: the core admits, and refuses, exactly what the reference does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.model.admission import Part
from tests.model.driver import LEASE, Driver, ids, unpack
from tests.model.histories import Machine, run_many, run_seeds
from tests.model.test_core_histories import durable
from tqclient.errors import TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, RoomChanged

PICK = st.integers(0, 1 << 16)
PARTS = st.sampled_from(["wait", "versions", "rate", "all"])


class Admission(Machine):
    """Four partitions, each with its limits, a few sessions and one consumer."""

    @initialize()
    def begin(self) -> None:
        self.driver = Driver()
        self.sessions = [self.driver.open(client=1), self.driver.open(client=2)]
        rate = pb.RateLimit(samples_per_insert=0.5, min_samples=2, error_buffer=1.5)
        wait = {"staleness": "wait", "max_staleness": 1, "samples_per_version": 4}
        held = {"ahead": 1, "per_version": 4}
        paced = {"ratio": 0.5, "first": 2, "buffer": 1.5}
        self.parts: dict[str, Part] = {}
        for name, policy, kept in (
            ("wait", wait, held),
            ("versions", {"capacity_versions": 2}, {"versions_max": 2}),
            ("rate", {"rate_limit": rate}, paced),
            ("all", {**wait, "capacity_versions": 2, "rate_limit": rate}, {**held, "versions_max": 2, **paced}),
        ):
            ident = self.driver.partition(1, name, max_attempts=1000, keep=True, **policy)
            self.parts[name] = Part(ident, **kept)  # type: ignore[arg-type]
        self.claims: dict[int, tuple[Part, list[int], int]] = {}

    def both(
        self,
        kind: str,
        body: Any,
        session: int,
        expected: Callable[[], Any],
        then: Callable[[Any], None] = lambda reply: None,
    ) -> Any:
        """Sends a command; the reference's refusal must be the core's, and a refusal changes nothing.

        What the core granted is taken in by `then`, and measured by what was promised, before it is compared.
        """
        before = durable(self.driver.core)
        try:
            expected()
            error = None
        except TQError as refused:
            error = refused
        outcome = self.driver.send(kind, body, client=session, session=session)
        if outcome.error is None:
            then(outcome.reply)
        self.limits_hold()
        assert type(outcome.error) is type(error), f"{kind}: {outcome.error!r}, expected {error!r}"
        if error is not None:
            assert durable(self.driver.core) == before
        self.effects = outcome.effects
        return outcome.reply

    def session(self, pick: int) -> int:
        return self.sessions[pick % len(self.sessions)]

    # Producers.

    @rule(name=PARTS, versions=st.lists(st.integers(-1, 4), min_size=1, max_size=7), pick=PICK, permitted=st.booleans())
    def put(self, name: str, versions: list[int], pick: int, permitted: bool) -> None:
        part, permit, session = self.parts[name], 0, self.session(pick)
        if permitted and part.permits:
            permit = sorted(part.permits)[pick % len(part.permits)]
            session = part.permits[permit][0] if pick % 7 else session
        request = self.driver.commit(part.ident, len(versions), versions=versions)
        request.permit = permit
        lacks: dict[Any, str] = {}
        with suppress(TQError):
            lacks = self.driver.demand(request, session).lacks
        if self.send_put(part, request, versions, session):
            assert not lacks, "a put that the core was expected to hold back was let in"

    def put_under(self, part: Part, permit: int, versions: list[int]) -> None:
        request = self.driver.commit(part.ident, len(versions), versions=versions)
        request.permit = permit
        self.send_put(part, request, versions, part.permits[permit][0])

    def send_put(self, part: Part, request: pb.CommitRequest, versions: list[int], session: int) -> bool:
        def put(reply: pb.CommitReply) -> None:
            part.has_put(unpack(reply.ids), versions, request.permit)

        expected = partial(part.put, versions, request.permit, session)
        return self.both("commit", request, session, expected, put) is not None

    @rule(name=st.sampled_from(["versions", "all"]), version=st.integers(0, 4), pick=PICK)
    def rewrite(self, name: str, version: int, pick: int) -> None:
        part = self.parts[name]
        chosen = sorted(part.samples)[: pick % 4]
        if not chosen:
            return
        request = self.driver.commit(part.ident, len(chosen), ids=chosen, versions=[version] * len(chosen), upsert=True)
        reply = self.both("commit", request, self.sessions[0], lambda: part.rewrite(chosen, version))
        if reply is not None:
            for i in chosen:
                part.samples[i].version = version

    @rule(name=PARTS, samples=st.integers(1, 6), pick=PICK)
    def acquire(self, name: str, samples: int, pick: int) -> None:
        part, session = self.parts[name], self.session(pick)
        request = pb.AcquirePermitRequest(partition_id=part.ident, samples=samples)

        def acquired(reply: pb.AcquirePermitReply) -> None:
            assert reply.permit not in part.permits
            assert reply.version == part.version, "stamped with the version at which generation begins"
            part.permits[reply.permit] = [session, samples]

        self.both("acquire_permit", request, session, lambda: part.permit(samples), acquired)

    @rule(name=PARTS, samples=st.integers(1, 4), pick=PICK)
    def generate(self, name: str, samples: int, pick: int) -> None:
        """A producer at work: it puts what it was admitted with, all of it or not."""
        part, before = self.parts[name], set(self.parts[name].permits)
        self.acquire(name, samples, pick)
        for permit in part.permits.keys() - before:
            self.put_under(part, permit, [0] * (1 + pick % samples))

    @rule(name=PARTS, pick=PICK)
    def give_back(self, name: str, pick: int) -> None:
        part = self.parts[name]
        permit = sorted(part.permits)[pick % len(part.permits)] if part.permits else 77
        session = self.session(pick)
        request = pb.ReturnPermitRequest(partition_id=part.ident, permit=permit)
        self.both("return_permit", request, session, lambda: None)
        if permit in part.permits and part.permits[permit][0] == session:
            del part.permits[permit]
            assert RoomChanged(part.ident) in self.effects, "whoever waits for room is told"

    @rule(pick=PICK)
    def session_ends(self, pick: int) -> None:
        session = self.session(pick)
        self.driver.send("end_session", journal_pb2.EndSession(session=session))
        for part in self.parts.values():
            part.session_ends(session)
        for claim in [claim for claim, (_, _, holder) in self.claims.items() if holder == session]:
            part, chosen, _ = self.claims.pop(claim)
            part.settled(chosen, "open")
        self.sessions.remove(session)
        new = self.driver.open(client=1 + max([*self.sessions, session]))
        self.sessions.append(new)

    # The trainer.

    @rule(name=PARTS, step=st.integers(0, 2))
    def set_version(self, name: str, step: int) -> None:
        part = self.parts[name]
        version = part.version + step
        if version >= 0:
            request = pb.SetVersionRequest(partition_id=part.ident, version=version)
            self.both("set_version", request, self.sessions[0], lambda: None)
            part.version = version
            assert not step or RoomChanged(part.ident) in self.effects, "whoever waits for the version is told"

    @rule(name=PARTS, batch=st.integers(1, 9), pick=PICK)
    def claim(self, name: str, batch: int, pick: int) -> None:
        part, session = self.parts[name], self.session(pick)
        request = pb.ClaimRequest(partition_id=part.ident, consumer="x", batch_size=batch)
        chosen: list[int] = []

        def granted(reply: pb.ClaimReply) -> None:
            part.has_claimed(unpack(reply.rows.ids))

        reply = self.both("claim", request, session, lambda: chosen.extend(part.claim(batch)), granted)
        if reply is not None:
            assert unpack(reply.rows.ids) == chosen
            self.claims[reply.claim_id] = part, chosen, session
            if part.ratio and not part.sealed:
                assert RoomChanged(part.ident) in self.effects, "whoever waits for claims is told"

    @precondition(lambda self: self.claims)
    @rule(pick=PICK, ack=st.booleans())
    def settle(self, pick: int, ack: bool) -> None:
        claim = sorted(self.claims)[pick % len(self.claims)]
        part, chosen, session = self.claims.pop(claim)
        verdict = pb.VERDICT_ACK if ack else pb.VERDICT_RELEASE
        request = pb.SettleRequest(claim_id=claim, verdict=verdict)
        self.driver.ok("settle", request, client=session, session=session)
        part.settled(chosen, "consumed" if ack else "open")

    @rule(name=PARTS, batch=st.integers(1, 3), pick=PICK)
    def train(self, name: str, batch: int, pick: int) -> None:
        """A trainer at work."""
        before = set(self.claims)
        self.claim(name, batch, pick)
        for claim in self.claims.keys() - before:
            self.settle(sorted(self.claims).index(claim), True)
        self.set_version(name, pick % 2)

    @rule(name=PARTS, pick=PICK)
    def clear(self, name: str, pick: int) -> None:
        part = self.parts[name]
        chosen = sorted(part.samples)[: 1 + pick % 5]
        request = pb.ClearRequest(partition_id=part.ident, ids=ids(*chosen))
        self.both("clear", request, self.sessions[0], lambda: None, lambda _: part.clear(chosen))

    @precondition(lambda self: len(self.driver.log) > 40)
    @rule(name=PARTS, pick=PICK)
    def seal(self, name: str, pick: int) -> None:
        if pick % 16 == 0:
            request = pb.SealPartitionRequest(partition_id=self.parts[name].ident)
            self.both("seal_partition", request, self.sessions[0], lambda: None)
            self.parts[name].sealed = True

    @rule()
    def restart(self) -> None:
        before = self.driver.core.snapshot()
        self.driver.core = Core.restore(before, self.driver.now, session_lease=LEASE)
        assert self.driver.core.snapshot() == before

    # What holds after every step.

    @invariant()
    def counts_agree(self) -> None:
        for part in self.parts.values():
            described = self.driver.describe(part.ident)
            told = (described.accepted, described.running, described.inserted, described.delivered)
            assert told == (part.accepted, part.running, part.inserted, part.delivered)

    @invariant()
    def limits_hold(self) -> None:
        for part in self.parts.values():
            described = self.driver.describe(part.ident)
            part.accepted_and_running_are_within_the_bound(described)
            part.no_more_versions_are_live_than_may_be(self.driver.live_versions(part.ident))
            part.puts_and_claims_keep_pace(described)


@pytest.mark.timeout(600)  # of processor time it takes a fraction; a busy machine may not give it
def test_random_histories() -> None:
    run_many(Admission, 60)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_long_range_of_seeds(seed: int, rounds: int | None) -> None:
    run_seeds(Admission, seed, rounds)
