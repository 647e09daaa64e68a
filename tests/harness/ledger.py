"""What every process of a fault run did, and whether the state at the end agrees with it.

Each process appends to a file of its own, a line per event, written by one system call: a SIGKILL may lose the event
that was not written yet, and tears at most the last line. What may or may not have happened is written down before the
call (`putting`, `acking`, `clearing`) and after it (`put`, `acked` or `refused`, `cleared`); without the second line it
is in doubt.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

COMPLETED: Final = frozenset({"put", "claimed", "acked", "refused", "cleared"})
"""Events that say that an operation was answered."""

Event = dict[str, Any]


class LedgerWriter:
    """Writes down the events of one process; safe to use from many threads."""

    def __init__(self, directory: Path) -> None:
        """Makes a file of its own in the directory, which every process of the run shares."""
        directory.mkdir(parents=True, exist_ok=True)
        name = f"{os.getpid()}-{time.monotonic_ns()}.jsonl"
        self._descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC)
        self._name = name.removesuffix(".jsonl")
        self._numbers = itertools.count()

    def putting(self, rows: int) -> str:
        """About to put so many rows; returns the token for `put`."""
        token = self._token()
        self._write("putting", token=token, rows=rows)
        return token

    def put(self, token: str, ids: Iterable[int]) -> None:
        """The put was answered with these ids."""
        self._write("put", token=token, ids=_ints(ids))

    def claimed(self, consumer: str, ids: Iterable[int]) -> str:
        """A claim was answered with these ids; returns the token for how it ends."""
        token = self._token()
        self._write("claimed", token=token, consumer=consumer, ids=_ints(ids))
        return token

    def acking(self, token: str) -> None:
        """About to ack the claim."""
        self._write("acking", token=token)

    def acked(self, token: str) -> None:
        """The ack was answered."""
        self._write("acked", token=token)

    def refused(self, token: str) -> None:
        """The ack was refused: it has had no effect."""
        self._write("refused", token=token)

    def clearing(self, ids: Iterable[int]) -> None:
        """About to clear these samples."""
        self._write("clearing", ids=_ints(ids))

    def cleared(self, ids: Iterable[int]) -> None:
        """The clear was answered."""
        self._write("cleared", ids=_ints(ids))

    def close(self) -> None:
        """Closes the file."""
        os.close(self._descriptor)

    def __enter__(self) -> LedgerWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _token(self) -> str:
        return f"{self._name}.{next(self._numbers)}"

    def _write(self, event: str, **fields: Any) -> None:
        line = json.dumps({"event": event, "time": time.monotonic(), **fields}, separators=(",", ":")) + "\n"
        os.write(self._descriptor, line.encode())


class Ledger:
    """The events of all processes of a run.

    Attributes:
        directory: pass it to child processes; they make a `LedgerWriter` over it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def writer(self) -> LedgerWriter:
        """Returns a writer for this process."""
        return LedgerWriter(self.directory)

    def events(self) -> list[Event]:
        """Returns every event that was written whole, by time."""
        events: list[Event] = []
        for path in sorted(self.directory.glob("*.jsonl")):
            whole, _, _torn = path.read_bytes().rpartition(b"\n")
            events += [json.loads(line) for line in whole.splitlines()]
        return sorted(events, key=lambda event: event["time"])

    def operations_per_second(self, start: float, stop: float) -> float:
        """Returns how many operations a second were answered between two instants of `time.monotonic()`."""
        answered: int = sum(event["event"] in COMPLETED and start <= event["time"] < stop for event in self.events())
        return answered / (stop - start)

    def check(self, outcome: Outcome) -> None:
        """Compares the events with the state at the end.

        Raises:
            AssertionError: lists every violation.
        """
        found = violations(self.events(), outcome)
        assert not found, "the ledger disagrees with the state:\n  " + "\n  ".join(found)


