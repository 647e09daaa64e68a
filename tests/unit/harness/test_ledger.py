from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.harness import Ledger, LedgerWriter, Outcome, Supervisor, violations


def outcome(*present: int, **consumed: int) -> Outcome:
    return Outcome(frozenset(present), consumed)


def put(writer: LedgerWriter, *ids: int) -> None:
    writer.put(writer.putting(len(ids)), ids)


def ack(writer: LedgerWriter, consumer: str, *ids: int) -> None:
    token = writer.claimed(consumer, ids)
    writer.acking(token)
    writer.acked(token)


def in_doubt(writer: LedgerWriter, consumer: str, *ids: int) -> None:
    writer.acking(writer.claimed(consumer, ids))


def refused(writer: LedgerWriter, consumer: str, *ids: int) -> None:
    token = writer.claimed(consumer, ids)
    writer.acking(token)
    writer.refused(token)


@pytest.mark.parametrize(
    ("events", "state"),
    [
        ([], outcome()),
        ([(put, 1, 2, 3)], outcome(1, 2, 3)),
        ([(LedgerWriter.putting, 2), (put, 1)], outcome(1, 2, 3)),  # the outcome of the first put is not known
        ([(put, 1, 2), (ack, "a", 1), (ack, "b", 1, 2)], outcome(1, 2, a=1, b=2)),
        ([(put, 1, 2), (refused, "a", 1, 2), (ack, "a", 1, 2)], outcome(1, 2, a=2)),
        ([(put, 1, 2), (in_doubt, "a", 1), (ack, "a", 2)], outcome(1, 2, a=1)),
        ([(put, 1, 2), (in_doubt, "a", 1), (ack, "a", 2)], outcome(1, 2, a=2)),
        ([(put, 1, 2), (in_doubt, "a", 1), (ack, "a", 1)], outcome(1, 2, a=1)),
        ([(put, 1, 2), (LedgerWriter.clearing, [1]), (LedgerWriter.cleared, [1])], outcome(2)),
        ([(put, 1, 2), (LedgerWriter.clearing, [1])], outcome(2)),
        ([(put, 1, 2), (LedgerWriter.clearing, [1])], outcome(1, 2)),
    ],
)
def test_what_agrees(tmp_path: Path, events, state: Outcome) -> None:
    ledger = Ledger(tmp_path)
    with ledger.writer() as writer:
        for event, *arguments in events:
            event(writer, *arguments)
    ledger.check(state)


@pytest.mark.parametrize(
    ("events", "state", "complaint"),
    [
        ([(put, 1, 2, 3)], outcome(2), "2 samples were put and are gone: 1, 3"),
        ([(put, 1), (put, 1)], outcome(1), "id 1 was given to two samples"),
        ([(put, 1)], outcome(1, 2), "1 samples that nobody put, with 0 rows in doubt: 2"),
        ([(LedgerWriter.putting, 1)], outcome(1, 2), "2 samples that nobody put, with 1 rows in doubt: 1, 2"),
        ([(put, 1), (ack, "a", 1, 9)], outcome(1, a=2), "1 samples that nobody put, with 0 rows in doubt: 9"),
        ([(put, 1), (LedgerWriter.cleared, [1])], outcome(1), "1 samples were cleared and are there: 1"),
        ([(put, 1, 2), (ack, "a", 1, 2), (ack, "a", 2)], outcome(1, 2, a=2), "a: 1 samples were acked twice: 2"),
        ([(put, 1, 2), (ack, "a", 1, 2)], outcome(1, 2, a=1), "a: 1 samples are consumed, but 2 were acked"),
        ([(put, 1, 2), (ack, "a", 1)], outcome(1, 2, a=2), "a: 2 samples are consumed, but 1 were acked and at most 1"),
        ([(put, 1), (refused, "a", 1)], outcome(1, a=1), "a: 1 samples are consumed, but 0 were acked and at most 0"),
        ([(put, 1)], outcome(1, a=1), "a: 1 samples are consumed, but 0 were acked"),
    ],
)
def test_what_does_not(tmp_path: Path, events, state: Outcome, complaint: str) -> None:
    ledger = Ledger(tmp_path)
    with ledger.writer() as writer:
        for event, *arguments in events:
            event(writer, *arguments)
    found = violations(ledger.events(), state)
    assert len(found) == 1
    assert found[0].startswith(complaint)
    with pytest.raises(AssertionError, match="disagrees"):
        ledger.check(state)


def test_events_of_killed_processes_count_up_to_the_torn_line(tmp_path: Path, supervisor: Supervisor) -> None:
    program = """
import sys
from pathlib import Path
from tests.harness.ledger import LedgerWriter
writer = LedgerWriter(Path(sys.argv[1]))
writer.put(writer.putting(1), [int(sys.argv[2])])
print("put", flush=True)
sys.stdin.read()
"""
    ledger = Ledger(tmp_path / "ledger")
    children = [supervisor.python(program, ledger.directory, id_) for id_ in (1, 2, 3)]
    for child in children:
        child.wait_for("put")
        child.kill()
    first = min(ledger.directory.iterdir())
    with first.open("ab") as file:
        file.write(b'{"event": "put", "tok')
    ledger.check(outcome(1, 2, 3))
    assert len(ledger.events()) == 6


def test_operations_are_counted_within_the_window(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with ledger.writer() as writer:
        put(writer, 1)
        start = time.monotonic()
        put(writer, 2)
        ack(writer, "a", 1)
        stop = time.monotonic()
        ack(writer, "a", 2)
    assert ledger.operations_per_second(start, stop) == pytest.approx(3 / (stop - start))
