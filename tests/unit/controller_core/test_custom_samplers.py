"""Samplers of users: their choice is journaled, and their faults stay theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.model.driver import Driver, claim_request, client_id, ids, unpack
from tqclient.errors import ClaimTimeout, InternalError, InvalidArgument, Sealed
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, samplers
from tqserver.controller.core.samplers.custom import Custom


class Picks:
    """Answers what the test wants."""

    def __init__(self, sample: Callable[[Any, Any], Any]) -> None:
        self.sample = sample


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    return lambda sample: monkeypatch.setitem(samplers.SAMPLERS, "mine", Custom("mine", Picks(sample)))


def _command(driver: Driver, session: int, p: int, batch: int, **options: Any) -> journal_pb2.Command:
    request = claim_request(p, batch, sampler="mine", **options)
    driver.requests[1] += 1
    request.mutation.client_id, request.mutation.request, request.mutation.session = (
        client_id(1),
        driver.requests[1],
        session,
    )
    return journal_pb2.Command(claim=request)


def test_a_choice_is_journaled_and_replayed_without_the_sampler(
    driver: Driver, session: int, install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session)
    driver.put(session, p, 6)
    install(lambda view, request: np.flatnonzero(view.ready)[[4, 1]])
    command = _command(driver, session, p, 2)
    driver.core.check(command)
    driver.core.choose(command)
    assert unpack(command.chosen_ids) == [5, 2]
    outcome = driver.journal(command)
    assert unpack(outcome.reply.rows.ids) == [5, 2]  # type: ignore[union-attr]
    monkeypatch.delitem(samplers.SAMPLERS, "mine")
    assert _replayed(driver).snapshot() == driver.core.snapshot()


def _replayed(driver: Driver) -> Core:
    core = Core()
    for logged, sequence in driver.log:
        core.apply(logged, 0.0, sequence)
    return core


def _member(number: int) -> pb.Topology:
    return pb.Topology(dp=1, tp=2, pp=1, cp=1, ep=1, dp_rank=0, member=number, members=2, world_rank=number)


def test_one_choice_is_for_all_members_of_a_dp_rank(
    driver: Driver, session: int, install: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = driver.partition(session)
    driver.put(session, p, 8)
    asked: list[int] = []

    def last(view: Any, request: Any) -> Any:
        asked.append(view.count)
        return view.last(request.batch_size)

    install(last)
    claims = []
    for session_of, member in ((session, 0), (driver.open(), 1)):
        for _ in range(2):
            command = _command(driver, session_of, p, 2, topology=_member(member))
            driver.core.choose(command)
            outcome = driver.journal(command)
            assert outcome.error is None
            claims.append(outcome.reply)
    assert [unpack(claim.rows.ids) for claim in claims] == [[8, 7], [6, 5], [8, 7], [6, 5]]  # type: ignore[union-attr]
    assert asked == [8, 6]
    monkeypatch.delitem(samplers.SAMPLERS, "mine")
    assert _replayed(driver).snapshot() == driver.core.snapshot()


def test_a_member_whose_share_is_gone_by_its_turn_waits_for_a_choice(
    driver: Driver, session: int, install: Callable[[Any], None]
) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4)
    install(lambda view, request: view.last(request.batch_size))
    first = _command(driver, session, p, 2, topology=_member(0))
    driver.core.choose(first)
    driver.journal(first)
    other = driver.open()
    second = _command(driver, other, p, 2, topology=_member(1))
    driver.core.choose(second)
    driver.ok("reset_consumer", pb.ResetConsumerRequest(partition_id=p, consumer="x"), session=session)
    assert isinstance(driver.journal(second).error, ClaimTimeout)
    driver.core.check_invariants()
    again = _command(driver, other, p, 2, topology=_member(1))
    driver.core.choose(again)
    assert unpack(driver.journal(again).reply.rows.ids) == [4, 3]  # type: ignore[union-attr]


def test_a_choice_is_not_foreseen(driver: Driver, session: int, install: Callable[[Any], None]) -> None:
    p = driver.partition(session)
    install(lambda view, request: view.last(request.batch_size))
    assert driver.core.countable(claim_request(p, 2))
    assert not driver.core.countable(claim_request(p, 2, sampler="mine"))


def test_a_choice_that_is_gone_by_its_turn_is_void(
    driver: Driver, session: int, install: Callable[[Any], None]
) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4)
    install(lambda view, request: np.array([0, 1]))
    command = _command(driver, session, p, 2)
    driver.core.choose(command)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert isinstance(driver.journal(command).error, ClaimTimeout)
    assert driver.counts(p) == (0, 3, 0, 0, 0)


def _raises(view: Any, request: Any) -> Any:
    raise ZeroDivisionError("oops")


def _sealed(view: Any, request: Any) -> Any:
    raise Sealed("another partition")  # as the claim's own answer, it would end the client's loop in silence


@pytest.mark.parametrize(
    ("sample", "says"),
    [
        (_raises, r"'mine' raised ZeroDivisionError\('oops'\)"),
        (_sealed, r"'mine' raised Sealed\('another partition'\)"),
        (lambda view, request: [], "expected 1 to 2 slots"),
        (lambda view, request: [0, 0], "each once"),
        (lambda view, request: [0, 1, 2], "expected 1 to 2 slots"),
        (lambda view, request: [0.5], "expected 1 to 2 slots"),
        (lambda view, request: [-1, 0], "expected 1 to 2 slots"),
        (lambda view, request: [0, 100], "not ready"),
        (lambda view, request: "first", "expected 1 to 2 slots"),
        (lambda view, request: [[0], [1, 2]], r"'mine' raised ValueError\("),
    ],
)
def test_a_sampler_that_fails_fails_that_claim_alone(
    driver: Driver, session: int, install: Callable[[Any], None], sample: Any, says: str
) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4)
    install(sample)
    with pytest.raises(InternalError, match=says):
        driver.core.choose(_command(driver, session, p, 2))
    assert unpack(driver.claim(session, p, 2).rows.ids) == [1, 2]


def test_nobody_is_asked_while_a_claim_is_applied(driver: Driver, session: int, install: Callable[[Any], None]) -> None:
    p = driver.partition(session)
    driver.put(session, p, 4)
    install(_raises)
    with pytest.raises(ClaimTimeout):
        driver.claim(session, p, 1, sampler="mine")
    with pytest.raises(ClaimTimeout):
        driver.claim(session, p, 0, sampler="mine", max_tokens=1, token_field="a")
    with pytest.raises(ClaimTimeout):
        driver.claim(session, p, 1, sampler="mine", topology=_member(0))
    assert driver.counts(p) == (0, 4, 0, 0, 0)


class Entry:
    """An entry point."""

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._value = name, value

    def load(self) -> Any:
        return self._value


class Newest:
    """A user's sampler, as a class."""

    def sample(self, view: Any, request: Any) -> Any:
        return view.last(request.batch_size)


@pytest.mark.parametrize(
    ("name", "value", "says"), [("fifo", Newest, "exists"), ("odd", object(), "no method `sample`")]
)
def test_entry_points_are_checked_at_the_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: Any, says: str
) -> None:
    monkeypatch.setattr(samplers, "entry_points", lambda group: [Entry(name, value)])
    with pytest.raises(InvalidArgument, match=says):
        samplers.load_entry_points()


def test_entry_points_become_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samplers, "SAMPLERS", dict(samplers.SAMPLERS))
    monkeypatch.setattr(samplers, "entry_points", lambda group: [Entry("newest", Newest)])
    assert samplers.load_entry_points() == ["newest"]
    assert samplers.SAMPLERS["newest"].name == "newest"
