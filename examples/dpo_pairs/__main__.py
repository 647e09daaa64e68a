"""DPO with a reference and a trainer, each a process, over a service on this machine.

pairs ──put──► train/pairs ──claim──► reference ──put reference_log_probs──► the same rows
                    └──── whole pairs, once both rows have that column ────► trainer (StreamingLoader)

python -m examples.dpo_pairs --pairs 1920 --seed 0
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from typing import Any, Final

import numpy as np

import tqclient as tq
from examples.dpo_pairs import reference, trainer
from examples.dpo_pairs.run import PARTITION, Run, draw_pairs
from examples.dpo_pairs.trainer import Trained
from tqserver.local import LocalCluster

PREFERRED_MIN: Final = 0.7
"""Share of pairs, among those of the last tenth of the steps; a coin has 0.5."""


def main() -> int:
    """Runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.dpo_pairs", description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=1920, help="a chosen and a rejected completion each (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and pairs (%(default)s)")
    arguments = parser.parse_args()
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster, tq.connect(cluster.address) as client:
        partition = client.create_partition(PARTITION, consumers=["reference", "trainer"])
        rows = draw_pairs(np.random.default_rng(arguments.seed), arguments.pairs)
        ids = partition.put({"tokens": rows}, groups=[row // 2 for row in range(len(rows))])
        partition.seal()  # no more rows; columns may still come
        put = list(zip(ids[::2].tolist(), ids[1::2].tolist(), strict=True))
        scored, trained = work(Run(cluster.address, arguments.seed), client)
        counts = partition.describe().counts
    return conclude(put, scored, trained, {name: each["consumed"] for name, each in counts.items()})


def work(run: Run, client: tq.Client) -> tuple[int, Trained]:
    """Starts a process for each role; returns how many rows the reference scored, and what the trainer did."""
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
        futures: list[Future[Any]] = [pool.submit(role.work, run) for role in (reference, trainer)]
        done, rest = wait(futures, return_when=FIRST_EXCEPTION)
        if rest:
            client.delete_partition(PARTITION)  # one has failed: the other shall not wait for its rows
        for future in done:
            future.result()
        scored, trained = [future.result() for future in futures]
    return scored, trained


def conclude(put: list[tuple[int, int]], scored: int, trained: Trained, consumed: dict[str, int]) -> int:
    """Prints what came of it; returns 0 if the policy learned to prefer and every pair is accounted for."""
    print(f"{len(put)} pairs put, {scored} rows scored, {len(trained.pairs)} pairs trained on; consumed: {consumed}")
    found = problems(put, scored, trained, consumed)
    print("\n".join(f"problem: {each}" for each in found) or "each pair whole and acked once")
    return 1 if found else 0


def problems(put: list[tuple[int, int]], scored: int, trained: Trained, consumed: dict[str, int]) -> list[str]:
    """Returns what is wrong with a run."""
    tenth = max(1, len(trained.losses) // 10)
    found = []
    if sorted(trained.pairs) != sorted(put):
        found.append("the pairs that were trained on are not those that were put, each once")
    if scored != 2 * len(put):
        found.append(f"{scored} of {2 * len(put)} rows were scored")
    if set(consumed.values()) != {2 * len(put)}:
        found.append(f"the controller counts {consumed}")
    if not np.mean(trained.margins[-tenth:]) > 0 or trained.losses[-1] >= trained.losses[0]:
        found.append("the margin did not grow")
    if np.mean(trained.preferred[-tenth:]) < PREFERRED_MIN:
        found.append(f"of the last pairs, less than {PREFERRED_MIN:.0%} were preferred rightly")
    return found


if __name__ == "__main__":
    sys.exit(main())
