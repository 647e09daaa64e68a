"""What the processes of a run agree on, and the pairs that they learn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from examples.grpo_addition import task
from examples.grpo_addition.model import Policy

PARTITION: Final = "train/pairs"
PAIRS_PER_BATCH: Final = 32
SUMS: Final = 19
"""What two digits can add up to: 0 to 18."""


@dataclass(frozen=True)
class Run:
    """What every process is told.

    Attributes:
        address: of the controller, host:port.
        seed: of weights and pairs.
    """

    address: str
    seed: int


def first_policy(run: Run) -> Policy:
    """Returns the policy that training begins with, and that stays the reference."""
    torch.manual_seed(run.seed)
    return Policy()


def draw_pairs(rng: np.random.Generator, count: int) -> list[torch.Tensor]:
    """Returns tokens, int64 [time], of 2 × `count` rows: the sum as chosen, a wrong one as rejected, in turn."""
    texts = []
    for prompt in task.draw_prompts(rng, count):
        chosen = task.answer_to(prompt)
        wrong = (int(chosen.removesuffix(task.END)) + int(rng.integers(1, SUMS))) % SUMS
        texts += [prompt + chosen, f"{prompt}{wrong}{task.END}"]
    return [torch.tensor(task.encode(text)) for text in texts]
