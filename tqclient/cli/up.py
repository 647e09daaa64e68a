"""`tq up`: both daemons on this machine, in the foreground."""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from typing import Any, NoReturn

from tqclient.cli.connection import DEFAULT_CONTROLLER, listen_of
from tqclient.errors import InvalidArgument
from tqclient.sizes import size_bytes
from tqclient.start import child_environment


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds this module's command to the parser."""
    del common  # it starts a service of its own, and asks none
    up = commands.add_parser(
        "up",
        allow_abbrev=False,
        help="start a controller and storage nodes on this machine, in the foreground",
        description="Starts a controller and storage nodes on this machine; Ctrl-C ends them.",
    )
    up.add_argument("--storage-nodes", metavar="N", type=int, default=1, help="how many [%(default)s]")
    up.add_argument("--arena", metavar="SIZE", default="1GiB", help="of each node, such as 64MiB [%(default)s]")
    up.add_argument(
        "--listen",
        metavar="HOST:PORT",
        type=listen_of,
        default=DEFAULT_CONTROLLER,
        help="of the controller; port 0 takes a free one [%(default)s]",
    )
    up.add_argument("--data-dir", metavar="PATH", help="keep everything there, and go on with it; else nothing is kept")
    up.set_defaults(run=_up)


def _up(arguments: argparse.Namespace) -> NoReturn:
    size_bytes(arguments.arena, what="--arena")
    if arguments.storage_nodes < 1:
        raise InvalidArgument("--storage-nodes must be 1 or more")
    # The client never imports the server, and this process has nothing left to do: it becomes the server's supervisor.
    if importlib.util.find_spec("tqserver") is None:
        raise InvalidArgument("the daemons are not installed here; tqserver comes with the package tq-dataplane")
    options = [
        f"--storage-nodes={arguments.storage_nodes}",
        f"--arena={arguments.arena}",
        f"--listen={arguments.listen}",
    ]
    options += [f"--data-dir={arguments.data_dir}"] if arguments.data_dir else []
    os.execve(sys.executable, [sys.executable, "-m", "tqserver", *options], child_environment(os.environ))
