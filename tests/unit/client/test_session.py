from __future__ import annotations

import logging
from typing import Any

import pytest

from tests.unit.client.fakes import LEASE_MS, FakeService, gone
from tqclient.errors import UnsupportedVersion
from tqclient.operations.sessions import live_session
from tqclient.session import Heartbeat


class Inline:
    """Stubs whose calls the fake service answers."""

    def __init__(self, service: FakeService) -> None:
        self._service = service

    def stub(self, target: str) -> Any:
        service = self._service

        class Stub:
            def __getattr__(self, method: str) -> Any:
                from tqclient.operations.effects import Call

                return lambda request, timeout: service.perform(Call(target, method, request, timeout))

        return Stub()


@pytest.fixture
def beat(service: FakeService) -> Heartbeat:
    service.run(live_session(service.state, service.state.deadline(None)))
    return Heartbeat(service.state, Inline(service))


def test_two_operations_open_one_session(service: FakeService) -> None:
    """The second one comes while the first has asked and has no answer yet."""
    deadline = service.state.deadline(None)
    first, second = live_session(service.state, deadline), live_session(service.state, deadline)
    asked = next(first)
    pause = next(second)
    reply = service.perform(asked)
    with pytest.raises(StopIteration) as ended:
        first.send(reply)
    service.perform(pause)
    with pytest.raises(StopIteration) as waited:
        second.send(None)
    assert waited.value.value is ended.value.value
    assert service.count("OpenSession") == 1


def test_a_controller_of_another_version_is_not_asked_again(service: FakeService) -> None:
    service.fault("OpenSession", UnsupportedVersion("speaks 2"))
    with pytest.raises(UnsupportedVersion):
        service.run(live_session(service.state, service.state.deadline(None)))
    assert service.count("OpenSession") == 1


def test_the_period_follows_the_shortest_lease(service: FakeService, beat: Heartbeat) -> None:
    assert LEASE_MS == 10_000
    assert beat._period() == 2.0
    service.state.lease_seen(300)
    assert beat._period() == pytest.approx(0.1)
    service.state.lease_seen(5000)  # longer: the short one is still held
    assert beat._period() == pytest.approx(0.1)
    beat._turn()  # the reply tells the shortest lease that is left
    assert beat._period() == 2.0


def test_a_controller_that_is_away_is_asked_again_at_the_next_beat(service: FakeService, beat: Heartbeat) -> None:
    service.fault("Heartbeat", gone())
    beat._turn()
    assert service.state.session is not None
    beat._turn()
    assert service.count("Heartbeat") == 2


def test_a_session_that_ended_is_noticed(service: FakeService, beat: Heartbeat) -> None:
    service.end_sessions()
    beat._turn()
    assert service.state.session is None


def test_an_unexpected_failure_is_logged_and_does_not_end_the_beats(
    service: FakeService, beat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    service.fault("Heartbeat", ValueError("a fault of this software"))
    with caplog.at_level(logging.ERROR):
        beat._turn()
    assert "a fault of this software" in caplog.text
    beat._turn()
    assert service.count("Heartbeat") == 2


def test_nodes_are_learnt_when_the_topology_changes(service: FakeService, beat: Heartbeat) -> None:
    service.topology_version = 4
    service.first.node.used_bytes = 99
    beat._turn()
    assert service.state.nodes["n0"].used_bytes == 99
    beat._turn()
    assert service.count("DescribeCluster") == 1
