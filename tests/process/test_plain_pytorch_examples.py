"""The examples in plain PyTorch as their users run them: `python -m examples.NAME`."""

from __future__ import annotations

import functools
import re
import subprocess
import sys

import numpy as np
import torch

from examples.dpo_pairs.loss import sequence_log_probs
from examples.dpo_pairs.run import draw_pairs
from examples.grpo_addition.model import Policy
from tests.harness.supervisor import ROOT

NUMBER = r"(-?\d+\.?\d*)"


def run(name: str) -> list[str]:
    command = [sys.executable, "-m", f"examples.{name}", "--seed", "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not done.stderr
    return done.stdout.splitlines()


first_run = functools.cache(run)


def figures(pattern: str, lines: list[str]) -> list[list[float]]:
    """The numbers of the lines that match; `#` stands for each."""
    found = (re.fullmatch(pattern.replace("#", NUMBER), line) for line in lines)
    return [[float(number) for number in match.groups()] for match in found if match]


def test_grpo_trains_two_ranks_on_whole_groups() -> None:
    lines = first_run("grpo_ddp")
    steps = figures(r"step +#: mean reward #", lines)
    assert [step for step, _ in steps] == [10, 20, 30]
    ((before, after, count),) = figures(r"mean reward # → # in # steps", lines)
    assert count == 30
    assert 0 < before < after - 0.05 < after < 1
    rows = 30 * 16 * 8  # steps, prompts, responses
    accounted = f"{rows} samples put, {rows // 2} + {rows // 2} acked by the ranks, {rows} consumed"
    assert lines[-2:] == [accounted, "each sample acked once, weights of the ranks equal"]


def test_dpo_learns_from_whole_pairs_that_the_reference_has_scored() -> None:
    lines = first_run("dpo_pairs")
    steps = figures(r"step +#: loss #, margin #, #% preferred", lines)
    assert [step for step, *_ in steps] == [1, 11, 21, 31, 41, 51]  # of 1920 / 32
    _, loss, margin, preferred = steps[0]
    assert (loss, margin) == (0.6931, 0)  # ln 2: policy and reference are the same still
    torch.manual_seed(0)
    log_probs = sequence_log_probs(Policy(), draw_pairs(np.random.default_rng(0), 1920)[: 2 * 32])
    assert preferred == round(100 * float((log_probs[::2] > log_probs[1::2]).float().mean()))
    ((loss, margin, preferred),) = figures(r"in the end: loss #, margin #, #% preferred", lines)
    assert loss < 0.6
    assert margin > 0.5
    assert preferred > 65
    assert lines[-2:] == [
        "1920 pairs put, 3840 rows scored, 1920 pairs trained on; consumed: {'reference': 3840, 'trainer': 3840}",
        "each pair whole and acked once",
    ]


def test_sft_goes_on_in_another_process_in_the_middle_of_an_epoch() -> None:
    lines = first_run("sft_warm_start")
    state = {"version": 1, "partition": "sft/sums", "consumer": "sft", "epoch": 3, "step": 8}
    assert lines[:2] == ["stopped in epoch 3 after 8 steps", f"resumed: {state}"]
    epochs = figures(r"epoch #: # samples in # steps, mean loss #", lines)
    assert [figures[:3] for figures in epochs] == [[epoch, 1000, 16] for epoch in range(6)]
    losses = [loss for *_, loss in epochs]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] / 2
    ((rise,),) = figures(r"the reward of sampled answers rose by #", lines)
    assert rise > 0.2
    assert lines[-1] == "each sample acked once in each epoch"


def test_the_same_seed_gives_the_same_figures() -> None:
    assert run("dpo_pairs") == first_run("dpo_pairs")
