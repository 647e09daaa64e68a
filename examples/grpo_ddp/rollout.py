"""The rollout process: asks the policy each question several times, scores the answers, and puts them as groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import tqclient as tq
from examples.grpo_addition import task
from examples.grpo_addition.model import Policy, sample
from examples.grpo_ddp.run import GROUP_SIZE, PROMPTS_PER_STEP, ROWS_PER_STEP, SAMPLES, Run, load


@dataclass
class Generated:
    """What the rollout process did.

    Attributes:
        ids: of all samples that it put.
        rewards: their mean, by step.
    """

    ids: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def work(run: Run) -> Generated:
    """Puts one batch of groups for each step, as the trainer's version admits it, then seals."""
    torch.set_num_threads(1)
    rng, generator = np.random.default_rng(run.seed), torch.Generator().manual_seed(run.seed)
    policy, done = Policy(), Generated()
    with tq.connect(run.address) as client:
        samples = client.partition(SAMPLES)
        for step in range(run.steps):
            with samples.permit(ROWS_PER_STEP, timeout=60) as permit:  # waits until training is near enough
                load(client, policy, permit.version or 0)
                columns = answer(policy, task.draw_prompts(rng, PROMPTS_PER_STEP), generator)
                groups = [f"{step}/{row // GROUP_SIZE}" for row in range(ROWS_PER_STEP)]
                done.ids += samples.put(columns, groups=groups, permit=permit).tolist()
            done.rewards.append(float(columns["rewards"].mean()))
            if (step + 1) % 10 == 0:
                print(f"step {step + 1:3}: mean reward {done.rewards[-1]:.3f}", flush=True)
        samples.seal()  # the trainers' loops end once they have the rest
    return done


def answer(policy: Policy, questions: list[str], generator: torch.Generator) -> dict[str, Any]:
    """Returns the columns of a put: `GROUP_SIZE` rows for each question, side by side."""
    prompts = [question for question in questions for _ in range(GROUP_SIZE)]
    drawn = sample(policy, torch.tensor([task.encode(prompt) for prompt in prompts]), generator)
    answers = [task.decode(tokens[task.PROMPT_TOKENS :]) for tokens in drawn.sequences]
    return {
        "tokens": drawn.sequences,
        "log_probs": drawn.log_probs,
        "rewards": torch.tensor([task.score(*pair) for pair in zip(prompts, answers, strict=True)]),
    }
