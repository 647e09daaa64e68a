"""The trainer: a critic that writes values, and an actor of several ranks that waits for them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from examples.rollout_bridge.rollout import VOCABULARY
from tqclient.integrations.rollout_bridge import Rollout, RolloutBridge


def criticise(bridge: RolloutBridge, rollouts: int, dp_size: int) -> None:
    """The critic: values every token by the mean reward so far. It trains on all shards by itself."""
    total, count = 0.0, 0
    for rollout_id in range(rollouts):
        for dp_rank in range(dp_size):
            with bridge.fetch(rollout_id, dp_rank, ["tokens", "rewards"], task="critic_train") as rollout:
                total, count = total + sum(rollout["rewards"]), count + rollout.samples
                value = total / count
                rollout.put({"values": [torch.full((len(tokens),), value) for tokens in rollout["tokens"]]})


def act(bridge: RolloutBridge, rollouts: int, dp_rank: int, dp_size: int, meet: str) -> None:
    """A rank of the actor: one step per rollout, over the micro-batches that were planned for it."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=dp_rank, world_size=dp_size)
    logits = torch.zeros(VOCABULARY, requires_grad=True)
    optimiser = torch.optim.Adam([logits], lr=0.2)
    for rollout_id in range(rollouts):
        with bridge.fetch(rollout_id, dp_rank, ["tokens", "rewards", "values"]) as rollout:
            optimiser.zero_grad()
            for rows in rollout["micro_batch_indices"]:
                loss(logits, rollout, rows).backward()  # type: ignore[no-untyped-call]
            dist.all_reduce(logits.grad)
            optimiser.step()
        if dp_rank == 0:
            even = float(logits.detach().softmax(0)[::2].sum())
            shape = f"{rollout['global_batch_sizes'][0]} samples, {rollout['num_microbatches'][0]} micro-batches a rank"
            print(f"rollout {rollout_id}: {shape}; an even token has probability {even:.3f}", flush=True)
    dist.destroy_process_group()


def loss(logits: torch.Tensor, rollout: Rollout, rows: list[int]) -> torch.Tensor:
    """Returns the policy-gradient loss of one micro-batch, its part of the mean over the global batch."""
    terms = [
        (logits.log_softmax(0)[rollout["tokens"][row]] * (rollout["rewards"][row] - rollout["values"][row])).mean()
        for row in rows
    ]
    samples: int = rollout["global_batch_sizes"][0]
    return -torch.stack(terms).sum() / samples
