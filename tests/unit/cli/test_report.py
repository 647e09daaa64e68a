"""How values and outcomes look, for people and for machines."""

from __future__ import annotations

import datetime
import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tqclient.cli.report import Report, console, plain, preview, size_text, table
from tqclient.info import STATES

SIZES = [
    (0, "0 B"),
    (1023, "1023 B"),
    (1024, "1.00 KiB"),
    (1536, "1.50 KiB"),
    (10 * 1024, "10.0 KiB"),
    (100 * 1024, "100 KiB"),
    (64 << 20, "64.0 MiB"),
    (3 << 40, "3.00 TiB"),
    (5000 << 40, "5,000 TiB"),
]


@pytest.mark.parametrize(("size_bytes", "expected"), SIZES, ids=[text for _, text in SIZES])
def test_sizes_have_three_digits(size_bytes: int, expected: str) -> None:
    assert size_text(size_bytes) == expected


PREVIEWS = [
    (torch.tensor([1, 2, 3]), "int64[3] 1 2 3"),
    (torch.arange(100), "int64[100] 0 1 2 3 4 5 …"),
    (torch.zeros(2, 4), "float32[2, 4] 0.0 0.0 0.0 0.0 0.0 0.0 …"),
    (torch.tensor(0.5, dtype=torch.bfloat16), "bfloat16[] 0.5"),
    (torch.zeros(0), "float32[0]"),
    (np.array([True]), "bool[1] True"),
    ("short", "'short'"),
    ("x" * 100, repr("x" * 72) + " … 100 in all"),
    (b"\x00", r"b'\x00'"),
    ({"a": 1, "b": [None, (2.5,)]}, "{a: 1, b: [None, (2.5)]}"),
    (list(range(9)), "[0, 1, 2, 3, 4, 5, 6, 7, …]"),
    (None, "None"),
]


@pytest.mark.parametrize(("value", "expected"), PREVIEWS, ids=[text[:20] for _, text in PREVIEWS])
def test_a_preview_is_a_line(value: Any, expected: str) -> None:
    assert preview(value) == expected


PLAIN = [
    (torch.tensor([[1, 2]]), {"dtype": "int64", "shape": [1, 2], "head": [1, 2]}),
    (torch.tensor([float("nan")]), {"dtype": "float32", "shape": [1], "head": ["nan"]}),
    (b"\x01\xff", "01ff"),
    ({1: (None, True)}, {"1": [None, True]}),
    (float("inf"), "inf"),
    (datetime.date(2026, 1, 2), "2026-01-02"),
    ("é", "é"),
]


@pytest.mark.parametrize(("value", "expected"), PLAIN, ids=[str(value) for _, value in PLAIN])
def test_json_says_what_it_can(value: Any, expected: Any) -> None:
    assert plain(value) == expected
    assert json.loads(json.dumps(plain(value), allow_nan=False)) == expected


def test_a_report_prints_one_form_or_the_other() -> None:
    report = Report(data={"samples": 12345}, view=table(["name", "#samples"], [["train/[0]\x1b", 12345]]))
    outputs = []
    for as_json in (True, False):
        console = Console(file=io.StringIO(), width=60)
        report.write(console, as_json=as_json)
        outputs.append(console.file.getvalue())  # type: ignore[attr-defined]
    assert outputs[0] == '{"samples": 12345}\n'
    assert [line.split() for line in outputs[1].splitlines()] == [["name", "samples"], [r"train/[0]\x1b", "12,345"]]


COLUMNS = ["partition", "state", "#samples", "#bytes", "consumer", *(f"#{state}" for state in STATES)]
ROW = ["train/step-000012", "open", 1_234_567, "64.0 MiB", "actor_train", 0, 12_345, 64, 1_222_158, 0]


def lines_of(width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width)
    Report(None, table(COLUMNS, [ROW])).write(out, as_json=False)
    return [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [20, 60, 80, 90, 200])
def test_neither_a_number_nor_its_head_is_ever_cut_or_folded(width: int) -> None:
    lines = [line.split() for line in lines_of(width)]
    assert lines[0] == [column.lstrip("#") for column in COLUMNS]
    assert "1,234,567 64.0 MiB" in " ".join(lines[1])
    assert lines[1][-5:] == ["0", "12,345", "64", "1,222,158", "0"]


def test_names_are_folded_where_room_is_scarce() -> None:
    assert len(lines_of(200)) == 2
    folded = [line.split() for line in lines_of(80)[1:]]
    assert (folded[0][0] + folded[1][0], folded[0][5] + folded[1][1]) == ("train/step-000012", "actor_train")


def test_what_is_no_terminal_has_lines_as_long_as_they_need_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", io.StringIO())
    monkeypatch.delenv("COLUMNS", raising=False)
    assert console().width > 1000
    monkeypatch.setenv("COLUMNS", "70")
    assert console().width == 70
    monkeypatch.setenv("COLUMNS", "0")  # as of a terminal without a size
    assert console().width > 1000


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1", "ascii"])
def test_json_is_json_in_any_encoding(encoding: str) -> None:
    written = io.BytesIO()
    out = Console(file=io.TextIOWrapper(written, encoding))
    Report({"name": "é→𝄞"}, "").write(out, as_json=True)
    out.file.flush()
    assert json.loads(written.getvalue().decode(encoding)) == {"name": "é→𝄞"}
