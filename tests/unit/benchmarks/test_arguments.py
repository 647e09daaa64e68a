from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import main
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
        ["compare", "--plot", "."],
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
