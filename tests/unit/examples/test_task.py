"""The verifiable reward, and the characters it is worked out on."""

import numpy as np
import pytest
import torch

from examples.grpo_addition import task


@pytest.mark.parametrize(
    ("prompt", "completion", "reward"),
    [
        ("7+8=", "15.", 1.0),
        ("2+3=", "5.", 1.0),
        ("0+0=", "0.", 1.0),
        ("9+9=", "18.", 1.0),
        ("7+8=", "16.", 2 / 3),  # the tens and the end mark
        ("7+8=", "25.", 2 / 3),
        ("7+8=", "150", 2 / 3),  # no end
        ("7+8=", "15", 2 / 3),
        ("7+8=", "51.", 1 / 3),
        ("7+8=", "5.", 0.0),  # right digit, wrong place
        ("2+3=", "50.", 1 / 3),  # one of three is right: what is too much counts as wrong
        ("2+3=", "5", 1 / 2),
        ("2+3=", ".", 0.0),
        ("2+3=", "+=+", 0.0),
    ],
)
def test_reward_is_the_share_of_right_characters(prompt: str, completion: str, reward: float) -> None:
    assert task.score(prompt, completion) == pytest.approx(reward)


def test_only_the_sum_earns_the_full_reward() -> None:
    for left in range(10):
        for right in range(10):
            full = [c for c in range(25) if task.score(f"{left}+{right}=", f"{c}.") == 1.0]
            assert full == [left + right]


def test_text_survives_its_tokens() -> None:
    text = "0123456789+=."
    tokens = task.encode(text)
    assert tokens == list(range(13))
    assert task.decode(torch.tensor(tokens)) == text


def test_prompts_are_sums_of_two_digits_and_follow_the_seed() -> None:
    prompts = task.draw_prompts(np.random.default_rng(5), 2000)
    assert prompts == task.draw_prompts(np.random.default_rng(5), 2000)
    assert len(set(prompts)) == 100
    assert {len(task.encode(prompt)) for prompt in prompts} == {task.PROMPT_TOKENS}
    assert max(len(task.answer_to(prompt)) for prompt in prompts) == task.COMPLETION_TOKENS_MAX
