"""The reward worker: scores completions and writes what they earned back to the rows they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

import tqclient as tq
from examples.grpo_addition import task
from examples.grpo_addition.ledger import Ledger
from examples.grpo_addition.worker import PARTITION, REWARD_CONSUMER, Run, deliveries

DEVIATION_MIN: Final = 1e-2
"""Keeps a group that earned the same throughout at an advantage of zero."""


def work(run: Run, number: int, ledger: Ledger) -> None:
    """Adds `rewards` and `advantages` to every sample, until the partition is sealed and drained."""
    with tq.connect(run.address) as client:
        partition = client.partition(PARTITION)
        for batch in deliveries(partition.consumer(REWARD_CONSUMER, fields=["tokens", "prompt"]), ledger):
            completions = [task.decode(tokens[task.PROMPT_TOKENS :]) for tokens in batch.list("tokens")]
            rewards = torch.tensor([task.score(*pair) for pair in zip(batch["prompt"], completions, strict=True)])
            columns = {"rewards": rewards, "advantages": advantages(rewards, batch.groups)}
            # A batch that is delivered twice is scored twice, to the same effect.
            partition.put(columns, ids=batch.ids, upsert=True)
            ledger.write("scored", ids=batch.ids.tolist(), rewards=rewards.tolist())


def advantages(rewards: torch.Tensor, groups: Sequence[object]) -> torch.Tensor:
    """How much better than its group each sample is, in standard deviations of the group: what GRPO learns from.

    Args:
        rewards: float32 [rows].
        groups: per row, the prompt that it belongs to; members need not be adjacent.

    Returns:
        float32 [rows]; zero throughout a group whose rewards are equal.
    """
    numbers: dict[object, int] = {}
    of_row = torch.tensor([numbers.setdefault(group, len(numbers)) for group in groups])
    counts = torch.bincount(of_row).float()
    means = torch.zeros(len(counts)).index_add(0, of_row, rewards) / counts
    centred = rewards - means[of_row]
    deviations = (torch.zeros(len(counts)).index_add(0, of_row, centred.square()) / counts).sqrt()
    return centred / (deviations[of_row] + DEVIATION_MIN)
