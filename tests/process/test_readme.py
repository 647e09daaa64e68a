"""The README's example runs as printed, and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLE = re.compile(r"```python\n(.*?)```\n\nIt prints\n\n```\n(.*?)```", re.DOTALL)


def test_the_example_prints_what_the_readme_says(no_leaks: None) -> None:
    ((program, printed),) = EXAMPLE.findall((ROOT / "README.md").read_text())
    assert len(program.splitlines()) <= 24
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, printed), done.stderr
