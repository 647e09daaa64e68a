"""Who put, claimed and acked which sample, written down by the workers themselves and audited at the end.

Each worker appends lines of JSON to a file of its own, a line with one `write`: what was written before a kill counts.
A put and an ack are announced before and recorded after. A worker that is killed in between leaves a doubt, which the
partition settles: did the keys appear, was the batch consumed?
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

Entry = dict[str, Any]
"""`time` (seconds, monotonic), `worker`, `event`, and what belongs to it: `ids` (int64 array), `keys`, `consumer`, …"""


class Ledger:
    """The file that one worker appends to."""

    def __init__(self, folder: Path, worker: str) -> None:
        self.worker = worker
        self._file = os.open(folder / f"{worker}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, event: str, **values: object) -> None:
        """Appends one entry; it outlives this process from here on."""
        entry = {"time": time.monotonic(), "worker": self.worker, "event": event, **values}
        os.write(self._file, json.dumps(entry).encode() + b"\n")

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._file)


class Account:
    """All ledgers of a folder, read as they grow."""

    def __init__(self, folder: Path) -> None:
        self.entries: list[Entry] = []
        self.last: dict[str, Entry] = {}
        self._folder = folder
        self._offsets: Counter[Path] = Counter()

    def read(self) -> list[Entry]:
        """Takes in what was written since the last call, and returns it."""
        fresh: list[Entry] = []
        for path in sorted(self._folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._offsets[path])
                whole = file.read().rpartition(b"\n")[0]
            if whole:
                self._offsets[path] += len(whole) + 1
                fresh.extend(map(_parse, whole.split(b"\n")))
        fresh.sort(key=lambda entry: entry["time"])
        for entry in fresh:
            self.last[entry["worker"]] = entry
        self.entries.extend(fresh)
        return fresh

    def of(self, event: str, consumer: str | None = None) -> list[Entry]:
        """The entries of one event, and of one consumer if it is named, in the order of time."""
        return [e for e in self.entries if e["event"] == event and consumer in (None, e.get("consumer"))]

    def ids(self, event: str, consumer: str | None = None) -> np.ndarray:
        """int64: the samples of those entries, one after another."""
        return np.concatenate([np.empty(0, np.int64), *(entry["ids"] for entry in self.of(event, consumer))])

    def put_ids(self) -> np.ndarray:
        """int64: the samples that were put, with those whose worker did not live to record it."""
        return np.concatenate([self.ids("put"), self.ids("found")])

    def redelivered(self, consumer: str) -> int:
        """Deliveries of samples that had been delivered before."""
        claimed = self.ids("claimed", consumer)
        return len(claimed) - len(np.unique(claimed))

    def doubtful_keys(self) -> list[str]:
        """Keys of puts that were announced but never recorded: their worker was killed in between."""
        settled = {key for event in ("put", "refused put") for entry in self.of(event) for key in entry["keys"]}
        return [key for entry in self.of("putting") for key in entry["keys"] if key not in settled]

    def doubtful_acks(self, consumer: str) -> set[int]:
        """Samples whose ack was announced, but never recorded, by a worker."""
        acks: Counter[tuple[str, int]] = Counter()
        for event, sign in (("acking", 1), ("acked", -1), ("refused ack", -1)):
            for entry in self.of(event, consumer):
                for id_ in entry["ids"].tolist():
                    acks[entry["worker"], id_] += sign
        return {id_ for (_, id_), count in acks.items() if count > 0}


def _parse(line: bytes) -> Entry:
    entry: Entry = json.loads(line)
    if "ids" in entry:
        entry["ids"] = np.array(entry["ids"], np.int64)  # 8 bytes a sample instead of an object
    return entry


@dataclass(frozen=True)
class PartitionState:
    """What the service says in the end.

    Attributes:
        samples: that it holds.
        counts: per consumer, how many of them are in each state.
    """

    samples: int
    counts: Mapping[str, Mapping[str, int]]


def audit(account: Account, state: PartitionState) -> list[str]:
    """Compares the ledgers with each other and with the partition.

    Returns:
        What is wrong, a sentence each. Empty when every sample that was put was acked exactly once for each consumer,
        and is accounted for by the partition.
    """
    all_put = account.put_ids().tolist()
    put = set(all_put)
    problems = _problem(_repeated(all_put), "the same id was given to two samples")
    for consumer, counts in state.counts.items():
        claimed, acked = account.ids("claimed", consumer).tolist(), account.ids("acked", consumer).tolist()
        doubtful = account.doubtful_acks(consumer)
        problems += _problem(put.difference(acked, doubtful), f"lost: never acked for consumer {consumer!r}")
        problems += _problem(_repeated(acked), f"acked twice for consumer {consumer!r}")
        problems += _problem(set(acked).difference(claimed), f"acked but never claimed for consumer {consumer!r}")
        problems += _problem(set(claimed) - put, f"delivered to consumer {consumer!r} but never put")
        if counts["consumed"] != sum(counts.values()) or counts["consumed"] != state.samples:
            problems.append(f"partition: of {state.samples} samples, consumer {consumer!r} has {dict(counts)}")
    cleared = set(account.ids("cleared").tolist())
    if state.samples != len(put - cleared):
        problems.append(f"partition: holds {state.samples} samples, but {len(put - cleared)} were put and not cleared")
    return problems


def _repeated(ids: Iterable[int]) -> set[int]:
    return {id_ for id_, count in Counter(ids).items() if count > 1}


def _problem(ids: set[int], what: str) -> list[str]:
    return [f"{what}: {len(ids)} samples, the first is {min(ids)}"] if ids else []
