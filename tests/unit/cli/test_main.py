"""The command line itself: help, arguments, exit codes, one-line errors."""

from __future__ import annotations

import argparse
import io
import subprocess
import sys

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


def test_output_that_cannot_be_written_is_a_line() -> None:
    report = (
        "import sys; from tqclient.cli import main as cli; from tqclient.cli.report import Report\n"
        "import argparse; real = cli.parser(); cli.parser = lambda: real\n"
        "real.parse_args = lambda _: argparse.Namespace(run=lambda _: Report('x' * 1000, ''), json=True)\n"
        "sys.exit(cli.main([]))"
    )
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", report], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "tq: No space left on device\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["top", "--interval", "nan"], "--interval and --count must be above 0"),
        (["top", "--interval", "inf"], "--interval at most 86400"),
        (["top", "--count", "0"], "--interval and --count must be above 0"),
        (["clear", "p", "--yes", "--tag", "a=1", "--tag", "a=2"], "--tag: a sample has one value of each tag"),
        (["status", "--timeout", "nan"], "timeout=nan"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_exits_with_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*argv, "--controller", "127.0.0.1:9"]) == 2
    assert message in capsys.readouterr().err


def test_clear_without_a_terminal_asks_for_yes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: False, raising=False)
    assert cli.main(["clear", "train", "--prefix", "a"]) == 2
    assert "--yes" in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["", "n\n", "\n", "yessir\n"])
def test_clear_asks_on_stderr_and_takes_the_end_of_input_for_a_no(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = io.StringIO(answer)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdin", terminal)
    assert cli.main(["clear", "train", "--prefix", "a", "--json"]) == 1
    printed = capsys.readouterr()
    assert printed.out == '{"removed": []}\n'
    assert printed.err.startswith("Remove the samples of 'train' with prefix 'a'? [y/N] ")


def test_up_hands_on_a_directory_whose_name_begins_with_a_dash(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr("os.execve", lambda program, argv, environ: started.extend(argv))
    arguments = cli.parser().parse_args(["up", "--data-dir=-runs"])
    arguments.run(arguments)
    assert "--data-dir=-runs" in started
