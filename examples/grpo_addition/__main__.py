"""`make demo`: a small asynchronous GRPO run whose every sample goes through the data plane.

    rollout-0 ─┐ put                    claim ┌─ trainer-0
    rollout-1 ─┴──► partition train/addition ─┴─ trainer-1 ──► weights, back to the rollout workers
                     claim │ ▲ put rewards
                          reward-0

Halfway, one rollout worker and one trainer are killed with SIGKILL, in the middle of a put and of a batch, and new ones
take their place. In the end the workers' ledgers are compared with the partition.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from rich.console import Console
from torch.nn.utils import parameters_to_vector

import tqclient as tq
from examples.grpo_addition.crew import Crew, CrewFailed
from examples.grpo_addition.ledger import Ledger
from examples.grpo_addition.model import Policy
from examples.grpo_addition.report import Live, conclude
from examples.grpo_addition.weights import Weights, WeightStore
from examples.grpo_addition.worker import PARTITION, REWARD_CONSUMER, ROWS_PER_BATCH, TRAIN_CONSUMER, Run
from tqserver.local import LocalCluster

WORKERS: Final = ("rollout", "rollout", "reward", "trainer", "trainer")
LEASE_S: Final = 3.0
"""How soon the batch of a dead trainer goes to another one."""
SAMPLES_MAX: Final = 8 * ROWS_PER_BATCH
"""What the partition holds at once: bounds its memory, and how stale a sample is when its turn comes."""
UPDATES_MIN: Final = 60
"""On a busy machine the run goes on until there was something to learn from."""
TICK_S: Final = 0.1
STALL_S_MAX: Final = 60.0
"""Without an update for so long, something is wrong."""


def main() -> int:
    """Runs the demo; returns the exit status."""
    arguments = parse_arguments()
    console = Console()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        with tempfile.TemporaryDirectory(prefix="grpo-addition-") as folder:
            return run(arguments, console, Path(folder))
    except CrewFailed as error:
        console.print(f"failed: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; everything was cleaned up")
        return 128 + signal.SIGINT


def parse_arguments() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo_addition", description="A small asynchronous GRPO run."
    )
    parser.add_argument(
        "--seconds", type=float, default=45.0, help="of learning, start and end not counted (%(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="6 seconds of learning")
    parser.add_argument("--seed", type=int, default=0, help="of weights, prompts and sampling (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out/demo.png"), help="where the plot goes (%(default)s)")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.seconds = 6.0
    if not _can_be_written(arguments.out):  # found out in the end, it would hide what the audit says
        parser.error(f"--out {arguments.out}: cannot be written; give a file that can")
    return arguments


def _can_be_written(path: Path) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return not path.is_dir() and os.access(path if path.exists() else path.parent, os.W_OK)


def run(arguments: argparse.Namespace, console: Console, folder: Path) -> int:
    """Brings everything up, learns, drains, audits, and reports; returns the exit status."""
    torch.manual_seed(arguments.seed)
    first = parameters_to_vector(Policy().parameters()).detach()
    WeightStore(folder).write(Weights.first(first))
    with (
        LocalCluster(storage_nodes=1, arena="256MiB") as cluster,
        tq.connect(cluster.address) as client,
        Ledger(folder, "demo") as ledger,
    ):
        partition = client.create_partition(
            PARTITION,
            consumers=[REWARD_CONSUMER, TRAIN_CONSUMER],
            lease=LEASE_S,
            capacity_samples=SAMPLES_MAX,
            keep=True,  # what is cleared and what is left is counted to the end
        )
        crew = Crew(Run(cluster.address, folder, arguments.seed), partition, ledger)
        try:
            with Live(console, arguments.seconds) as live:
                learn(crew, live, arguments.seconds)
                partition.seal()
                follow(crew, live, "draining", lambda: not crew.working)
            problems = crew.audit()
        finally:
            crew.end()
    return conclude(console, crew.account, problems, arguments.out)


def learn(crew: Crew, live: Live, seconds: float) -> None:
    """Lets the workers work, and replaces two of them by force halfway; time counts from the first update."""
    for kind in WORKERS:
        crew.start(kind)
    follow(crew, live, "starting", lambda: crew.updates > 0)
    started = time.monotonic()
    live.start_clock()
    follow(crew, live, "learning", lambda: time.monotonic() - started >= seconds / 2)
    for kind in ("rollout", "trainer"):
        live.say(crew.kill_and_replace(kind))
    follow(crew, live, "learning", lambda: time.monotonic() - started >= seconds and crew.updates >= UPDATES_MIN)


def follow(crew: Crew, live: Live, phase: str, done: Callable[[], bool]) -> None:
    """Looks after the workers, and shows how far they are, until a phase is done."""
    updates, updated_at = crew.updates, time.monotonic()
    while not done():
        crew.catch_up()
        crew.check()
        live.show(phase, crew.account)
        if crew.updates > updates:
            updates, updated_at = crew.updates, time.monotonic()
        elif time.monotonic() - updated_at > STALL_S_MAX:
            raise CrewFailed(f"{phase}: no update of the model for {STALL_S_MAX:.0f} s")
        time.sleep(TICK_S)


if __name__ == "__main__":
    sys.exit(main())
