"""Backpressure between rollout and training: a rollout may be live once an earlier one is finished."""

from __future__ import annotations

import time
from collections.abc import Callable

from tqclient.errors import BackpressureTimeout, PartitionNotFound
from tqclient.partition import Partition


def wait_until_finished(find: Callable[[], Partition], waiting: str, timeout: float) -> None:
    """Waits until every task is done with a rollout; the controller says when something changes.

    Args:
        find: finds or makes the rollout's partition: one that a worker left half published is replaced.
        waiting: who waits, for messages.
        timeout: seconds.

    Raises:
        BackpressureTimeout: it did not come in time.
        Unavailable: the controller is away.
    """
    deadline = time.monotonic() + timeout
    part, seen = find(), 0
    while True:
        try:
            if part.describe().retired:
                return
            changed = _next_change(part, seen, deadline)
        except PartitionNotFound:
            part, changed = find(), 0
        if changed is None:
            break
        seen = changed
    raise BackpressureTimeout(f"{waiting} waits for {part.name!r}, which training has not finished in {timeout:g} s")


def _next_change(part: Partition, seen: int, deadline: float) -> int | None:
    """Waits until something changes after a sequence, and returns the sequence of that; None: nothing did in time."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        return None
    for change in part.watch(seen, timeout=seconds):
        if change.last:
            return change.sequence
    return None
