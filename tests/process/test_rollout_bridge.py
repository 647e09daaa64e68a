"""Rollouts from workers to an actor and a critic, each rank a process, over real daemons."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tqclient as tq
from tests.harness.supervisor import Child, Supervisor, wait_until
from tests.process.rollout_process import DP, ROLLOUTS, TASKS, TP, make_batch
from tqclient.integrations.rollout_bridge import RolloutBridge, RolloutOptions
from tqserver.local import LocalCluster

PROCESS = Path(__file__).with_name("rollout_process.py")
KILLED_DP, FIRST_KILLED_AT = 2, 4


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="128MiB", session_lease=5.0) as running:
        yield running


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(cluster.address, timeout=20) as client:
        yield client


class Job:
    """All processes of a job, over all their lives."""

    def __init__(self, supervisor: Supervisor, address: str, seed: int, directory: Path) -> None:
        self._supervisor, self._address, self._seed, self._directory = supervisor, address, seed, directory
        self.lives: dict[str, list[Child]] = {}

    def start(self, role: str, rank: int, **options: int) -> None:
        lives = self.lives.setdefault(f"{role}-{rank}", [])
        arguments = [f"--{name}={value}" for name, value in {"rank": rank, "seed": self._seed, **options}.items()]
        if role == "actor":
            arguments.append(f"--meet={self._directory}/dp-{rank // TP}-{len(lives)}")
        # A dozen processes on a few processors: each with one thread of its own.
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        name = f"{role}-{rank}-{len(lives)}"
        lives.append(self._supervisor.python(PROCESS, self._address, role, *arguments, name=name, env=env))

    def events(self, process: str, kind: str) -> list[dict[str, Any]]:
        """What a process said of a kind, in order; a line that a SIGKILL cut short does not count."""
        lines = [line for life in self.lives[process] for line in life.stdout.splitlines(keepends=True)]
        said = [json.loads(line) for line in lines if line.endswith("\n")]
        return [event for event in said if event["event"] == kind]

    def wait_for(self, process: str, kind: str, rollout: int) -> None:
        text = f'"{kind}", "rollout": {rollout}'
        lives = self.lives[process]
        try:
            wait_until(lambda: any(text in life.stdout for life in lives), what=f"{process}: {text}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.report()}") from None

    def report(self) -> str:
        """What every process said last, for a failure."""
        return "\n".join(lives[-1].report()[-2000:] for lives in self.lives.values())

    def end(self) -> None:
        for lives in self.lives.values():
            assert lives[-1].wait() == 0, lives[-1].report()


def check_everything_was_trained_on_once(job: Job, seed: int) -> None:
    for rollout in range(ROLLOUTS):
        batch = make_batch(rollout, seed)
        rows, ids = [], []
        for dp_rank in range(DP):
            shares = []
            for member in range(TP):
                name = f"actor-{dp_rank * TP + member}"
                fetched = [each for each in job.events(name, "fetched") if each["rollout"] == rollout]
                assert all(each == fetched[0] for each in fetched)  # again after the crash: the same samples
                assert len([each for each in job.events(name, "acked") if each["rollout"] == rollout]) == 1
                shares.append(fetched[0])
            assert shares[0] == shares[1]
            rows += shares[0]["rows"]
            ids += shares[0]["ids"]
        assert sorted(rows) == list(range(len(batch["tokens"])))
        seen = [each for rank in range(2) for each in job.events(f"critic-{rank}", "acked")]
        assert sorted(ids) == sorted(sample for each in seen if each["rollout"] == rollout for sample in each["ids"])


def test_a_job_goes_on_when_a_rank_of_its_actor_is_killed(
    client: tq.Client, cluster: LocalCluster, supervisor: Supervisor, seed: int, tmp_path: Path
) -> None:
    job = Job(supervisor, cluster.address, seed, tmp_path)
    # In an even rollout each rank had fetched, in an odd one the leader alone.
    killed_at = FIRST_KILLED_AT + seed % 2
    victim, peer = (KILLED_DP * TP + (member + seed // 2) % 2 for member in range(TP))
    for rank in range(DP * TP):
        job.start("actor", rank, **({"hold": killed_at} if rank == victim else {}))
    for rank in range(2):
        job.start("worker", rank)
        job.start("critic", rank)
    job.wait_for(f"actor-{victim}", "fetched", killed_at)
    job.wait_for(f"actor-{peer}", "fetched", killed_at)
    job.lives[f"actor-{victim}"][0].kill()
    assert job.lives[f"actor-{peer}"][0].wait() != 0  # its collective broke

    # Nobody else is held up until the next rollout would be one too many.
    bridge = RolloutBridge(client, RolloutOptions(run="job", tasks=TASKS, max_staleness=1))
    others = [rank for rank in range(DP * TP) if rank // TP != KILLED_DP]
    for rank in others:
        job.wait_for(f"actor-{rank}", "acked", killed_at)
    job.wait_for(f"worker-{(killed_at + 1) % 2}", "published", killed_at + 1)
    assert bridge.live() == [killed_at, killed_at + 1]

    for rank in (victim, peer):
        job.start("actor", rank, start=killed_at)
    most = 0
    while any(lives[-1].running for lives in job.lives.values()):
        most = max(most, len(bridge.live()))
        time.sleep(0.02)
    job.end()
    assert most <= 2
    check_everything_was_trained_on_once(job, seed)
    for rollout in range(ROLLOUTS):
        info = client.partition(f"job/{rollout:08d}").describe()
        rows = len(make_batch(rollout, seed)["tokens"])
        done = {"pending": 0, "ready": 0, "leased": 0, "consumed": rows, "dropped": 0}
        assert (info.retired, info.bytes, info.counts) == (True, 0, dict.fromkeys(TASKS, done))
