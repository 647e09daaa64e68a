"""What the rollout worker samples, and how the trainer scores it."""

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from examples.grpo_addition import task
from examples.grpo_addition.model import Completions, Policy, sample
from examples.grpo_addition.trainer import ENTROPY_WEIGHT, RATIO_MAX, RATIO_MIN, grpo_loss


@pytest.fixture(scope="module")
def policy() -> Policy:
    torch.manual_seed(1)
    return Policy()


@pytest.fixture(scope="module")
def completions(policy: Policy) -> Completions:
    prompts = torch.tensor([task.encode(f"{left}+{right}=") for left in range(10) for right in range(10)])
    return sample(policy, prompts, torch.Generator().manual_seed(2))


def test_completions_are_ragged_and_end_at_the_first_end_mark(completions: Completions) -> None:
    assert {len(row) - task.PROMPT_TOKENS for row in completions.sequences} == {1, 2, 3}
    for sequence, log_probs in zip(completions.sequences, completions.log_probs, strict=True):
        completion = task.decode(sequence[task.PROMPT_TOKENS :])
        assert len(log_probs) == len(completion)
        assert task.END not in completion[:-1]
        assert completion.endswith(task.END) or len(completion) == task.COMPLETION_TOKENS_MAX


def test_trainer_and_rollout_agree_on_log_probabilities(policy: Policy, completions: Completions) -> None:
    padded = pad_sequence(completions.sequences, batch_first=True)
    scored, _ = policy.completion_log_probs(padded)
    for row, drawn in zip(scored, completions.log_probs, strict=True):
        torch.testing.assert_close(row[: len(drawn)], drawn, atol=1e-5, rtol=1e-5)


def test_log_probabilities_are_normalised_and_causal(policy: Policy) -> None:
    tokens = torch.tensor([task.encode("7+8=15")])
    changed = torch.tensor([task.encode("7+8=19")])
    torch.testing.assert_close(policy(tokens).exp().sum(-1), torch.ones(1, 6))
    torch.testing.assert_close(policy(tokens)[:, :5], policy(changed)[:, :5])


def test_entropy_is_that_of_the_next_token(policy: Policy) -> None:
    tokens = torch.tensor([task.encode("7+8=15.")])
    _, entropies = policy.completion_log_probs(tokens)
    for place in range(3):
        given = policy(tokens[:, : task.PROMPT_TOKENS + place])[0, -1]
        expected = torch.distributions.Categorical(logits=given).entropy()
        torch.testing.assert_close(entropies[0, place], expected)


class Fixed(Policy):
    """A policy whose completions have given log-probabilities, and entropy zero."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        super().__init__()
        self.log_probs = log_probs

    def completion_log_probs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.log_probs, torch.zeros_like(self.log_probs)


def test_loss_is_the_clipped_objective_over_real_tokens() -> None:
    # Ratios: 2 and 1 in the first row, 0.5 in the second, whose other place is padding.
    new = torch.tensor([[2.0, 1.0], [0.5, 99.0]]).log()
    old = [torch.zeros(2), torch.zeros(1)]
    advantages = torch.tensor([1.0, -1.0])
    # Gains are cut at RATIO_MAX; a bad token that has become rarer counts as no rarer than RATIO_MIN.
    expected = -(RATIO_MAX + 1.0 - RATIO_MIN) / 3
    loss = grpo_loss(Fixed(new), torch.zeros(2, 6, dtype=torch.long), old, advantages)
    assert loss.item() == pytest.approx(expected)


def test_on_policy_the_gradient_is_that_of_reinforce(policy: Policy, completions: Completions) -> None:
    tokens = pad_sequence(completions.sequences, batch_first=True)
    advantages = torch.linspace(-1, 1, len(tokens))
    lengths = [len(row) for row in completions.log_probs]
    parameter = policy.tokens.weight
    loss = grpo_loss(policy, tokens, completions.log_probs, advantages)
    scored, entropies = policy.completion_log_probs(tokens)
    terms = [
        advantages[row] * scored[row, place] + ENTROPY_WEIGHT * entropies[row, place]
        for row, length in enumerate(lengths)
        for place in range(length)
    ]
    reinforce = -torch.stack(terms).mean()
    (ours,), (theirs,) = torch.autograd.grad(loss, [parameter]), torch.autograd.grad(reinforce, [parameter])
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-3)
