"""The model that two trainers share."""

import threading
from pathlib import Path

import torch

from examples.grpo_addition.weights import (
    BETA_MEAN,
    BETA_SQUARE,
    GRADIENT_NORM_MAX,
    LEARNING_RATE,
    Weights,
    WeightStore,
)


def ignore(version: int) -> None:
    del version


def test_updates_are_those_of_adam_with_clipped_gradients() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    adam = torch.optim.Adam([parameter], lr=LEARNING_RATE, betas=(BETA_MEAN, BETA_SQUARE))
    weights = Weights.first(parameter.detach().clone())
    for gradient in (torch.tensor([0.1, -0.2, 0.0]), torch.tensor([3.0, 4.0, 0.0]), torch.tensor([-0.3, 0.0, 0.2])):
        weights = weights.updated(gradient)
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], GRADIENT_NORM_MAX)
        adam.step()
        torch.testing.assert_close(weights.parameters, parameter.detach())
    assert weights.version == 3


def test_what_is_written_is_read_back_exactly(tmp_path: Path) -> None:
    written = Weights(2**40, torch.randn(10), torch.randn(10), torch.rand(10))
    store = WeightStore(tmp_path)
    store.write(written)
    read = store.read()
    assert read.version == 2**40
    assert torch.equal(read.parameters, written.parameters)
    assert torch.equal(read.mean, written.mean)
    assert torch.equal(read.square, written.square)


def test_no_update_of_concurrent_trainers_is_lost_and_versions_are_announced_in_order(tmp_path: Path) -> None:
    announced: list[int] = []
    WeightStore(tmp_path).write(Weights.first(torch.zeros(4)))

    def train() -> None:
        store = WeightStore(tmp_path)
        for _ in range(20):
            store.update(torch.ones(4), announced.append)

    trainers = [threading.Thread(target=train) for _ in range(4)]
    for trainer in trainers:
        trainer.start()
    for trainer in trainers:
        trainer.join()
    assert announced == list(range(1, 81))
    assert WeightStore(tmp_path).read().version == 80


def test_a_write_that_was_cut_short_is_never_read(tmp_path: Path) -> None:
    store = WeightStore(tmp_path)
    store.write(Weights.first(torch.zeros(4)))
    (tmp_path / "weights.12345").write_bytes(b"half a version")  # what a killed trainer leaves behind
    assert store.read().version == 0
    assert store.update(torch.ones(4), ignore).version == 1
