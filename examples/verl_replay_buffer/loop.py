"""The loop: agent loops in a thread, a trainer that takes whole groups from the replay buffer."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tensordict import TensorDict

import tqclient.compat.transfer_queue as tq
from examples.verl_replay_buffer.buffer import ReplayBuffer, uid_of
from examples.verl_replay_buffer.rollout import Weights, generate

MINI_BATCHES = 2


@dataclass
class Report:
    """What a run did.

    Attributes:
        steps: keys of the groups that each step trained on.
        stale: keys that were too old.
        failed: keys of groups with a session that failed.
        tokens: trained on.
        left: keys that the run left behind.
    """

    steps: list[list[list[str]]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    tokens: int = 0
    left: list[str] = field(default_factory=list)

    @property
    def trained(self) -> list[str]:
        """Keys that were trained on."""
        return [key for step in self.steps for group in step for key in group]


def train_step(groups: list[tq.KVBatchMeta]) -> int:
    """Computes advantages within each group, stores them, and reads mini-batches of all groups, to train on.

    Returns:
        Tokens.
    """
    for group in groups:
        rewards = tq.kv_batch_get(group.keys, str(group.partition_id), "rewards")["rewards"]
        advantages = TensorDict({"advantages": rewards - rewards.mean()}, batch_size=len(group))
        tq.kv_batch_put(group.keys, str(group.partition_id), advantages)
    tokens = 0
    for mini_batch in tq.KVBatchMeta.concat(groups).chunk(MINI_BATCHES):
        if mini_batch.size:
            data = tq.kv_batch_get(mini_batch.keys, str(mini_batch.partition_id), ["responses", "advantages"])
            tokens += sum(len(row) for row in data["responses"].unbind())
    return tokens


def run(partition: str, *, groups: int, sessions: int, per_step: int, max_staleness: int, seed: int) -> Report:
    """Generates and trains until every group was trained on or given up.

    Args:
        partition: of the samples.
        groups: prompts.
        sessions: of each prompt.
        per_step: groups of a step.
        max_staleness: versions that a group may lag behind.
        seed: of what the sessions draw.
    """
    weights = Weights()
    buffer = ReplayBuffer(partition, max_staleness)
    report = Report(stale=buffer.stale, failed=buffer.failed)
    with ThreadPoolExecutor(1) as pool:
        rollout = pool.submit(lambda: asyncio.run(generate(partition, groups, sessions, weights, seed)))
        while True:
            ended = rollout.done()
            try:
                taken = buffer.sample(per_step, weights.version, timeout=0.0 if ended else 1.0)
            except TimeoutError:
                if ended:
                    break
                continue
            report.tokens += train_step(taken)
            report.steps.append([group.keys for group in taken])
            weights.version += 1
            tq.kv_clear([key for group in taken for key in [uid_of(group.keys[0]), *group.keys]], partition)
        rollout.result()
    report.left = list(tq.kv_list(partition).get(partition, {}))
    return report
