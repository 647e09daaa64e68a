"""The data set: a list of dicts, as tokenizers and data files give them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from examples.grpo_addition import task


def draw_samples(rng: np.random.Generator, count: int) -> list[dict[str, Any]]:
    """Returns samples: tokens, int64 [time]; loss_mask, bool [time], true where the answer is; and the text."""
    samples = []
    for prompt in task.draw_prompts(rng, count):
        text = prompt + task.answer_to(prompt)
        tokens = torch.tensor(task.encode(text))
        samples.append({"tokens": tokens, "loss_mask": torch.arange(len(tokens)) >= len(prompt), "text": text})
    return samples
