"""Random histories: core and reference agree after every step; nothing is lost, doubled or freed too soon."""

from __future__ import annotations

import random
from typing import Any

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.model.driver import BLOCK_BYTES, LEASE, Driver, ids, unpack
from tests.model.histories import Machine, promise, run_many, run_seeds
from tests.model.reference import Reference, Sample
from tqclient.errors import TQError
from tqclient.wire.packing import pack_blobs, pack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core

NAMES = ("p", "q")
FIELDS = st.lists(st.sampled_from(["a", "b", "c"]), unique=True, max_size=2)
CONSUMERS = st.sampled_from(["x", "y", "z"])
PICK = st.integers(0, 1 << 16)


def durable(core: Core) -> Any:
    """The state less the number of the last command."""
    tree = msgpack.unpackb(core.snapshot(), strict_map_key=False)
    tree["counters"] = tree["counters"][1:]
    return tree


class Histories(Machine):
    """Two partitions, a few sessions, three consumers, three fields."""

    @initialize()
    def begin(self) -> None:
        self.driver = Driver()
        self.model = Reference()
        self.offsets: dict[int, int] = {}  # offset of an extent → block
        self.grace_until = 0.0
        self.replies: list[tuple[journal_pb2.Command, Any]] = []
        self.open_session()
        for name, consumers in (("p", ["x", "y"]), ("q", [])):
            self.create(name, consumers, 1, False, 0)
        for part in (0, 1):
            rows = [(key, "g0", 1, {"t": 1}) for key in ("k0", "k1", "", "", "")]
            self.put(part, rows, ["a", "b"], False, False)

    # What rules are made of.

    def one(self, values: Any, pick: int, default: int = 99) -> int:
        """Picks one of the values, or now and then one that is not there."""
        known = sorted(values)
        return known[pick % len(known)] if known and pick % 23 != 22 else default

    def some(self, values: Any, pick: int, most: int = 4) -> list[int]:
        known = sorted(values)
        return random.Random(pick).sample(known, min(len(known), pick % most + 1)) if known else []

    def samples(self, part: int) -> list[int]:
        return list(self.model.parts[part].samples) if part in self.model.parts else []

    def both(self, kind: str, body: Any, session: int, expected: Any) -> Any:
        """Sends a command; the reference's answer, or its refusal, must be the core's."""
        before = durable(self.driver.core)
        try:
            wanted, error = expected(), None
        except TQError as refused:
            wanted, error = None, refused
        outcome = self.driver.send(kind, body, client=session, session=session)
        assert type(outcome.error) is type(error), f"{kind}: {outcome.error!r}, expected {error!r}"
        if error is not None:
            assert durable(self.driver.core) == before
            return None, None
        assert not outcome.repeated
        self.replies.append((self.driver.log[-1][0], outcome.reply))
        return outcome.reply, wanted

    # Sessions.

    @rule()
    def open_session(self) -> None:
        session = self.model.open_session()
        assert self.driver.open(client=session) == session

    @rule(pick=PICK, how=st.sampled_from(["close", "end", "lease"]))
    def end_session(self, pick: int, how: str) -> None:
        session = self.one(self.model.sessions, pick)
        if how == "close":
            self.driver.ok("close_session", pb.CloseSessionRequest(), client=session, session=session)
        elif how == "end" or session not in self.model.sessions:
            self.driver.send("end_session", journal_pb2.EndSession(session=session))
        else:
            self.driver.now += LEASE * 0.7
            for other in self.model.sessions - {session}:
                self.driver.core.heartbeat(other, (), self.driver.now)
            self.driver.now += LEASE * 0.5
            for command in self.driver.core.due(self.driver.now):
                self.driver.journal(command)
            # Claims of 10 s leases were renewed with their sessions: only this one's are over.
        self.model.end_session(session)
        if not self.model.sessions:
            self.open_session()
        assert set(self.driver.core.node_sync("", 0)[1].tolist()) == self.model.sessions

    # Partitions.

    @rule(
        name=st.sampled_from(NAMES),
        consumers=st.sampled_from([[], ["x"], ["x", "y"]]),
        staleness=st.sampled_from([None, 1]),
        exist_ok=st.booleans(),
        pick=PICK,
    )
    def create(self, name: str, consumers: list[str], staleness: int | None, exist_ok: bool, pick: int) -> None:
        session = self.one(self.model.sessions, pick)
        policy = pb.Policy(max_attempts=2, max_staleness=staleness)
        body = pb.CreatePartitionRequest(name=name, consumers=consumers, policy=policy, exist_ok=exist_ok)
        reply, ident = self.both(
            "create_partition", body, session, lambda: self.model.create(session, name, consumers, staleness, exist_ok)
        )
        assert reply is None or reply.partition.partition_id == ident

    @precondition(lambda self: len(self.driver.log) > 25)
    @rule(pick=PICK, what=st.sampled_from(["seal", "delete"]))
    def finish(self, pick: int, what: str) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        if pick % 3 != 1:  # rarely: what follows is dull
            return
        body = (pb.SealPartitionRequest if what == "seal" else pb.DeletePartitionRequest)(partition_id=part)
        act = self.model.seal if what == "seal" else self.model.delete
        self.both(f"{what}_partition", body, session, lambda: act(session, part))

    @rule(pick=PICK, version=st.integers(0, 6))
    def set_version(self, pick: int, version: int) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        body = pb.SetVersionRequest(partition_id=part, version=version)
        self.both("set_version", body, session, lambda: self.model.set_version(session, part, version))

    # Samples.

    @rule(
        pick=PICK,
        rows=st.lists(
            st.tuples(
                st.sampled_from(["", "", "k0", "k1", "k2", "m0"]),
                st.sampled_from(["", "g0", "g1"]),
                st.integers(-1, 6),
                st.sampled_from([{}, {"t": 1}, {"t": 2, "u": 1}]),
            ),
            min_size=1,
            max_size=5,
            unique_by=lambda row: row[0] or object(),
        ),
        names=st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=3, unique=True),
        upsert=st.booleans(),
        skip=st.booleans(),
    )
    def put(self, pick: int, rows: list[Any], names: list[str], upsert: bool, skip: bool) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        new = [Sample(key, group, low, tags) for key, group, low, tags in rows]
        skipped = {row.key for row in new if row.key} if skip else set()
        offset = self.driver.offset
        body = self.driver.commit(
            part,
            len(new),
            names,
            keys=[row.key for row in new],
            groups=[row.group for row in new],
            versions=[row.low for row in new],
            tags=[row.tags for row in new],
            upsert=upsert,
            skip=[int(row.key in skipped) for row in new] if skip else [],
        )
        reply, wanted = self.both(
            "commit", body, session, lambda: self.model.put_new(session, part, new, names, upsert, skipped)
        )
        if reply is not None:
            assert unpack(reply.ids) == wanted
            self.offsets[offset] = self.model.next["block"] - 1

    @rule(pick=PICK, name=st.sampled_from(["a", "b", "c"]), upsert=st.booleans(), missing=st.booleans())
    def add_column(self, pick: int, name: str, upsert: bool, missing: bool) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        lacking = [i for i in self.samples(part) if name not in self.model.parts[part].samples[i].fields]
        chosen = self.some(self.samples(part) if upsert else lacking, pick) + (
            [10**6] if missing and pick % 5 == 0 else []
        )
        if not chosen:
            return
        offset = self.driver.offset
        body = self.driver.commit(part, len(chosen), [name], ids=chosen, upsert=upsert)
        reply, _ = self.both(
            "commit", body, session, lambda: self.model.put_column(session, part, chosen, name, upsert)
        )
        if reply is not None:
            assert unpack(reply.ids) == chosen
            self.offsets[offset] = self.model.next["block"] - 1

    @rule(
        pick=PICK,
        kind=st.sampled_from(["ids", "keys", "groups", "tags", "prefix"]),
        key=st.sampled_from(["k0", "k1", "m0"]),
        group=st.sampled_from(["g0", "g1", "g2"]),
        tags=st.sampled_from([{"t": 1}, {"t": 2}, {"t": 2, "u": 1}, {"v": 1}]),
    )
    def clear(self, pick: int, kind: str, key: str, group: str, tags: dict[str, int]) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        body = pb.ClearRequest(partition_id=part)
        value: Any
        if kind == "ids":
            value = [*self.some(self.samples(part), pick), 10**6]
            body.ids = ids(*value)
        elif kind == "keys":
            value = [key]
            body.keys.CopyFrom(pack_strings(value))
        elif kind == "groups":
            value = [group]
            body.groups.CopyFrom(pack_blobs([msgpack.packb(group)]))
        elif kind == "tags":
            value = tags
            body.tags = msgpack.packb(tags)
        else:
            value = body.prefix = key[0]
        reply, wanted = self.both("clear", body, session, lambda: self.model.clear(session, part, (kind, value)))
        assert reply is None or unpack(reply.ids) == wanted

    @rule(pick=PICK, tags=st.dictionaries(st.sampled_from(["t", "u"]), st.sampled_from([None, 1, 2]), max_size=2))
    def set_tags(self, pick: int, tags: dict[str, int | None]) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        chosen = self.some(self.samples(part), pick)
        packed = pack_blobs([msgpack.packb(tags)] * len(chosen))
        body = pb.SetTagsRequest(partition_id=part, ids=ids(*chosen), tags=packed)
        self.both("set_tags", body, session, lambda: self.model.set_tags(session, part, chosen, tags))

    @rule(pick=PICK, names=FIELDS)
    def locate(self, pick: int, names: list[str]) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        chosen = self.some(self.samples(part), pick)
        request = pb.LocateRequest(session=session, partition_id=part, ids=ids(*chosen), fields=names)
        try:
            blocks, error = self.model.locate(session, part, chosen, names), None
        except TQError as refused:
            blocks, error = set(), type(refused)
        if error is not None:
            with pytest.raises(error):
                self.driver.core.locate(request, self.driver.now)
            return
        reply = self.driver.core.locate(request, self.driver.now)
        assert unpack(reply.rows.ids) == chosen
        placed = {name: placement for placement in reply.rows.placements for name in placement.fields}
        for name in names:
            wanted = [self.model.parts[part].samples[i].fields[name] for i in chosen]
            assert unpack(placed[name].block) == wanted
        assert all(self.driver.core.block(block) is not None for block in blocks)
        self.model.pins[reply.pin] = (session, blocks)

    @rule(pick=PICK)
    def drop_pins(self, pick: int) -> None:
        session = self.one(self.model.sessions, pick)
        if session in self.model.sessions:
            pins = self.some([pin for pin, (owner, _) in self.model.pins.items() if owner == session], pick)
            for pin in pins:
                del self.model.pins[pin]
            _, effects = self.driver.core.heartbeat(session, [*pins, 12345], self.driver.now)
            self.driver.believe(effects)

    # Consumers.

    @rule(pick=PICK, consumer=CONSUMERS, names=FIELDS, batch=st.integers(1, 4))
    def claim(self, pick: int, consumer: str, names: list[str], batch: int) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        body = pb.ClaimRequest(partition_id=part, consumer=consumer, fields=names, batch_size=batch)
        reply, wanted = self.both(
            "claim", body, session, lambda: self.model.claim(session, part, consumer, names, batch)
        )
        if reply is None:
            return
        assert (reply.claim_id, unpack(reply.rows.ids)) == wanted
        progress = self.model.parts[part].consumers[consumer]
        attempts = [progress.attempts[i] for i in wanted[1]]
        assert list(memoryview(reply.rows.attempts).cast("I")) == attempts

    @rule(picks=st.lists(PICK, min_size=2, max_size=4), names=FIELDS, consumer=CONSUMERS)
    def work(self, picks: list[int], names: list[str], consumer: str) -> None:
        """Consumers at work: several claims, and most of them settled."""
        for pick in picks:
            self.claim(pick, consumer, names if pick % 2 else [], 1 + pick % 2)
        for pick in picks[1:]:
            self.settle(pick, ("ack", "release", "release", "expire")[pick % 4])

    @precondition(lambda self: self.model.claims)
    @rule(pick=PICK, how=st.sampled_from(["ack", "ack", "release", "expire", "stranger"]))
    def settle(self, pick: int, how: str) -> None:
        claim = self.one(self.model.claims, pick)
        owner = self.model.claims[claim].session if claim in self.model.claims else 1
        if how == "expire":
            self.driver.send("expire_claim", journal_pb2.ExpireClaim(claim_id=claim))
            if claim in self.model.claims:
                self.model.end_claim(claim, consumed=False)
            return
        session = self.one(self.model.sessions, pick) if how == "stranger" else owner
        verdict = pb.VERDICT_RELEASE if how == "release" else pb.VERDICT_ACK
        body = pb.SettleRequest(claim_id=claim, verdict=verdict)
        self.both("settle", body, session, lambda: self.model.settle(session, claim, how != "release"))

    @rule(pick=PICK, consumer=CONSUMERS)
    def reset(self, pick: int, consumer: str) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        if pick % 4 == 0:
            body = pb.ResetConsumerRequest(partition_id=part, consumer=consumer)
            self.both("reset_consumer", body, session, lambda: self.model.reset(session, part, consumer))

    @rule(pick=PICK, consumer=CONSUMERS)
    def requeue(self, pick: int, consumer: str) -> None:
        session, part = self.one(self.model.sessions, pick), self.one(self.model.parts, pick)
        consumers = self.model.parts[part].consumers if part in self.model.parts else {}
        dead = [i for i, state in consumers[consumer].state.items() if state == "dead"] if consumer in consumers else []
        chosen = self.some(dead, pick) or self.some(self.samples(part), pick)
        body = pb.RequeueRequest(partition_id=part, consumer=consumer, ids=ids(*chosen))
        self.both("requeue", body, session, lambda: self.model.requeue(session, part, consumer, chosen))

    # Faults.

    @precondition(lambda self: self.replies)
    @rule(pick=PICK)
    def repeat(self, pick: int) -> None:
        """A request that was applied is answered with the same reply, and changes nothing."""
        command, reply = self.replies[pick % len(self.replies)]
        before = durable(self.driver.core)
        outcome = self.driver.journal(command)
        assert outcome.repeated
        assert (outcome.reply, outcome.error, outcome.effects) == (reply, None, ())
        assert durable(self.driver.core) == before

    @rule(how=st.sampled_from(["snapshot", "log"]))
    def restart(self, how: str) -> None:
        """The controller dies and comes back; pins are lost, and so are the extents that only they kept."""
        before = self.driver.core.snapshot()
        if how == "snapshot":
            self.driver.core = Core.restore(before, self.driver.now, session_lease=LEASE)
        else:
            self.driver.core = Core(session_lease=LEASE)
            for command, sequence in self.driver.log:
                self.driver.core.apply(command, self.driver.now, sequence)
        assert self.driver.core.snapshot() == before
        self.driver.send("start", journal_pb2.Start())
        self.grace_until = self.driver.quiet_until = self.driver.now + LEASE
        self.model.pins.clear()
        self.driver.sealed = self.driver.synced()

    @rule()
    def grace_ends(self) -> None:
        self.driver.now = max(self.driver.now, self.grace_until)
        for session in self.model.sessions:
            self.driver.core.heartbeat(session, (), self.driver.now)
        self.driver.believe(self.driver.core.collect(self.driver.now))

    # What holds after every step.

    @invariant()
    @promise
    def counts_always_add_up(self) -> None:
        for part in self.model.parts.values():
            described = self.driver.describe(part.ident)
            for counts in described.consumers:
                five = counts.pending + counts.ready + counts.leased + counts.consumed + counts.dropped
                assert five == described.samples, counts
            assert described.samples == len(part.samples)
            assert {c.name for c in described.consumers} == set(part.consumers)
            for counts in described.consumers:
                states = list(part.consumers[counts.name].state.values())
                assert counts.pending + counts.ready == states.count("open")
                assert counts.leased == states.count("leased")
                assert counts.consumed == states.count("consumed")
                assert counts.dropped == states.count("dead") + states.count("stale")
            names = {f.name: f.written for f in described.fields}
            assert names == {f: sum(f in s.fields for s in part.samples.values()) for f in part.fields}
            assert described.bytes == BLOCK_BYTES * len({b for s in part.samples.values() for b in s.fields.values()})

    @invariant()
    def extents_live_as_long_as_they_must(self) -> None:
        sealed = {self.offsets[extent[0]] for extent in self.driver.sealed}
        assert self.driver.synced() == self.driver.sealed
        must = self.model.covered() | self.model.pinned()
        assert must <= sealed
        if self.driver.now >= self.grace_until:
            self.driver.believe(self.driver.core.collect(self.driver.now))
            assert {self.offsets[extent[0]] for extent in self.driver.sealed} == must


@pytest.mark.timeout(600)  # of processor time it takes a fraction; a busy machine may not give it
def test_random_histories() -> None:
    run_many(Histories, 100)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_a_long_range_of_seeds(seed: int, rounds: int | None) -> None:
    run_seeds(Histories, seed, rounds)
