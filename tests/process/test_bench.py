from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import main
from benchmarks.machine import children_of
from tests.harness import Supervisor, wait_until


@pytest.mark.parametrize(
    ("command", "key"),
    [
        (["run", "small", "--repeats", "2", "--arena", "64MiB"], "run"),
        (["claims", "--waiting", "20", "--calls", "20"], "claims"),
        (["start", "--repeats", "1", "--arena", "16MiB"], "start"),
        (["bridge", "--samples", "10", "--repeats", "2", "--arena", "64MiB"], "bridge"),
    ],
)
def test_a_short_run_writes_its_figures(no_leaks: None, tmp_path: Path, command: list[str], key: str) -> None:
    """The bytes that come back are compared inside the run."""
    program = [sys.executable, "-m", "benchmarks.main", *command, "--json", str(tmp_path / "report.json")]
    subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report) == {"machine", key}
    assert all(value > 0 for value in _medians(report[key]))


def test_scale_writes_its_figures_and_a_plot(no_leaks: None, tmp_path: Path) -> None:
    """That groups are whole, and delivered once, is checked inside the run."""
    program = [sys.executable, "-m", "benchmarks.main", "scale", "--json", str(tmp_path / "report.json")]
    program += ["--sizes", "1000", "2000", "--repeats", "5", "--waiting", "20", "--groups", "200", "--arena", "64MiB"]
    subprocess.run([*program, "--plot", str(tmp_path / "cost.png")], check=True, stdout=subprocess.DEVNULL)
    scale = json.loads((tmp_path / "report.json").read_text())["scale"]
    assert {(cost["sampler"], cost["rows"]) for cost in scale["claims"]} == {
        (sampler, rows) for sampler in scale["growth"] for rows in (1000, 2000)
    }
    assert len(scale["growth"]) == 6
    assert all(growth > 0 for growth in scale["growth"].values())
    assert (scale["groups"]["groups"], scale["wake"]["waiting"]) == (200, 20)
    assert [watching["rows"] for watching in scale["watching"]] == [1000, 2000]
    assert all(watching["listing_ms"] > 0 for watching in scale["watching"])
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_growth_sets_little_beside_much(no_leaks: None, tmp_path: Path) -> None:
    """That the bytes come back is checked inside the run; how long it takes is not what a test can say."""
    program = [sys.executable, "-m", "benchmarks.main", "growth", "--scale", "small", "--repeats", "1"]
    program += ["--json", str(tmp_path / "report.json")]
    status = subprocess.run(program, check=False, stdout=subprocess.DEVNULL).returncode
    report = json.loads((tmp_path / "report.json").read_text())
    assert status == report["failed"] == any(not each["passed"] for each in report["growth"])
    assert [(each["operation"], each["bound"]) for each in report["growth"]] == [
        *[("put", 18), ("get", 18)] * 2,
        *[("put", 4), ("get", 4)] * 2,
        *[("get", 8)] * 2,
        *[("get", 4)] * 2,
        ("put", 1.5),
        ("claim", 1.5),
    ]
    for each in report["growth"]:
        assert each["factor"] == pytest.approx(each["more"]["median_ms"] / each["less"]["median_ms"])
        assert each["passed"] == (each["factor"] <= each["bound"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(
    "command", [["start", "--repeats", "1000"], ["compare", "small", "--peers", "ours", "--repeats", "1000"]], ids=str
)
def test_a_signal_that_asks_for_an_end_leaves_nothing_behind(
    no_leaks: None, supervisor: Supervisor, tmp_path: Path, command: list[str], number: signal.Signals
) -> None:
    program = [sys.executable, "-m", "benchmarks", *command]
    bench = supervisor.command(program, env={"TMPDIR": str(tmp_path), "PYTHONUNBUFFERED": "1"})
    wait_until(lambda: children_of(bench.pid) and any(tmp_path.glob("tq-bench-*")), what="it measures")
    bench.signal(number)
    assert bench.wait() == 128 + number
    assert list(tmp_path.glob("tq-*")) == []


def _medians(report: object) -> list[float]:
    if isinstance(report, dict):
        found = [report["median_ms"]] if "median_ms" in report else []
        return found + [value for part in report.values() for value in _medians(part)]
    return [value for part in report for value in _medians(part)] if isinstance(report, list) else []


def test_an_unknown_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no workload nonesuch; there are multimodal, small, regular, jagged"):
        main.main(["run", "nonesuch"])
    with pytest.raises(
        SystemExit, match="no sampler nonesuch; there are fifo, lifo, random, prioritized, group, seqlen b"
    ):
        main.main(["scale", "nonesuch"])
