"""Ctrl-C while a command is being imported, and while it runs."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPT = "import os, signal; os.kill(os.getpid(), signal.SIGINT)\n"
PROGRAM = "import signal, sys; {before}; from tqclient.start import run; sys.exit(run('command'))"


def run(folder: Path, module: str, before: str = "pass") -> tuple[int, str, str]:
    """Runs a command of this text; returns its exit status and what it printed."""
    (folder / "command.py").write_text(module)
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); " + PROGRAM.format(before=before)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "module",
    [
        INTERRUPT + "def main(): return 0\n",
        "try:\n    " + INTERRUPT + "except BaseException:\n    pass\ndef main(): return 0\n",
        "def main():\n    " + INTERRUPT,
        "def main(): raise KeyboardInterrupt\n",
    ],
    ids=["import", "import that catches", "main", "raised"],
)
def test_an_interrupt_is_130_and_no_traceback(tmp_path: Path, module: str) -> None:
    assert run(tmp_path, module) == (130, "", "")


@pytest.mark.parametrize(("result", "status"), [("0", 0), ("5", 5), ("None", 0)])
def test_the_status_is_that_of_the_command(tmp_path: Path, result: str, status: int) -> None:
    assert run(tmp_path, f"print('ran')\ndef main(): return {result}\n") == (status, "ran\n", "")


def test_who_ignores_interrupts_goes_on(tmp_path: Path) -> None:
    module = INTERRUPT + "def main():\n    os.kill(os.getpid(), signal.SIGINT)\n    return 7\n"
    assert run(tmp_path, module, "signal.signal(signal.SIGINT, signal.SIG_IGN)") == (7, "", "")


def test_what_a_command_sets_itself_is_left_alone(tmp_path: Path) -> None:
    module = "import signal\ndef main(): return int(signal.getsignal(2) is not signal.default_int_handler)\n"
    assert run(tmp_path, module) == (0, "", "")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
