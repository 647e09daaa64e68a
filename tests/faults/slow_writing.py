"""Makes the writes of this process so slow that a test can kill or hold it in the middle of one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.codec import Plan, allocate
from tqclient.limits import KIB
from tqclient.transport import stream

STEP_BYTES: Final = 64 * KIB


def write_in_steps(reached: Callable[[int], None]) -> None:
    """From here on, blocks are written a step at a time.

    Args:
        reached: called within every write, in front of each step and behind the last, with the bytes that are in place.
    """
    write = Plan.write

    def write_slowly(plan: Plan, target: NDArray[np.uint8]) -> bytes:
        staged = allocate(plan.size_bytes)
        directory = write(plan, staged)
        for start in range(0, plan.size_bytes, STEP_BYTES):
            reached(start)
            target[start : start + STEP_BYTES] = staged[start : start + STEP_BYTES]
        reached(plan.size_bytes)
        return directory

    Plan.write = write_slowly  # type: ignore[method-assign]


def send_in_steps(reached: Callable[[int], None]) -> None:
    """From here on, what goes to a node as a stream waits in front of each chunk and behind the last, likewise."""
    chunks = stream._chunks

    def send_slowly(*arguments: Any) -> Iterator[Any]:
        sent_bytes = 0
        for chunk in chunks(*arguments):
            reached(sent_bytes)
            sent_bytes += len(chunk.data)
            yield chunk
        reached(sent_bytes)

    stream._chunks = send_slowly
