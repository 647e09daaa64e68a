"""The `tq-storage` daemon."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from tqclient.errors import TQError
from tqclient.wire.v1 import storage_pb2_grpc
from tqserver import limits, logs
from tqserver.config import ADDRESS, FLAG, LOG_LEVEL, PATH, SECONDS, SIZE, load, option
from tqserver.security import Security
from tqserver.serving import DaemonServer, announce, run_daemon
from tqserver.storage.arena import Arena, open_arena
from tqserver.storage.link import CHANNEL_OPTIONS, Link
from tqserver.storage.node import Node
from tqserver.storage.prefault import Prefault
from tqserver.storage.service import StorageService

PROGRAM = "tq-storage"
SERVICE = "tq.v1.Storage"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_log = logs.get("storage.main")


@dataclass(frozen=True)
class StorageConfig:
    """Serves one arena of shared memory: the storage node of a tq cluster."""

    listen: str = option("127.0.0.1:7701", "address to serve on; port 0 takes a free one", kind=ADDRESS)
    advertise: str | None = option(
        None, "address that clients are told, when it is not the one served on", kind=ADDRESS
    )
    controller: str = option("127.0.0.1:7700", "address of the controller", kind=ADDRESS, env="TQ_CONTROLLER")
    name: str = option("storage-0", "name of this node, the same at every start: letters, digits and . _ -")
    arena_path: Path | None = option(None, "arena file; unset is /dev/shm/tq-NAME.arena", kind=PATH)
    arena_bytes: int = option(
        limits.ARENA_BYTES, "size of the arena file; refused at the start when there is no room for it", kind=SIZE
    )
    segment_bytes: int = option(limits.SEGMENT_BYTES, "most that a partition takes ahead of its need", kind=SIZE)
    unlink_on_exit: bool = option(False, "remove the arena file, and the blocks in it, on an orderly exit", kind=FLAG)
    prefault: bool = option(True, "touch the arena's pages in the background", kind=FLAG)
    drain_timeout: float = option(10.0, "longest wait for calls under way on an orderly exit", kind=SECONDS)
    log_level: str = option("info", "least severe level to log", kind=LOG_LEVEL)
    token_file: Path | None = option(
        None, "accepted tokens, one a line; the first one is sent to the controller", kind=PATH
    )
    tls_cert: Path | None = option(None, "certificate chain, PEM; also shown to the controller", kind=PATH)
    tls_key: Path | None = option(None, "private key, PEM", kind=PATH)
    tls_client_ca: Path | None = option(None, "roots that a client's certificate must come from, PEM", kind=PATH)
    tls_ca: Path | None = option(None, "roots that the controller's certificate must come from, PEM", kind=PATH)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                f"name {self.name!r}: up to 128 letters, digits and . _ -, beginning with a letter or digit"
            )

    @property
    def arena_file(self) -> Path:
        """Where the arena lies."""
        return self.arena_path or Path(f"/dev/shm/tq-{self.name}.arena")

    @property
    def security(self) -> Security:
        """What callers of this node must show."""
        return Security(self.token_file, self.tls_cert, self.tls_key, self.tls_client_ca)

    def open_channel(self) -> grpc.aio.Channel:
        """Opens a channel to the controller; reads certificates anew each time."""
        if self.tls_ca is None:
            return grpc.aio.insecure_channel(self.controller, options=CHANNEL_OPTIONS)
        key, chain = (path.read_bytes() if path else None for path in (self.tls_key, self.tls_cert))
        credentials = grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, chain)
        return grpc.aio.secure_channel(self.controller, credentials, options=CHANNEL_OPTIONS)

    def link_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the token that this node shows to the controller."""
        if self.token_file is None:
            return ()
        tokens = self.token_file.read_text().split()
        return (("authorization", f"Bearer {tokens[0]}"),) if tokens else ()


def advertised(bound: str, advertise: str | None) -> str:
    """Returns the address that clients are told: the one bound, but this machine's name for a wildcard host."""
    if advertise is not None:
        return advertise
    host, _, port = bound.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "*") else bound


async def serve(config: StorageConfig, arena: Arena, stop: asyncio.Event) -> int:
    """Serves an open arena until `stop` is set; returns the exit status."""
    node = Node(arena)
    loop = asyncio.get_running_loop()
    prefault = Prefault(arena, lambda size: loop.call_soon_threadsafe(node.extend, size), populate=config.prefault)
    server = DaemonServer(interceptors=config.security.interceptors(), credentials=config.security.credentials())
    service = StorageService(node, lambda: prefault.done_bytes)
    storage_pb2_grpc.add_StorageServicer_to_server(service, server.grpc)  # type: ignore[no-untyped-call,unused-ignore]
    config.security.warn(config.listen)
    bound = await server.start(config.listen, [SERVICE])
    address = advertised(bound, config.advertise)
    link = Link(
        node,
        address=address,
        controller=config.controller,
        open_channel=config.open_channel,
        metadata=config.link_metadata,
    )
    running = asyncio.create_task(link.run(), name="link")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        prefault.start()
        announce(bound, name=config.name, arena=str(arena.path), incarnation=node.incarnation)
        _log.info(
            "serving", address=address, arena=str(arena.path), bytes=arena.header.file_bytes, created=arena.created
        )
        await asyncio.wait([running, stopping], return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()  # the link only ever ends by a fault: let it be seen
        await server.drain(config.drain_timeout)
    finally:
        running.cancel()
        stopping.cancel()
        prefault.stop()
    _log.info("stopped")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the daemon; returns its exit status."""
    config = load(StorageConfig, sys.argv[1:] if argv is None else argv, program=PROGRAM)
    logs.configure(config.log_level, PROGRAM)
    try:
        with open_arena(
            config.arena_file,
            node=config.name,
            file_bytes=config.arena_bytes,
            segment_bytes=config.segment_bytes,
        ) as arena:
            status = run_daemon(lambda stop: serve(config, arena, stop))
            if config.unlink_on_exit:
                arena.unlink()
            return status
    except (TQError, OSError) as error:
        _log.error("cannot serve", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
