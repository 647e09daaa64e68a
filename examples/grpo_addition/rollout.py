"""The rollout worker: asks the policy the same question several times, and puts what it answered."""

from __future__ import annotations

import itertools
import os
import time

import numpy as np
import torch
from torch.nn.utils import vector_to_parameters

import tqclient as tq
from examples.grpo_addition import task
from examples.grpo_addition.ledger import Ledger
from examples.grpo_addition.model import Completions, Policy, sample
from examples.grpo_addition.weights import WeightStore
from examples.grpo_addition.worker import GROUP_SIZE, PARTITION, PROMPTS_PER_PUT, PUT_TIMEOUT_S, Run


def work(run: Run, number: int, ledger: Ledger) -> None:
    """Puts groups of completions until the partition is sealed; each put is drawn with the latest weights."""
    rng = np.random.default_rng([run.seed, number])
    generator = torch.Generator().manual_seed(int(rng.integers(2**62)))
    store, policy = WeightStore(run.folder), Policy()
    with tq.connect(run.address) as client:
        partition = client.partition(PARTITION)
        for turn in itertools.count():
            weights = store.read()
            vector_to_parameters(weights.parameters, policy.parameters())
            prompts = [prompt for prompt in task.draw_prompts(rng, PROMPTS_PER_PUT) for _ in range(GROUP_SIZE)]
            completions = sample(policy, torch.tensor([task.encode(prompt) for prompt in prompts]), generator)
            name = f"rollout-{number}/{turn}"
            keys = [f"{name}/{row}" for row in range(len(prompts))]
            ledger.write("putting", keys=keys)
            columns, started = samples(prompts, completions, weights.version, number), time.monotonic()
            try:
                ids = partition.put(
                    columns,
                    keys=keys,
                    groups=[f"{name}/{row // GROUP_SIZE}" for row in range(len(prompts))],
                    weight_version=weights.version,
                    timeout=PUT_TIMEOUT_S,
                )
            except tq.Sealed:
                ledger.write("refused put", keys=keys)
                return
            ledger.write(
                "put",
                ids=ids.tolist(),
                keys=keys,
                seconds=time.monotonic() - started,
                size_bytes=sum(row.nbytes for row in completions.sequences + completions.log_probs),
            )


def samples(prompts: list[str], completions: Completions, version: int, number: int) -> dict[str, list[object]]:
    """The columns of one put: ragged tokens and log-probabilities, text, and a nested dict."""
    lengths = [len(row) for row in completions.log_probs]
    return {
        "tokens": list(completions.sequences),
        "log_probs": list(completions.log_probs),
        "prompt": list(prompts),
        "meta": [
            {
                "worker": {"name": f"rollout-{number}", "pid": os.getpid()},
                "sampling": {"temperature": 1.0, "weight_version": version},
                "length": length,
            }
            for length in lengths
        ],
    }
