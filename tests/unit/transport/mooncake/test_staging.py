"""Slots of registered memory never overlap, and come back when their last holder is gone."""

from __future__ import annotations

import threading

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tqclient.transport.mooncake.staging import Slot, Staging

START, LENGTH = 640, 4096


class Slots(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.area = Staging(START, LENGTH)
        self.holders: list[Slot] = []

    @rule(length=st.integers(0, 1500))
    def take(self, length: int) -> None:
        slot = self.area.take(length)
        if slot is not None:
            assert slot.length >= length
            self.holders.append(slot)
        else:
            assert self.largest_hole() < max(64, -(-length // 64) * 64)  # a slot takes a multiple of 64

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.holders))
        slot.hold()
        self.holders.append(slot)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))).release()

    def largest_hole(self) -> int:
        edges = [START, *(edge for slot in self.taken() for edge in (slot.offset, slot.offset + slot.length))]
        edges.append(START + LENGTH)
        return max(stop - start for start, stop in zip(edges[::2], edges[1::2], strict=True))

    def taken(self) -> list[Slot]:
        return sorted({id(slot): slot for slot in self.holders}.values(), key=lambda slot: slot.offset)

    @invariant()
    def slots_lie_apart_and_within(self) -> None:
        end = START
        for slot in self.taken():
            assert slot.offset % 64 == 0
            assert slot.offset >= end
            end = slot.offset + slot.length
        assert end <= START + LENGTH
        assert self.area.taken_bytes == sum(slot.length for slot in self.taken())

    def teardown(self) -> None:
        for slot in self.holders:
            slot.release()
        whole = self.area.take(LENGTH)
        assert whole is not None
        assert whole.offset == START


TestSlots = Slots.TestCase


def test_waiting_ends_with_the_slot_or_with_the_time() -> None:
    area = Staging(0, 128)
    kept = area.take(100)
    assert kept is not None
    assert area.wait(64, 0.01) is None
    releasing = threading.Timer(0.02, kept.release)
    releasing.start()
    slot = area.wait(64, 5)
    releasing.join()
    assert slot is not None
    assert area.taken_bytes == 64
