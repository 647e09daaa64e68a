"""Training jobs of several ranks, each a process, over real daemons: one replica dies and comes back."""

from __future__ import annotations

import json
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import Child, Supervisor, wait_until
from tqserver.local import LocalCluster

DP, TP, STEPS, ROWS = 4, 2, 50, 8
KILLED, AT = 2, 20
"""The DP rank that is killed, and the step that it has in hand then."""
_log = logging.getLogger(__name__)
RANK_PROCESS = Path(__file__).with_name("rank_process.py")


def said(life: Child) -> list[dict[str, Any]]:
    """What a process said; a line that a SIGKILL cut short does not count."""
    return [json.loads(line) for line in life.stdout.splitlines(keepends=True) if line.endswith("\n")]


@dataclass
class Rank:
    """One rank of the job, over all its lives."""

    dp_rank: int
    member: int
    lives: list[Child] = field(default_factory=list)

    def events(self, kind: str) -> list[dict[str, Any]]:
        """What it said, in order."""
        return [event for life in self.lives for event in said(life) if event["event"] == kind]

    def wait_for(self, event: str, step: int) -> None:
        """Waits until it said this of a step, in any of its lives."""
        text = f'"{event}", "step": {step},'
        wait_until(lambda: any(text in life.stdout for life in self.lives), what=f"{self}: {text}")


