from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import compare, main
from tqclient.errors import Unavailable


@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--repeats", "0"],
        ["run", "--repeats", "-1"],
        ["run", "--seed", "-1"],
        ["run", "--arena", "foo"],
        ["run", "--transport", "nope"],
        ["run", "--json", "absent/report.json"],
        ["run", "--json", "."],
        ["claims", "--waiting", "0"],
        ["claims", "--calls", "many"],
        ["bridge", "--samples", "0"],
        ["start", "--arena", "0"],
        ["growth", "--repeats", "0"],
        ["transport", "--staging", "foo"],
        ["scale", "--sizes", "1000", "0"],
        ["scale", "--plot", "absent/cost.png"],
        ["scale", "--plot", "cost.txt"],
        ["compare", "--plot", "."],
        ["compare", "--plot", "bars.csv"],
        ["soak", "--plot", "lines.json"],
        ["soak", "--minutes", "nan"],
        ["soak", "--minutes", "inf"],
        ["soak", "--minutes", "0"],
    ],
    ids=" ".join,
)
def test_what_is_off_is_refused_before_anything_is_measured(
    argv: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main.main(argv)
    assert f"argument {argv[1]}: " in capsys.readouterr().err


def test_an_error_is_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(**_: object) -> None:
        raise Unavailable("tq-storage did not start")

    monkeypatch.setattr("benchmarks.start.run", fails)
    assert main.main(["start"]) == 1
    assert capsys.readouterr().err == "tq-bench: Unavailable: tq-storage did not start\n"


@pytest.mark.parametrize("command", ["scale", "compare", "soak"])
def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="2"):
        main.main([command, "--plot", str(tmp_path / "out.png")])
    assert "needs matplotlib: pip install 'tq-dataplane[bench]'" in capsys.readouterr().err


def test_a_file_that_has_no_room_costs_a_line_and_none_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.compare.run", lambda plan: compare.Result([], [], [], []))
    report, picture = tmp_path / "report.json", tmp_path / "bars"
    asked = ["compare", "small", "--peers", "ours"]
    assert main.main([*asked, "--json", str(report), "--plot", "/dev/full"]) == 1
    assert json.loads(report.read_text())["compare"]["rows"] == []
    assert "tq-bench: /dev/full: No space left on device" in capsys.readouterr().err
    assert main.main([*asked, "--json", "/dev/full", "--plot", str(picture)]) == 1
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "tq-bench: /dev/full: No space left on device" in capsys.readouterr().err
