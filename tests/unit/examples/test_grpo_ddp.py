"""What the rollout process puts, and what the example finds wrong with a run. Advantages: test_advantages.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from examples.grpo_addition import task
from examples.grpo_addition.model import Policy
from examples.grpo_addition.trainer import grpo_loss
from examples.grpo_ddp.__main__ import conclude, problems
from examples.grpo_ddp.rollout import Generated, answer
from examples.grpo_ddp.run import GROUP_SIZE
from examples.grpo_ddp.trainer import Objective, Trained

COUNTS = {"pending": 0, "ready": 0, "leased": 0, "consumed": 8, "dropped": 0}
WEIGHTS = np.ones(3, np.float32)
PUT = Generated(ids=list(range(8)), rewards=[0.1, 0.3])
RANKS = [Trained([[0, 1], [4, 5]], WEIGHTS), Trained([[2, 3], [6, 7]], WEIGHTS)]


def test_each_question_is_answered_by_a_group_and_every_answer_is_scored() -> None:
    torch.manual_seed(0)
    columns = answer(Policy(), ["7+8=", "2+3="], torch.Generator().manual_seed(0))
    texts = [task.decode(tokens) for tokens in columns["tokens"]]
    assert [text[: task.PROMPT_TOKENS] for text in texts] == ["7+8="] * GROUP_SIZE + ["2+3="] * GROUP_SIZE
    completions = [text[task.PROMPT_TOKENS :] for text in texts]
    assert [len(row) for row in columns["log_probs"]] == [len(text) for text in completions]
    scores = [task.score(text[: task.PROMPT_TOKENS], text[task.PROMPT_TOKENS :]) for text in texts]
    torch.testing.assert_close(columns["rewards"], torch.tensor(scores))
    assert len(set(completions[:GROUP_SIZE])) > 1


def test_the_objective_is_the_loss_of_its_policy() -> None:
    policy = Policy()
    columns = answer(policy, ["1+1="], torch.Generator().manual_seed(0))
    tokens = torch.nn.utils.rnn.pad_sequence(columns["tokens"], batch_first=True)
    arguments = (tokens, columns["log_probs"], torch.linspace(-1, 1, GROUP_SIZE))
    torch.testing.assert_close(Objective(policy)(*arguments), grpo_loss(policy, *arguments))


def test_a_good_run_has_no_problems(capsys: pytest.CaptureFixture[str]) -> None:
    assert problems(PUT, RANKS, COUNTS) == []
    assert conclude(PUT, RANKS, COUNTS) == 0
    assert conclude(replace(PUT, rewards=[0.3, 0.3]), RANKS, COUNTS) == 1
    assert "problem: the mean reward did not rise by 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("second_rank", "counts", "message"),
    [
        (Trained([[2, 3], [6]], WEIGHTS), COUNTS, "1 samples were never trained on"),
        (Trained([[2, 3], [6, 7, 9]], WEIGHTS), COUNTS, "1 samples were trained on that nobody put"),
        (Trained([[2, 3], [6, 7, 0]], WEIGHTS), COUNTS, "1 samples were trained on more than once"),
        (Trained([[2, 3, 6, 7]], WEIGHTS), COUNTS, "different numbers of steps"),
        (Trained([[2, 3], [6, 7]], WEIGHTS + 1), COUNTS, "weights of the ranks differ"),
        (RANKS[1], {**COUNTS, "consumed": 7, "leased": 1}, "the controller counts"),
        (RANKS[1], {**COUNTS, "dropped": 1}, "the controller counts"),
    ],
)
def test_what_is_wrong_is_said(second_rank: Trained, counts: dict[str, int], message: str) -> None:
    (found,) = problems(PUT, [RANKS[0], second_rank], counts)
    assert message in found
