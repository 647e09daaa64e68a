"""What a filter of tags says, and how much it remembers of the maps that it was asked about."""

from __future__ import annotations

import msgpack
import pytest

from tqserver.controller.core.tags import KNOWN_BYTES_MAX, KNOWN_MAX, TagFilter


@pytest.mark.parametrize("note_bytes", [0, 8_000, 60_000])
def test_a_filter_remembers_few_of_many_maps(note_bytes: int) -> None:
    """They are those of samples that were given others since, or cleared."""
    passes = TagFilter(msgpack.packb({"status": "finished"}), False)
    most = 0
    for turn in range(5_000 if not note_bytes else 200):
        tags = {"status": "finished" if turn % 3 else "running", "turn": turn, "note": "x" * note_bytes}
        assert passes(msgpack.packb(tags)) == bool(turn % 3)
        most = max(most, passes.nbytes)
    assert most < KNOWN_BYTES_MAX + 100 * KNOWN_MAX
