"""The worker processes of a run: started, watched, killed in the middle of their work, replaced, audited."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from subprocess import Popen
from typing import Final

import tqclient as tq
from examples.grpo_addition import process
from examples.grpo_addition.ledger import Account, Ledger, PartitionState, audit
from examples.grpo_addition.worker import REWARD_CONSUMER, ROWS_PER_BATCH, TRAIN_CONSUMER, Run

BUSY: Final = {"rollout": "putting", "trainer": "claimed"}
"""What the last line of a worker's ledger says while it is in the middle of something."""
MARKS_WHEN_DONE: Final = 3
"""A sample is done with once it was put and acked by both consumers."""
BUSY_S_MAX: Final = 30.0


class CrewFailed(Exception):
    """A worker did what it should not."""


class Crew:
    """The processes of one run, and the account of what they did."""

    def __init__(self, run: Run, partition: tq.Partition, ledger: Ledger) -> None:
        self.account = Account(run.folder)
        self._run, self._partition, self._ledger = run, partition, ledger
        self._processes: dict[str, Popen[bytes]] = {}
        self._started: Counter[str] = Counter()
        self._marks: Counter[int] = Counter()

    def start(self, kind: str) -> str:
        """Starts one more worker of a kind, and returns its name."""
        number = self._started[kind]
        self._started[kind] += 1
        name = f"{kind}-{number}"
        self._processes[name] = process.start(self._run, kind, number)
        return name

    @property
    def working(self) -> bool:
        """Whether a worker is still at it; each ends once the sealed partition has nothing left for it."""
        return any(worker.poll() is None for worker in self._processes.values())

    @property
    def updates(self) -> int:
        """How often the model was changed."""
        return len(self.account.of("stepped"))

    def check(self) -> None:
        """Raises CrewFailed when a worker ended with an error; the message holds its log."""
        for name, worker in self._processes.items():
            if worker.poll() not in (None, 0):
                raise CrewFailed(
                    f"{name} ended with {worker.returncode}\n{process.log_of(self._run, name).read_text()}"
                )

    def catch_up(self) -> None:
        """Reads the ledgers, and clears the samples that are done with; those in doubt stay for the audit."""
        for entry in self.account.read():
            if entry["event"] in ("put", "acked"):
                self._marks.update(entry["ids"].tolist())
        done = [id_ for id_, marks in self._marks.items() if marks >= MARKS_WHEN_DONE]
        if len(done) >= ROWS_PER_BATCH:
            self._partition.clear(ids=done)
            self._ledger.write("cleared", ids=done)
            for id_ in done:
                del self._marks[id_]

    def kill_and_replace(self, kind: str) -> str:
        """Sends SIGKILL to a worker in the middle of its work, starts another, and says so."""
        name = next(name for name in self._processes if name.startswith(kind))
        self._freeze_while_busy(name, BUSY[kind])
        pid = self._processes[name].pid
        self._end(name)
        self._ledger.write("killed", name=name)
        return f"kill -9 {name} (pid {pid}, last seen {BUSY[kind]}): {self.start(kind)} takes its place"

    def _freeze_while_busy(self, name: str, event: str) -> None:
        """Stops a worker at a moment when its ledger ends with an event, so that it never finishes what comes next."""
        deadline, pid = time.monotonic() + BUSY_S_MAX, self._processes[name].pid
        while time.monotonic() < deadline:
            if self._last_event(name) == event:
                os.kill(pid, signal.SIGSTOP)
                os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
                if self._last_event(name) == event:
                    return
                os.kill(pid, signal.SIGCONT)
            self.check()
            time.sleep(0.001)
        raise CrewFailed(f"{name} was not {event} once in {BUSY_S_MAX:.0f} s")

    def _last_event(self, name: str) -> str:
        self.catch_up()
        return str(self.account.last.get(name, {}).get("event"))

    def end(self) -> None:
        """Ends the workers that still run."""
        for name in list(self._processes):
            self._end(name)

    def _end(self, name: str) -> None:
        self._processes[name].kill()
        self._processes[name].communicate()  # waits, and closes our end of its lifeline
        del self._processes[name]

    def audit(self) -> list[str]:
        """Compares the ledgers with the partition, as `ledger.audit` does, once every doubtful put is settled."""
        self.catch_up()
        if keys := self.account.doubtful_keys():
            try:
                found = self._partition.get(keys=keys, fields=["prompt"])
                self._ledger.write("found", ids=found.ids.tolist(), keys=keys)
            except tq.SampleNotFound as error:
                if len(error.rows) != len(keys):
                    return [f"a put that was cut short is there in part: {error}"]
            self.catch_up()
        info = self._partition.describe()
        counts = {consumer: dict(info.counts[consumer]) for consumer in (REWARD_CONSUMER, TRAIN_CONSUMER)}
        return audit(self.account, PartitionState(info.samples, counts))
