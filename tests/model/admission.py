"""What limits promise, said in dicts and sums: what is admitted, what is refused, and why. Shares no code with it."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.model.histories import promise
from tqclient.errors import BackpressureTimeout, ClaimTimeout, InvalidArgument, Sealed
from tqclient.wire.v1 import controller_pb2 as pb


@dataclass
class Sample:
    version: int
    state: str = "open"  # or leased, consumed
    delivered: bool = False


@dataclass
class Part:
    """One partition with limits; each check is named after the promise that it holds the core to."""

    ident: int
    ahead: int = -1  # max_staleness, under "wait"
    per_version: int = 0
    versions_max: int = 0
    ratio: float = 0.0
    first: int = 0
    buffer: float = 0.0
    sealed: bool = False
    version: int = -1
    accepted: int = 0
    inserted: int = 0
    delivered: int = 0
    permits: dict[int, list[int]] = field(default_factory=dict)  # permit → session, samples left
    samples: dict[int, Sample] = field(default_factory=dict)

    @property
    def running(self) -> int:
        return sum(left for _, left in self.permits.values())

    def bound(self) -> float:
        return (self.ahead + max(self.version, 0) + 1) * self.per_version if self.per_version else float("inf")

    def balance(self) -> float:
        return self.inserted * self.ratio - self.delivered - self.ratio * self.first

    # What the core must answer.

    def put(self, versions: list[int], permit: int, session: int) -> None:
        rows = len(versions)
        if self.sealed:
            raise Sealed("")
        held = self.permits.get(permit)
        if permit and (held is None or held[0] != session or held[1] < rows):
            raise InvalidArgument("")
        full = [] if permit or self.accepted + self.running + rows <= self.bound() else ["accepted + running in bound"]
        if self.ratio and self.balance() + rows * self.ratio > self.buffer:
            if rows * self.ratio > 2 * self.buffer:
                raise InvalidArgument("")
            full.append("puts keep pace")
        live = {sample.version for sample in self.samples.values()} - {-1}
        brought = set(versions) - {-1}
        if self.versions_max and not brought <= live:
            if len(brought) > self.versions_max:
                raise InvalidArgument("")
            full += ["live versions"] if len(live | brought) > self.versions_max else []
        if full:
            raise BackpressureTimeout(", ".join(full))

    def has_put(self, ids: list[int], versions: list[int], permit: int) -> None:
        self.samples.update(zip(ids, map(Sample, versions), strict=True))
        self.inserted += len(ids)
        self.accepted += len(ids)
        if permit in self.permits:
            self.permits[permit][1] -= len(ids)
            if not self.permits[permit][1]:
                del self.permits[permit]

    def rewrite(self, ids: list[int], version: int) -> None:
        """An upsert gives samples another version."""
        after = {i: version if i in ids else sample.version for i, sample in self.samples.items()}
        live = {sample.version for sample in self.samples.values()} - {-1}
        left = set(after.values()) - {-1}
        if self.versions_max and left - live and len(left) > self.versions_max:
            raise BackpressureTimeout("live versions")

    def permit(self, samples: int) -> None:
        if self.sealed:
            raise Sealed("")
        if self.accepted + self.running + samples > self.bound():
            raise BackpressureTimeout("accepted + running in bound")

    def ready(self) -> list[int]:
        return sorted(i for i, sample in self.samples.items() if sample.state == "open")

    def claim(self, batch: int) -> list[int]:
        if self.ratio and not self.sealed and batch > 2 * self.buffer:
            raise InvalidArgument("")
        ready = self.ready()
        if len(ready) < batch and not (self.sealed and ready):
            leased = any(sample.state == "leased" for sample in self.samples.values())
            raise (Sealed if self.sealed and not leased else ClaimTimeout)("")
        chosen = ready[:batch]
        new = sum(not self.samples[i].delivered for i in chosen)
        if self.ratio and not self.sealed and (self.inserted < self.first or self.balance() - new < -self.buffer):
            raise ClaimTimeout("claims keep pace")
        return chosen

    def has_claimed(self, ids: list[int]) -> None:
        for i in ids:
            self.delivered += not self.samples[i].delivered
            self.samples[i].state, self.samples[i].delivered = "leased", True

    def settled(self, ids: list[int], state: str) -> None:
        for i in ids:
            if i in self.samples:
                self.samples[i].state = state

    def clear(self, ids: list[int]) -> None:
        for i in ids:
            sample = self.samples.pop(i, None)
            self.accepted -= sample is not None and sample.state == "open"

    def session_ends(self, session: int) -> None:
        self.permits = {permit: held for permit, held in self.permits.items() if held[0] != session}

    # What always holds: of what the core says it admitted, and of what it was seen to admit.

    @promise
    def accepted_and_running_are_within_the_bound(self, described: pb.Partition) -> None:
        for accepted, running in ((described.accepted, described.running), (self.accepted, self.running)):
            assert accepted + running <= self.bound(), f"{accepted} accepted, {running} running, {self.bound()} may be"

    @promise
    def no_more_versions_are_live_than_may_be(self, versions: list[int]) -> None:
        live = set(versions) - {-1}
        assert not self.versions_max or len(live) <= self.versions_max, f"{live} are live, {self.versions_max} may be"

    @promise
    def puts_and_claims_keep_pace(self, described: pb.Partition) -> None:
        for inserted, delivered in (
            (described.inserted, described.delivered),
            (self.inserted, self.delivered),
        ):
            off = (inserted - self.first) * self.ratio - delivered
            assert not self.ratio or off <= self.buffer, f"{inserted} inserted, only {delivered} delivered"
            if self.ratio and delivered and not described.sealed:
                assert inserted >= self.first, f"{delivered} delivered of {inserted} inserted"
                assert off >= -self.buffer, f"{delivered} delivered, only {inserted} inserted"
