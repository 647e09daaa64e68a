"""A trainer rank: whole groups from a `StreamingLoader`, gradients averaged by DistributedDataParallel."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_, parameters_to_vector

import tqclient as tq
from examples.grpo_addition.model import Policy
from examples.grpo_addition.reward import advantages
from examples.grpo_addition.trainer import grpo_loss
from examples.grpo_ddp.run import CONSUMER, DP, GROUP_SIZE, ROWS_PER_STEP, SAMPLES, Run, load, publish


@dataclass(frozen=True)
class Trained:
    """What a rank did.

    Attributes:
        ids: that it trained on and acked, by step.
        weights: float32 [size], its parameters in the end.
    """

    ids: list[list[int]]
    weights: NDArray[np.float32]


class Objective(nn.Module):
    """The loss as a module: DistributedDataParallel averages the gradients of what it has called itself."""

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, tokens: torch.Tensor, old_log_probs: list[torch.Tensor], better: torch.Tensor) -> torch.Tensor:
        """Arguments as in `grpo_loss`; `better` are the advantages."""
        return grpo_loss(self.policy, tokens, old_log_probs, better)


def work(run: Run, rank: int) -> Trained:
    """Meets the other ranks over gloo, and trains."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meet, minute = f"file://{run.meet}", timedelta(minutes=1)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=DP, timeout=minute)
    try:
        with tq.connect(run.address) as client:
            return train(run, client, rank)
    finally:
        dist.destroy_process_group()


def train(run: Run, client: tq.Client, rank: int) -> Trained:
    """Takes one step a batch, until the partition is sealed and drained."""
    policy = Policy()
    load(client, policy, 0)
    model = DistributedDataParallel(Objective(policy))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.99))
    consumer = client.partition(SAMPLES).consumer(
        CONSUMER,
        fields=["tokens", "log_probs", "rewards"],
        sampler=tq.SeqlenBalanced("tokens", groups=GROUP_SIZE),  # step n of all ranks is one global batch, groups whole
        topology=tq.Topology(dp=DP, rank=rank, world_size=dist.get_world_size()),
    )
    ids: list[list[int]] = []
    with tq.torch.StreamingLoader(consumer, ROWS_PER_STEP // DP) as loader:
        for batch in loader:  # asking for the next one acks this one
            better = advantages(batch["rewards"], batch.groups)
            optimizer.zero_grad()
            model(batch.padded("tokens"), batch.list("log_probs"), better).backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ids.append(batch.ids.tolist())
            if rank == 0:
                publish(run, client, policy, version=len(ids))
    return Trained(ids, parameters_to_vector(policy.parameters()).detach().numpy())
