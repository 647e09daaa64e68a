"""The policy: a transformer small enough that a hundred updates take a few seconds of one core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from examples.grpo_addition import task

CONTEXT_TOKENS: Final = task.PROMPT_TOKENS + task.COMPLETION_TOKENS_MAX


class Block(nn.Module):
    """Causal self-attention, then a two-layer perceptron, each around a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Maps float32 [rows, time, width] to the same shape."""
        rows, time, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, time, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, time, width))
        hidden: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return hidden


class Policy(nn.Module):
    """A decoder-only transformer over the task's characters."""

    def __init__(self, width: int = 64, heads: int = 4, depth: int = 1) -> None:
        super().__init__()
        self.tokens = nn.Embedding(task.VOCABULARY_SIZE, width)
        self.positions = nn.Embedding(CONTEXT_TOKENS, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, task.VOCABULARY_SIZE))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of the next token: int64 [rows, time] to float32 [rows, time, vocabulary]."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.log_softmax(self.head(self.blocks(x)), dim=-1)

    def completion_log_probs(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores completions that were sampled earlier.

        Args:
            tokens: int64 [rows, time], prompts and completions; any token pads a short row.

        Returns:
            float32 [rows, time - prompt] log-probabilities of the completions' tokens, and of the same shape the
            entropies of the distributions that they were drawn from. Meaningless where a row is padded.
        """
        log_probs = self(tokens[:, :-1])[:, task.PROMPT_TOKENS - 1 :]
        chosen = log_probs.gather(2, tokens[:, task.PROMPT_TOKENS :, None]).squeeze(2)
        return chosen, -(log_probs.exp() * log_probs).sum(-1)


@dataclass(frozen=True)
class Completions:
    """What `sample` drew.

    Attributes:
        sequences: per row, int64 [prompt + completion] tokens.
        log_probs: per row, float32 [completion]: of each completion token when it was drawn.
    """

    sequences: list[torch.Tensor]
    log_probs: list[torch.Tensor]


@torch.no_grad()
def sample(policy: Policy, prompts: torch.Tensor, generator: torch.Generator) -> Completions:
    """Draws one completion a row, up to the end mark or `COMPLETION_TOKENS_MAX`.

    Args:
        policy: who is asked.
        prompts: int64 [rows, PROMPT_TOKENS].
        generator: the source of randomness.
    """
    tokens, log_probs = prompts, []
    for _ in range(task.COMPLETION_TOKENS_MAX):
        next_log_probs = policy(tokens)[:, -1]
        drawn = torch.multinomial(next_log_probs.exp(), 1, generator=generator)
        log_probs.append(next_log_probs.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    completions = tokens[:, task.PROMPT_TOKENS :]
    ended = completions == task.END_TOKEN
    first_end = torch.where(ended.any(1), ended.int().argmax(1), completions.shape[1] - 1)
    lengths = (first_end + 1).tolist()
    stacked = torch.cat(log_probs, dim=1)
    return Completions(
        [row[: task.PROMPT_TOKENS + length] for row, length in zip(tokens, lengths, strict=True)],
        [row[:length] for row, length in zip(stacked, lengths, strict=True)],
    )
