"""Rollouts, log-probs and training as three processes over NeMo-RL's data-plane interface, on this machine.

rollout ──put_samples──► train ──claim_meta("logprobs")──► logprobs ──put_samples(prev_logprobs)──► the same samples
                           └────claim_meta("train"), whole groups that have that field──► trainer ──clear_samples──►

python -m examples.nemo_rl_data_plane --steps 6 --seed 0
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor

from examples.nemo_rl_data_plane.meta import KVBatchMeta
from examples.nemo_rl_data_plane.roles import GENERATIONS, PARTITION, ROWS, generate, score, train
from tqclient.integrations.nemo_rl import DataPlane
from tqserver.local import LocalCluster


def main() -> int:
    """Runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.nemo_rl_data_plane", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--steps", type=int, default=6, help="of the trainer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the samples (%(default)s)")
    arguments = parser.parse_args()
    steps = arguments.steps
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool,
    ):
        plane = DataPlane(cluster.address, batch_meta=KVBatchMeta)
        fields = ["input_ids", "rewards", "prev_logprobs"]
        plane.register_partition(PARTITION, fields, steps * ROWS, ["logprobs", "train"], grpo_group_size=GENERATIONS)
        generated = pool.submit(generate, cluster.address, steps, arguments.seed)
        scored = pool.submit(score, cluster.address, steps)
        trained = pool.submit(train, cluster.address, steps).result()
        left = plane.client.partition(PARTITION).describe().samples
        plane.close()
        ids = [sample_id for step in trained for sample_id in step]
        groups = [ids[at : at + GENERATIONS] for at in range(0, len(ids), GENERATIONS)]
        whole = all(len({sample_id.rpartition("_g")[0] for sample_id in group}) == 1 for group in groups)
        once = sorted(ids) == sorted(generated.result())
        print(f"{len(generated.result())} samples put, {scored.result()} scored, {len(ids)} trained on, {left} left")
    print("each sample once, groups whole" if once and whole and not left else "problem: samples are missing or mixed")
    return 0 if once and whole and not left else 1


if __name__ == "__main__":
    sys.exit(main())
