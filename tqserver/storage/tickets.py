"""The numbers that clients give their reservations: by them, one whose reply was lost is found again, and closed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from tqclient.errors import InvalidArgument

_CLOSED: Final = 0
"""In the place of a window's generation: nothing is granted by this ticket any more."""


@dataclass(slots=True)
class _Session:
    below: int = 0  # every ticket below is done with
    granted: dict[int, int] = field(default_factory=dict)  # ticket → generation of the window, or _CLOSED


class Tickets:
    """What each ticket of a live session was granted. Pure."""

    def __init__(self) -> None:
        self._sessions: dict[int, _Session] = {}

    def granted(self, session: int, ticket: int, below: int) -> int | None:
        """Returns the window's generation that a ticket was granted before; None: nothing yet.

        Args:
            session: a live one.
            ticket: its number, not 0.
            below: every ticket below is done with, says the client.

        Raises:
            InvalidArgument: the ticket was closed.
        """
        known = self._sessions.setdefault(session, _Session())
        if below > known.below:
            known.below = below
            known.granted = {number: generation for number, generation in known.granted.items() if number >= below}
        generation = known.granted.get(ticket, _CLOSED if ticket < known.below else None)
        if generation == _CLOSED:
            raise InvalidArgument(f"ticket {ticket} of session {session} was closed: reserve by another one")
        return generation

    def grant(self, session: int, ticket: int, generation: int) -> None:
        """Notes the window that a ticket was granted."""
        self._sessions.setdefault(session, _Session()).granted[ticket] = generation

    def close(self, session: int, ticket: int) -> int:
        """Grants nothing by a ticket any more.

        Args:
            session: a live one.
            ticket: of a reservation that may still be on its way.

        Returns:
            The generation of the window that it was granted; 0: none.
        """
        known = self._sessions.setdefault(session, _Session())
        if ticket < known.below:
            return _CLOSED
        generation = known.granted.get(ticket, _CLOSED)
        known.granted[ticket] = _CLOSED
        return generation

    def forget(self, session: int) -> None:
        """Forgets a session."""
        self._sessions.pop(session, None)

    def keep(self, sessions: Collection[int]) -> None:
        """Forgets every session but these."""
        self._sessions = {session: known for session, known in self._sessions.items() if session in sessions}
