"""The reference process: scores every row with the frozen policy, and writes that to the row as another column."""

from __future__ import annotations

import torch

import tqclient as tq
from examples.dpo_pairs.loss import sequence_log_probs
from examples.dpo_pairs.run import PAIRS_PER_BATCH, PARTITION, Run, first_policy


@torch.no_grad()
def work(run: Run) -> int:
    """Works until the partition is sealed and drained; returns how many rows were scored."""
    torch.set_num_threads(1)
    reference, rows = first_policy(run), 0
    with tq.connect(run.address) as client:
        partition = client.partition(PARTITION)
        for batch in partition.consumer("reference", fields=["tokens"]).batches(2 * PAIRS_PER_BATCH):
            scores = sequence_log_probs(reference, batch.list("tokens"))
            # A batch that is delivered twice is scored twice, to the same effect.
            partition.put({"reference_log_probs": scores}, ids=batch.ids, upsert=True)
            rows += batch.rows
    return rows
