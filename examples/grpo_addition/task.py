"""What is learned: sums of two digits, with a reward that anyone can check.

A prompt is `7+8=`; the completion that earns the full reward is `15.`: the sum, then the end mark.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

END: Final = "."
ALPHABET: Final = "0123456789+=" + END
TOKEN_OF: Final = {character: token for token, character in enumerate(ALPHABET)}
VOCABULARY_SIZE: Final = len(ALPHABET)
END_TOKEN: Final = TOKEN_OF[END]

PROMPT_TOKENS: Final = len("7+8=")
COMPLETION_TOKENS_MAX: Final = len("15.")


def draw_prompts(rng: np.random.Generator, count: int) -> list[str]:
    """Draws `count` prompts, evenly from all hundred sums of two digits."""
    return [f"{left}+{right}=" for left, right in rng.integers(0, 10, size=(count, 2))]


def encode(text: str) -> list[int]:
    """Tokens of a text, one a character."""
    return [TOKEN_OF[character] for character in text]


def decode(tokens: torch.Tensor) -> str:
    """The text of a token sequence (int64 [time])."""
    return "".join(ALPHABET[token] for token in tokens.tolist())


def answer_to(prompt: str) -> str:
    """The completion that earns the full reward: `15.` for `7+8=`."""
    left, right = prompt.removesuffix("=").split("+")
    return f"{int(left) + int(right)}{END}"


def score(prompt: str, completion: str) -> float:
    """The reward: the share of characters that are right, so 1 for the sum and for nothing else.

    Partial credit keeps the reward dense: a model that starts from noise has something to climb. What is missing or
    too much counts as wrong.
    """
    answer = answer_to(prompt)
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))
