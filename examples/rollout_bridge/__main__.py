"""A rollout worker, a critic and an actor of two DP ranks, each a process, over a service on this machine.

worker ──publish──► rollout 0, 1, … ──fetch──► critic ──put values──► the same samples
                                     └─fetch, once the values are there──► actor, DP ranks 0 and 1 (gloo)

python -m examples.rollout_bridge --rollouts 20 --tq-max-staleness 2
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
from dataclasses import replace
from multiprocessing.connection import wait

from examples.rollout_bridge.process import DP, run
from tqclient.integrations.rollout_bridge import RolloutOptions, add_arguments, connect
from tqserver.local import LocalCluster


def main() -> int:
    """Runs the job; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m examples.rollout_bridge", description=__doc__.partition("\n")[0])
    parser.add_argument("--rollouts", type=int, default=12)
    add_arguments(parser)
    arguments = parser.parse_args()
    options = replace(RolloutOptions.from_args(arguments), tasks=("actor_train", "critic_train"), timeout=120)
    spawn = multiprocessing.get_context("spawn")
    with (
        LocalCluster(storage_nodes=1, arena="64MiB") as cluster,
        tempfile.TemporaryDirectory(prefix="rollout-bridge-") as folder,
    ):
        options = replace(options, controller=cluster.address)
        crew = [("worker", 0), ("critic", 0), *(("actor", rank) for rank in range(DP))]
        processes = [
            spawn.Process(target=run, args=(role, rank, arguments.rollouts, options, f"{folder}/meet"))
            for role, rank in crew
        ]
        for process in processes:
            process.start()
        try:
            return _finish(processes)
        finally:
            with connect(options) as bridge:
                left = bridge.live()
            print(f"rollouts that are still live: {left or 'none'}")


def _finish(processes: list[multiprocessing.context.SpawnProcess]) -> int:
    """Waits for all of them; when one fails, ends the others."""
    running = list(processes)
    while running:
        wait([process.sentinel for process in running])
        if any(process.exitcode for process in running):
            for process in running:
                process.terminate()
            for process in running:
                process.join()
            return 1
        running = [process for process in running if process.exitcode is None]
    return 0


if __name__ == "__main__":
    sys.exit(main())
