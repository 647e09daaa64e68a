"""How the commands start, and what becomes of their input and output.

Ctrl-C ends them quietly, with 130, while what they need is still being imported, too. Where there is no standard input,
output or error, /dev/null takes its place. What stdout has no letter for is escaped, and what it has no room for, or
nobody to read it, ends a command with a line.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import select
import signal
import site
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

EXIT_OUTPUT_LOST: Final = 1
EXIT_INTERRUPTED: Final = 130


def run(module: str) -> Any:
    """Imports a module and runs its `main`.

    Returns:
        What that returned, or 130 when it was interrupted: the exit status.
    """
    asked = signal.getsignal(signal.SIGINT)
    if asked is signal.default_int_handler:  # else Ctrl-C is ignored
        # An exception may come out of an import as another one, or not at all.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    _open_standard_streams()
    command = importlib.import_module(module)
    signal.signal(signal.SIGINT, asked)
    try:
        return _run_to_the_last_letter(command.main)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if not drops_output(error):
            raise
        if not isinstance(error, BrokenPipeError):  # else the reader (`| head`) has seen enough
            print(f"{Path(sys.argv[0]).name}: {error.strerror}", file=sys.stderr)  # noqa: T201
        return EXIT_OUTPUT_LOST


def child_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment in which a Python process finds these packages and, from Python 3.11 on, imports nothing
    out of its working directory: what lies there may be called as a module of the standard library is.

    Args:
        environ: that it has else.
    """
    root = Path(__file__).resolve().parent.parent
    # Those are found anyway, and PYTHONPATH would put them before the standard library, which has back-ports there.
    found = root in [Path(folder).resolve() for folder in (*site.getsitepackages(), site.getusersitepackages())]
    paths = [*([] if found else [str(root)]), environ.get("PYTHONPATH")]
    path = os.pathsep.join(filter(None, paths))
    return {**environ, "PYTHONSAFEPATH": "1", **({"PYTHONPATH": path} if path else {})}


def _run_to_the_last_letter(main: Callable[[], Any]) -> Any:
    try:
        return main()
    finally:
        sys.stdout.flush()


def _open_standard_streams() -> None:
    """Opens those that the process was started without.

    Else the next file that is opened, an arena or a socket, has their number, and libraries print into it.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(null, True)
    os.close(null)
    sys.stdin = sys.stdin or io.TextIOWrapper(io.FileIO(0, "r", closefd=False))
    sys.stdout = sys.stdout or io.TextIOWrapper(io.FileIO(1, "w", closefd=False))
    sys.stderr = sys.stderr or io.TextIOWrapper(io.FileIO(2, "w", closefd=False))
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def drops_output(error: OSError) -> bool:
    """Says whether stdout takes no more, and if so, drops what it holds: Python would complain again at exit."""
    if isinstance(error, BrokenPipeError):
        watched = select.poll()
        watched.register(sys.stdout.fileno(), 0)
        lost = bool(watched.poll(0))  # else it is another pipe, or a socket
    else:
        lost = error.errno in (errno.ENOSPC, errno.EDQUOT) and error.filename is None
    if lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
    return lost
