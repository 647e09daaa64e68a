"""The `tq-storage` daemon."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tqclient.errors import TQError
from tqclient.wire import mooncake
from tqclient.wire.addresses import host_of, is_loopback
from tqclient.wire.dialing import dial_aio
from tqclient.wire.pem import check_certificates, check_pair
from tqclient.wire.v1 import storage_pb2_grpc
from tqserver import limits, logs
from tqserver.config import (
    ADDRESS,
    COUNT,
    FLAG,
    HOST,
    LISTEN,
    LOG_LEVEL,
    PATH,
    PORTS,
    SECONDS,
    SIZE,
    choice,
    load,
    option,
)
from tqserver.security import Security, parse_tokens
from tqserver.serving import DaemonServer, announce, run_daemon, signals_noted
from tqserver.storage.arena import Arena, open_arena
from tqserver.storage.cgroup import memory_limit
from tqserver.storage.engine import Engine, EngineOptions, NoEngine
from tqserver.storage.link import CHANNEL_OPTIONS, Link
from tqserver.storage.node import Node
from tqserver.storage.prefault import Prefault
from tqserver.storage.service import RawChunks, StorageService

PROGRAM = "tq-storage"
SERVICE = "tq.v1.Storage"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

_log = logs.get("storage.main")


@dataclass(frozen=True)
class StorageConfig:
    """Serves one arena of shared memory: the storage node of a tq cluster."""

    listen: str = option("127.0.0.1:7701", "address to serve on; port 0 takes a free one", kind=LISTEN)
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
    huge_pages: bool = option(
        True, "and bring them together in huge pages, where the kernel can: Linux 6.1 and later", kind=FLAG
    )
    mooncake: str = option(
        "auto",
        "transfer engine for clients on other hosts; it has no authentication, and listens on every interface: for "
        "private networks. auto: where it can be had, unless clients are told a loopback address; on: refuse to start "
        "without; rdma: and refuse TCP; off",
        kind=choice("auto", "on", "rdma", "off"),
    )
    mooncake_host: str | None = option(
        None,
        "name or address of this host that the engine tells its peers; unset is that of the address clients are told",
        kind=HOST,
    )
    mooncake_devices: str = option("", "RDMA adapters that the engine may use, with commas; empty is all")
    mooncake_gid_index: int | None = option(
        None, "GID index of their ports; unset leaves it to the library", kind=COUNT
    )
    mooncake_ports: tuple[int, int] | None = option(
        None, "ports that an engine draws its two from; unset is the library's 15000-17000", kind=PORTS
    )
    quarantine_seconds: float = option(
        limits.QUARANTINE,
        "how long bytes that a remote writer may still write to stay unused, before the engine is replaced to end that",
        kind=SECONDS,
    )
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
        if self.mooncake_ports is not None:
            low, high = self.mooncake_ports
            if high - low + 1 < limits.ENGINE_PORTS_MIN:
                raise ValueError(f"mooncake_ports {low}-{high}: at least {limits.ENGINE_PORTS_MIN} ports")

    @property
    def arena_file(self) -> Path:
        """Where the arena lies, for clients in whatever directory."""
        return (self.arena_path or Path(f"/dev/shm/tq-{self.name}.arena")).absolute()

    @property
    def security(self) -> Security:
        """What callers of this node must show."""
        return Security(self.token_file, self.tls_cert, self.tls_key, self.tls_client_ca)

    def credentials(self) -> grpc.ChannelCredentials | None:
        """Returns what this node shows to the controller, and trusts of it; None: it speaks plain text.

        Raises:
            InvalidArgument: a file cannot be read, or holds something else.
        """
        if self.tls_ca is None:
            return None
        check_certificates(self.tls_ca, "tls_ca")
        if self.tls_cert is not None and self.tls_key is not None:
            check_pair(self.tls_cert, self.tls_key, ("tls_cert", "tls_key"))
        key, chain = (path.read_bytes() if path else None for path in (self.tls_key, self.tls_cert))
        return grpc.ssl_channel_credentials(self.tls_ca.read_bytes(), key, chain)

    def open_channel(self) -> grpc.aio.Channel:
        """Opens a channel to the controller; reads certificates anew each time."""
        return dial_aio(self.controller, self.credentials(), CHANNEL_OPTIONS)

    def link_metadata(self) -> tuple[tuple[str, str], ...]:
        """Returns the token that this node shows to the controller.

        Raises:
            InvalidArgument: the file holds none, or something else.
            OSError: it cannot be read.
        """
        if self.token_file is None:
            return ()
        first, *_ = parse_tokens(self.token_file, self.token_file.read_bytes())
        return (("authorization", f"Bearer {first.decode('ascii')}"),)


def advertised(bound: str, advertise: str | None) -> str:
    """Returns the address that clients are told: the one bound, but this machine's name for a wildcard host."""
    if advertise is not None:
        return advertise
    host, _, port = bound.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]") else bound


def engine_host(config: StorageConfig) -> str:
    """Returns the name or address of this host that an engine tells its peers."""
    if config.mooncake_host is not None:
        return config.mooncake_host
    return host_of(advertised(config.listen, config.advertise))


