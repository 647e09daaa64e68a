from __future__ import annotations

import pytest

from tests.harness.steps import finished
from tests.unit.storage.test_allocator_model import MemoryLedger
from tqclient.errors import InvalidArgument, StorageFull
from tqclient.limits import MIB
from tqserver import limits
from tqserver.storage.extents import Allocator, Extent, Run
from tqserver.storage.sync import sync

START = 1 * MIB
SEGMENT = 64 * MIB  # its first segments are 64 KiB


def allocator(size: int = 1024 * MIB, ledger: MemoryLedger | None = None) -> Allocator:
    return Allocator(START, START + size, SEGMENT, ledger or MemoryLedger())


def test_a_thousand_tiny_partitions_take_a_thousand_small_segments() -> None:
    made = allocator(1000 * 64 * 1024)
    windows = [made.reserve(1, partition, 100, mapped=False) for partition in range(1000)]
    assert len({window.offset // 65536 for window in windows}) == 1000
    assert made.usage().reserved == 1000 * 256


def test_a_partitions_bytes_lie_together_and_segments_double() -> None:
    made = allocator()
    offsets = []
    for _ in range(8):
        offsets.append(made.reserve(1, 1, 32 * 1024, mapped=False).offset - START)
        made.reserve(1, 2, 32 * 1024, mapped=False)
    # 64 KiB for the first two, another 64 KiB for the next two, then 128 KiB for four.
    assert [b - a for a, b in zip(offsets[::2], offsets[1::2], strict=True)] == [32 * 1024] * 4
    assert offsets[6] - offsets[4] == 64 * 1024


def test_a_wholly_free_segment_serves_another_partition() -> None:
    made = allocator(128 * 1024)
    window = made.reserve(1, 1, 64 * 1024, mapped=False)
    made.reserve(1, 2, 64 * 1024, mapped=False)
    with pytest.raises(StorageFull):
        made.reserve(1, 3, 1, mapped=False)
    made.close_window(1, window.generation, window.offset)
    assert made.reserve(1, 3, 64 * 1024, mapped=False).offset == window.offset


def test_the_free_parts_of_other_partitions_segments_are_used_before_the_arena_is_full() -> None:
    made = allocator(1 * MIB)
    half = made.reserve(1, 1, 512 * 1024, mapped=False)
    made.reserve(1, 1, 64 * 1024, mapped=False)  # a second segment, as big as the first: partition 1 owns everything
    assert made.reserve(1, 2, 256 * 1024, mapped=False).length == 256 * 1024
    made.close_window(1, half.generation, half.offset)
    assert made.reserve(1, 3, 512 * 1024, mapped=False).offset == half.offset


def test_more_than_a_segment_takes_a_contiguous_run_at_the_end() -> None:
    made = allocator(512 * MIB)
    made.reserve(1, 1, 1, mapped=False)
    window = made.reserve(1, 1, 400 * MIB, mapped=False)
    assert window.offset + window.length == START + 512 * MIB


def test_full_says_how_much_there_is() -> None:
    made = allocator(1 * MIB)
    made.reserve(1, 1, 768 * 1024, mapped=False)
    with pytest.raises(StorageFull, match="524288 bytes do not fit: 262144 of 1048576 bytes are free, 262144 of them"):
        made.reserve(1, 2, 524_288, mapped=False)
    with pytest.raises(StorageFull):
        made.reserve(1, 2, 2**64 - 1, mapped=False)
    with pytest.raises(InvalidArgument, match="length 0"):
        made.reserve(1, 2, 0, mapped=False)


def test_a_full_table_is_full_storage() -> None:
    class FullLedger(MemoryLedger):
        def has_room(self) -> bool:
            return False

    with pytest.raises(StorageFull, match="windows are open"):
        allocator(ledger=FullLedger()).reserve(1, 1, 1, mapped=False)


def test_one_session_leaves_windows_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WINDOWS_PER_SESSION_MAX", 3)
    made = allocator()
    first, *_ = [made.reserve(1, partition, 100) for partition in range(3)]
    for session in (2, 3):
        made.reserve(session, 1, 100)
        with pytest.raises(StorageFull, match=r"session 1 has 3 windows open here, .* abort what it has allocated, or"):
            made.reserve(1, 9, 100)
    made.close_window(1, first.generation, 0)
    made.reserve(1, 9, 100)


def test_only_its_own_session_closes_a_window() -> None:
    made = allocator()
    window = made.reserve(1, 1, 1000, mapped=False)
    with pytest.raises(InvalidArgument, match="session 1, not to 2"):
        made.close_window(2, window.generation, window.offset)
    made.close_window(1, window.generation, window.offset + 1025)
    assert made.usage().reserved == 1024
    made.close_window(1, window.generation, window.offset + 1)  # one byte was used: 256 stay
    assert made.usage().reserved == 256
    made.close_window(1, window.generation + 1, 0)  # never was: passed over


def test_a_quarantined_window_outlives_its_session_and_its_bytes_are_not_handed_out() -> None:
    made = allocator(128 * 1024)
    window = made.reserve(1, 1, 128 * 1024, mapped=True)
    made.end_session(1, now=0)
    usage = made.usage()
    assert (usage.reserved, usage.quarantined, usage.free) == (0, 128 * 1024, 0)
    assert not made.may_write(1, window.generation, window.offset, 1)
    assert made.mapped_sessions() == {1: True}
    with pytest.raises(StorageFull):
        made.reserve(2, 1, 1, mapped=True)
    assert made.release(1) == 128 * 1024
    assert made.usage().free == 128 * 1024


def test_a_one_sided_window_outlives_its_session_for_as_long_as_its_engine_runs() -> None:
    made = allocator(256 * 1024)
    with pytest.raises(InvalidArgument, match="engine 1 does not run"):
        made.reserve(1, 1, 4096, engine=1)
    made.engine_started(1)
    old = made.reserve(1, 1, 4096, engine=1)
    made.seal([Extent(old.offset, 256, old.generation, 1)])
    made.engine_started(2)
    new = made.reserve(2, 1, 8192, engine=2)
    made.reserve(2, 1, 512)  # through the node: comes back with the session
    made.end_session(1, now=10.0)
    made.end_session(2, now=11.0)
    assert made.usage().quarantined == (4096 - 256) + 8192
    assert made.usage().reserved == 0
    assert made.quarantined_since() == 10.0
    assert not made.has_window(1, old.generation)
    assert made.release(1) == 0  # a word about mapped writers says nothing of these
    assert made.engine_ended(1) == 4096 - 256
    assert (made.usage().sealed, made.usage().quarantined, made.quarantined_since()) == (256, 8192, 11.0)
    assert made.engine_ended(2) == 8192
    assert (made.usage().quarantined, made.quarantined_since()) == (0, None)
    assert made.may_read(old.offset, 256, old.generation)
    assert not made.may_read(new.offset, 1, new.generation)


def test_a_writer_that_is_done_ends_the_quarantine_of_its_window() -> None:
    made = allocator()
    made.engine_started(1)
    first, second = (made.reserve(1, 1, 4096, engine=1) for _ in range(2))
    made.close_window(1, second.generation, second.offset + 1024)  # while the session lives, `end` counts
    assert made.usage().reserved == 4096 + 1024
    made.end_session(1, now=5.0)
    with pytest.raises(InvalidArgument, match="session 1, not to 2"):
        made.close_window(2, first.generation, 0)
    made.close_window(1, first.generation, first.offset + 4096)  # and afterwards it does not
    assert (made.usage().quarantined, made.quarantined_since()) == (1024, 5.0)
    made.close_window(1, second.generation, 2**64 - 1)
    assert (made.usage().quarantined, made.usage().used, made.quarantined_since()) == (0, 0, None)


def test_nobody_writes_through_an_engine_that_ended_before_the_session() -> None:
    made = allocator()
    made.engine_started(1)
    window = made.reserve(1, 1, 4096, engine=1)
    assert made.engine_ended(1) == 0  # the session lives: it may commit what it wrote
    assert made.has_window(1, window.generation)
    made.end_session(1, now=1.0)
    assert (made.usage().used, made.quarantined_since()) == (0, None)


def test_orders_that_contradict_the_arena_are_reported_and_change_nothing_else() -> None:
    made = allocator()
    window = made.reserve(1, 1, 4096, mapped=True)
    sealed = Extent(window.offset, 1000, window.generation, 1)
    made.seal([sealed])
    before = made.usage()
    wrong = [
        Extent(window.offset, 900, window.generation, 1),  # another length for sealed bytes
        Extent(window.offset + 1024, 8192, window.generation, 1),  # behind the window's end, over bytes of nobody
        Extent(window.offset + 1025, 10, window.generation, 1),  # not aligned
        Extent(window.offset + 2048, 0, window.generation, 1),
        Extent(window.offset + 2048, 10, window.generation + 7, 1),  # reserved bytes, another generation
        Extent(START - 256, 256, 3, 1),
        Extent(START + 1024 * MIB, 256, 3, 1),
        Extent(2**64 - 256, 2**64 - 1, 3, 1),
    ]
    outcome = made.seal(wrong)
    assert outcome.conflicts == wrong
    assert made.usage() == before
    free = Extent(START + 512 * MIB, 256, 99, 1)
    assert made.seal([free]).adopted == [free]
    made.end_session(1, now=0)
    late = Extent(window.offset + 1024, 256, window.generation, 1)
    assert made.seal([late]).late == [late]
    assert made.free([Extent(late.offset, 256, late.generation + 1, 1)]) == 0


@pytest.mark.parametrize("rests", [[(1024, 4096)], [(0, 512)], [(0, 512), (1024, 4096)]])
def test_restore_after_a_death_between_two_rows(rests: list[tuple[int, int]]) -> None:
    """The rests of a cut run were remembered, and the whole not yet forgotten: the bytes count once."""
    ledger = MemoryLedger()
    whole = Run(1, 1, 1, START, START + 4096, True)
    ledger.runs = {whole, *(whole._replace(start=START + start, end=START + end) for start, end in rests)}
    made = allocator(ledger=ledger)
    made.restore(ledger.runs.copy())
    assert made.usage().reserved == 4096
    assert ledger.runs == {whole}
    finished(sync(made, [Extent(START, 1024, 1, 1)], [1], now=0))
    assert (made.usage().sealed, made.usage().reserved) == (1024, 3072)
    made.end_session(1, now=0)
    made.release(1)
    assert ledger.runs == set()


def test_sync_frees_what_the_controller_does_not_know() -> None:
    made = allocator()
    window = made.reserve(1, 1, 4096, mapped=False)
    kept = Extent(window.offset, 256, window.generation, 1)
    lost = Extent(window.offset + 256, 256, window.generation, 1)
    made.seal([kept, lost])
    other = made.reserve(2, 1, 4096, mapped=False)
    outcome = finished(sync(made, [kept], [2], now=0))
    assert not outcome.adopted + outcome.conflicts + outcome.late
    usage = made.usage()
    assert (usage.sealed, usage.reserved, usage.quarantined) == (256, 4096, 0)
    assert made.may_write(2, other.generation, other.offset, 4096)
    assert not made.may_read(lost.offset, 1, lost.generation)


@pytest.mark.parametrize("keep", [False, True])
def test_sync_frees_what_was_committed_and_freed_unheard(keep: bool) -> None:
    made = allocator()
    window = made.reserve(1, 5, 8192)
    whole = made.reserve(1, 5, 4096)
    other = made.reserve(2, 5, 4096)
    at, generation = window.offset, window.generation
    live = Extent(at + 1024, 500, generation, 5)  # its order was lost, too
    committed = [
        (generation, at, at + 2048),
        (generation, at + 3072, at + 4096),
        (whole.generation, whole.offset, whole.offset + 4096),
        (generation + 1000, at, at + 8192),  # a window that is no more
    ]
    for _ in range(2):  # the link breaks again
        outcome = finished(sync(made, [live], [1, 2], committed, now=0, keep=keep))
        assert not outcome.late + outcome.adopted + outcome.conflicts
        assert made.usage().sealed == 512 + (7680 - 1024 if keep else 0)
        assert made.usage().reserved == 8192 - 3072 + 4096
        assert made.usage().quarantined == 0
    made.free(outcome.kept)
    assert made.usage().sealed == 512
    assert made.may_write(1, generation, at + 2048, 1024)
    assert not made.may_write(1, generation, at + 2047, 10)
    assert made.may_write(2, other.generation, other.offset, 4096)
    assert not made.has_window(1, whole.generation)


def test_a_window_may_be_closed_after_a_restart_that_forgot_its_sealed_end() -> None:
    ledger = MemoryLedger()
    made = allocator(ledger=ledger)
    window = made.reserve(1, 1, 4096, mapped=True)
    back = Extent(window.offset + 2048, 2048, window.generation, 1)
    made.seal([back])
    made = allocator(ledger=ledger)
    made.restore(ledger.runs.copy())
    finished(sync(made, [back], [1], now=0))
    made.close_window(1, window.generation, window.offset + 4096)
    assert (made.usage().sealed, made.usage().reserved) == (2048, 2048)
