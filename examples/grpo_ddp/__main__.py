"""GRPO with a rollout process and two DDP ranks, each a process, over a service on this machine.

rollout ──put groups──► train/samples ──StreamingLoader──► trainer ranks 0 and 1 (DDP over gloo)
   ▲                                                           │
   └───────────── get ── train/weights ◄── put ── rank 0 ──────┘

python -m examples.grpo_ddp --steps 30 --seed 0
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from collections import Counter
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from typing import Any, Final

import numpy as np
import torch

import tqclient as tq
from examples.grpo_addition.model import Policy
from examples.grpo_ddp import rollout, trainer
from examples.grpo_ddp.rollout import Generated
from examples.grpo_ddp.run import CONSUMER, DP, ROWS_PER_STEP, SAMPLES, WEIGHTS, Run, publish
from examples.grpo_ddp.trainer import Trained
from tqserver.local import LocalCluster

RISE_MIN: Final = 0.05
"""Of the mean reward, from the first tenth of the steps to the last: more than luck."""


def main() -> int:
    """Runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo_ddp", description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30, help="of the optimizer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (%(default)s)")
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        help="versions that rollouts may lag behind (%(default)s); above 0, they are drawn while the ranks train, and "
        "two runs of a seed differ",
    )
    arguments = parser.parse_args()
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tq.connect(cluster.address) as client,
        tempfile.TemporaryDirectory(prefix="grpo-ddp-") as folder,
    ):
        samples = client.create_partition(
            SAMPLES,
            consumers=[CONSUMER],
            max_staleness=arguments.max_staleness,
            staleness="wait",  # rollouts wait for the trainer; none is thrown away
            samples_per_version=ROWS_PER_STEP,
        )
        client.create_partition(WEIGHTS)
        run = Run(cluster.address, f"{folder}/meet", **vars(arguments))
        torch.manual_seed(run.seed)
        publish(run, client, Policy(), version=0)
        generated, trained = work(run, client)
        counts = samples.describe().counts[CONSUMER]
    return conclude(generated, trained, counts)


def work(run: Run, client: tq.Client) -> tuple[Generated, list[Trained]]:
    """Starts a process for each role, and returns what they did."""
    with ProcessPoolExecutor(1 + DP, multiprocessing.get_context("spawn")) as pool:
        futures: list[Future[Any]] = [pool.submit(rollout.work, run)]
        futures += [pool.submit(trainer.work, run, rank) for rank in range(DP)]
        done, rest = wait(futures, return_when=FIRST_EXCEPTION)
        if rest:
            client.delete_partition(SAMPLES)  # one has failed: the others shall not wait for samples
        for future in done:
            future.result()
        generated, *trained = [future.result() for future in futures]
    return generated, trained


def conclude(generated: Generated, trained: list[Trained], counts: dict[str, int]) -> int:
    """Prints what came of it; returns 0 if the reward rose and every sample is accounted for."""
    tenth = max(1, len(generated.rewards) // 10)
    first, last = np.mean(generated.rewards[:tenth]), np.mean(generated.rewards[-tenth:])
    ranks = " + ".join(str(sum(map(len, each.ids))) for each in trained)
    print(f"mean reward {first:.3f} → {last:.3f} in {len(generated.rewards)} steps")
    print(f"{len(generated.ids)} samples put, {ranks} acked by the ranks, {counts['consumed']} consumed")
    found = problems(generated, trained, counts)
    if last - first < RISE_MIN:
        found.append(f"the mean reward did not rise by {RISE_MIN}")
    print("\n".join(f"problem: {each}" for each in found) or "each sample acked once, weights of the ranks equal")
    return 1 if found else 0


def problems(generated: Generated, trained: list[Trained], counts: dict[str, int]) -> list[str]:
    """Returns what is wrong with a run: samples that were lost or trained on twice, ranks that drifted apart."""
    times = Counter(id_ for each in trained for step in each.ids for id_ in step)
    found = []
    if lost := set(generated.ids) - times.keys():
        found.append(f"{len(lost)} samples were never trained on")
    if unknown := times.keys() - set(generated.ids):
        found.append(f"{len(unknown)} samples were trained on that nobody put")
    if twice := [id_ for id_, count in times.items() if count > 1]:
        found.append(f"{len(twice)} samples were trained on more than once")
    if counts["consumed"] != len(generated.ids) or sum(counts.values()) != counts["consumed"]:
        found.append(f"the controller counts {counts}")
    if len({len(each.ids) for each in trained}) > 1:
        found.append("the ranks took different numbers of steps")
    if any(not np.array_equal(each.weights, trained[0].weights) for each in trained):
        found.append("the weights of the ranks differ")
    return found


if __name__ == "__main__":
    sys.exit(main())
