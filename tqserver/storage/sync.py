"""What a NodeSync does to an allocator, in steps: there may be millions of extents, and calls are to be answered."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from typing import TypeVar

from tqserver import limits
from tqserver.storage.extents import Allocator, Extent, Outcome

T = TypeVar("T")


def sync(
    allocator: Allocator,
    extents: Iterable[Extent],
    sessions: Iterable[int],
    committed: Iterable[tuple[int, int, int]] = (),
    *,
    now: float,
    keep: bool = False,
) -> Generator[None, None, Outcome]:
    """Takes over the controller's whole truth: what is neither sealed nor reserved by a live session is freed.

    It yields after every few extents: until it returns, some of the truth is not taken over, and nothing else may seal
    or free extents.

    Args:
        allocator: of the arena.
        extents: every one that is sealed; in the order of their offsets, that is quickest.
        sessions: every one that is live.
        committed: generation, start and end of bytes that were ever committed, live or not.
        now: as for `Allocator.end_session`.
        keep: extents that the controller does not know stay sealed; the caller is to `free` them later.

    Returns:
        As `Allocator.seal`; extents that were adopted are no surprise after a restart.
    """
    truth: dict[int, Extent] = {}
    for extent in extents:
        truth[extent.offset] = extent
        if len(truth) % limits.EXTENTS_PER_STEP == 0:
            yield
    gone: list[Extent] = []
    for part in _parts(list(allocator.extents())):
        gone += [extent for extent in part if truth.get(extent.offset) != extent]
        yield
    for part in _parts([] if keep else gone):
        allocator.free(part)  # ahead of the seals, which may need their bytes
        yield
    outcome = Outcome()
    for offsets in _parts(sorted(truth)):
        outcome.add(allocator.seal(truth[offset] for offset in offsets))
        yield
    unheard = allocator.unheard(committed)
    allocator.seal(unheard)
    if keep:
        outcome.kept += gone + unheard
    else:
        allocator.free(unheard)
    allocator.end_others(sessions, now=now)
    return outcome


def _parts(values: list[T]) -> Iterator[list[T]]:
    for start in range(0, len(values), limits.EXTENTS_PER_STEP):
        yield values[start : start + limits.EXTENTS_PER_STEP]
