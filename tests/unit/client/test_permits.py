"""Permits as a client holds, uses and returns them, whatever happens to its calls and its session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit.client.fakes import FakeService
from tqclient.arguments import RowArguments
from tqclient.errors import BackpressureTimeout, InternalError, InvalidArgument, LeaseExpired, TQError, Unavailable
from tqclient.operations.permits import PermitHandle, acquire, give_back, return_lost_permits
from tqclient.operations.put import put
from tqclient.policy import Policy, SamplesPerInsert
from tqclient.wire.v1 import controller_pb2 as pb


class Admitting(FakeService):
    """A service that hands out permits.

    Attributes:
        held: permit → samples.
        version: of the partition.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.granted = 0
        self.version = -1

    def on_acquire_permit(self, request: pb.AcquirePermitRequest) -> pb.AcquirePermitReply:
        self.granted += 1
        self.held[self.granted] = request.samples
        return pb.AcquirePermitReply(permit=self.granted, version=self.version)

    def on_return_permit(self, request: pb.ReturnPermitRequest) -> pb.ReturnPermitReply:
        self.held.pop(request.permit, None)
        return pb.ReturnPermitReply()

    def permit(self, samples: int = 4) -> PermitHandle:
        return self.run(acquire(self.state, self.ref(), samples, None))

    def put(self, permit: PermitHandle, **arguments: Any) -> pb.CommitRequest:
        self.run(put(self.state, self.ref(), {"x": torch.arange(2)}, RowArguments(**arguments), None, permit))
        commits: Iterator[pb.CommitRequest] = (call for name, call in reversed(self.calls) if name == "Commit")
        return next(commits)


@pytest.fixture
def admitting() -> Admitting:
    return Admitting()


def test_a_permit_is_granted_put_under_and_returned(admitting: Admitting) -> None:
    admitting.version = 7
    permit = admitting.permit()
    assert (permit.version, permit.samples, permit.session) == (7, 4, 1)
    commit = admitting.put(permit)
    assert commit.permit == permit.permit
    assert list(memoryview(commit.version_min).cast("q")) == list(memoryview(commit.version_max).cast("q")) == [7, 7]
    assert list(memoryview(admitting.put(permit, weight_version=(5, 8)).version_min).cast("q")) == [5, 5]
    admitting.run(give_back(admitting.state, permit))
    admitting.run(give_back(admitting.state, permit))
    assert admitting.held == {}
    assert admitting.count("ReturnPermit") == 1
    with pytest.raises(InvalidArgument, match="was returned"):
        admitting.put(permit)


def test_without_a_version_nothing_is_stamped_and_a_column_takes_from_no_permit(admitting: Admitting) -> None:
    permit = admitting.permit()
    commit = admitting.put(permit)
    assert (permit.version, commit.version_min) == (None, b"")
    assert admitting.put(permit, ids=[1, 2], upsert=True).permit == 0


@pytest.mark.parametrize("samples", [0, -1, True, 1.5, 1 << 25])
def test_a_permit_is_for_a_number_of_samples(admitting: Admitting, samples: Any) -> None:
    with pytest.raises(InvalidArgument, match="samples="):
        admitting.permit(samples)
    assert admitting.calls == []


def test_a_lost_reply_is_one_permit(admitting: Admitting) -> None:
    admitting.fault("AcquirePermit", Unavailable("gone"), reply_lost=True)
    assert admitting.permit().permit == 1
    assert admitting.held == {1: 4}


def test_no_room_in_time_is_said_and_nothing_is_held(admitting: Admitting) -> None:
    admitting.fault("AcquirePermit", BackpressureTimeout("full"))
    with pytest.raises(BackpressureTimeout):
        admitting.permit()
    assert not admitting.state.lost_permits


@pytest.mark.parametrize("reply_lost", [True, False])
@pytest.mark.parametrize("error", [InternalError("broken"), KeyboardInterrupt()])
def test_a_permit_that_nobody_got_is_given_back_later(
    admitting: Admitting, error: BaseException, reply_lost: bool
) -> None:
    admitting.fault("AcquirePermit", error, reply_lost=reply_lost)
    with pytest.raises(type(error)):
        admitting.permit()
    (lost,) = admitting.state.lost_permits
    assert lost.request is not None
    admitting.run(return_lost_permits(admitting.state))
    assert admitting.held == {}
    assert not admitting.state.lost_permits
    assert admitting.state.requests.settled_below() > lost.request.mutation.request


def test_a_permit_is_given_back_once_the_controller_is_there_again(admitting: Admitting) -> None:
    permit = admitting.permit()
    for _ in range(2):
        admitting.fault("ReturnPermit", Unavailable("away"))
    admitting.run(give_back(admitting.state, permit))  # it does not raise: the caller is done
    admitting.run(return_lost_permits(admitting.state))
    assert admitting.held == {1: 4}
    admitting.run(return_lost_permits(admitting.state))
    assert admitting.held == {}


def test_a_permit_ends_with_its_session(admitting: Admitting) -> None:
    permit = admitting.permit()
    admitting.end_sessions()
    with pytest.raises(LeaseExpired, match="the permit ended with its session"):
        admitting.put(permit)
    assert admitting.samples == {}
    calls = len(admitting.calls)
    admitting.run(give_back(admitting.state, permit))
    assert len(admitting.calls) == calls  # under another session there is nothing to give back


def test_a_session_that_ends_while_a_permit_waits_is_replaced(admitting: Admitting) -> None:
    admitting.permit()
    admitting.fault("AcquirePermit", LeaseExpired("ended"), before=admitting.end_sessions)
    assert admitting.permit().session == 2


@pytest.mark.parametrize("lost", [LeaseExpired("ended"), InvalidArgument("odd")])
def test_a_permit_that_cannot_be_given_back_is_let_go(admitting: Admitting, lost: TQError) -> None:
    permit = admitting.permit()
    admitting.fault("ReturnPermit", Unavailable("away"))
    admitting.run(give_back(admitting.state, permit))
    admitting.fault("ReturnPermit", lost)
    admitting.run(return_lost_permits(admitting.state))
    assert not admitting.state.lost_permits


# Policies.


@pytest.mark.parametrize(
    ("rate", "buffer"),
    [
        (SamplesPerInsert(1), 2.0),
        (SamplesPerInsert(0.25), 2.0),
        (SamplesPerInsert(4), 8.0),
        (SamplesPerInsert(4, min_samples=100), 400.0),
        (SamplesPerInsert(4, min_samples=100, error_buffer=5), 5.0),
    ],
)
def test_the_buffer_has_a_default(rate: SamplesPerInsert, buffer: float) -> None:
    assert rate.buffer == buffer


@pytest.mark.parametrize(
    "arguments",
    [(0,), (-1,), (float("nan"),), (float("inf"),), (True,), ("2",), (2, 0), (2, 1.5), (2, 1, 1.5), (0.5, 1, 0.9)],
)
def test_rates_that_cannot_be_kept_are_refused(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(InvalidArgument, match="samples_per_insert"):
        SamplesPerInsert(*arguments)


def test_a_policy_comes_back_from_the_wire() -> None:
    policy = Policy(
        max_staleness=2,
        staleness="wait",
        capacity_versions=3,
        samples_per_version=64,
        samples_per_insert=SamplesPerInsert(2, 5, 30.0),
        keep=True,
    )
    assert Policy.from_wire(policy.to_wire()) == policy
    assert Policy.from_wire(Policy().to_wire()) == Policy()
