"""Collections of garbage that keep short, however many objects there are that live long.

A full collection looks through all of them: of 100,000 blocks for a quarter of a second, in which the daemon does
nothing else, and again whenever there are a quarter more. What has outlived one that took long is passed over from then
on. It still goes when nothing refers to it any more; only what becomes part of a cycle later stays, and of that there
is next to nothing.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping
from typing import Any, Final

LONG_SECONDS: Final = 0.02


class Watch:
    """Told of each collection by the interpreter."""

    def __init__(self) -> None:
        self._begun = 0.0

    def __call__(self, phase: str, info: Mapping[str, Any]) -> None:
        """A collection begins or ends; see `gc.callbacks`."""
        if info["generation"] < 2:
            return
        if phase == "start":
            self._begun = time.perf_counter()
        elif time.perf_counter() - self._begun >= LONG_SECONDS:
            gc.freeze()


def keep_collections_short() -> None:
    """Has what this process has so far, and later on what outlives a long collection, passed over."""
    gc.freeze()
    gc.callbacks.append(Watch())
