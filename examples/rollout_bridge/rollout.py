"""The rollout worker: generates sequences, plans who trains on which of them, and publishes both."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from tqclient.integrations.rollout_bridge import RolloutBridge

VOCABULARY: Final = 16
SAMPLES: Final = 48
LENGTHS: Final = (4, 65)
TOKENS_PER_MICROBATCH: Final = 400


def generate(draw: np.random.Generator) -> dict[str, Any]:
    """Returns sequences of random tokens. A sequence is as good as its share of even tokens."""
    tokens = [draw.integers(0, VOCABULARY, length) for length in draw.integers(*LENGTHS, SAMPLES)]
    return {
        "tokens": tokens,
        "rewards": [float(np.mean(row % 2 == 0)) for row in tokens],
        "total_lengths": [len(row) for row in tokens],
        "sample_indices": list(range(SAMPLES)),
        "metadata": [{"generator": "uniform"} for _ in tokens],
    }


def schedule(lengths: list[int], dp_size: int) -> dict[str, Any]:
    """Deals sequences out so that DP ranks have like numbers of tokens, and cuts each rank's into micro-batches.

    Every rank has as many micro-batches as the others: their collectives must meet.
    """
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    for row in np.argsort(lengths)[::-1].tolist():
        min(shards, key=lambda shard: sum(lengths[each] for each in shard)).append(row)
    count = max(-(-sum(lengths[row] for row in shard) // TOKENS_PER_MICROBATCH) for shard in shards)
    cuts = [[part.tolist() for part in np.array_split(np.arange(len(shard)), count)] for shard in shards]
    return {
        "partition": shards,
        "global_batch_sizes": [[len(lengths)]] * dp_size,
        "num_microbatches": [[count]] * dp_size,
        "micro_batch_indices": cuts,
    }


def publish(bridge: RolloutBridge, rollouts: int, dp_size: int, seed: int) -> None:
    """Generates and publishes; never more than `max_staleness` rollouts ahead of the trainer."""
    draw = np.random.default_rng(seed)
    for rollout_id in range(rollouts):
        bridge.admit(rollout_id)
        batch = generate(draw)
        bridge.publish(rollout_id, {**batch, **schedule(batch["total_lengths"], dp_size)}, dp_size, rollout_id)