class Job:
    """All ranks."""

    def __init__(self, supervisor: Supervisor, address: str) -> None:
        self._supervisor, self._address = supervisor, address
        self.ranks = [Rank(rank // TP, rank % TP) for rank in range(DP * TP)]

    def replica(self, dp_rank: int) -> list[Rank]:
        return [rank for rank in self.ranks if rank.dp_rank == dp_rank]

    def start(self, rank: Rank, **options: float) -> None:
        number = rank.dp_rank * TP + rank.member
        options = {"rank": number, "dp": DP, "tp": TP, "rows": ROWS, **options}
        arguments = [f"--{name}={value}" for name, value in options.items()]
        name = f"rank-{number}-{len(rank.lives)}"
        if not rank.lives:
            arguments.append("--together")
        # Ten processes on a few processors: each with one thread of its own.
        env = {"OMP_NUM_THREADS": "1"}
        rank.lives.append(self._supervisor.python(RANK_PROCESS, self._address, *arguments, name=name, env=env))

    def end(self) -> None:
        """Waits until all have come to the end of the data."""
        for rank in self.ranks:
            assert rank.lives[-1].wait() == 0, rank.lives[-1].report()
            assert rank.events("drained")


@pytest.fixture
def job(supervisor: Supervisor) -> Iterator[tuple[tq.Partition, Job]]:
    with (
        LocalCluster(storage_nodes=1, arena="64MiB", session_lease=5.0) as cluster,
        tq.connect(cluster.address, timeout=30) as client,
    ):
        yield client.create_partition("train"), Job(supervisor, cluster.address)


def fill(part: tq.Partition, seed: int) -> None:
    """Puts what the job trains on, log-uniform lengths from 512 to 8,192, and seals."""
    draw = np.random.default_rng(seed)
    rows = DP * ROWS * STEPS
    lengths = np.exp(draw.uniform(np.log(512), np.log(8192), rows)).astype(int).tolist()
    for start in range(0, rows, 100):  # not in step with the batches
        chosen = range(start, min(start + 100, rows))
        tokens = [torch.arange(row, row + lengths[row], dtype=torch.int32) for row in chosen]
        part.put({"tokens": tokens, "row": torch.tensor(chosen)})
    part.seal()


def delivered(rank: Rank) -> dict[int, dict[str, Any]]:
    """What a rank was given, by step: the last delivery of each."""
    return {event["step"]: event for event in rank.events("claimed")}


def check_replicas_saw_the_same(job: Job) -> None:
    for dp_rank in range(DP):
        first, *others = (delivered(rank) for rank in job.replica(dp_rank))
        assert sorted(first) == list(range(STEPS))
        for other in others:
            assert other == first  # rows, their order, attempts and lengths, step by step


def check_all_is_consumed_once(part: tq.Partition, job: Job) -> None:
    shares = [each["ids"] for dp_rank in range(DP) for each in delivered(job.replica(dp_rank)[0]).values()]
    everything = [sample for ids in shares for sample in ids]
    assert len(set(everything)) == len(everything) == DP * ROWS * STEPS
    total = {"pending": 0, "ready": 0, "leased": 0, "consumed": DP * ROWS * STEPS, "dropped": 0}
    assert part.describe().counts["actor"] == total


def acks(rank: Rank) -> Counter[int]:
    """How often a rank acked each sample."""
    return Counter(sample for event in rank.events("acked") for sample in event["ids"])


def token_ratio(job: Job) -> float:
    """The largest of all steps: of the token sums of the DP ranks, the highest by the lowest."""
    sums: dict[int, list[int]] = defaultdict(list)
    for dp_rank in range(DP):
        for step, event in delivered(job.replica(dp_rank)[0]).items():
            assert len(event["ids"]) == ROWS
            sums[step].append(sum(event["lengths"]))
    assert all(len(each) == DP for each in sums.values())
    return max(max(each) / min(each) for each in sums.values())


def test_a_replica_is_killed_and_restarted_and_the_others_flow(job: tuple[tq.Partition, Job], seed: int) -> None:
    part, ranks = job
    fill(part, seed)
    for rank in ranks.ranks:
        ranks.start(rank, hold=AT if rank.dp_rank == KILLED else -1)
    victims, others = ranks.replica(KILLED), [rank for rank in ranks.ranks if rank.dp_rank != KILLED]
    for rank in victims:
        rank.wait_for("claimed", AT)
    for rank in victims:
        rank.lives[0].kill()

    # Nobody is held up: the others train on, up to their last step.
    for rank in others:
        rank.wait_for("acked", STEPS - 1)
    counts = part.describe().counts["actor"]
    assert (counts["ready"], counts["pending"]) == (0, 0)
    assert counts["leased"] == (STEPS - AT) * ROWS  # what is the dead replica's own waits for it

    for rank in victims:
        ranks.start(rank)
    ranks.end()
    check_replicas_saw_the_same(ranks)
    check_all_is_consumed_once(part, ranks)
    for rank in ranks.ranks:
        acked = acks(rank)
        assert set(acked.values()) == {1}
        assert len(acked) == STEPS * ROWS
    for rank in victims:
        again = [event for event in rank.events("claimed") if event["step"] == AT]
        assert [event["attempts"] for event in again] == [[1] * ROWS, [2] * ROWS]
        assert again[0]["ids"] == again[1]["ids"]
    ratio = token_ratio(ranks)
    _log.info("seed %d: token sums of the DP ranks differ by a factor of %.4f at most in %d steps", seed, ratio, STEPS)
    assert ratio <= 1.15


@pytest.mark.chaos
@pytest.mark.timeout(600)
def test_ranks_die_at_any_instant(job: tuple[tq.Partition, Job], seed: int, rounds: int | None) -> None:
    part, ranks = job
    fill(part, seed)
    draw = np.random.default_rng(seed)
    for rank in ranks.ranks:
        ranks.start(rank, pace=0.02)
    deaths = Counter(draw.integers(DP, size=rounds or 8).tolist())
    for dp_rank, count in deaths.items():
        for step in sorted(draw.choice(STEPS, size=count, replace=False).tolist()):
            victims = ranks.replica(dp_rank)
            if draw.random() < 0.5:
                victims = [victims[draw.integers(TP)]]
            victims[0].wait_for("claimed", step)
            for rank in victims:
                rank.lives[-1].wait_for("registered")
            time.sleep(draw.uniform(0, 0.03))
            for rank in victims:
                rank.lives[-1].kill()
            for rank in victims:
                ranks.start(rank, pace=0.02)
    ranks.end()
    check_replicas_saw_the_same(ranks)
    check_all_is_consumed_once(part, ranks)
    assert token_ratio(ranks) <= 1.15
    for rank in ranks.ranks:
        # An ack counts once all members have acked: one who acked before the death of another acks again.
        unsaid = {event["step"] for event in rank.events("claimed")} - {event["step"] for event in rank.events("acked")}
        assert unsaid <= {said(life)[-1].get("step") for life in rank.lives[:-1]}
        if rank.dp_rank not in deaths:
            assert set(acks(rank).values()) == {1}
