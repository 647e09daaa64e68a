"""What was admitted to a partition: samples that were put, and permits for samples that are being generated."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tqclient.errors import InvalidArgument


@dataclass(slots=True)
class Permit:
    """Samples that a session was admitted with, and has yet to put.

    Attributes:
        permit: its id, never reused.
        session: that holds it.
        version: of the weights when it was granted; -1: none was set yet.
        left: samples that were not put yet.
    """

    permit: int
    session: int
    version: int
    left: int


class Admitted:
    """The counts that limits are about.

    Attributes:
        inserted: samples ever put.
        accepted: those of them that count against `samples_per_version`: all but those that were removed before any
            consumer was given them, since no version's share is used up by what is never consumed.
        delivered: samples ever granted to a consumer, redeliveries not counted.
        permits: by id, those with samples left.
        running: samples left of all permits.
    """

    def __init__(self) -> None:
        self.inserted = 0
        self.accepted = 0
        self.delivered = 0
        self.permits: dict[int, Permit] = {}
        self.running = 0

    def grant(self, permit: Permit) -> None:
        """Hands out a permit."""
        self.permits[permit.permit] = permit
        self.running += permit.left

    def held(self, permit: int, session: int) -> Permit:
        """Returns a permit of a session.

        Raises:
            InvalidArgument: it was used up or returned, or is another session's.
        """
        found = self.permits.get(permit)
        if found is None or found.session != session:
            raise InvalidArgument(
                f"permit {permit} is not one of session {session}, or was used up or returned; put without it, and the "
                "samples are admitted as they come"
            )
        return found

    def put(self, rows: int, permit: Permit | None) -> None:
        """New samples came, of a permit or without one."""
        self.inserted += rows
        self.accepted += rows
        if permit is not None:
            permit.left -= rows
            self.running -= rows
            if not permit.left:
                del self.permits[permit.permit]

    def give_back(self, permits: Iterable[int]) -> None:
        """Permits end; those that are gone already are passed over."""
        for permit in permits:
            ended = self.permits.pop(permit, None)
            self.running -= 0 if ended is None else ended.left

    def of_session(self, session: int) -> list[int]:
        """Returns the permits that a session holds."""
        return [permit.permit for permit in self.permits.values() if permit.session == session]

    def to_tree(self) -> list[Any]:
        """Returns what a snapshot keeps."""
        permits = [[p.permit, p.session, p.version, p.left] for p in self.permits.values()]
        return [self.inserted, self.accepted, self.delivered, permits]

    @classmethod
    def from_tree(cls, tree: list[Any]) -> Admitted:
        """Rebuilds what `to_tree` returned."""
        admitted = cls()
        admitted.inserted, admitted.accepted, admitted.delivered, permits = tree
        for row in permits:
            admitted.grant(Permit(*row))
        return admitted
