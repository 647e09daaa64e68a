"""Producers that register while an earlier registration of theirs is being ended."""

from __future__ import annotations

import pytest

from tests.unit.client.fakes import FakeService
from tqclient.errors import InvalidArgument, Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.effects import Call, Sleep
from tqclient.operations.producers import register


def test_who_registers_waits_for_the_end_of_what_is_retracted(service: FakeService, ref: PartitionRef) -> None:
    service.state.retracting.add(ref.partition_id)
    operation = register(service.state, ref)
    for _ in range(3):
        assert isinstance(next(operation), Sleep)
    service.state.retracting.clear()  # the chores have done it
    assert isinstance(next(operation), Call)
    operation.close()


def test_but_not_for_ever(service: FakeService, ref: PartitionRef) -> None:
    service.state.retracting.add(ref.partition_id)
    with pytest.raises(Unavailable, match="an earlier registration of this client was not confirmed"):
        service.run(register(service.state, ref, 2.0))
    assert not service.state.producing


def test_a_closed_client_is_counted_as_no_producer(service: FakeService, ref: PartitionRef) -> None:
    service.state.mark_closed()
    with pytest.raises(InvalidArgument, match="closed"):
        service.run(register(service.state, ref))
    assert not service.state.producing
