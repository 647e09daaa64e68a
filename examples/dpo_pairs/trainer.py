"""The trainer process: whole pairs from a `StreamingLoader`, once the reference has scored both of their rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

import tqclient as tq
from examples.dpo_pairs.loss import dpo_loss, sequence_log_probs
from examples.dpo_pairs.run import PAIRS_PER_BATCH, PARTITION, Run, first_policy


@dataclass
class Trained:
    """What the trainer did; the figures are those before each step, on pairs that it had not seen yet.

    Attributes:
        pairs: ids of the chosen and the rejected row of each pair that was trained on and acked.
        losses: by step.
        margins: their mean, by step.
        preferred: share of pairs whose chosen completion the policy finds likelier than the rejected one, by step.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    preferred: list[float] = field(default_factory=list)


def work(run: Run) -> Trained:
    """Takes one step a batch, until the partition is sealed and drained."""
    torch.set_num_threads(1)
    policy, done = first_policy(run), Trained()
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    with tq.connect(run.address) as client:
        consumer = client.partition(PARTITION).consumer(
            "trainer",
            fields=["tokens", "reference_log_probs"],  # a row is ready once it has both
            sampler=tq.GroupSampler(2),  # and given out once its pair is, side by side with it, the older one first
        )
        with tq.torch.StreamingLoader(consumer, 2 * PAIRS_PER_BATCH) as loader:
            for batch in loader:  # asking for the next one acks this one
                log_probs = sequence_log_probs(policy, batch.list("tokens"))
                loss, margins = dpo_loss(log_probs, batch["reference_log_probs"])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                done.pairs += zip(batch.ids[::2].tolist(), batch.ids[1::2].tolist(), strict=True)
                done.losses.append(loss.item())
                done.margins.append(margins.mean().item())
                done.preferred.append((log_probs[::2] > log_probs[1::2]).float().mean().item())
                if len(done.losses) % 10 == 1:
                    print(f"step {len(done.losses):3}: {_figures(done)}", flush=True)
    print(f"in the end: {_figures(done)}", flush=True)
    return done


def _figures(done: Trained) -> str:
    return f"loss {done.losses[-1]:.4f}, margin {done.margins[-1]:.4f}, {done.preferred[-1]:.0%} preferred"
