"""Read pins, which a client takes again when the controller that gave them has died."""

from __future__ import annotations

import pytest
import torch

from tests.unit.client.fakes import FakeService, gone
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.errors import Unavailable
from tqclient.info import PartitionRef
from tqclient.operations.effects import Operation
from tqclient.operations.put import put
from tqclient.operations.read import get
from tqclient.operations.sessions import heartbeat
from tqclient.wire.v1 import controller_pb2 as pb


@pytest.fixture
def filled(service: FakeService, ref: PartitionRef) -> FakeService:
    service.run(put(service.state, ref, {"x": torch.arange(3)}, RowArguments(), None))
    return service


def views(service: FakeService, ref: PartitionRef) -> BatchData:
    return BatchData(service.state, service.run(get(service.state, ref, [1], None, None, False, 5.0)))


def take_again(service: FakeService) -> Operation[bool]:
    """Returns a beat that has learned of a restart, and told of the pins, and waits for the reply."""
    beat = heartbeat(service.state, 1.0)
    learns = next(beat)
    tells = beat.send(service.perform(learns))
    service.perform(tells)
    return beat


def test_views_hold_their_pin_over_a_restart_of_the_controller(filled: FakeService, ref: PartitionRef) -> None:
    batches = [views(filled, ref) for _ in range(3)]
    filled.run(heartbeat(filled.state, 1.0))
    held = filled.pins.copy()
    assert len(held) == 3
    filled.epoch, filled.pins = 2, set()
    batches.pop().close()
    filled.fault("Heartbeat", gone())
    with pytest.raises(Unavailable):
        filled.run(heartbeat(filled.state, 1.0))
    with pytest.raises(Unavailable):  # it has learned of the restart, and could not tell of the pins
        take_again(filled).throw(gone())
    filled.run(heartbeat(filled.state, 1.0))
    assert len(filled.pins) == 2
    assert filled.pins < held
    count = filled.count("Heartbeat")
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.count("Heartbeat") == count + 1
    for batch in batches:
        batch.close()
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == set()


def test_a_look_up_that_a_restart_overtook_takes_its_pin_again(filled: FakeService, ref: PartitionRef) -> None:
    session = filled.state.session
    assert session is not None
    filled.epoch = 2
    filled.run(heartbeat(filled.state, 1.0))
    filled.state.hold_pin(session, 77, [3], epoch=1)  # the reply is of the former life
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == {77}


def test_so_does_one_that_ends_while_the_others_are_taken_again(filled: FakeService, ref: PartitionRef) -> None:
    session = filled.state.session
    assert session is not None
    batch = views(filled, ref)
    filled.epoch, filled.pins = 2, set()
    beat = take_again(filled)
    filled.state.hold_pin(session, 77, [3], epoch=1)
    with pytest.raises(StopIteration):
        beat.send(pb.HeartbeatReply(epoch=2))
    filled.run(heartbeat(filled.state, 1.0))
    assert 77 in filled.pins
    batch.close()


def test_many_pins_are_taken_again_by_several_messages(
    filled: FakeService, ref: PartitionRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tqclient.operations.sessions.HELD_BLOCKS_MAX", 4)
    session = filled.state.session
    assert session is not None
    filled.run(heartbeat(filled.state, 1.0))
    for pin in range(101, 106):
        filled.state.hold_pin(session, pin, [1, 2, 3], epoch=filled.state.epoch)
    filled.epoch, filled.pins = 2, set()
    count = filled.count("Heartbeat")
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.count("Heartbeat") == count + 1 + 3
    assert filled.pins == {101, 102, 103, 104, 105}


@pytest.mark.parametrize("reply_lost", [False, True])
def test_pins_that_are_dropped_while_they_are_taken_again_are_dropped(
    filled: FakeService, ref: PartitionRef, *, reply_lost: bool
) -> None:
    batch = views(filled, ref)
    filled.epoch, filled.pins = 2, set()
    beat = take_again(filled)
    held, filled.pins = filled.pins, set()
    batch.close()
    filled.run(get(filled.state, ref, [2], None, None, True, 5.0))  # carries the drop, and is there ahead of the beat
    filled.pins |= held
    with pytest.raises(Unavailable if reply_lost else StopIteration):
        _ = beat.throw(gone()) if reply_lost else beat.send(pb.HeartbeatReply(epoch=2))
    filled.run(heartbeat(filled.state, 1.0))
    assert filled.pins == set()
