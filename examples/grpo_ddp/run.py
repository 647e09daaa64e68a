"""What the processes of a run agree on, and how weights get from one to the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

import tqclient as tq
from examples.grpo_addition.model import Policy

SAMPLES: Final = "train/samples"
WEIGHTS: Final = "train/weights"
CONSUMER: Final = "trainer"
DP: Final = 2
GROUP_SIZE: Final = 8
"""Responses to a prompt: what an advantage is relative to."""
PROMPTS_PER_STEP: Final = 16
ROWS_PER_STEP: Final = PROMPTS_PER_STEP * GROUP_SIZE
"""Rows that all ranks train on together before the weights have their next version."""


@dataclass(frozen=True)
class Run:
    """What every process is told.

    Attributes:
        address: of the controller, host:port.
        meet: a file that does not exist yet; the trainer ranks find each other by it.
        steps: of the optimizer.
        seed: of weights, prompts and sampling.
        max_staleness: versions that rollouts may lag behind the trainer.
    """

    address: str
    meet: str
    steps: int
    seed: int
    max_staleness: int


def publish(run: Run, client: tq.Client, policy: Policy, version: int) -> None:
    """Makes a version of the policy the current one, which admits the rollouts that are to be drawn from it."""
    samples, weights = client.partition(SAMPLES), client.partition(WEIGHTS)
    flat = parameters_to_vector(policy.parameters()).detach()
    weights.put({"parameters": flat[None]}, keys=[f"v{version}"])
    samples.set_version(version)
    weights.clear(keys=[f"v{version - run.max_staleness - 1}"])  # no rollout may begin with it any more


def load(client: tq.Client, policy: Policy, version: int) -> None:
    """Gives a policy the parameters of a version."""
    flat: torch.Tensor = client.partition(WEIGHTS).get(keys=[f"v{version}"])["parameters"][0]
    vector_to_parameters(flat, policy.parameters())
