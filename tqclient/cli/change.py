"""Commands that change the service: clear."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from rich.text import Text

from tqclient.cli.connection import reach
from tqclient.cli.report import Report
from tqclient.errors import InvalidArgument


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds this module's commands to the parser."""
    clear = commands.add_parser(
        "clear",
        parents=[common],
        allow_abbrev=False,
        help="remove samples for every consumer",
        description="Removes samples for every consumer. What a claim holds may still be read and acknowledged.",
    )
    clear.add_argument("partition", metavar="PARTITION")
    what = clear.add_mutually_exclusive_group(required=True)
    what.add_argument("--id", type=int, action="append", help="of a sample (repeatable)")
    what.add_argument("--key", action="append", help="of a sample (repeatable)")
    what.add_argument("--prefix", help="of the samples' keys")
    what.add_argument("--group", type=group_of, action="append", help="of samples; a number is an int (repeatable)")
    what.add_argument(
        "--tag", type=tag_of, action="append", metavar="NAME=VALUE", help="that samples have (all of them)"
    )
    clear.add_argument("--yes", action="store_true", help="do not ask")
    clear.set_defaults(run=_clear)


def group_of(text: str) -> int | str:
    """Returns the group that a command line means: a number is an int, anything else a string."""
    return int(text) if text.lstrip("-").isdecimal() else text


def tag_of(text: str) -> tuple[str, Any]:
    """Returns the tag that `NAME=VALUE` means; the value is read as JSON where it is any, else as a string."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def selection_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of `Partition.clear` that a command line means.

    Raises:
        InvalidArgument: two values for one tag, which no sample has.
    """
    tags = dict(arguments.tag or ())
    if len(tags) < len(arguments.tag or ()):
        raise InvalidArgument("--tag: a sample has one value of each tag, and one is named twice")
    named = {
        "ids": arguments.id,
        "keys": arguments.key,
        "prefix": arguments.prefix,
        "groups": arguments.group,
        "tags": tags or None,
    }
    return {name: value for name, value in named.items() if value is not None}


def _clear(arguments: argparse.Namespace) -> Report:
    selection = selection_of(arguments)
    (what,) = (f"{name} {value!r}" for name, value in selection.items())
    if not arguments.yes:
        if not sys.stdin.isatty():
            raise InvalidArgument("clear asks before it removes anything; without a terminal, pass --yes")
        if not _confirmed(f"Remove the samples of {arguments.partition!r} with {what}? [y/N] "):
            return Report({"removed": []}, Text("nothing was removed"), code=1)
    with reach(arguments) as client:
        removed = [int(each) for each in client.partition(arguments.partition).clear(**selection)]
    return Report({"removed": removed}, Text(f"{len(removed):,} samples removed"))


def _confirmed(question: str) -> bool:
    """Asks on stderr, as stdout may be a file; the end of input (Ctrl-D) is a no."""
    sys.stderr.write(question)
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        sys.stderr.write("\n")
    return answer.strip().lower() in ("y", "yes")
