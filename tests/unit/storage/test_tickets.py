"""Tickets of reservations: repeated, closed, overtaken on their way, and done with."""

from __future__ import annotations

import pytest

from tqclient.errors import InvalidArgument
from tqserver.storage.tickets import Tickets


@pytest.fixture
def tickets() -> Tickets:
    tickets = Tickets()
    assert tickets.granted(1, 7, 7) is None
    tickets.grant(1, 7, 30)
    return tickets


def test_a_repeated_ticket_has_its_window(tickets: Tickets) -> None:
    assert tickets.granted(1, 7, 7) == 30
    assert tickets.granted(1, 8, 7) is None
    assert tickets.granted(2, 7, 7) is None  # another session's has the same number


def test_a_closed_ticket_gives_its_window_back_once_and_is_granted_nothing_more(tickets: Tickets) -> None:
    assert tickets.close(1, 7) == 30
    assert tickets.close(1, 7) == 0
    with pytest.raises(InvalidArgument, match="ticket 7 of session 1 was closed"):
        tickets.granted(1, 7, 7)


def test_a_ticket_that_is_closed_before_it_arrives_is_granted_nothing(tickets: Tickets) -> None:
    assert tickets.close(1, 9) == 0
    with pytest.raises(InvalidArgument, match="ticket 9 of session 1 was closed"):
        tickets.granted(1, 9, 7)


def test_what_is_done_with_is_forgotten_and_granted_nothing(tickets: Tickets) -> None:
    assert tickets.granted(1, 10, 10) is None
    assert tickets._sessions[1].granted == {}
    assert tickets.close(1, 7) == 0  # its window is the client's business
    with pytest.raises(InvalidArgument, match="ticket 7 of session 1 was closed"):
        tickets.granted(1, 7, 5)  # it was on its way for long: what it says is of then
    assert tickets.granted(1, 11, 5) is None


def test_sessions_that_ended_are_forgotten(tickets: Tickets) -> None:
    tickets.close(2, 1)
    tickets.keep({2})
    tickets.forget(2)
    assert tickets._sessions == {}
