"""The bitmap behind the views, beside a plain set."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tqserver.controller.core.bitmap import Bitmap

CAPACITY = 70
SLOTS = st.lists(st.integers(0, CAPACITY - 1), unique=True, max_size=6)
STEP = st.tuples(st.sampled_from(["discard", "assign", "range"]), SLOTS, st.integers(0, 2**CAPACITY - 1))


def mask_of(bits: int, count: int) -> list[bool]:
    return [bool(bits >> place & 1) for place in range(count)]


@given(members=st.integers(0, 2**CAPACITY - 1), steps=st.lists(STEP, max_size=20), rows=st.integers(1, 5))
def test_it_finds_what_a_set_would(members: int, steps: list[tuple[str, list[int], int]], rows: int) -> None:
    bitmap = Bitmap(np.array(mask_of(members, CAPACITY)))
    expected = {slot for slot in range(CAPACITY) if members >> slot & 1}
    for kind, slots, bits in [("discard", [], 0), *steps]:
        if kind == "discard":
            bitmap.discard(np.array(slots, dtype=np.int64))
            expected -= set(slots)
        elif kind == "assign":
            mask = mask_of(bits, len(slots))
            bitmap.assign(np.array(slots, dtype=np.int64), np.array(mask, dtype=np.bool_))
            expected = expected - set(slots) | {slot for slot, chosen in zip(slots, mask, strict=True) if chosen}
        elif slots:
            start, stop = min(slots), max(slots) + 1
            mask = mask_of(bits, stop - start)
            bitmap.assign(slice(start, stop), np.array(mask, dtype=np.bool_))
            expected = expected - set(range(start, stop)) | {start + n for n, chosen in enumerate(mask) if chosen}
        assert bitmap.count == len(expected)
        for wanted in (1, rows):
            assert bitmap.first(wanted).tolist() == sorted(expected)[:wanted]
            assert bitmap.last(wanted).tolist() == sorted(expected, reverse=True)[:wanted]


@given(members=st.integers(1, 2**CAPACITY - 1))
def test_one_by_one_all_are_taken_in_their_order(members: int) -> None:
    bitmap = Bitmap(np.array(mask_of(members, CAPACITY)))
    taken = []
    while bitmap.count:
        slot = bitmap.first(1)
        assert slot.dtype == np.int64
        bitmap.discard(slot)
        taken += slot.tolist()
    assert taken == [slot for slot in range(CAPACITY) if members >> slot & 1]
