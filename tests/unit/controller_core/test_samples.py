"""The table of samples: what it says of some of them, side by side or scattered."""

from __future__ import annotations

import numpy as np
import pytest

from tqclient.schema import Form
from tqserver.controller.core.rows import blocks_of
from tqserver.controller.core.samples import SampleTable, compact_index, picked

FORM = Form("dense", "torch", "float32", (2,))
SCATTERED = {
    "none": [],
    "one": [4],
    "side by side": [2, 3, 4],
    "with a gap": [1, 3, 4],
    "in another order": [4, 3, 2],
    "as long as their span, but not it": [2, 5, 4],
    "ends swapped in the middle": [2, 4, 3, 5],
}


def table(rows: int = 8) -> SampleTable:
    samples = SampleTable()
    samples.reserve(rows)
    slots = np.array(
        samples.append(np.arange(100, 100 + rows), [f"key-{row}" if row % 2 else "" for row in range(rows)])
    )
    samples.set_tags(slots, [b"\x81\xa1a" + bytes([row]) for row in range(rows)])
    samples.add_column("a", FORM, FORM.to_bytes())
    samples.write("a", slots, np.array([7, 7, 7, 9, 9, 7, 7, 9], np.uint64)[:rows], slots.astype(np.uint32))
    return samples


@pytest.mark.parametrize("slots", SCATTERED.values(), ids=SCATTERED)
def test_the_entries_of_slots_come_in_their_order(slots: list[int]) -> None:
    assert picked(list("abcdefgh"), np.array(slots, np.int64)) == ["abcdefgh"[slot] for slot in slots]


@pytest.mark.parametrize("slots", SCATTERED.values(), ids=SCATTERED)
def test_a_compact_index_selects_the_same(slots: list[int]) -> None:
    index = compact_index(np.array(slots, np.int64))
    assert np.arange(10, 18)[index].tolist() == [10 + slot for slot in slots]
    assert isinstance(index, slice) == (slots in ([], [4], [2, 3, 4]))


@pytest.mark.parametrize("slots", SCATTERED.values(), ids=SCATTERED)
def test_removed_samples_lose_their_names_and_no_others_do(slots: list[int]) -> None:
    samples = table()
    blocks = samples.remove(np.array(slots, np.int64))
    assert blocks.tolist() == [[7, 7, 7, 9, 9, 7, 7, 9][slot] for slot in slots]
    left = [slot for slot in range(8) if slot not in slots]
    assert samples.keys == ["" if slot in slots or not slot % 2 else f"key-{slot}" for slot in range(8)]
    assert samples.tags == [b"" if slot in slots else b"\x81\xa1a" + bytes([slot]) for slot in range(8)]
    assert samples.key_ids == {f"key-{slot}": 100 + slot for slot in left if slot % 2}
    assert samples.slots().tolist() == left


@pytest.mark.parametrize(
    ("slots", "blocks"), [([], []), ([0], [7]), ([0, 1, 2], [7]), ([2, 3], [7, 9]), ([3, 0, 4, 5], [7, 9])]
)
def test_each_block_of_the_samples_is_named_once(slots: list[int], blocks: list[int]) -> None:
    assert blocks_of(table(), np.array(slots, np.int64), ("a", "a")) == blocks
