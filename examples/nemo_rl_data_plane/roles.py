"""The roles: each is a process, and knows the others by what is in the partition alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from tensordict import TensorDict

from examples.nemo_rl_data_plane.meta import KVBatchMeta
from tqclient.integrations.nemo_rl import DataPlane

PARTITION: Final = "train"
GENERATIONS: Final = 4
"""Of each prompt: a group."""
PROMPTS: Final = 8
ROWS: Final = PROMPTS * GENERATIONS
"""Of a step."""
WAIT_S: Final = 60.0


def generate(address: str, steps: int, seed: int) -> list[str]:
    """Puts the samples of each step; returns the ids of all."""
    draw = torch.Generator().manual_seed(seed)
    plane = DataPlane(address, batch_meta=KVBatchMeta)
    put = []
    for step in range(steps):
        ids = [f"s{step}p{prompt}_g{number}" for prompt in range(PROMPTS) for number in range(GENERATIONS)]
        lengths = torch.randint(8, 64, (ROWS,), generator=draw).tolist()
        fields = {
            "input_ids": jagged(torch.randint(0, 1000, (length,), generator=draw) for length in lengths),
            "rewards": torch.rand(ROWS, generator=draw),
        }
        tags = [{"input_lengths": length, "step": step} for length in lengths]
        put += plane.put_samples(ids, PARTITION, TensorDict(fields, batch_size=[ROWS]), tags).sample_ids
    plane.close()
    return put


def score(address: str, steps: int) -> int:
    """Writes `prev_logprobs` beside the tokens of every sample, as they come; returns how many."""
    plane = DataPlane(address, batch_meta=KVBatchMeta)
    rows = 0
    for _ in range(steps * PROMPTS):
        meta = plane.claim_meta(PARTITION, "logprobs", ["input_ids"], GENERATIONS, timeout_s=WAIT_S)
        tokens = plane.get_data(meta)["input_ids"]
        log_probs = jagged(-row.float() / 1000 for row in tokens.unbind())
        plane.put_samples(meta.sample_ids, PARTITION, TensorDict({"prev_logprobs": log_probs}, [GENERATIONS]))
        rows += len(meta.sample_ids)
    plane.close()
    return rows


def train(address: str, steps: int) -> list[list[str]]:
    """Takes a step on whole groups, and clears them; returns the ids of each step."""
    plane = DataPlane(address, batch_meta=KVBatchMeta)
    trained = []
    for step in range(steps):
        meta = plane.claim_meta(PARTITION, "train", ["rewards", "prev_logprobs"], ROWS, timeout_s=WAIT_S)
        data = plane.get_data(meta, ["input_ids", "rewards", "prev_logprobs"])
        rewards = data["rewards"].view(-1, GENERATIONS)  # a group's samples lie side by side
        advantages = (rewards - rewards.mean(1, keepdim=True)).flatten()
        log_probs = torch.stack([row.sum() for row in data["prev_logprobs"].unbind()])
        if meta.sequence_lengths != [len(row) for row in data["input_ids"].unbind()]:
            raise AssertionError("the tags do not belong to the samples")
        print(f"step {step}: {len(meta.sample_ids)} samples, loss {-(advantages * log_probs).mean():.3f}", flush=True)
        trained.append(meta.sample_ids)
        if step == steps - 1 and not plane.check_consumption_status(PARTITION, ["logprobs", "train"]):
            raise AssertionError("a task has not had all samples")
        plane.clear_samples(meta.sample_ids, PARTITION)
    plane.close()
    return trained


def jagged(rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns rows of several lengths as one jagged tensor."""
    made: torch.Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return made
