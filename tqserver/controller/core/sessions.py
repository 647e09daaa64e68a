"""Sessions, claims and their leases. That they exist is durable; when they end is volatile."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tqclient.errors import LeaseExpired
from tqserver.controller.core import limits


@dataclass(slots=True)
class Session:
    """The life of one client.

    Attributes:
        session: its id, never reused.
        client_id: of the client, 16 bytes.
        label: for people.
        version: of the client.
        claims: ids of the claims that it holds, oldest first.
        consumers: (partition_id, name) of those in whose topology it holds a place.
        permits: permit that it holds → the partition that it is for.
        producing: partitions that it is registered with as a producer.
        pins: read pin → the blocks that it covers; volatile.
        deadline: when its lease runs out, in seconds of the monotonic clock; volatile.
        overdue: its end was reported; volatile.
    """

    session: int
    client_id: bytes
    label: str
    version: str
    claims: dict[int, None] = field(default_factory=dict)
    consumers: dict[tuple[int, str], None] = field(default_factory=dict)
    permits: dict[int, int] = field(default_factory=dict)
    producing: dict[int, None] = field(default_factory=dict)
    pins: dict[int, list[int]] = field(default_factory=dict)
    deadline: float = 0.0
    overdue: bool = False


class Membership(NamedTuple):
    """Whose claim it is, of a share."""

    dp_rank: int
    step: int
    member: int


@dataclass(slots=True)
class Claim:
    """A lease on a batch of samples.

    Attributes:
        claim_id: never reused.
        session: that holds it.
        partition_id: of the samples.
        consumer: that they were delivered to.
        ids: int64 [rows], in delivery order; some may have been cleared since.
        blocks: that it covers, each once.
        lease_ms: how long it lives without a renewal.
        membership: of a claim on a share, which has the ids and the blocks.
        deadline: as of a session; volatile.
        overdue: as of a session; volatile.
    """

    claim_id: int
    session: int
    partition_id: int
    consumer: str
    ids: NDArray[Any]
    blocks: list[int]
    lease_ms: int
    membership: Membership | None = None
    deadline: float = 0.0
    overdue: bool = False


class Leases:
    """All live sessions and claims, and which of them is due next.

    The heap holds one entry for each, at or before its deadline: a renewal only moves the deadline, and an entry that
    comes up early is put back. Entries of what has ended are dropped when they come up, or all at once when they are
    more than the others.
    """

    def __init__(self, session_lease: float) -> None:
        self.session_lease = session_lease
        self.sessions: dict[int, Session] = {}
        self.claims: dict[int, Claim] = {}
        self._heap: list[tuple[float, bool, int]] = []  # (time, is a claim, id)

    def session(self, session: int) -> Session:
        """Returns a live session.

        Raises:
            LeaseExpired: it has ended.
        """
        found = self.sessions.get(session)
        if found is None:
            raise LeaseExpired(f"session {session} has ended: open another one")
        return found

    def claim_of(self, claim_id: int, session: int) -> Claim:
        """Returns a live claim of a session.

        Raises:
            LeaseExpired: it ended, or is another session's.
        """
        claim = self.claims.get(claim_id)
        if claim is None or claim.session != session:
            raise LeaseExpired(
                f"claim {claim_id} has expired, was settled, or is not of session {session}; "
                "its samples were or will be delivered again"
            )
        return claim

    def open_session(self, session: Session, now: float) -> None:
        """Takes in a session, with a full lease."""
        session.deadline = now + self.session_lease
        self.sessions[session.session] = session
        heapq.heappush(self._heap, (session.deadline, False, session.session))

    def end_session(self, session: int) -> Session:
        """Removes a session whose claims have ended."""
        found = self.sessions.pop(session)
        self._drop_ended()
        return found

    def add_claim(self, claim: Claim, now: float) -> None:
        """Takes in a claim, with a full lease."""
        claim.deadline = now + claim.lease_ms / 1000
        self.claims[claim.claim_id] = claim
        self.sessions[claim.session].claims[claim.claim_id] = None
        heapq.heappush(self._heap, (claim.deadline, True, claim.claim_id))

    def end_claim(self, claim_id: int) -> Claim:
        """Removes a claim."""
        claim = self.claims.pop(claim_id)
        del self.sessions[claim.session].claims[claim_id]
        self._drop_ended()
        return claim

    def _drop_ended(self) -> None:
        live = len(self.sessions) + len(self.claims)
        if len(self._heap) > max(limits.ENDED_LEASES_MIN, 2 * live):
            self._heap = [entry for entry in self._heap if self._find(entry[1], entry[2]) is not None]
            heapq.heapify(self._heap)

    def renew(self, session: int, now: float) -> int:
        """Renews a session and its claims; returns the shortest lease among them, in milliseconds.

        Raises:
            LeaseExpired: the session has ended, or is about to.
        """
        found = self.session(session)
        if found.overdue:
            raise LeaseExpired(f"the lease of session {session} ran out: open another one")
        found.deadline = now + self.session_lease
        lease_ms = int(self.session_lease * 1000)
        for claim_id in found.claims:
            claim = self.claims[claim_id]
            if not claim.overdue:
                claim.deadline = now + claim.lease_ms / 1000
                lease_ms = min(lease_ms, claim.lease_ms)
        return lease_ms

    def renew_claim(self, claim_id: int, session: int, now: float) -> int:
        """Renews one claim; returns its lease in milliseconds.

        Raises:
            LeaseExpired: the claim has ended, or is about to.
        """
        claim = self.claim_of(claim_id, session)
        if claim.overdue:
            raise LeaseExpired(f"the lease of claim {claim_id} ran out; its samples will be delivered again")
        claim.deadline = now + claim.lease_ms / 1000
        return claim.lease_ms

    def restart(self, now: float) -> None:
        """Begins every lease anew; read pins are gone."""
        self._heap = []
        for session in self.sessions.values():
            session.deadline, session.overdue = now + self.session_lease, False
            session.pins.clear()
            self._heap.append((session.deadline, False, session.session))
        for claim in self.claims.values():
            claim.deadline, claim.overdue = now + claim.lease_ms / 1000, False
            self._heap.append((claim.deadline, True, claim.claim_id))
        heapq.heapify(self._heap)

    def next_deadline(self) -> float | None:
        """Returns when the next lease runs out."""
        while self._heap:
            time, is_claim, key = self._heap[0]
            found = self._find(is_claim, key)
            if found is None:
                heapq.heappop(self._heap)
            elif not found.overdue and found.deadline > time:
                heapq.heapreplace(self._heap, (found.deadline, is_claim, key))
            else:
                return time
        return None

    def pop_due(self, now: float) -> list[Session | Claim]:
        """Returns what is overdue and marks it so: it cannot be renewed any more.

        What is not ended within `limits.DUE_AGAIN_S` is returned again.
        """
        due: list[Session | Claim] = []
        while (time := self.next_deadline()) is not None and time <= now:
            _, is_claim, key = self._heap[0]
            heapq.heapreplace(self._heap, (now + limits.DUE_AGAIN_S, is_claim, key))
            found = self._find(is_claim, key)
            if found is not None:
                found.overdue = True
                due.append(found)
        return due

    def _find(self, is_claim: bool, key: int) -> Session | Claim | None:
        return self.claims.get(key) if is_claim else self.sessions.get(key)
