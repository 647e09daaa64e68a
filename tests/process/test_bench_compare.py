from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import main

PNG = b"\x89PNG"


def bench(directory: Path, *command: str) -> tuple[int, dict[str, Any], str]:
    """Runs `tq-bench` where no peer is installed; returns its status, its report and what it printed."""
    report = directory / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.main", *command, "--json", str(report)],
        env={**os.environ, "TQ_BENCH_PEERS": str(directory)},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    return done.returncode, json.loads(report.read_text()), done.stdout


def test_we_are_compared_with_plain_copies_and_a_missing_peer_is_a_result(no_leaks: None, tmp_path: Path) -> None:
    """The bytes that come back are compared inside the run."""
    plot = tmp_path / "plot.png"
    peers = ["--peers", "ours", "memcpy", "redis"]
    options = ["--scale", "small", "--repeats", "1", "--plot", str(plot)]
    status, report, printed = bench(tmp_path, "compare", "rollout", *peers, *options)
    result = report["compare"]
    reason = "it is not installed: tq-bench peers install redis"
    assert [(each["workload"], each["peer"], each["reason"]) for each in result["failures"]] == [
        ("rollout", "redis", reason),
    ]
    assert status == 0
    lanes = [("ours", "default"), ("ours", "copy=False"), ("ours", "jagged tensors"), ("memcpy", "np.copyto")]
    assert [(row["peer"], row["way"], row["operation"]) for row in result["rows"]] == [
        (*lane, operation) for lane in lanes for operation in ("end to end", "put", "get")
    ]
    assert all(row["times"]["median_ms"] > 0 and row["cold_ms"] > 0 for row in result["rows"])
    assert {cost["part"] for cost in result["costs"]} == {"producer", "consumer", "storage"}
    assert plot.read_bytes().startswith(PNG)
    assert f"rollout: redis failed: {reason}" in printed


def test_a_batch_of_tensors_is_put_in_place_as_well(no_leaks: None, tmp_path: Path) -> None:
    """The bytes that come back are compared inside the run."""
    options = ["--peers", "ours", "--scale", "small", "--repeats", "1"]
    status, report, _ = bench(tmp_path, "compare", "multimodal", *options)
    result = report["compare"]
    assert (status, result["failures"]) == (0, [])
    ways = ["default", "copy=False", "jagged tensors", "in place"]
    assert [row["way"] for row in result["rows"] if row["operation"] == "end to end"] == ways
    assert all(row["times"]["median_ms"] > 0 for row in result["rows"])


def test_a_soak_samples_every_process(no_leaks: None, tmp_path: Path) -> None:
    plot = tmp_path / "plot.png"
    options = ["--minutes", "0.03", "--workload", "small", "--scale", "small", "--plot", str(plot)]
    status, report, _ = bench(tmp_path, "soak", *options)
    result = report["soak"]
    assert set(result["samples"]) == {"producer", "consumer", "tq-storage", "tq-controller"}
    assert {len(values) for values in result["samples"]["consumer"].values()} == {len(result["times_s"])}
    assert result["batches"] > 20
    assert {verdict["passed"] for verdict in result["verdicts"] if verdict["quantity"] == "registrations"} == {True}
    assert status == int(not result["passed"])
    assert plot.read_bytes().startswith(PNG)


def test_what_is_unknown_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="no peer carrier-pigeon; there are ours, memcpy, transferqueue"):
        main.main(["compare", "small", "--peers", "carrier-pigeon"])
    with pytest.raises(SystemExit, match="no workload nonesuch; there are regular, jagged, multimodal, small, fields"):
        main.main(["compare", "nonesuch"])
    with pytest.raises(SystemExit, match="no workload nonesuch; there are multimodal"):
        main.main(["soak", "--workload", "nonesuch"])