@dataclass(frozen=True)
class Outcome:
    """The state at the end of a run.

    Attributes:
        present: ids of samples that can be got.
        consumed: per consumer, how many samples it has consumed.
    """

    present: frozenset[int]
    consumed: Mapping[str, int]


@dataclass
class _Tally:
    """The events of a run, sorted."""

    put: Counter[int] = field(default_factory=Counter)
    cleared: set[int] = field(default_factory=set)
    clearing: set[int] = field(default_factory=set)
    rows_in_doubt: dict[str, int] = field(default_factory=dict)
    claims: dict[str, tuple[str, list[int]]] = field(default_factory=dict)
    acked: set[str] = field(default_factory=set)
    acks_in_doubt: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, events: Sequence[Event]) -> _Tally:
        tally = cls()
        for event in events:
            match event["event"]:
                case "putting":
                    tally.rows_in_doubt[event["token"]] = event["rows"]
                case "put":
                    del tally.rows_in_doubt[event["token"]]
                    tally.put.update(event["ids"])
                case "claimed":
                    tally.claims[event["token"]] = (event["consumer"], event["ids"])
                case "acking":
                    tally.acks_in_doubt.add(event["token"])
                case "acked":
                    tally.acks_in_doubt.discard(event["token"])
                    tally.acked.add(event["token"])
                case "refused":
                    tally.acks_in_doubt.discard(event["token"])
                case "clearing":
                    tally.clearing.update(event["ids"])
                case "cleared":
                    tally.cleared.update(event["ids"])
        return tally

    def ids_by_consumer(self, tokens: Iterable[str]) -> dict[str, Counter[int]]:
        """How often each id lies in one of these claims, per consumer."""
        counts: dict[str, Counter[int]] = defaultdict(Counter)
        for token in tokens:
            consumer, ids = self.claims[token]
            counts[consumer].update(ids)
        return counts


def violations(events: Sequence[Event], outcome: Outcome) -> list[str]:
    """Returns every promise that the events and the state at the end break together; pure."""
    tally = _Tally.of(events)
    put = set(tally.put)
    found = [f"id {_cut(twice)} was given to two samples" for twice in _nonempty(_repeated(tally.put))]
    if lost := put - tally.cleared - tally.clearing - outcome.present:
        found.append(f"{len(lost)} samples were put and are gone: {_cut(lost)}")
    if back := tally.cleared & outcome.present:
        found.append(f"{len(back)} samples were cleared and are there: {_cut(back)}")
    claimed = {id_ for _, ids in tally.claims.values() for id_ in ids}
    unknown = (outcome.present | claimed) - put
    in_doubt = sum(tally.rows_in_doubt.values())
    if len(unknown) > in_doubt:
        found.append(f"{len(unknown)} samples that nobody put, with {in_doubt} rows in doubt: {_cut(unknown)}")
    acked = tally.ids_by_consumer(tally.acked)
    doubtful = tally.ids_by_consumer(tally.acks_in_doubt)
    for consumer in sorted({*acked, *doubtful, *outcome.consumed}):
        if twice := _repeated(acked[consumer]):
            found.append(f"{consumer}: {len(twice)} samples were acked twice: {_cut(twice)}")
        least = len(acked[consumer])
        most = len(acked[consumer].keys() | doubtful[consumer].keys())
        consumed = outcome.consumed.get(consumer, 0)
        if not least <= consumed <= most:
            found.append(f"{consumer}: {consumed} samples are consumed, but {least} were acked and at most {most}")
    return found


def _repeated(counts: Counter[int]) -> set[int]:
    return {id_ for id_, count in counts.items() if count > 1}


def _nonempty(ids: set[int]) -> list[set[int]]:
    return [ids] if ids else []


def _ints(ids: Iterable[int]) -> list[int]:
    return [int(id_) for id_ in ids]


def _cut(ids: Iterable[int], count: int = 10) -> str:
    ordered = sorted(ids)
    return ", ".join(map(str, ordered[:count])) + (", …" if len(ordered) > count else "")
