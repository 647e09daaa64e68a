"""What becomes of batches that were fetched ahead, when nobody can be asked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tqclient.errors import LeaseExpired, TQError, Unavailable
from tqclient.operations.claims import Verdict
from tqclient.torch.feed import Feed, Held


class Fetching(Feed):
    """Batches that were fetched, and a controller that answers with an error.

    Attributes:
        failure: of every call.
        asked: the keys that it was called with.
        given_up: the keys of what was left to the chores.
    """

    def __init__(self, failure: TQError, batches: int) -> None:
        mover: Any = SimpleNamespace(arrived=lambda value, ready: None)
        super().__init__(mover)
        self.failure = failure
        self.asked: list[int] = []
        self.given_up: list[int] = []
        for key in range(batches):
            self.put(Held(key), "a batch", lambda: None)

    def holds(self, held: Held) -> bool:
        raise self.failure

    def settle(self, held: Held, verdict: Verdict) -> None:
        self.asked.append(held.key)
        raise self.failure

    def renew(self, held: Held) -> None:
        raise self.failure

    def give_up(self, held: Held) -> None:
        self.given_up.append(held.key)

    def interrupt(self) -> None:
        """Nothing waits."""

    def join(self) -> None:
        """Nothing runs."""

    def took(self, held: Held) -> None:
        """There is no more."""


@pytest.mark.parametrize(("failure", "asked"), [(Unavailable("timed out"), 1), (LeaseExpired("it has ended"), 7)])
def test_closing_waits_once_for_a_controller_that_does_not_answer(failure: TQError, asked: int) -> None:
    feed = Fetching(failure, 5)
    feed.close([Held(10), Held(11)])
    assert len(feed.asked) == asked
    assert sorted(feed.given_up) == [0, 1, 2, 3, 4, 10, 11]


def test_a_batch_is_given_up_of_which_nobody_can_say_whether_it_is_held() -> None:
    feed = Fetching(Unavailable("timed out"), 2)
    with pytest.raises(Unavailable):
        feed.take()
    assert feed.given_up == [0]
