"""`tq-bench start`: how soon the daemons serve."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.statistics import Spread
from benchmarks.workers import deaf_to_interrupts
from tqclient.errors import Unavailable
from tqclient.start import child_environment

DAEMONS = ("tq-controller", "tq-storage")
_MODULES = {"tq-controller": "tqserver.controller", "tq-storage": "tqserver.storage"}


def run(*, repeats: int, arena: str) -> dict[str, Spread]:
    """Starts each daemon anew, in turn, and times it until it says that it serves.

    Args:
        repeats: starts of each.
        arena: of the storage node; made anew at each start.

    Returns:
        Daemon → times from the start of its process to its serving line.
    """
    times: dict[str, list[float]] = {daemon: [] for daemon in DAEMONS}
    # One for all: a signal that came while one for each start was made, or removed, would leave it behind.
    with tempfile.TemporaryDirectory(prefix="tq-bench-") as scratch:
        for number in range(repeats):
            for daemon in DAEMONS:
                directory = Path(scratch) / f"{Path(scratch).name}-{number}"
                directory.mkdir()
                times[daemon].append(_time(daemon, directory, arena))
                shutil.rmtree(directory)
    return {daemon: Spread.of(values) for daemon, values in times.items()}


def _time(daemon: str, directory: Path, arena: str) -> float:
    flags = ["--listen", "127.0.0.1:0", "--log-level", "error"]
    if daemon == "tq-controller":
        flags += ["--data-dir", str(directory)]
    else:
        name = directory.name
        flags += ["--name", name, "--arena-bytes", arena, "--unlink-on-exit"]
    start = time.perf_counter()
    with deaf_to_interrupts():
        command = [sys.executable, "-m", _MODULES[daemon], *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment(os.environ))
    with process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            elapsed = time.perf_counter() - start
        finally:
            process.terminate()
    if b'"serving"' not in line:
        raise Unavailable(f"{daemon} did not start; its log is above")
    return elapsed
