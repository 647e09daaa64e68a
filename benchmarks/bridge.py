"""`tq-bench bridge`: what a rollout costs with its per-shard schedule, without it, and by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

import tqclient as tq
from benchmarks.statistics import Spread
from tqclient.integrations.rollout_bridge import RolloutBridge, RolloutOptions
from tqserver.local import LocalCluster

DP: Final = 4
PER_MICROBATCH: Final = 4
TASK: Final = "actor_train"
FIELDS: Final = ("tokens", "loss_masks", "rollout_log_probs", "rewards")


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run.

    Attributes:
        samples: of each rollout.
        size_bytes: of its values.
        ways: how → from the start of the publishing to the ack of the last DP rank.
        schedule_ratio: median with the schedule ÷ without it.
        hand_ratio: median with the schedule ÷ by hand.
    """

    samples: int
    size_bytes: int
    ways: dict[str, Spread]
    schedule_ratio: float
    hand_ratio: float


def run(*, samples: int, repeats: int, seed: int, arena: str) -> Result:
    """Measures the three ways by turns. What comes back is compared outside the timed region.

    Args:
        samples: of each rollout, in 4 shards.
        repeats: rounds that count.
        seed: of the values.
        arena: size of the storage node's arena.
    """
    columns, schedule = _rollout(np.random.default_rng(seed), samples)
    with LocalCluster(arena=arena) as cluster, tq.connect(cluster.address) as client:
        planned, bare = (
            RolloutBridge(client, RolloutOptions(run=run, tasks=(TASK,), max_staleness=None))
            for run in ("planned", "bare")
        )
        ways: dict[str, Callable[[int], list[Any]]] = {
            "with the schedule": lambda turn: _over(planned, turn, {**columns, **schedule}),
            "without it": lambda turn: _over(bare, turn, columns),
            "by hand": lambda turn: _by_hand(client, turn, columns),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(1 + repeats):
            for name, way in ways.items():
                start = time.perf_counter()
                shards = way(turn)
                took = time.perf_counter() - start
                if turn:  # the first round touches pages
                    times[name].append(took)
                _check(shards, columns, schedule["partition"] if name == "with the schedule" else None)
    spreads = {name: Spread.of(taken) for name, taken in times.items()}
    base = spreads["with the schedule"].median_ms
    return Result(
        samples,
        sum(value.nbytes for name in FIELDS for value in columns[name]),
        spreads,
        base / spreads["without it"].median_ms,
        base / spreads["by hand"].median_ms,
    )


def _rollout(draw: np.random.Generator, samples: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the columns of a rollout, and a schedule that deals its samples to the DP ranks at random."""
    lengths = draw.integers(512, 2048, samples)
    columns = {
        "tokens": [torch.from_numpy(draw.integers(0, 1 << 17, length)) for length in lengths],
        "loss_masks": [torch.from_numpy(draw.integers(0, 2, length, dtype=np.int32)) for length in lengths],
        "rollout_log_probs": [torch.from_numpy(draw.random(length, np.float32)) for length in lengths],
        "rewards": torch.from_numpy(draw.random(samples, np.float32)),
    }
    partition = [sorted(part.tolist()) for part in np.array_split(draw.permutation(samples), DP)]
    batches = [
        [list(range(at, min(at + PER_MICROBATCH, len(p)))) for at in range(0, len(p), PER_MICROBATCH)]
        for p in partition
    ]
    schedule = {
        "partition": partition,
        "global_batch_sizes": [[samples]] * DP,
        "num_microbatches": [[len(each)] for each in batches],
        "micro_batch_indices": batches,
    }
    return columns, schedule


def _over(bridge: RolloutBridge, turn: int, batch: dict[str, Any]) -> list[Any]:
    bridge.publish(turn, batch, DP, weight_version=turn)
    shards = []
    for dp_rank in range(DP):
        with bridge.fetch(turn, dp_rank) as rollout:
            shards.append((rollout["partition"], {name: rollout[name] for name in FIELDS}))
    return shards


def _by_hand(client: tq.Client, turn: int, columns: dict[str, Any]) -> list[Any]:
    """What a user would write who has no bridge: shards are tags, and each rank claims its own."""
    name = f"hand/{turn}"
    part = client.create_partition(name, consumers=[TASK])
    samples = len(columns["tokens"])
    part.put(columns, tags=[{"dp": row % DP} for row in range(samples)], weight_version=turn)
    part.seal()
    shards = []
    for dp_rank in range(DP):
        consumer = client.partition(name).consumer(TASK, fields=list(FIELDS), where={"dp": dp_rank})
        batch = consumer.claim(samples)
        shards.append((list(range(dp_rank, samples, DP)), {name: batch.list(name) for name in FIELDS}))
        batch.ack()
    return shards


def _check(shards: list[Any], columns: dict[str, Any], partition: list[list[int]] | None) -> None:
    if partition is not None and [mine for mine, _ in shards] != partition:
        raise AssertionError("the schedule came back as another one")
    rows = [row for mine, _ in shards for row in mine]
    if sorted(rows) != list(range(len(columns["tokens"]))):
        raise AssertionError("the shards are not the rollout, each sample once")
    for mine, values in shards:
        for name in FIELDS:
            if not all(
                torch.equal(torch.as_tensor(a), columns[name][row]) for a, row in zip(values[name], mine, strict=True)
            ):
                raise AssertionError(f"{name} came back as something else")
