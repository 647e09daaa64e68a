"""A worker as a process of its own: `python -m examples.grpo_addition.process rollout 0 ADDRESS FOLDER SEED`.

It shares nothing with the others but the service, and the run's folder for weights and ledgers.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

import torch

from examples.grpo_addition import reward, rollout, trainer
from examples.grpo_addition.ledger import Ledger
from examples.grpo_addition.worker import Run

WORK: Final = {"rollout": rollout.work, "reward": reward.work, "trainer": trainer.work}
LIFELINE: Final = 0
"""The descriptor, standard input, that reads as ended when whoever started us is gone, however that came about."""


def start(run: Run, kind: str, number: int) -> subprocess.Popen[bytes]:
    """Starts a worker; what it says goes to a log in the run's folder."""
    command = [sys.executable, "-m", __name__, kind, str(number), run.address, str(run.folder), str(run.seed)]
    with log_of(run, f"{kind}-{number}").open("ab") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            # Seven processes share the cores; none is to leave the empty cache of torch's compiler in /tmp.
            env={"TORCHINDUCTOR_CACHE_DIR": str(run.folder / "inductor"), **os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
        )


def log_of(run: Run, name: str) -> Path:
    """The log of a worker."""
    return run.folder / f"{name}.log"


def main() -> None:
    """Works until there is no more work."""
    kind, number, address, folder, seed = sys.argv[1:]
    run = Run(address, Path(folder), int(seed))
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    with Ledger(run.folder, f"{kind}-{number}") as ledger:
        WORK[kind](run, int(number), ledger)


def _end_with_parent() -> None:
    os.read(LIFELINE, 1)  # nobody writes: it returns when the last writer is gone
    os._exit(1)


if __name__ == "__main__":
    main()
