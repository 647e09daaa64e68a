"""The learning by itself: no service, one process."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.rnn import pad_sequence

from examples.grpo_addition import task
from examples.grpo_addition.model import Policy, sample
from examples.grpo_addition.report import RISE_MIN
from examples.grpo_addition.reward import advantages
from examples.grpo_addition.trainer import grpo_loss
from examples.grpo_addition.weights import Weights
from examples.grpo_addition.worker import GROUP_SIZE, PROMPTS_PER_PUT

UPDATES = 60
STALENESS = 6
"""Versions between rollout and update: about what the service's bounded partition gives."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """The tensors are so small that more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("seed", range(2))
def test_stale_rollouts_raise_the_mean_reward_within_sixty_updates(one_thread: None, seed: int) -> None:
    torch.manual_seed(seed)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    policy, actor = Policy(), Policy()
    history = [Weights.first(parameters_to_vector(policy.parameters()).detach())]
    means = []
    for _ in range(UPDATES):
        vector_to_parameters(history[max(0, len(history) - 1 - STALENESS)].parameters, actor.parameters())
        prompts = [prompt for prompt in task.draw_prompts(rng, PROMPTS_PER_PUT) for _ in range(GROUP_SIZE)]
        drawn = sample(actor, torch.tensor([task.encode(prompt) for prompt in prompts]), generator)
        answers = [task.decode(row[task.PROMPT_TOKENS :]) for row in drawn.sequences]
        rewards = torch.tensor([task.score(*pair) for pair in zip(prompts, answers, strict=True)])
        groups = [row // GROUP_SIZE for row in range(len(prompts))]
        means.append(rewards.mean().item())
        vector_to_parameters(history[-1].parameters, policy.parameters())
        tokens = pad_sequence(drawn.sequences, batch_first=True)
        loss = grpo_loss(policy, tokens, drawn.log_probs, advantages(rewards, groups))
        gradient = parameters_to_vector(torch.autograd.grad(loss, list(policy.parameters())))
        history.append(history[-1].updated(gradient))
    tenth = UPDATES // 10
    assert np.mean(means[-tenth:]) - np.mean(means[:tenth]) > 2 * RISE_MIN
