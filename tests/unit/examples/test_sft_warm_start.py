"""The masked loss against a value worked out by hand, the data, and what the example finds wrong with a run."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
import torch

from examples.grpo_addition import task
from examples.grpo_addition.model import Policy
from examples.sft_warm_start.__main__ import problems
from examples.sft_warm_start.data import draw_samples
from examples.sft_warm_start.trainer import ROWS_PER_BATCH, Step, sft_loss


class Doubting(Policy):
    """Gives token t the probability (t + 1) / 6, whatever came before; there are three tokens."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tensor([1 / 6, 2 / 6, 3 / 6]).log().expand(*tokens.shape, 3)


def test_only_tokens_under_the_mask_count() -> None:
    tokens = torch.tensor([[0, 2, 1, 2], [1, 0, 0, 0]])
    loss_mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]], dtype=torch.bool)
    # Token 1, token 2, and token 0 of the second row, each as a mean over all three.
    assert sft_loss(Doubting(), tokens, loss_mask).item() == pytest.approx((log(3) + log(2) + log(6)) / 3)


def test_samples_are_sums_with_the_answer_under_the_mask() -> None:
    samples = draw_samples(np.random.default_rng(0), 100)
    assert {len(sample["tokens"]) for sample in samples} == {6, 7}
    for sample in samples:
        assert task.decode(sample["tokens"]) == sample["text"]
        answer = task.decode(sample["tokens"][sample["loss_mask"]])
        assert answer == task.answer_to(sample["text"][: task.PROMPT_TOKENS])


def steps() -> list[Step]:
    """Two epochs over a hundred samples, the second in another order."""
    order = list(range(100))
    taken = []
    for epoch in range(2):
        for number in range(2):
            ids = order[number * ROWS_PER_BATCH : (number + 1) * ROWS_PER_BATCH]
            taken.append(Step(epoch, number, ids, loss=2.0 - epoch))
        order.reverse()
    return taken


def test_a_good_run_has_no_problems() -> None:
    assert problems(list(range(100)), 2, steps()) == []


def test_what_is_wrong_is_said() -> None:
    ids = list(range(100))
    first, second, third, fourth = steps()
    assert problems(ids, 2, [first, second, third, fourth, fourth])[:1] == ["epoch 1 did not have each sample once"]
    assert problems(ids, 2, [first, third, fourth])[:1] == ["epoch 0 did not have each sample once"]
    misnumbered = Step(1, 0, fourth.ids, fourth.loss)
    assert problems(ids, 2, [first, second, third, misnumbered]) == ["the loader's count of steps has a gap"]
    no_better = Step(1, 1, fourth.ids, first.loss)
    assert problems(ids, 2, [first, second, third, no_better]) == ["the loss did not fall"]