def make_engine(config: StorageConfig, node: Node, arena: Arena, memory_ready: asyncio.Event) -> Engine | NoEngine:
    """Returns the engine that the configuration asks for; it is not started yet."""
    host = engine_host(config)
    if config.mooncake == "off":
        return NoEngine("switched off with --mooncake=off")
    if config.mooncake == "auto" and is_loopback(host):
        return NoEngine(
            f"clients are told to reach this node at {host}, which is not to be had from another host, and an engine "
            "would be open to all of them; --mooncake=on starts one all the same"
        )
    options = EngineOptions(
        arena.path,
        arena.header.arena,
        host,
        config.mooncake_devices,
        config.mooncake_ports,
        config.mooncake_gid_index,
        rdma=config.mooncake == "rdma",
    )
    populated = memory_ready if config.prefault else None
    return Engine(node, options, quarantine=config.quarantine_seconds, populated=populated)


async def keep(engine: Engine | NoEngine, memory_ready: asyncio.Event) -> None:
    """Runs the engine, if there is to be one, until it is cancelled.

    Over RDMA an engine pins every page of the arena, so all of them have to be there first. Over TCP it starts at once.
    """
    if isinstance(engine, Engine):
        if mooncake.may_use_rdma():
            await memory_ready.wait()
        await engine.run()
    await asyncio.Event().wait()  # nothing is left to do, and that is no fault


async def watch_file(arena: Arena) -> None:
    """Says so in the log, once, when somebody has removed the arena's file; runs until it is cancelled."""
    while not arena.is_removed():  # noqa: ASYNC110
        await asyncio.sleep(limits.ARENA_POLL)
    _log.error(
        "the arena's file was removed while it is in use: its blocks last as long as this process, and clients that "
        "connect from now on cannot map them; let them be consumed, or put elsewhere, then start this node again",
        arena=str(arena.path),
    )
    await asyncio.Event().wait()  # the node goes on


async def serve(config: StorageConfig, arena: Arena, stop: asyncio.Event) -> int:
    """Serves an open arena until `stop` is set; returns the exit status.

    Raises:
        TQError: it cannot start: an engine is required and cannot be had, the port is taken, a file is not there.
    """
    config.credentials()  # later, the link would only complain
    node = Node(arena)
    loop = asyncio.get_running_loop()
    memory_ready = asyncio.Event()
    engine = make_engine(config, node, arena, memory_ready)
    prefault = Prefault(
        arena,
        lambda size: loop.call_soon_threadsafe(node.extend, size),
        populate=config.prefault,
        huge_pages=config.huge_pages,
        finished=lambda: loop.call_soon_threadsafe(memory_ready.set),
    )
    server = DaemonServer(config.security, [RawChunks()])
    service = StorageService(node, lambda: prefault.done_bytes, engine)
    storage_pb2_grpc.add_StorageServicer_to_server(service, server.grpc)  # type: ignore[no-untyped-call,unused-ignore]
    config.security.warn(config.listen)
    bound = server.bind(config.listen)
    await server.start([SERVICE])
    address = advertised(bound, config.advertise)
    link = Link(
        node,
        address=address,
        controller=config.controller,
        open_channel=config.open_channel,
        metadata=config.link_metadata,
    )
    tasks = [
        asyncio.create_task(stop.wait(), name="stop"),
        asyncio.create_task(keep(engine, memory_ready), name="engine"),
        asyncio.create_task(watch_file(arena), name="arena file"),
    ]
    try:
        prefault.start()
        if isinstance(engine, Engine) and config.mooncake != "auto":
            # Nobody was told of this node yet, so that none is disappointed when it ends here.
            await _until_first([asyncio.create_task(engine.first(), name="first engine"), *tasks])
        arena.told = True
        tasks.append(asyncio.create_task(link.run(), name="link"))
        announce(bound, name=config.name, arena=str(arena.path), incarnation=node.incarnation)
        _log.info(
            "serving", address=address, arena=str(arena.path), bytes=arena.header.file_bytes, created=arena.created
        )
        await _until_first(tasks)
        await server.drain(config.drain_timeout)
    finally:
        for task in tasks:
            task.cancel()
        prefault.stop()
        await server.grpc.stop(None)
        await asyncio.gather(*tasks, return_exceptions=True)  # the engine's process is gone then
    _log.info("stopped")
    return 0


async def _until_first(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Waits until one of these ends, and raises its error if it ended by one."""
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        task.result()


def warn_of_limit(arena: Arena, limit: int | None) -> None:
    """Warns of an arena that the limit of this process's cgroup leaves no room for; hugetlbfs is counted elsewhere."""
    size = arena.header.file_bytes
    if limit is not None and limit < size and os.statvfs(arena.path).f_bsize == mmap.PAGESIZE:
        _log.warning(
            "the arena is larger than the memory that this process's cgroup (container, unit) may have: the kernel "
            "kills the node, or clients beside it, when that is full; raise the limit, or give less with --arena-bytes",
            arena_bytes=size,
            limit_bytes=limit,
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the daemon; returns its exit status."""
    config = load(StorageConfig, sys.argv[1:] if argv is None else argv, program=PROGRAM)
    logs.configure(config.log_level, PROGRAM)
    try:
        with (
            signals_noted() as noted,
            open_arena(
                config.arena_file,
                node=config.name,
                file_bytes=config.arena_bytes,
                segment_bytes=config.segment_bytes,
            ) as arena,
        ):
            warn_of_limit(arena, memory_limit())
            try:
                status = run_daemon(lambda stop: serve(config, arena, stop), noted)
            finally:
                if arena.created and not arena.told:  # a later start may be told another size
                    arena.unlink()
            if config.unlink_on_exit:
                arena.unlink()
            return status
    except (TQError, OSError) as error:
        _log.error("cannot serve", reason=str(error))
        return 1


if __name__ == "__main__":
    sys.exit(main())
