"""What those who watch a partition are told."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.model.driver import Driver, ids, unpack
from tqclient.wire.packing import unpack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import limits
from tqserver.controller.core.changes import Changes, Late, removed, tagged, written
from tqserver.controller.core.samples import SampleTable


def test_a_watcher_is_told_what_came_after_what_it_saw(driver: Driver, session: int) -> None:
    partition = driver.partition(session, keep=True)
    first = driver.put(session, partition, 2)
    listed = list(driver.core.changes(partition, 0))
    assert [c.WhichOneof("change") for c in listed] == ["listing"]
    assert unpack(listed[0].listing.ids) == first
    assert listed[0].listing.complete
    assert driver.core.changes(partition, listed[-1].sequence) == []
    second = driver.put(session, partition, 1)
    driver.settle(session, driver.claim(session, partition, 3).claim_id)
    driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(*first)), session=session)
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=partition), session=session)
    written, settled, removed, sealed = driver.core.changes(partition, listed[-1].sequence)
    assert unpack(written.written.ids) == second
    assert written.written.added
    assert settled.settled.consumer == "x"
    assert unpack(settled.settled.consumed) == first + second
    assert unpack(removed.removed.ids) == first
    assert sealed.partition.partition.sealed
    sequences = [each.sequence for each in (written, settled, removed, sealed)]
    assert sequences == sorted(set(sequences))
    assert all(each.last for each in (written, settled, removed, sealed))
    assert driver.core.changes(partition, removed.sequence) == [sealed]


def test_who_asks_for_what_is_forgotten_gets_a_listing(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    held = driver.put(session, partition, 1)
    sequence = driver.core.sequence
    core = type(driver.core).restore(driver.core.snapshot(), 0.0)
    (listing,) = core.changes(partition, sequence - 1)
    assert unpack(listing.listing.ids) == held
    assert core.changes(partition, sequence) == []


def test_messages_are_cut_by_rows_and_by_bytes(driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGE_ROWS_MAX", 4)
    monkeypatch.setattr(limits, "CHANGE_BYTES_MAX", 100)
    partition = driver.partition(session, keep=True)
    start = driver.core.sequence
    tags = [{"t": "x" * size} for size in (0, 0, 200, 40, 40, 0)]  # 4 bytes of msgpack and more around each
    put = driver.put(session, partition, 6, keys=["k", "", "", "", "", ""], tags=tags)
    told = driver.core.changes(partition, start)
    assert [unpack(each.written.ids) for each in told] == [put[:2], put[2:3], put[3:4], put[4:]]
    assert [each.last for each in told] == [False, False, False, True]
    assert len({each.sequence for each in told}) == 1
    assert [each.written.HasField("keys") for each in told] == [True, False, False, False]
    listed = list(driver.core.changes(partition, 0))
    assert [unpack(each.listing.ids) for each in listed] == [put[:2], put[2:3], put[3:4], put[4:]]
    assert [each.listing.complete for each in listed] == [each.last for each in told]
    sequence = driver.core.sequence
    driver.settle(session, driver.claim(session, partition, 6).claim_id)
    driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(*put)), session=session)
    told = list(driver.core.changes(partition, sequence))
    assert [unpack(each.settled.consumed) for each in told[:2]] == [put[:4], put[4:]]
    assert [unpack(each.removed.ids) for each in told[2:]] == [put[:4], put[4:]]
    assert [each.last for each in told] == [False, True, False, True]


def test_a_listing_is_of_one_instant(driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGE_ROWS_MAX", 2)
    partition = driver.partition(session, keep=True)
    held = driver.put(session, partition, 6, keys=[f"k{i}" for i in range(6)])
    sequence = driver.core.sequence
    pieces = iter(driver.core.changes(partition, 0))
    first = next(pieces)
    driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(*held[1:4])), session=session)
    later = driver.put(session, partition, 2000)  # enough for the tables to grow
    driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(*later)), session=session)  # and to be compacted
    rest = list(pieces)
    assert [each for piece in (first, *rest) for each in unpack(piece.listing.ids)] == held
    assert unpack_strings(rest[-1].listing.keys, what="keys") == ["k4", "k5"]
    assert {piece.sequence for piece in (first, *rest)} == {sequence}
    told = list(driver.core.changes(partition, sequence))
    assert [unpack(each.removed.ids) for each in told[:2]] == [held[1:3], held[3:4]]


def test_an_empty_partition_has_a_listing(driver: Driver, session: int) -> None:
    (listed,) = driver.core.changes(driver.partition(session), 0)
    assert (listed.last, listed.listing.complete, listed.listing.ids) == (True, True, b"")


def test_who_saw_what_never_was_gets_a_listing(driver: Driver, session: int) -> None:
    """It watched a controller whose journal was lost since."""
    partition = driver.partition(session)
    (listed,) = driver.core.changes(partition, driver.core.sequence + 1)
    assert listed.listing.complete


def test_an_ended_session_tells_of_what_died_with_it(driver: Driver, session: int) -> None:
    partition = driver.partition(session, max_attempts=1, keep=True)
    held = driver.put(session, partition, 2)
    other = driver.open(client=2)
    driver.claim(other, partition, 2, client=2)
    sequence = driver.core.sequence
    driver.send("end_session", journal_pb2.EndSession(session=other))
    (settled,) = driver.core.changes(partition, sequence)
    assert (unpack(settled.settled.dropped), settled.sequence) == (held, sequence + 1)


def _change(size: int = 0) -> pb.Change:
    return pb.Change(removed=pb.Change.Removed(ids=bytes(size)))


def test_the_oldest_are_forgotten_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_MAX", 3)
    changes = Changes(floor=10)
    for sequence in range(11, 41):
        changes.add(_change())
        assert changes.end_command(sequence)
        assert changes.latest == sequence
        kept = list(range(max(11, sequence - 2), sequence + 1))
        assert changes.floor == kept[0] - 1
        assert changes.after(changes.floor - 1) is None
        for seen in range(changes.floor, sequence + 1):
            told = changes.after(seen)
            assert told is not None
            assert [each.sequence for each in told] == [each for each in kept if each > seen]


def test_the_oldest_are_forgotten_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_BYTES_MAX", 1_000)
    changes = Changes(floor=0)
    for sequence in (1, 2, 3):
        changes.add(_change(400))
        changes.end_command(sequence)
    assert (changes.floor, changes.latest) == (1, 3)
    changes.add(_change(1_001))
    changes.end_command(4)
    assert (changes.floor, changes.latest) == (3, 4)  # the latest are kept, however large
    assert [each.sequence for each in changes.after(3) or ()] == [4]
    assert changes.after(2) is None
    changes.add(_change(900))
    changes.end_command(5)
    assert [each.sequence for each in changes.after(4) or ()] == [5]


def test_one_who_lags_is_served_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHANGES_READ_MAX", 2)
    changes = Changes(floor=0)
    for sequence in (2, 4, 6, 8):
        changes.add(_change(), _change())
        changes.end_command(sequence)
    assert not changes.end_command(9)
    assert [each.sequence for each in changes.after(3) or ()] == [4, 4, 6, 6]
    assert [each.sequence for each in changes.after(6) or ()] == [8, 8]


TELL: dict[str, Callable[[SampleTable, NDArray[np.int64]], list[Late]]] = {
    "written": lambda samples, slots: written(samples, slots, ["a"], added=True),
    "tagged": tagged,
    "removed": removed,
}


def _kept(kind: str, samples: SampleTable, slots: NDArray[np.int64]) -> tuple[int, Changes]:
    """Bytes that 200 changes take, and what keeps them."""
    changes = Changes(0)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for sequence in range(1, 201):
            if kind == "settled":
                changes.settle("x", slots, samples, consumed=True)
            else:
                changes.add(*TELL[kind](samples, slots))
            changes.end_command(sequence)
        return tracemalloc.get_traced_memory()[0] - before, changes
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows", [1, 64, 1000])
@pytest.mark.parametrize("kind", [*TELL, "settled"])
def test_what_is_kept_is_what_is_counted(kind: str, rows: int) -> None:
    """A message of a few bytes takes a kilobyte: the controller would grow far beyond its limit."""
    samples, slots = SampleTable(), np.arange(rows)
    samples.reserve(rows)
    samples.append(1 + slots, None)
    samples.tags = [b"\x81\xa1t\x01"] * rows
    # The least of three: what other threads of the process, and first uses of a library, take is traced as well.
    kept, changes = min((_kept(kind, samples, slots) for _ in range(3)), key=lambda each: each[0])
    assert 0.5 * changes.size_bytes < kept < 1.5 * changes.size_bytes
    assert all(isinstance(each, Late) for group in changes._groups for each in group)
