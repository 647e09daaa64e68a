"""Runs the loop over a service on this machine: `python -m examples.verl_replay_buffer`."""

from __future__ import annotations

import argparse
import os

import tqclient.compat.transfer_queue as tq
from examples.verl_replay_buffer.buffer import uid_of
from examples.verl_replay_buffer.loop import run
from tqserver.local import LocalCluster


def main() -> None:
    """Runs the loop and prints what became of the samples."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=24, help="prompts")
    parser.add_argument("--sessions", type=int, default=4, help="of each prompt")
    parser.add_argument("--per-step", type=int, default=3, help="groups of a training step")
    parser.add_argument("--max-staleness", type=int, default=4, help="versions that a group may lag behind")
    parser.add_argument("--seed", type=int, default=0, help="of what the sessions draw")
    arguments = parser.parse_args()
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster:
        os.environ["TQ_CONTROLLER"] = cluster.address
        tq.init()
        try:
            report = run("train", **vars(arguments))
        finally:
            tq.close()
    for step, groups in enumerate(report.steps):
        names = ", ".join(uid_of(keys[0]) for keys in groups)
        print(f"step {step:3}  {sum(map(len, groups)):3} samples of {names}")
    print(
        f"{len(report.trained)} samples trained on ({report.tokens} tokens), {len(report.stale)} too stale, "
        f"{len(report.failed)} in groups with a session that failed, {len(report.left)} left behind"
    )


if __name__ == "__main__":
    main()
