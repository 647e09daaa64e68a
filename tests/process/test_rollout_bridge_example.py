"""`python -m examples.rollout_bridge` as its users run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.harness.supervisor import ROOT


def test_the_example_learns_from_every_rollout(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "examples.rollout_bridge", "--rollouts", "8", "--tq-max-staleness", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *steps, last = done.stdout.splitlines()
    assert [int(number) for line in steps for number in re.findall(r"^rollout (\d+): 48 samples", line)] == list(
        range(8)
    )
    chances = [float(line.rpartition(" ")[2]) for line in steps]
    assert chances == sorted(chances)
    assert chances[-1] > 0.6
    assert last == "rollouts that are still live: none"
