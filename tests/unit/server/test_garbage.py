"""Full collections of garbage, and what they pass over."""

from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from tqserver import garbage

CHILD = """
import gc, weakref
from tqserver import garbage
garbage.LONG_SECONDS = float("{limit}")
garbage.keep_collections_short()
at_first = gc.get_freeze_count()
kept = [(number, [number]) for number in range(200_000)]
gc.collect()
assert (gc.get_freeze_count() - at_first > 200_000) == {freezes}, gc.get_freeze_count()
cycle = []
cycle.append(cycle)
del cycle
assert gc.collect() >= 1, "what became garbage since is collected"
class Held: pass
held = Held()
gone = weakref.ref(held)
gc.freeze()
del held
assert gone() is None, "what nothing refers to goes, frozen or not"
"""


@pytest.mark.parametrize(("limit", "freezes"), [("0", True), ("inf", False)])
def test_what_outlives_a_long_collection_is_passed_over(limit: str, freezes: bool) -> None:
    program = CHILD.format(limit=limit, freezes=freezes)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_short_and_partial_collections_freeze_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, garbage.LONG_SECONDS / 2, 1.0, 1.0 + garbage.LONG_SECONDS])
    frozen: list[int] = []
    monkeypatch.setattr(garbage.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(1))
    watch = garbage.Watch()
    for generation, expected in ((0, 0), (1, 0), (2, 0), (2, 1)):
        watch("start", {"generation": generation})
        watch("stop", {"generation": generation})
        assert len(frozen) == expected
