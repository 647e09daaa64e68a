"""One process of a job over the rollout bridge: a rollout worker, a critic, or a rank of the actor.

A JSON object per line on stdout: `published`, `fetched`, `acked`, each with the rollout, and `done` at the end.
"""

from __future__ import annotations

import argparse
import datetime
import json
import signal
import sys
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import tqclient as tq
from tqclient.integrations.rollout_bridge import Rollout, RolloutBridge, RolloutOptions

DP, TP, ROLLOUTS = 4, 2, 10
TASKS = ("actor_train", "critic_train")
SCHEDULE = ("partition", "global_batch_sizes", "num_microbatches", "micro_batch_indices")
FIELDS = ("tokens", "loss_masks", "rollout_log_probs", "rewards", "sample_indices", "prompt", "metadata")
MORE_FIELDS = ("multimodal_train_inputs", "routed_experts")


def make_batch(rollout_id: int, seed: int) -> dict[str, Any]:
    """What a rollout consists of: the same for whoever asks. Every third one is without routed experts."""
    draw = np.random.default_rng((seed, rollout_id))
    rows = int(draw.integers(20, 40))
    lengths = draw.integers(1, 300, rows).tolist()
    cuts = sorted(draw.choice(np.arange(1, rows), DP - 1, replace=False).tolist())  # uneven shards, none empty
    partition = [part.tolist() for part in np.split(draw.permutation(rows), cuts)]
    batch = {
        "tokens": [draw.integers(0, 1 << 17, length).tolist() for length in lengths],
        "loss_masks": [draw.integers(0, 2, length).tolist() for length in lengths],
        "rollout_log_probs": [torch.from_numpy(draw.random(length, np.float32)) for length in lengths],
        "rewards": draw.random(rows).tolist(),
        "sample_indices": torch.from_numpy(draw.integers(0, 1 << 40, rows)),
        "prompt": [f"prompt {row}" if row % 2 else [{"role": "user", "content": str(row)}] for row in range(rows)],
        "metadata": [{"turns": [row, [1, (2, None)]]} for row in range(rows)],
        "multimodal_train_inputs": [{"pixels": torch.full((row, 2), 0.5)} if row % 2 else None for row in range(rows)],
        "partition": partition,
        "global_batch_sizes": [[rows // 2, rows - rows // 2]] * DP,
        "num_microbatches": [[len(part) // 2, 1] for part in partition],
        "micro_batch_indices": [[[index] for index in range(len(part))] for part in partition],
    }
    if rollout_id % 3:
        shape = (4, 2)
        batch["routed_experts"] = [draw.integers(0, 64, (length, *shape)).astype(np.int16) for length in lengths]
    return batch


def say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


def check(rollout: Rollout, batch: dict[str, Any]) -> None:
    """Compares what was fetched with what was published: the schedule exactly, every sample's fields by value."""
    for name in SCHEDULE:
        if rollout[name] != batch[name][rollout.dp_rank]:
            raise AssertionError(f"rollout {rollout.rollout_id}: {name} is {rollout[name]}")
    for name in [*FIELDS, *MORE_FIELDS]:
        if (name in rollout) != (name in batch):
            raise AssertionError(f"rollout {rollout.rollout_id}: {name} is there, or is not")
        if name not in batch:
            continue
        for value, row in zip(rollout[name], rollout["partition"], strict=True):
            if not same(value, batch[name][row]):
                raise AssertionError(f"rollout {rollout.rollout_id}: {name} of sample {row} is {value}")


def same(value: Any, given: Any) -> bool:
    if isinstance(given, dict):
        return given.keys() == value.keys() and all(same(value[key], each) for key, each in given.items())
    if isinstance(value, torch.Tensor):
        return bool(torch.equal(value, torch.as_tensor(given, dtype=value.dtype)))
    return bool(value == given)


def publish(bridge: RolloutBridge, worker: int, seed: int) -> None:
    """A rollout worker: every second rollout is its own."""
    for rollout_id in range(worker, ROLLOUTS, 2):
        batch = make_batch(rollout_id, seed)
        assert bridge.publish(rollout_id, batch, DP, weight_version=(rollout_id, rollout_id + 1))
        say("published", rollout=rollout_id)


def criticise(bridge: RolloutBridge, rank: int, seed: int) -> None:
    """A rank of the critic: it has two shards of each rollout."""
    for rollout_id in range(ROLLOUTS):
        for dp_rank in (rank, rank + 2):
            with bridge.fetch(rollout_id, dp_rank, ["tokens"], task="critic_train") as rollout:
                rollout.put({"values": [tokens.float() / 2 for tokens in rollout["tokens"]]})
            say("acked", rollout=rollout_id, dp_rank=dp_rank, ids=rollout.ids.tolist())


class Actor:
    """A rank of the actor. In even rollouts each rank fetches; in odd ones the leader does, and broadcasts."""

    def __init__(self, client: tq.Client, options: RolloutOptions, dp_rank: int, member: int) -> None:
        place = tq.Topology(dp=DP, tp=TP, rank=dp_rank * TP + member, leader_acks=True)
        self.dp_rank, self.member = dp_rank, member
        self.by_itself = RolloutBridge(client, options, topology=place)
        self.as_leader = RolloutBridge(client, options)

    def fetch(self, rollout_id: int) -> Rollout:
        fields = [*FIELDS, *MORE_FIELDS, "values"]
        if rollout_id % 2 == 0:
            return self.by_itself.fetch(rollout_id, self.dp_rank, fields)
        if self.member:
            size = torch.zeros(1, dtype=torch.int64)
            dist.broadcast(size, 0)
            buffer = torch.empty(int(size), dtype=torch.uint8)
            dist.broadcast(buffer, 0)
            return Rollout.from_buffer(buffer)
        rollout = self.as_leader.fetch(rollout_id, self.dp_rank, fields)
        buffer = rollout.to_buffer()
        dist.broadcast(torch.tensor([len(buffer)]), 0)
        dist.broadcast(buffer, 0)
        return rollout

    def train(self, rollout_id: int, seed: int, hold: int) -> None:
        rollout = self.fetch(rollout_id)
        with rollout:
            batch = make_batch(rollout_id, seed)
            check(rollout, batch)
            assert [each.tolist() for each in rollout["values"]] == [(each / 2).tolist() for each in rollout["tokens"]]
            ids = rollout.ids.tolist()
            say("fetched", rollout=rollout_id, ids=ids, rows=rollout["partition"])
            while rollout_id == hold:
                signal.pause()
            gathered = [torch.zeros(len(ids), dtype=torch.int64) for _ in range(TP)]
            dist.all_gather(gathered, torch.tensor(ids))
            assert gathered[0].tolist() == gathered[1].tolist() == ids
        say("acked", rollout=rollout_id)
        dist.barrier()  # nobody is a rollout ahead of its leader's ack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("role", choices=["worker", "critic", "actor"])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--start", type=int, default=0, help="the actor's first rollout")
    parser.add_argument("--hold", type=int, default=-1, help="rollout that the actor never gets beyond")
    parser.add_argument("--meet", default="", help="file at which the ranks of a DP rank meet")
    given = parser.parse_args()
    options = RolloutOptions(run="job", tasks=TASKS, max_staleness=1, timeout=60)
    with tq.connect(given.address, timeout=60) as client:
        if given.role == "worker":
            publish(RolloutBridge(client, options), given.rank, given.seed)
        elif given.role == "critic":
            criticise(RolloutBridge(client, options), given.rank, given.seed)
        else:
            dp_rank, member = divmod(given.rank, TP)
            dist.init_process_group(
                "gloo",
                init_method=f"file://{given.meet}",
                rank=member,
                world_size=TP,
                timeout=datetime.timedelta(seconds=60),
            )
            actor = Actor(client, options, dp_rank, member)
            for rollout_id in range(given.start, ROLLOUTS):
                actor.train(rollout_id, given.seed, given.hold)
            dist.destroy_process_group()
    say("done")


if __name__ == "__main__":
    main()
