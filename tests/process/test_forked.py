"""Runs `forked.py`: where other tests have used gRPC and Mooncake before, a child that was forked may hang in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_what_a_forked_child_does_has_no_effect_on_its_parent() -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).with_name("forked.py")),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
