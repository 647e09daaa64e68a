"""A driver that hands on rows by their ids, and workers that read and write the fields that they need, on this machine.

driver ──put(rows)──► train ──get(input_ids)──► worker ──put(log_probs)──► the same rows ──get──► driver ──delete──►

python -m examples.roll_transfer_backend --rows 64 --seed 0
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from typing import Final

import numpy as np
import torch

import tqclient as tq
from examples.roll_transfer_backend.worker import RowRemoteBatch, work
from tqclient.integrations.roll import TransferBackend
from tqserver.local import LocalCluster

PARTITION: Final = "train_actor"
WORKERS: Final = 2


def main() -> int:
    """Runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.roll_transfer_backend", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--rows", type=int, default=64, help="of the batch (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of its values (%(default)s)")
    arguments = parser.parse_args()
    draw = torch.Generator().manual_seed(arguments.seed)
    row_ids = [f"row-{number}" for number in range(arguments.rows)]
    tokens = torch.randint(0, 1000, (arguments.rows, 32), generator=draw)
    prompts = np.array([f"{number}+1=" for number in range(arguments.rows)], dtype=object)
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        ProcessPoolExecutor(WORKERS, multiprocessing.get_context("spawn")) as pool,
    ):
        backend = TransferBackend(cluster.address, remote_batch=RowRemoteBatch)
        backend.put(PARTITION, row_ids, {"input_ids": tokens, "prompt": prompts}, batch_size=arguments.rows)
        shares = [row_ids[number::WORKERS] for number in range(WORKERS)]
        batches = [RowRemoteBatch(PARTITION, None, ["input_ids"], share, None) for share in shares]
        written = list(pool.map(work, [cluster.address] * WORKERS, batches))
        for batch in written:
            print(f"a worker wrote {', '.join(batch.fields)} of {len(batch.row_ids)} rows")
        whole = backend.get(PARTITION, row_ids, ["input_ids", "prompt", "log_probs"])
        exact = torch.equal(whole["input_ids"], tokens) and list(whole["prompt"]) == prompts.tolist()
        exact = exact and torch.equal(whole["log_probs"], -tokens.float().log1p())
        backend.delete(PARTITION, row_ids, ["input_ids", "prompt", "log_probs"])
        backend.close()
        with tq.connect(cluster.address) as client:
            left = client.partition(PARTITION).describe().samples
    print(f"{arguments.rows} rows read back, {left} left")
    print("all as they were written" if exact and not left else "problem: values differ, or rows are left")
    return 0 if exact and not left else 1


if __name__ == "__main__":
    sys.exit(main())
