"""A warm start for RL: epochs over a list of dicts, stopped in the middle and resumed by another process.

list of dicts ──one put──► sft/sums ──StreamingLoader──► trainer, until it stops in an epoch's middle
                                          └────────────► trainer, another process, from the checkpoint on

python -m examples.sft_warm_start --samples 1000 --epochs 6 --seed 0
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import torch

import tqclient as tq
from examples.grpo_addition import task
from examples.grpo_addition.model import Policy, sample
from examples.sft_warm_start.data import draw_samples
from examples.sft_warm_start.trainer import CONSUMER, PARTITION, ROWS_PER_BATCH, Run, Step, work
from tqserver.local import LocalCluster

RISE_MIN: Final = 0.2
"""Of the reward of sampled answers: what a warm start is for."""


def main() -> int:
    """Runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.sft_warm_start", description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=1000, help="in the list (%(default)s)")
    parser.add_argument("--epochs", type=int, default=6, help="over them (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, samples and their order (%(default)s)")
    arguments = parser.parse_args()
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tq.connect(cluster.address) as client,
        tempfile.TemporaryDirectory(prefix="sft-warm-start-") as folder,
    ):
        partition = client.create_partition(PARTITION, consumers=[CONSUMER], keep=True)  # stays after an epoch
        ids = partition.put(draw_samples(np.random.default_rng(arguments.seed), arguments.samples)).tolist()
        partition.seal()
        run = Run(cluster.address, Path(folder) / "checkpoint.pt", arguments.epochs, arguments.seed)
        torch.manual_seed(run.seed)
        policy = Policy()
        before = mean_reward(policy)
        middle = (arguments.epochs // 2, max(1, len(ids) // ROWS_PER_BATCH // 2))
        first = in_new_process(run, stop_at=middle)
        print(f"stopped in epoch {first[-1].epoch} after {first[-1].number + 1} steps", flush=True)
        rest = in_new_process(run, stop_at=None)
        policy.load_state_dict(torch.load(run.checkpoint)["policy"])
    return conclude(ids, arguments.epochs, first + rest, mean_reward(policy) - before)


def in_new_process(run: Run, stop_at: tuple[int, int] | None) -> list[Step]:
    """Trains until the end, or until that step of that epoch."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, run, stop_at).result()


def mean_reward(policy: Policy) -> float:
    """Asks for all hundred sums, and scores what the policy answers."""
    prompts = [f"{left}+{right}=" for left in range(10) for right in range(10)]
    drawn = sample(policy, torch.tensor([task.encode(prompt) for prompt in prompts]), torch.Generator().manual_seed(0))
    answers = [task.decode(tokens[task.PROMPT_TOKENS :]) for tokens in drawn.sequences]
    return float(np.mean([task.score(*pair) for pair in zip(prompts, answers, strict=True)]))


def conclude(ids: list[int], epochs: int, steps: list[Step], rise: float) -> int:
    """Prints what came of it; returns 0 if the policy learned and every epoch had each sample once."""
    for epoch in range(epochs):
        losses = [step.loss for step in steps if step.epoch == epoch]
        samples = sum(len(step.ids) for step in steps if step.epoch == epoch)
        print(f"epoch {epoch}: {samples} samples in {len(losses)} steps, mean loss {np.mean(losses):.3f}")
    print(f"the reward of sampled answers rose by {rise:.3f}")
    found = problems(ids, epochs, steps)
    if rise < RISE_MIN:
        found.append(f"the reward rose by less than {RISE_MIN}")
    print("\n".join(f"problem: {each}" for each in found) or "each sample acked once in each epoch")
    return 1 if found else 0


def problems(ids: list[int], epochs: int, steps: list[Step]) -> list[str]:
    """Returns what is wrong with a run."""
    found = []
    for epoch in range(epochs):
        times = Counter(id_ for step in steps if step.epoch == epoch for id_ in step.ids)
        if times != Counter(ids):
            found.append(f"epoch {epoch} did not have each sample once")
    if [step.number for step in steps] != list(range(-(-len(ids) // ROWS_PER_BATCH))) * epochs:
        found.append("the loader's count of steps has a gap")
    if steps[-1].loss >= steps[0].loss:
        found.append("the loss did not fall")
    return found


if __name__ == "__main__":
    sys.exit(main())
