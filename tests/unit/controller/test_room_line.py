"""Puts and permits that wait for room in a real core: their order, who passes whom, and what they are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.model.driver import Driver, client_id, ids
from tqclient.errors import BackpressureTimeout, ClaimTimeout, InvalidArgument, LeaseExpired, Sealed, TQError
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import ReadinessChanged, RoomChanged
from tqserver.controller.lines import Waiter
from tqserver.controller.waiters import Waiters

WAIT: dict[str, Any] = {"staleness": "wait", "max_staleness": 0, "samples_per_version": 4}


class Room:
    """A core and its lines: whoever is granted is applied, and what that changes is looked at, as the service does."""

    def __init__(self) -> None:
        self.driver = Driver()
        self.session = self.driver.open()
        self.timers: list[Callable[[], None]] = []
        self.waiters = Waiters(self.driver.core, lambda seconds, callback: self._schedule(callback))
        self.done: list[str] = []
        self.refused: dict[str, TQError] = {}
        self.replies: dict[str, Any] = {}

    def _schedule(self, callback: Callable[[], None]) -> Callable[[], object]:
        self.timers.append(callback)
        return lambda: self.timers.remove(callback) if callback in self.timers else None

    def _wait(self, name: str, kind: str, request: Any) -> None:
        session = self.session

        def grant() -> None:
            outcome = self.driver.send(kind, request, session=session)
            self.waiters.settled(waiter)
            if isinstance(outcome.error, BackpressureTimeout | ClaimTimeout):
                self.waiters.wait(waiter, 10)
            elif outcome.error is not None:
                self.refused[name] = outcome.error
            else:
                self.done.append(name)
                self.replies[name] = outcome.reply
            self._effects(outcome.effects)

        request.mutation.session, request.mutation.client_id = session, client_id(1)
        waiter = Waiter(request, grant, lambda error: self.refused.__setitem__(name, error))
        self.waiters.wait(waiter, 10)
        self.waiters.serve()

    def _effects(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, RoomChanged):
                self.waiters.room_changed(effect.partition_id)
            elif isinstance(effect, ReadinessChanged):
                self.waiters.readiness_changed(effect.partition_id, by_count=effect.by_count)

    def put(self, name: str, p: int, rows: int, permit: str = "", **options: Any) -> None:
        request = self.driver.commit(p, rows, **options)
        request.permit = self.replies[permit].permit if permit else 0
        self._wait(name, "commit", request)

    def permit(self, name: str, p: int, samples: int) -> None:
        self._wait(name, "acquire_permit", pb.AcquirePermitRequest(partition_id=p, samples=samples))

    def claim(self, name: str, p: int, rows: int) -> None:
        self._wait(name, "claim", pb.ClaimRequest(partition_id=p, consumer="x", batch_size=rows))

    def send(self, kind: str, body: Any) -> None:
        outcome = self.driver.send(kind, body, session=self.session)
        assert outcome.error is None
        self._effects(outcome.effects)
        self.waiters.serve()

    def set_version(self, p: int, version: int) -> None:
        self.send("set_version", pb.SetVersionRequest(partition_id=p, version=version))

    def time_is_up(self) -> None:
        for timer in list(self.timers):
            timer()


@pytest.fixture
def room() -> Room:
    return Room()


def test_permits_and_puts_are_let_in_in_the_order_in_which_they_came(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT)
    room.put("full", p, 4)
    room.permit("permit 3", p, 3)
    room.put("put 2", p, 2)
    room.permit("permit 1", p, 1)
    assert room.done == ["full"]
    room.set_version(p, 1)
    assert room.done == ["full", "permit 3"]  # the put finds 1 left and waits, and whoever came after it, too
    room.set_version(p, 2)
    assert room.done == ["full", "permit 3", "put 2", "permit 1"]
    assert room.replies["permit 3"].version == 1
    assert room.replies["permit 1"].version == 2


def test_samples_of_a_permit_pass_those_who_wait_for_the_version(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT)
    room.permit("permit", p, 4)
    room.put("waits", p, 1)
    room.put("permitted", p, 4, permit="permit")
    assert room.done == ["permit", "permitted"]
    room.set_version(p, 1)
    assert room.done == ["permit", "permitted", "waits"]


def test_samples_of_a_permit_do_not_pass_those_who_wait_for_capacity(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT, capacity_samples=3)
    room.permit("permit", p, 2)
    room.put("first", p, 2)
    room.set_version(p, 5)
    room.put("waits", p, 2)
    room.put("permitted", p, 1, permit="permit")
    assert room.done == ["permit", "first"]
    room.send("clear", pb.ClearRequest(partition_id=p, ids=ids(1)))
    assert room.done == ["permit", "first", "waits"]
    room.send("clear", pb.ClearRequest(partition_id=p, ids=ids(2)))
    assert room.done == ["permit", "first", "waits", "permitted"]


def test_a_returned_permit_lets_the_next_one_in(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT)
    room.permit("all", p, 4)
    room.permit("next", p, 4)
    room.send("return_permit", pb.ReturnPermitRequest(partition_id=p, permit=room.replies["all"].permit))
    assert room.done == ["all", "next"]


def test_the_end_of_a_session_lets_the_next_one_in(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT)
    other = room.driver.open(client=2)
    room.driver.ok("acquire_permit", pb.AcquirePermitRequest(partition_id=p, samples=4), client=2, session=other)
    room.put("waits", p, 4)
    room.send("end_session", journal_pb2.EndSession(session=other))
    assert room.done == ["waits"]


def test_who_waits_for_a_session_that_is_gone_holds_up_nobody(room: Room) -> None:
    p = room.driver.partition(room.session, capacity_samples=2)
    room.put("one", p, 1)
    room.put("waits", p, 2)
    dead, room.session = room.session, room.driver.open()
    room.put("small", p, 1)
    assert room.done == ["one"]
    assert room.driver.send("end_session", journal_pb2.EndSession(session=dead)).error is None
    room.waiters.session_ended()
    room.waiters.serve()
    assert room.done == ["one", "small"]
    assert isinstance(room.refused["waits"], LeaseExpired)


def test_samples_of_a_live_version_pass_those_who_bring_another(room: Room) -> None:
    p = room.driver.partition(room.session, capacity_versions=1)
    room.put("first", p, 1, versions=[5])
    room.put("newer", p, 1, versions=[6])
    room.put("straggler", p, 1, versions=[5])
    room.put("newest", p, 1, versions=[7])
    assert room.done == ["first", "straggler"]
    room.send("clear", pb.ClearRequest(partition_id=p, ids=ids(1, 2)))
    assert room.done == ["first", "straggler", "newer"]


def test_claims_make_room_under_a_rate_limit_and_puts_make_samples_due(room: Room) -> None:
    limit = pb.RateLimit(samples_per_insert=1, min_samples=2, error_buffer=1)  # 1 <= inserted - delivered <= 3
    p = room.driver.partition(room.session, rate_limit=limit)
    room.claim("claim", p, 1)
    room.put("two", p, 2)
    assert room.done == ["two", "claim"]
    room.claim("claim more", p, 1)
    room.put("third", p, 1)
    assert room.done == ["two", "claim", "third", "claim more"]
    room.put("two more", p, 2)
    room.put("too much", p, 1)
    assert room.done[4:] == ["two more"]
    room.claim("last", p, 1)
    assert room.done[4:] == ["two more", "last", "too much"]


def test_a_seal_ends_the_wait(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT)
    room.put("full", p, 4)
    room.put("put", p, 1)
    room.permit("permit", p, 1)
    room.send("seal_partition", pb.SealPartitionRequest(partition_id=p))
    assert {name: type(error) for name, error in room.refused.items()} == {"put": Sealed, "permit": Sealed}


def test_who_waited_in_vain_is_told_what_for(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT, capacity_samples=4)
    room.put("full", p, 4)
    room.put("put", p, 1)
    room.set_version(p, 9)
    room.put("behind", p, 1)
    room.permit("permit", p, 99)
    room.time_is_up()
    texts = {name: str(error) for name, error in room.refused.items()}
    assert all(isinstance(error, BackpressureTimeout) for error in room.refused.values())
    assert "capacity_samples=4: 4 are live, 1 more come" in texts["put"]
    assert "capacity_samples=4" in texts["behind"]
    assert "max_staleness=0: at version 9, 40 samples are admitted; 4 were accepted, 0 are running" in texts["permit"]
    assert room.waiters._room == {}


def test_who_stood_behind_another_is_told_that(room: Room) -> None:
    p = room.driver.partition(room.session, **WAIT)
    room.put("some", p, 2)
    room.permit("large", p, 3)
    room.permit("small", p, 2)
    list(room.timers)[1]()
    assert "another came first: max_staleness=0" in str(room.refused["small"])


def test_a_claim_that_the_rate_holds_back_is_told_so(room: Room) -> None:
    limit = pb.RateLimit(samples_per_insert=1, min_samples=2, error_buffer=1)
    p = room.driver.partition(room.session, rate_limit=limit)
    room.put("one", p, 1)
    room.claim("claim", p, 1)
    room.time_is_up()
    assert isinstance(room.refused["claim"], ClaimTimeout)
    assert "samples_per_insert: 1 samples were put, min_samples=2" in str(room.refused["claim"])


def test_what_never_fits_does_not_wait(room: Room) -> None:
    p = room.driver.partition(room.session, capacity_samples=2, capacity_versions=1)
    room.put("rows", p, 3)
    room.put("versions", p, 2, versions=[1, 2])
    assert {type(error) for error in room.refused.values()} == {InvalidArgument}
    assert sorted(room.refused) == ["rows", "versions"]
