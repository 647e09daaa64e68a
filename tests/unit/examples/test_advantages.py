"""Group-normalised rewards."""

import pytest
import torch

from examples.grpo_addition.reward import DEVIATION_MIN, advantages


def test_each_group_is_normalised_by_its_own_mean_and_deviation() -> None:
    # Group a: 0, 1, 1, 0: mean 0.5, deviation 0.5. Group b: 0.2, 0.8: mean 0.5, deviation 0.3.
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.0, 0.2, 0.8])
    a, b = 0.5 / (0.5 + DEVIATION_MIN), 0.3 / (0.3 + DEVIATION_MIN)
    expected = torch.tensor([-a, a, a, -a, -b, b])
    torch.testing.assert_close(advantages(rewards, ["a", "a", "a", "a", "b", "b"]), expected)


def test_members_of_a_group_need_not_be_adjacent() -> None:
    rewards = torch.tensor([0.0, 0.2, 1.0, 0.8])
    a, b = 0.5 / (0.5 + DEVIATION_MIN), 0.3 / (0.3 + DEVIATION_MIN)
    torch.testing.assert_close(advantages(rewards, [7, 3, 7, 3]), torch.tensor([-a, -b, a, b]))


@pytest.mark.parametrize("reward", [0.0, 1 / 3, 1.0])
def test_a_group_of_equals_and_a_group_of_one_teach_nothing(reward: float) -> None:
    rewards = torch.tensor([reward] * 5)
    torch.testing.assert_close(advantages(rewards, ["a"] * 4 + ["b"]), torch.zeros(5), atol=1e-5, rtol=0)
