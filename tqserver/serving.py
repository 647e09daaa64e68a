"""What both daemons are made of: a grpc.aio server, with health, reflection, a lane, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import grpc
import uvloop
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tqclient import limits
from tqclient.errors import Unavailable
from tqclient.start import drops_output
from tqclient.wire.addresses import split_address
from tqclient.wire.v1 import lane_pb2_grpc
from tqserver import health
from tqserver.boundary import Boundary, Method
from tqserver.lane import LaneServer
from tqserver.security import Security

_log = logging.getLogger(__name__)

OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", -1),  # `Method` bounds replies; a NodeSync is as long as the arena has extents
    ("grpc.server.max_pending_requests", limits.PENDING_REQUESTS_MAX),
    ("grpc.server.max_pending_requests_hard_limit", limits.PENDING_REQUESTS_MAX),
    # A stopped peer keeps its sockets open: only an unanswered ping tells.
    ("grpc.keepalive_time_ms", limits.KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", limits.KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # Clients ping as often as we do; the default answers that with GOAWAY.
    ("grpc.http2.min_ping_interval_without_data_ms", limits.KEEPALIVE_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", limits.KEEPALIVE_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    # Two daemons on one port would share its callers at random.
    ("grpc.so_reuseport", 0),
)
_ENDING: Final = (signal.SIGTERM, signal.SIGINT)


class DaemonServer:
    """A grpc.aio server with health, reflection, a lane for clients of this host, and an orderly end.

    Args:
        security: what it demands of its callers.
        outermost: interceptors that stand before every other one of gRPC; a lane has none.
    """

    def __init__(self, security: Security, outermost: Sequence[grpc.aio.ServerInterceptor] = ()) -> None:
        interceptors = [*outermost, *security.interceptors(), Boundary()]
        self.grpc = grpc.aio.server(interceptors=interceptors, options=OPTIONS)
        self._lane = LaneServer()
        # gRPC finds methods among the generic handlers, where they are added in any case. For each one that is
        # registered as well, it would wait on one more future at every call.
        self.grpc.add_registered_method_handlers = self._add_to_lane  # type: ignore[method-assign,assignment,unused-ignore]
        self._credentials = security.credentials()
        self._has_lane = security.allows_lane
        self._health = health.Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)  # type: ignore[no-untyped-call,unused-ignore]
        lane_pb2_grpc.add_LaneServicer_to_server(self._lane, self.grpc)  # type: ignore[no-untyped-call,unused-ignore]

    def _add_to_lane(self, service: str, handlers: Mapping[str, Any]) -> None:
        unary = {
            name: Method(f"/{service}/{name}", handler).unary
            for name, handler in handlers.items()
            if not handler.request_streaming and not handler.response_streaming
        }
        self._lane.add(service, unary)

    def bind(self, listen: str) -> str:
        """Takes the address; whoever connects waits until `start`.

        Args:
            listen: `host:port`; port 0 takes a free one.

        Returns:
            `host:port` as bound.

        Raises:
            Unavailable: the address cannot be bound.
        """
        _require_free(listen)
        try:
            if self._credentials is None:
                port = self.grpc.add_insecure_port(listen)
            else:
                port = self.grpc.add_secure_port(listen, self._credentials)
        except RuntimeError:  # taken just now; why, gRPC writes to stderr
            raise Unavailable(f"cannot listen on {listen}: gRPC could not bind it") from None
        return f"{listen.rpartition(':')[0]}:{port}"

    async def start(self, services: Sequence[str]) -> None:
        """Serves; call it after `bind`, and after the services were added to `grpc`.

        Args:
            services: full names (`tq.v1.Controller`) for health and reflection.
        """
        names = [*services, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc)
        if self._has_lane:
            await self._lane.start()
        await self.grpc.start()
        self._health.serve(services)

    async def drain(self, timeout: float, release: Callable[[], object] = lambda: None) -> None:
        """Ends the server: health says NOT_SERVING first, then calls under way may finish.

        Args:
            timeout: seconds; what has not finished by then is cut off.
            release: called in between; ends what would otherwise wait for long (blocked claims, links).
        """
        self._health.end()
        release()
        await asyncio.gather(self.grpc.stop(timeout), self._lane.drain(timeout))


def _require_free(listen: str) -> None:
    """Says why an address cannot be bound: gRPC would write that to stderr, and raise something else.

    Raises:
        Unavailable: it is taken, or none of this host's.
    """
    host, port = split_address(listen, port_min=0)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise Unavailable(f"cannot listen on {listen}: no host is called {host!r} here ({error.strerror})") from None
    failures = [failure for family, kind, _, _, address in found if (failure := _bind_failure(family, kind, address))]
    if any(failure.errno == errno.EADDRINUSE for failure in failures):
        raise Unavailable(
            f"cannot listen on {listen}: the port is in use; give another one with --listen, or end what serves there"
        )
    if len(failures) == len(found):  # of a name's addresses, one is enough
        why = failures[0].strerror
        raise Unavailable(f"cannot listen on {listen}: {why}; give an address of this host with --listen")


def _bind_failure(family: int, kind: int, address: Any) -> OSError | None:
    try:
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(address)
    except OSError as error:
        return error
    return None


def announce(address: str, **facts: object) -> None:
    """Prints the one line that a daemon's stdout ever sees: it is serving now, even if that cannot be told."""
    try:
        sys.stdout.write(json.dumps({"serving": address, "pid": os.getpid(), **facts}) + "\n")
        sys.stdout.flush()
    except OSError as error:
        if not drops_output(error):
            raise
        _log.warning("stdout cannot be told of serving on %s: %s", address, error.strerror)


@contextlib.contextmanager
def signals_noted() -> Iterator[list[int]]:
    """Notes SIGTERM and SIGINT until `run_daemon` has them, so that what is made before that is removed in order.

    Blocking them would not do: threads of libraries are there already, and would take them.
    """
    noted: list[int] = []
    former = {number: signal.signal(number, lambda got, _: noted.append(got)) for number in _ENDING}
    try:
        yield noted
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


def run_daemon(main: Callable[[asyncio.Event], Awaitable[int]], noted: Sequence[int] = ()) -> int:
    """Runs a daemon on uvloop until it returns.

    Args:
        main: the daemon; its event is set by SIGTERM or SIGINT.
        noted: those that came before, by `signals_noted`; more may come into it until this has them.

    Returns:
        The process's exit status.
    """

    async def supervised() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            loop.add_signal_handler(number, stop.set)
        if noted:
            stop.set()
        return await main(stop)

    _raise_descriptor_limit()
    return uvloop.run(supervised())


def _raise_descriptor_limit() -> None:
    """Takes all descriptors that may be had: each client has some, and the usual 1,024 are for programs that select."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # more than the kernel allows by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
