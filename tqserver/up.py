"""Both daemons in the foreground, until they are interrupted: what `tq up` runs."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from tqclient.errors import TQError
from tqserver.local import LocalCluster

POLL: Final = 0.2
"""Seconds between looks at whether a daemon has died."""
EXIT_INTERRUPTED: Final = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a cluster on this machine until SIGINT or SIGTERM (0), or until a daemon dies (1)."""
    parser = argparse.ArgumentParser(prog="tq up", description=__doc__, allow_abbrev=False)
    parser.add_argument("--storage-nodes", type=int, required=True)
    parser.add_argument("--arena", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--data-dir")
    parser.add_argument("--mooncake", default="auto")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, _interrupt)
    cluster = LocalCluster(
        options.storage_nodes,
        options.arena,
        data_dir=options.data_dir,
        mooncake=options.mooncake,
        controller_args=[f"--listen={options.listen}"],
    )
    try:
        with cluster, contextlib.suppress(KeyboardInterrupt):
            nodes = ", ".join(f"{node.name} {node.address}" for node in cluster.storage)
            sys.stdout.write(
                f"serving: controller {cluster.address}, {nodes}; {options.arena} each; Ctrl-C ends them\n"
            )
            sys.stdout.write(f"logs: {cluster.directory}\nexport TQ_CONTROLLER={cluster.address}\n")
            sys.stdout.flush()
            while not any(daemon.died for daemon in (cluster.controller, *cluster.storage)):
                time.sleep(POLL)
        return 0
    except (TQError, ValueError, OSError) as error:
        sys.stderr.write(f"tq: {error}\n")
        return 1
    except KeyboardInterrupt:  # before they served
        return EXIT_INTERRUPTED


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
