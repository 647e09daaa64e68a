"""The trainer: epochs over a partition, and a checkpoint from which another process goes on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

import tqclient as tq
from examples.grpo_addition.model import Policy

PARTITION: Final = "sft/sums"
CONSUMER: Final = "sft"
ROWS_PER_BATCH: Final = 64


@dataclass(frozen=True)
class Run:
    """What every process is told.

    Attributes:
        address: of the controller, host:port.
        checkpoint: a file; it is there once there is one.
        epochs: over the data.
        seed: of weights and order.
    """

    address: str
    checkpoint: Path
    epochs: int
    seed: int


@dataclass(frozen=True)
class Step:
    """A step that was taken.

    Attributes:
        epoch: that it belongs to, from 0.
        number: within its epoch, from 0.
        ids: of its samples.
        loss: before it.
    """

    epoch: int
    number: int
    ids: list[int]
    loss: float


class Trainer:
    """Everything that a checkpoint keeps: policy, optimizer, loader."""

    def __init__(self, run: Run, partition: tq.Partition) -> None:
        torch.manual_seed(run.seed)
        self._checkpoint = run.checkpoint
        self._policy = Policy()
        self._optimizer = torch.optim.Adam(self._policy.parameters(), lr=3e-3)
        self._consumer = partition.consumer(
            CONSUMER,
            fields=["tokens", "loss_mask"],
            sampler=tq.Random(run.seed),  # another order in each epoch
        )
        # What is fetched ahead when the loop is left is drawn anew: without, the order depends on the seed alone.
        self.loader = tq.torch.StreamingLoader(self._consumer, ROWS_PER_BATCH, prefetch=0)

    def save(self) -> None:
        """Makes a checkpoint that has the present step in it."""
        self.loader.ack()  # or this step's samples would come again
        state = {
            "policy": self._policy.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "loader": self.loader.state_dict(),
        }
        torch.save(state, self._checkpoint)

    def resume(self) -> None:
        """Goes on from the checkpoint. Which samples are left of its epoch is known to the controller."""
        state = torch.load(self._checkpoint)
        self._policy.load_state_dict(state["policy"])
        self._optimizer.load_state_dict(state["optimizer"])
        self.loader.load_state_dict(state["loader"])

    def train(self, epochs: int, stop_at: tuple[int, int] | None) -> list[Step]:
        """Trains until there were so many epochs, or one step of one epoch was taken; returns the steps."""
        taken = []
        while self.loader.epoch < epochs:
            for batch in self.loader:  # asking for the next one acks this one
                loss = sft_loss(self._policy, batch.padded("tokens"), batch.padded("loss_mask", False))
                self._optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                self._optimizer.step()
                taken.append(Step(self.loader.epoch, self.loader.step, batch.ids.tolist(), loss.item()))
                if stop_at == (self.loader.epoch, self.loader.step):
                    self.save()
                    return taken
            if self.loader.epoch < epochs:
                self._consumer.reset()  # every sample is new again
        self.save()
        return taken


def sft_loss(policy: Policy, tokens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """Mean surprise at the tokens that are to be learned.

    Args:
        policy: that learns.
        tokens: int64 [rows, time], padded.
        loss_mask: bool [rows, time]: which of them count; false where a row is padded.
    """
    log_probs: torch.Tensor = policy(tokens[:, :-1]).gather(2, tokens[:, 1:, None]).squeeze(2)
    return -log_probs[loss_mask[:, 1:]].mean()


def work(run: Run, stop_at: tuple[int, int] | None) -> list[Step]:
    """Trains in a process of its own, from the checkpoint if there is one."""
    torch.set_num_threads(1)
    with tq.connect(run.address) as client:
        trainer = Trainer(run, client.partition(PARTITION))
        if run.checkpoint.exists():
            trainer.resume()
            print(f"resumed: {trainer.loader.state_dict()}", flush=True)
        return trainer.train(run.epochs, stop_at)
