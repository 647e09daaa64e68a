"""The `tq-controller` daemon."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tqclient.errors import InvalidArgument, TQError
from tqclient.wire.v1 import controller_pb2_grpc
from tqserver import logs
from tqserver.config import COUNT, FLAG, LISTEN, LOG_LEVEL, PATH, SECONDS, load, option
from tqserver.controller.core.samplers import load_entry_points
from tqserver.controller.group_commit import JOURNAL_FAILED_STATUS
from tqserver.controller.journal import JournalFailed, SqliteJournal
from tqserver.controller.lease_clock import LeaseClock
from tqserver.controller.pipeline import recover
from tqserver.controller.service import SERVICE_NAME, ControllerService
from tqserver.garbage import keep_collections_short
from tqserver.security import Security
from tqserver.serving import DaemonServer, announce, run_daemon

PROGRAM: Final = "tq-controller"
REFUSED_STATUS: Final = 1
"""The journal is damaged, locked or full, or the address is taken."""
LOST_DATA_STATUS: Final = 3
"""A storage node has seen more than the journal knows."""

_log = logs.get("controller.main")


@dataclass(frozen=True)
class ControllerConfig:
    """The control plane of the tq data plane: partitions, samples, consumers, claims."""

    listen: str = option("127.0.0.1:7700", "address to serve on; port 0 takes a free one", kind=LISTEN)
    data_dir: Path = option(Path("tq-controller"), "directory of the journal, for this process alone", kind=PATH)
    session_lease: float = option(10.0, "how long a client may be silent before its session ends", kind=SECONDS)
    snapshot_records: int = option(100_000, "commands between two snapshots of the state", kind=COUNT)
    replay_budget: float = option(0.5, "replay time that makes another snapshot worth while", kind=SECONDS)
    drain_timeout: float = option(10.0, "how long calls under way may take at SIGTERM", kind=SECONDS)
    token_file: Path | None = option(None, "accepted bearer tokens, one a line; unset asks for none", kind=PATH)
    tls_cert: Path | None = option(None, "PEM certificate chain; unset serves in the clear", kind=PATH)
    tls_key: Path | None = option(None, "PEM private key of tls_cert", kind=PATH)
    tls_client_ca: Path | None = option(None, "PEM roots that client certificates must chain to", kind=PATH)
    accept_data_loss: bool = option(False, "start from what is left of a damaged or older journal", kind=FLAG)
    log_level: str = option("info", "least severe log to write", kind=LOG_LEVEL)

    def __post_init__(self) -> None:
        if self.session_lease < 0.05:
            raise ValueError(f"session_lease: {self.session_lease} s, at least 50ms")
        if self.snapshot_records < 1 or self.replay_budget <= 0:
            raise ValueError("snapshot_records and replay_budget must be above 0")


async def serve(config: ControllerConfig, stop: asyncio.Event) -> int:
    """Runs the daemon until `stop` is set; returns the exit status.

    Raises:
        TQError: it cannot start.
    """
    started = time.monotonic()
    security = Security(config.token_file, config.tls_cert, config.tls_key, config.tls_client_ca)
    server = DaemonServer(security)
    address = server.bind(config.listen)  # ahead of the journal, which counts the starts
    journal = _journal(config)
    added = load_entry_points()
    if added:
        _log.info("samplers were found", samplers=added)
    core = recover(journal, time.monotonic, config.session_lease)
    keep_collections_short()
    clock = LeaseClock(time.monotonic)
    ticking = asyncio.create_task(clock.run(), name="lease clock")
    status = 0

    def lost_data() -> None:
        nonlocal status
        status = LOST_DATA_STATUS
        stop.set()

    service = ControllerService(
        core,
        journal,
        clock=clock,
        lost_data=lost_data,
        accept_data_loss=config.accept_data_loss,
        snapshot_records=config.snapshot_records,
        replay_budget=config.replay_budget,
        replayed=time.monotonic() - started,
    )
    try:
        await service.start()
        controller_pb2_grpc.add_ControllerServicer_to_server(service, server.grpc)  # type: ignore[no-untyped-call]
        await server.start([SERVICE_NAME])
        security.warn(config.listen)
        announce(address, epoch=core.epoch, sequence=core.sequence)
        _log.info("serving", address=address, sequence=core.sequence, took_ms=round((time.monotonic() - started) * 1e3))
        await stop.wait()
        _log.info("draining", timeout_s=config.drain_timeout)
        await server.drain(config.drain_timeout, service.release)
    finally:
        ticking.cancel()
        await asyncio.to_thread(service.close)
    _log.info("stopped", status=status)
    return status


def _journal(config: ControllerConfig) -> SqliteJournal:
    try:
        return SqliteJournal(config.data_dir, accept_data_loss=config.accept_data_loss)
    except OSError as error:
        raise InvalidArgument(
            f"data_dir {config.data_dir}: {error.strerror}; give a directory that this process can make, or write to"
        ) from None


def main(argv: Sequence[str] | None = None) -> None:
    """Runs `tq-controller`; the exit status says how it ended."""
    config = load(ControllerConfig, sys.argv[1:] if argv is None else argv, program=PROGRAM)
    logs.configure(config.log_level, PROGRAM)
    os.umask(0o077)  # what it writes is the journal, which is nobody else's to read
    try:
        status = run_daemon(lambda stop: serve(config, stop))
    except JournalFailed as error:
        _log.error("cannot go on", error=str(error))
        status = JOURNAL_FAILED_STATUS
    except (TQError, OSError) as error:
        _log.error("cannot start", error=str(error))
        status = REFUSED_STATUS
    raise SystemExit(status)


if __name__ == "__main__":
    main()
