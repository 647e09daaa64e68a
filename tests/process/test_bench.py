from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import main


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["run", "small", "--repeats", "2", "--arena", "64MiB"], "run"),
        (["claims", "--waiting", "20", "--calls", "20"], "claims"),
        (["start", "--repeats", "1", "--arena", "16MiB"], "start"),
    ],
)
def test_a_short_run_writes_its_figures(no_leaks: None, tmp_path: Path, command: list[str], key: str) -> None:
    """The bytes that come back are compared inside the run."""
    program = [sys.executable, "-m", "benchmarks.main", *command, "--json", str(tmp_path / "report.json")]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"machine", key}
    assert all(value > 0 for value in _medians(report[key]))


def _medians(report: object) -> list[float]:
    if isinstance(report, dict):
        found = [report["median_ms"]] if "median_ms" in report else []
        return found + [value for part in report.values() for value in _medians(part)]
    return [value for part in report for value in _medians(part)] if isinstance(report, list) else []


def test_an_unknown_workload_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no workload nonesuch; there are multimodal, small, regular, jagged"):
        main.main(["run", "nonesuch"])
