"""Ctrl-C while a command is being imported, and while it runs; commands without standard streams, or without room."""

from __future__ import annotations

import signal
import site
import subprocess
import sys
from pathlib import Path

import pytest

from tqclient.start import child_environment

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


def shell(folder: Path, module: str, redirected: str) -> tuple[int, str]:
    """Runs a command of this text by a shell, its streams redirected; returns its exit status and stderr."""
    (folder / "command.py").write_text(module)
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); sys.argv[0] = '/usr/bin/tq-x'; "
    line = f'"$0" -c "$1" {redirected}'
    command = ["bash", "-o", "pipefail", "-c", line, sys.executable, program + PROGRAM.format(before="pass")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_not_there_are_no_other_file(tmp_path: Path, closed: str) -> None:
    module = (
        "import os, sys\n"
        "def main():\n"
        "    print('said'); print('complained', file=sys.stderr); read = sys.stdin.read()\n"
        "    return 9 if read == '' and os.open('/', os.O_RDONLY) > 2 else 1\n"
    )
    assert shell(tmp_path, module, closed if "<" in closed else closed + " </dev/null")[0] == 9


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("ends", ["", "; raise SystemExit(0)"])
@pytest.mark.parametrize("size", [1, 100_000])
def test_output_that_is_lost_is_a_line_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, ends: str, unbuffered: str
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)
    module = f"import sys\ndef main(): sys.stdin.read(); print('x' * {size}){ends}\n"
    assert shell(tmp_path, module, "</dev/null >/dev/full") == (1, "tq-x: No space left on device\n")
    reader_gone = "import os, sys; reader, writer = os.pipe(); os.dup2(writer, 1); os.close(reader)\n"
    assert shell(tmp_path, reader_gone + module, "</dev/null") == (1, "")


def test_an_error_that_is_not_of_the_output_is_no_line(tmp_path: Path) -> None:
    status, complaint = shell(tmp_path, "def main(): raise BrokenPipeError('of a peer')\n", "")
    assert (status, complaint.splitlines()[-1]) == (1, "BrokenPipeError: of a peer")


def test_what_an_output_has_no_letter_for_is_escaped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    assert shell(tmp_path, "def main(): print(chr(0xD7))\n", "| grep -qFx '\\xd7'") == (0, "")


@pytest.mark.parametrize("given", ["", "/theirs"])
def test_a_child_finds_these_packages_behind_the_standard_library_where_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/usr/lib/site-packages"])
    environ = {"PYTHONPATH": given, "A": "b"} if given else {"A": "b"}
    safe = {"A": "b", "PYTHONSAFEPATH": "1"}
    assert child_environment(environ) == {**safe, "PYTHONPATH": f"{root}:{given}".rstrip(":")}
    home = tmp_path / "home"  # a link to where it is
    home.symlink_to(root)
    for packages in (root, str(home)):
        monkeypatch.setattr(site, "getsitepackages", lambda packages=packages: ["/usr/lib/site-packages", packages])
        assert child_environment(environ) == {**safe, **({"PYTHONPATH": given} if given else {})}
