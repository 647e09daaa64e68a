"""The loss of DPO against values worked out by hand, the pairs, and what the example finds wrong with a run."""

from __future__ import annotations

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch

from examples.dpo_pairs.__main__ import problems
from examples.dpo_pairs.loss import dpo_loss, sequence_log_probs
from examples.dpo_pairs.run import draw_pairs
from examples.dpo_pairs.trainer import Trained
from examples.grpo_addition import task
from examples.grpo_addition.model import Policy

CONSUMED = {"reference": 4, "trainer": 4}
GOOD = Trained(pairs=[(1, 2), (3, 4)], losses=[0.69, 0.4], margins=[0.0, 0.8], preferred=[0.5, 0.9])


def test_the_loss_is_that_of_the_paper() -> None:
    # Beta 0.1. Pair 0: 0.1 × ((-1 + 2) - (-3 + 2.5)) = 0.15, ln(1 + exp(-0.15)) = 0.620957.
    # Pair 1: 0.1 × ((-2 + 1) - (-1 + 1)) = -0.1, ln(1 + exp(0.1)) = 0.744397.
    loss, margins = dpo_loss(torch.tensor([-1.0, -3.0, -2.0, -1.0]), torch.tensor([-2.0, -2.5, -1.0, -1.0]))
    torch.testing.assert_close(margins, torch.tensor([0.15, -0.1]))
    assert loss.item() == pytest.approx((0.620957 + 0.744397) / 2, abs=1e-6)


def test_a_policy_that_is_the_reference_has_no_margin_and_is_pulled_towards_the_chosen() -> None:
    log_probs = torch.tensor([-4.0, -2.0], requires_grad=True)
    loss, margins = dpo_loss(log_probs, log_probs.detach())
    assert margins.tolist() == [0]
    assert loss.item() == pytest.approx(log(2))
    (gradient,) = torch.autograd.grad(loss, log_probs)
    torch.testing.assert_close(gradient, torch.tensor([-0.05, 0.05]))  # beta × sigmoid(0)


def test_a_completion_is_scored_by_its_own_tokens_whatever_pads_it() -> None:
    torch.manual_seed(0)
    policy = Policy()
    short, long = (torch.tensor(task.encode(text)) for text in ("1+1=2.", "9+9=18."))
    by_hand = sum(
        policy(row[None])[0, at, row[at + 1]] for row in (short,) for at in range(task.PROMPT_TOKENS - 1, len(row) - 1)
    )
    together = sequence_log_probs(policy, [short, long])
    torch.testing.assert_close(together[0], by_hand)
    torch.testing.assert_close(together[1:], sequence_log_probs(policy, [long]))


def test_pairs_are_a_right_and_a_wrong_sum_of_one_prompt() -> None:
    rows = [task.decode(tokens) for tokens in draw_pairs(np.random.default_rng(0), 200)]
    for chosen, rejected in zip(rows[::2], rows[1::2], strict=True):
        prompt = chosen[: task.PROMPT_TOKENS]
        assert rejected.startswith(prompt)
        assert chosen == prompt + task.answer_to(prompt)
        assert task.score(prompt, rejected[task.PROMPT_TOKENS :]) < 1
        assert 0 <= int(rejected[task.PROMPT_TOKENS : -1]) <= 18


def test_a_good_run_has_no_problems() -> None:
    assert problems([(1, 2), (3, 4)], 4, GOOD, CONSUMED) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pairs": [(1, 2)]}, "each once"),
        ({"pairs": [(1, 2), (3, 4), (3, 4)]}, "each once"),
        ({"pairs": [(1, 3), (2, 4)]}, "each once"),
        ({"pairs": [(2, 1), (3, 4)]}, "each once"),
        ({"margins": [0.0, -0.1]}, "margin"),
        ({"losses": [0.69, 0.7]}, "margin"),
        ({"preferred": [0.5, 0.6]}, "preferred"),
    ],
)
def test_what_is_wrong_is_said(change: dict[str, list[object]], message: str) -> None:
    (found,) = problems([(1, 2), (3, 4)], 4, replace(GOOD, **change), CONSUMED)
    assert message in found


def test_counts_that_do_not_add_up_are_said() -> None:
    assert len(problems([(1, 2), (3, 4)], 2, GOOD, {**CONSUMED, "reference": 2})) == 2
