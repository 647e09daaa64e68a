"""The examples of the NeMo-RL and ROLL adapters as their users run them, and that `make` runs every example."""

from __future__ import annotations

import re
import subprocess
import sys

from tests.harness.supervisor import ROOT


def run(name: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", f"examples.{name}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_nemo_rl_trains_on_whole_groups_that_were_scored() -> None:
    *steps, total, verdict = run("nemo_rl_data_plane", "--steps", "3")
    assert [re.sub(r"-?\d\.\d{3}$", "#", line) for line in steps] == [
        f"step {step}: 32 samples, loss #" for step in range(3)
    ]
    assert total == "96 samples put, 96 scored, 96 trained on, 0 left"
    assert verdict == "each sample once, groups whole"


def test_roll_hands_on_rows_by_their_ids() -> None:
    assert run("roll_transfer_backend", "--rows", "10") == [
        *["a worker wrote log_probs of 5 rows"] * 2,
        "10 rows read back, 0 left",
        "all as they were written",
    ]


def test_make_has_a_target_for_each_example() -> None:
    (named,) = re.findall(r"^EXAMPLES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    there = {path.parent.name for path in ROOT.glob("examples/*/__main__.py")} - {"grpo_addition"}  # `make demo`
    assert {name.replace("-", "_") for name in named.split()} == there
