"""The master of a Mooncake Store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import mooncake

from benchmarks.peers.daemons import HOST, Daemon, free_port


def tune() -> None:
    """Sets what Mooncake reads from the environment, before its import.

    It moves bytes over TCP, as there is nothing else on a host without adapters, and writes no log: to stderr, whatever
    it is told.
    """
    os.environ.update({"MC_FORCE_TCP": "1", "MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2"})


def start(directory: str, options: Sequence[str] = ()) -> tuple[Daemon, str]:
    """Starts it; returns it and its address."""
    tune()
    address = f"{HOST}:{free_port()}"
    command = [
        str(Path(mooncake.__path__[0]) / "mooncake_master"),
        f"--rpc_address={HOST}",
        f"--rpc_port={address.rpartition(':')[2]}",
        f"--metrics_host={HOST}",
        f"--metrics_port={free_port()}",
        *options,
    ]
    return Daemon(command, address, directory), address
