"""The loss of Direct Preference Optimization (Rafailov et al., arXiv:2305.18290), and what it is made of."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence

from examples.grpo_addition import task
from examples.grpo_addition.model import Policy

BETA: Final = 0.1


def sequence_log_probs(policy: Policy, tokens: list[torch.Tensor]) -> torch.Tensor:
    """Scores completions.

    Args:
        policy: whose opinion is asked.
        tokens: per row, int64 [prompt + completion].

    Returns:
        float32 [rows]: the log-probability of each completion, given its prompt.
    """
    of_tokens, _ = policy.completion_log_probs(pad_sequence(tokens, batch_first=True))
    lengths = torch.tensor([len(row) - task.PROMPT_TOKENS for row in tokens])
    return (of_tokens * (torch.arange(of_tokens.shape[1]) < lengths[:, None])).sum(1)


def dpo_loss(log_probs: torch.Tensor, reference_log_probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How little the policy prefers what was chosen, compared with the reference.

    Args:
        log_probs: float32 [2 × pairs], of the policy: of the chosen completion and of the rejected one, in turn.
        reference_log_probs: the same of the reference.

    Returns:
        The mean loss, and float32 [pairs] margins: by how much more than the reference the policy prefers each chosen
        completion, times beta.
    """
    chosen, rejected = (log_probs - reference_log_probs).view(-1, 2).unbind(1)
    margins = BETA * (chosen - rejected)
    return -F.logsigmoid(margins).mean(), margins
