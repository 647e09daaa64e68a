"""The trainer: claims scored samples, turns them into a gradient, and moves the shared model along it."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tqclient as tq
from examples.grpo_addition.ledger import Ledger
from examples.grpo_addition.model import Policy
from examples.grpo_addition.weights import WeightStore
from examples.grpo_addition.worker import PARTITION, TRAIN_CONSUMER, Run, deliveries

RATIO_MIN: Final = 0.8
RATIO_MAX: Final = 1.28
"""Beyond these, a sample that the policy has moved away from stops pulling. The wider upper side, from DAPO
(arXiv:2503.14476), leaves room for unlikely tokens to grow."""
ENTROPY_WEIGHT: Final = 0.05
"""Keeps the policy curious long enough to find the right digits."""


def work(run: Run, number: int, ledger: Ledger) -> None:
    """Takes one step a batch, until the partition is sealed and drained."""
    del number
    store, policy = WeightStore(run.folder), Policy()
    with tq.connect(run.address) as client:
        partition = client.partition(PARTITION)
        consumer = partition.consumer(TRAIN_CONSUMER, fields=["tokens", "log_probs", "advantages"])
        for batch in deliveries(consumer, ledger):
            vector_to_parameters(store.read().parameters, policy.parameters())
            loss = grpo_loss(policy, batch.padded("tokens"), batch.list("log_probs"), batch["advantages"])
            gradient = parameters_to_vector(torch.autograd.grad(loss, list(policy.parameters())))
            weights = store.update(gradient, announce=partition.set_version)
            staleness = weights.version - 1 - float(batch.weight_versions.mean())
            ledger.write("stepped", ids=batch.ids.tolist(), version=weights.version, staleness=staleness)


def grpo_loss(
    policy: Policy, tokens: torch.Tensor, old_log_probs: list[torch.Tensor], advantages: torch.Tensor
) -> torch.Tensor:
    """The clipped objective of GRPO, averaged over tokens, with a bonus for entropy; negated, to be minimised.

    Args:
        policy: as it is now; the samples may come from versions before it, which the importance ratio corrects.
        tokens: int64 [rows, time], prompts and completions, padded.
        old_log_probs: per row, float32 [completion]: of the policy that drew the completion.
        advantages: float32 [rows].
    """
    lengths = torch.tensor([len(row) for row in old_log_probs])
    old = torch.nn.utils.rnn.pad_sequence(old_log_probs, batch_first=True)
    mask = torch.arange(old.shape[1]) < lengths[:, None]
    new, entropies = policy.completion_log_probs(tokens)
    ratios, advantages = (new - old).exp(), advantages[:, None]
    objective = torch.minimum(ratios * advantages, ratios.clamp(RATIO_MIN, RATIO_MAX) * advantages)
    return -(objective + ENTROPY_WEIGHT * entropies)[mask].mean()
