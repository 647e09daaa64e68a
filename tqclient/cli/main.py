"""The `tq` command: arguments, exit codes, and one-line errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

from tqclient.cli import change, doctor, look, top, up
from tqclient.cli.connection import DEFAULT_CONTROLLER, address_of
from tqclient.cli.report import Report, console
from tqclient.errors import (
    InvalidArgument,
    PartitionNotFound,
    SampleNotFound,
    TQError,
    Unauthenticated,
    Unavailable,
)
from tqclient.start import drops_output

EXIT_CODES: Final[dict[type[TQError], int]] = {
    InvalidArgument: 2,
    Unavailable: 3,
    PartitionNotFound: 4,
    SampleNotFound: 4,
    Unauthenticated: 5,
}
EXIT_OTHER: Final = 1
EXIT_INTERRUPTED: Final = 130

EPILOG = """\
environment: TQ_CONTROLLER is the default of --controller; TQ_TOKEN and TQ_TLS_* as for the client library.
exit codes: 0 done, 1 failed, 2 wrong arguments, 3 a daemon is away, 4 no such partition or sample, 5 token refused
"""


def parser() -> argparse.ArgumentParser:
    """Returns the parser of the whole command line; each command sets `run`."""
    root = argparse.ArgumentParser(
        prog="tq",
        description="Looks into a running service, and starts one on this machine.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    root.add_argument("--version", action="version", version=f"tq {metadata.version('tq-dataplane')}")
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--controller",
        metavar="HOST:PORT",
        type=address_of,
        help=f"the controller [TQ_CONTROLLER, or {DEFAULT_CONTROLLER}]",
    )
    common.add_argument("--timeout", metavar="SECONDS", type=float, default=5.0, help="for an answer [%(default)s]")
    common.add_argument("--json", action="store_true", help="print JSON for programs instead of a table for people")
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    for module in (up, look, top, change, doctor):
        module.add_commands(commands, common)
    return root


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code.

    Args:
        argv: the arguments behind `tq`; None takes the process's.
    """
    arguments = parser().parse_args(argv)
    try:
        report: Report = arguments.run(arguments)
        report.write(console(), as_json=arguments.json)
        sys.stdout.flush()
        return report.code
    except TQError as error:
        print(f"tq: {type(error).__name__}: {error}", file=sys.stderr)
        return next((EXIT_CODES[base] for base in type(error).__mro__ if base in EXIT_CODES), EXIT_OTHER)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if not (drops_output(error) and isinstance(error, BrokenPipeError)):  # else `| head` has seen enough
            print(f"tq: {error.strerror}", file=sys.stderr)
        return EXIT_OTHER


if __name__ == "__main__":
    sys.exit(main())
