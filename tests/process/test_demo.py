"""`make demo` as its users run it: a process of its own, and what it leaves behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

REPOSITORY = Path(__file__).parents[2]
MARK = "DEMO_TEST_MARK"
POLL_SECONDS = 0.02

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def mark() -> str:
    """A value in the environment of every process of one run."""
    return uuid4().hex


@pytest.fixture
def start(tmp_path: Path, mark: str) -> Start:
    """Starts the demo in a session of its own, as a shell would in a terminal; its temporary files go to `tmp`."""
    (tmp_path / "tmp").mkdir()

    def popen(*arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "examples.grpo_addition", "--out", str(tmp_path / "demo.png"), *arguments],
            cwd=REPOSITORY,
            env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path / "tmp"), "COLUMNS": "100"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    return popen


def processes_with(mark: str) -> list[str]:
    """Command lines of the processes that have the mark in their environment."""
    found = []
    for process in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{MARK}={mark}".encode() in Path(f"/proc/{process}/environ").read_bytes():
                found.append(Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue  # it has ended, or is another user's
    return found


def wait_until(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(POLL_SECONDS)


@pytest.mark.timeout(300)  # twenty seconds on two idle cores
def test_a_quick_run_learns_survives_two_kills_and_leaves_nothing_behind(
    no_leaks: None, start: Start, mark: str, tmp_path: Path
) -> None:
    with start("--quick", "--seed", "1") as demo:
        output, _ = demo.communicate(timeout=280)
    assert demo.returncode == 0, output
    assert "nothing lost, nothing acked twice" in output
    assert len(re.findall(r"kill -9 (rollout|trainer)-0 ", output)) == 2
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    # The last two columns before the latencies are acked and redelivered: the killed trainer held one batch.
    put, trained = (re.search(rf"{row} +│ +([\d,]+) │ +([\d,]*) │ +([\d,]*) │", output) for row in ("put", "by train"))
    assert put is not None
    assert trained is not None
    assert trained[2] == put[1]
    assert int(trained[3]) > 0
    wait_until(lambda: not processes_with(mark), seconds=5)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("at", ["start", "work"])
def test_an_interrupt_ends_everything(no_leaks: None, start: Start, mark: str, tmp_path: Path, at: str) -> None:
    pattern = {"start": "*/demo.jsonl", "work": "*/rollout-0.jsonl"}[at]
    with start("--seconds", "60") as demo:
        wait_until(lambda: list((tmp_path / "tmp").glob(f"grpo-addition-{pattern}")), seconds=60)
        os.killpg(demo.pid, signal.SIGINT)  # what Ctrl-C does: every process of the terminal's group gets it
        output, _ = demo.communicate(timeout=60)
    assert demo.returncode == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    wait_until(lambda: not processes_with(mark), seconds=5)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize("out", ["/proc/nowhere/demo.png", "/proc/version/demo.png", "/tmp"])
def test_a_plot_that_cannot_be_written_is_refused_before_the_run(start: Start, out: str) -> None:
    process = start("--out", out)
    printed, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert printed.endswith(f"error: --out {out}: cannot be written; give a file that can\n")
