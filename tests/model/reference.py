"""What the controller promises, said in dicts and loops. Shares no code with the core."""

from __future__ import annotations

from dataclasses import dataclass, field

from tqclient.errors import (
    ClaimTimeout,
    DuplicateKey,
    InvalidArgument,
    LeaseExpired,
    PartitionExists,
    PartitionNotFound,
    SampleNotFound,
    Sealed,
)


@dataclass
class Sample:
    key: str
    group: str
    low: int
    tags: dict[str, int]
    fields: dict[str, int] = field(default_factory=dict)  # name → block


@dataclass
class Progress:
    state: dict[int, str] = field(default_factory=dict)
    attempts: dict[int, int] = field(default_factory=dict)
    acked: set[int] = field(default_factory=set)


@dataclass
class Part:
    ident: int
    name: str
    declared: bool
    max_attempts: int
    max_staleness: int | None
    sealed: bool = False
    version: int = -1
    samples: dict[int, Sample] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    consumers: dict[str, Progress] = field(default_factory=dict)

    def stale(self, ident: int) -> bool:
        low = self.samples[ident].low
        return self.max_staleness is not None and low >= 0 and self.version - low > self.max_staleness

    def fresh(self) -> Progress:
        return Progress({i: "stale" if self.stale(i) else "open" for i in self.samples}, dict.fromkeys(self.samples, 0))

    def ready(self, progress: Progress, wanted: list[str]) -> list[int]:
        names = wanted or self.fields
        return [
            i
            for i, sample in sorted(self.samples.items())
            if progress.state[i] == "open" and all(name in sample.fields for name in names)
        ]

    def apply_staleness(self) -> None:
        for progress in self.consumers.values():
            for i, state in progress.state.items():
                if state in ("open", "stale"):
                    progress.state[i] = "stale" if self.stale(i) else "open"


@dataclass
class Lease:
    session: int
    part: int
    consumer: str
    ids: list[int]
    blocks: set[int]


