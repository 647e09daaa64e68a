"""The command line itself: help, arguments, exit codes, one-line errors."""

from __future__ import annotations

import argparse

import pytest

from tqclient import errors
from tqclient.cli import main as cli

COMMANDS = ("up", "status", "partitions", "show", "peek", "top", "clear", "doctor")


@pytest.mark.parametrize("argv", [["--help"], *([command, "--help"] for command in COMMANDS)], ids=" ".join)
def test_every_command_has_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(argv)
    assert "usage: tq" in capsys.readouterr().out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["nonsense"],
        ["show"],
        ["peek", "p"],
        ["peek", "p", "1", "--key", "k"],
        ["peek", "p", "one"],
        ["clear", "p"],
        ["clear", "p", "--id", "1", "--key", "k"],
        ["clear", "p", "--tag", "status"],
        ["status", "--time", "1"],
        ["status", "--controller", "garbage"],
        ["status", "--controller", "127.0.0.1:73236"],
        ["up", "--listen", "garbage"],
        ["up", "--listen", "127.0.0.1:65536"],
    ],
    ids=" ".join,
)
def test_wrong_arguments_exit_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main(argv)
    assert "usage: tq" in capsys.readouterr().err


CODES = [
    (errors.InvalidArgument, 2),
    (errors.Unavailable, 3),
    (errors.PartitionNotFound, 4),
    (errors.SampleNotFound, 4),
    (errors.Unauthenticated, 5),
    (errors.CorruptBlock, 1),
    (KeyboardInterrupt, 130),
]


@pytest.mark.parametrize(("error", "code"), CODES, ids=[error.__name__ for error, _ in CODES])
def test_an_error_is_a_line_and_an_exit_code(
    error: type[BaseException], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(_: argparse.Namespace) -> None:
        raise error("what was wrong")

    real = cli.parser()
    monkeypatch.setattr(real, "parse_args", lambda _: argparse.Namespace(run=fails, json=False))
    monkeypatch.setattr(cli, "parser", lambda: real)
    assert cli.main(["status"]) == code
    expected = "" if error is KeyboardInterrupt else f"tq: {error.__name__}: what was wrong\n"
    assert capsys.readouterr() == ("", expected)


def test_clear_without_a_terminal_asks_for_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert cli.main(["clear", "train", "--prefix", "a"]) == 2
    assert "--yes" in capsys.readouterr().err