class Reference:
    def __init__(self) -> None:
        self.parts: dict[int, Part] = {}
        self.sessions: set[int] = set()
        self.claims: dict[int, Lease] = {}
        self.pins: dict[int, tuple[int, set[int]]] = {}  # pin → session, blocks
        self.next = {"part": 1, "sample": 1, "block": 1, "claim": 1, "session": 1}

    def draw(self, what: str) -> int:
        self.next[what] += 1
        return self.next[what] - 1

    def session(self, session: int) -> None:
        if session not in self.sessions:
            raise LeaseExpired("")

    def part(self, ident: int) -> Part:
        if ident not in self.parts:
            raise PartitionNotFound("")
        return self.parts[ident]

    def covered(self) -> set[int]:
        """Blocks that a row or a claim covers."""
        held = [claim.blocks for claim in self.claims.values()]
        rows = [set(s.fields.values()) for part in self.parts.values() for s in part.samples.values()]
        return set().union(*held, *rows)

    def pinned(self) -> set[int]:
        return set().union(*(blocks for _, blocks in self.pins.values()))

    # Sessions.

    def open_session(self) -> int:
        session = self.draw("session")
        self.sessions.add(session)
        return session

    def end_session(self, session: int) -> None:
        for claim in [c for c, lease in self.claims.items() if lease.session == session]:
            self.end_claim(claim, consumed=False)
        self.pins = {pin: held for pin, held in self.pins.items() if held[0] != session}
        self.sessions.discard(session)

    # Partitions.

    def create(self, session: int, name: str, consumers: list[str], staleness: int | None, exist_ok: bool) -> int:
        self.session(session)
        found = next((part for part in self.parts.values() if part.name == name), None)
        if found is not None:
            if not exist_ok or found.max_staleness != staleness:
                raise PartitionExists("")
            for consumer in consumers:
                found.consumers.setdefault(consumer, found.fresh())
            return found.ident
        part = Part(self.draw("part"), name, bool(consumers), 2, staleness)
        part.consumers = {consumer: Progress() for consumer in consumers}
        self.parts[part.ident] = part
        return part.ident

    def seal(self, session: int, ident: int) -> None:
        self.session(session)
        self.part(ident).sealed = True

    def delete(self, session: int, ident: int) -> None:
        self.session(session)
        self.part(ident)
        del self.parts[ident]

    def set_version(self, session: int, ident: int, version: int) -> None:
        self.session(session)
        part = self.part(ident)
        if version < part.version:
            raise InvalidArgument("")
        part.version = version
        part.apply_staleness()

    # Samples.

    def put_new(
        self, session: int, ident: int, rows: list[Sample], names: list[str], upsert: bool, skip: set[str]
    ) -> list[int]:
        self.session(session)
        part = self.part(ident)
        by_key = {sample.key: i for i, sample in part.samples.items() if sample.key}
        if not upsert and any(row.key in by_key and row.key not in skip for row in rows):
            raise DuplicateKey("")
        if part.sealed and any(row.key not in by_key for row in rows):
            raise Sealed("")
        block = self.draw("block")
        part.fields += [name for name in names if name not in part.fields]
        ids = []
        for row in rows:
            known = by_key.get(row.key)
            if known is None:
                known = self.draw("sample")
                part.samples[known] = Sample(row.key, row.group, row.low, dict(row.tags))
                for progress in part.consumers.values():
                    progress.state[known], progress.attempts[known] = "open", 0
            elif row.key not in skip:
                sample = part.samples[known]
                sample.group = row.group or sample.group
                sample.low = row.low if row.low >= 0 else sample.low
                sample.tags.update(row.tags)
            ids.append(known)
            if row.key not in skip or row.key not in by_key:
                part.samples[known].fields.update(dict.fromkeys(names, block))
        part.apply_staleness()
        return ids

    def put_column(self, session: int, ident: int, ids: list[int], name: str, upsert: bool) -> None:
        self.session(session)
        part = self.part(ident)
        if any(i not in part.samples for i in ids):
            raise SampleNotFound("")
        if not upsert and any(name in part.samples[i].fields for i in ids):
            raise DuplicateKey("")
        block = self.draw("block")
        part.fields += [name] if name not in part.fields else []
        for i in ids:
            part.samples[i].fields[name] = block

    def clear(self, session: int, ident: int, chosen: object) -> list[int]:
        self.session(session)
        part = self.part(ident)
        kind, value = chosen  # type: ignore[misc]
        test = {
            "ids": lambda i, s: i in value,
            "keys": lambda i, s: s.key in value,
            "groups": lambda i, s: s.group in value,
            "tags": lambda i, s: value.items() <= s.tags.items(),
            "prefix": lambda i, s: s.key != "" and s.key.startswith(value),
        }[kind]
        gone = sorted(i for i, sample in part.samples.items() if test(i, sample))
        for i in gone:
            del part.samples[i]
            for progress in part.consumers.values():
                del progress.state[i], progress.attempts[i]
        return gone

    def set_tags(self, session: int, ident: int, ids: list[int], tags: dict[str, int | None]) -> None:
        self.session(session)
        part = self.part(ident)
        if any(i not in part.samples for i in ids):
            raise SampleNotFound("")
        for i in ids:
            merged = {**part.samples[i].tags, **tags}
            part.samples[i].tags = {key: value for key, value in merged.items() if value is not None}

    def locate(self, session: int, ident: int, ids: list[int], names: list[str]) -> set[int]:
        """Returns the blocks to be pinned."""
        self.session(session)
        part = self.part(ident)
        names = names or part.fields
        if any(name not in part.fields for name in names) or any(i not in part.samples for i in ids):
            raise SampleNotFound("")
        if any(name not in part.samples[i].fields for i in ids for name in names):
            raise SampleNotFound("")
        return {part.samples[i].fields[name] for i in ids for name in names}

    # Consumers.

    def consumer(self, part: Part, name: str) -> Progress:
        if name not in part.consumers and part.declared:
            raise InvalidArgument("")
        return part.consumers.get(name) or part.fresh()

    def claim(self, session: int, ident: int, consumer: str, names: list[str], batch: int) -> tuple[int, list[int]]:
        self.session(session)
        part = self.part(ident)
        progress = self.consumer(part, consumer)
        ready = part.ready(progress, names)
        states = list(progress.state.values())
        over = part.sealed and states.count("open") == len(ready)
        if len(ready) < batch and not (over and ready):
            raise (Sealed if over and "leased" not in states else ClaimTimeout)("")
        part.consumers[consumer] = progress
        ids = ready[:batch]
        for i in ids:
            progress.state[i] = "leased"
            progress.attempts[i] += 1
        blocks = {part.samples[i].fields[name] for i in ids for name in names or part.fields}
        claim = self.draw("claim")
        self.claims[claim] = Lease(session, ident, consumer, ids, blocks)
        return claim, ids

    def end_claim(self, claim: int, *, consumed: bool) -> None:
        lease = self.claims.pop(claim)
        part = self.parts.get(lease.part)
        if part is None:
            return
        progress = part.consumers[lease.consumer]
        for i in lease.ids:
            if i not in part.samples:
                continue
            if consumed:
                assert i not in progress.acked, f"sample {i} was acked twice"
                progress.acked.add(i)
                progress.state[i] = "consumed"
            elif progress.attempts[i] >= part.max_attempts:
                progress.state[i] = "dead"
            else:
                progress.state[i] = "stale" if part.stale(i) else "open"

    def settle(self, session: int, claim: int, consumed: bool) -> None:
        self.session(session)
        if claim not in self.claims or self.claims[claim].session != session:
            raise LeaseExpired("")
        self.end_claim(claim, consumed=consumed)

    def reset(self, session: int, ident: int, consumer: str) -> None:
        self.session(session)
        part = self.part(ident)
        self.consumer(part, consumer)
        if consumer not in part.consumers:
            return
        for claim in [c for c, lease in self.claims.items() if (lease.part, lease.consumer) == (ident, consumer)]:
            self.end_claim(claim, consumed=False)
        part.consumers[consumer] = part.fresh()

    def requeue(self, session: int, ident: int, consumer: str, ids: list[int]) -> None:
        self.session(session)
        part = self.part(ident)
        progress = self.consumer(part, consumer)
        if any(progress.state.get(i) != "dead" for i in ids):
            raise SampleNotFound("")
        for i in ids:
            progress.state[i], progress.attempts[i] = "stale" if part.stale(i) else "open", 0
