"""What both daemons are made of: a grpc.aio server whose every answer is a reply or a typed error.

Every handler stands behind `Boundary`: a request that does not parse is INVALID_ARGUMENT (grpc.aio would say UNKNOWN),
a `TQError` becomes its status with an `ErrorDetail`, and anything else becomes INTERNAL, with the trace in the log. A
call whose caller is gone is cancelled by grpc.aio: its handler sees CancelledError, and must leave no waiter behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn

import grpc
import uvloop
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from tqclient import limits
from tqclient.errors import InvalidArgument, TQError, Unavailable
from tqclient.start import drops_output
from tqclient.wire.addresses import split_address
from tqclient.wire.status import DETAIL_KEY, status_of, to_detail
from tqclient.wire.v1 import lane_pb2_grpc
from tqserver import health
from tqserver.lane import LaneServer
from tqserver.refusal import refusal

if TYPE_CHECKING:
    from tqserver.security import Security

_log = logging.getLogger(__name__)

DETAILS_CHARS_MAX: Final = 1024
"""Of an error's text: it travels twice in the trailing metadata, which clients bound."""

OPTIONS: Final = (
    ("grpc.max_receive_message_length", limits.MESSAGE_BYTES_MAX),
    ("grpc.max_send_message_length", limits.MESSAGE_BYTES_MAX),
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


async def abort_with(context: Any, error: TQError) -> NoReturn:
    """Ends a call with an error: its status, its text, and its detail in the trailing metadata."""
    detail = to_detail(error)
    if len(detail.message) > DETAILS_CHARS_MAX:
        detail.message = detail.message[:DETAILS_CHARS_MAX] + "…"
    await context.abort(status_of(error), detail.message, ((DETAIL_KEY, detail.SerializeToString()),))
    raise AssertionError("abort raises")


class Boundary(grpc.aio.ServerInterceptor):  # type: ignore[misc,unused-ignore]
    """Wraps every handler: parses requests, serialises replies, and turns exceptions into typed errors."""

    def __init__(self) -> None:
        self._wrapped: dict[str, Any] = {}

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """Returns the method's handler, wrapped."""
        method = handler_call_details.method
        wrapped = self._wrapped.get(method)
        if wrapped is None:
            handler = await continuation(handler_call_details)
            if handler is None:
                return None  # UNIMPLEMENTED; not remembered, so that made-up names take no memory
            wrapped = _Method(method, handler).handler(
                request_streaming=handler.request_streaming, response_streaming=handler.response_streaming
            )
            self._wrapped[method] = wrapped
        return wrapped


class _Method:
    """One method's handler, wrapped."""

    def __init__(self, name: str, handler: Any) -> None:
        self._name = name
        self._deserialize = handler.request_deserializer
        self._serialize = handler.response_serializer
        self._behaviour = handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
        self._take: Callable[[Any], Any] = self._parse_each if handler.request_streaming else self._parse

    def handler(self, *, request_streaming: bool, response_streaming: bool) -> Any:
        """Returns what grpc.aio is to call; it hands over raw bytes."""
        if not response_streaming:
            unary = grpc.stream_unary_rpc_method_handler if request_streaming else grpc.unary_unary_rpc_method_handler
            return unary(self.unary)
        stream = grpc.stream_stream_rpc_method_handler if request_streaming else grpc.unary_stream_rpc_method_handler
        run: Any = self._generated if inspect.isasyncgenfunction(self._behaviour) else self._written
        return stream(run, response_serializer=self._serialize)

    def _parse(self, raw: bytes) -> Any:
        try:
            return self._deserialize(raw) if self._deserialize else raw
        except DecodeError:
            raise InvalidArgument(f"{self._name}: {len(raw)} bytes that are not a request of this method") from None

    async def _parse_each(self, raws: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for raw in raws:
            yield self._parse(raw)

    async def unary(self, request: Any, context: Any) -> bytes:
        """Answers a request's bytes, or each request's of a stream, with the reply's."""
        try:
            reply = await self._behaviour(self._take(request), context)
            raw: bytes = self._serialize(reply) if self._serialize else reply
            if len(raw) > limits.MESSAGE_BYTES_MAX:
                raise InvalidArgument(
                    f"{self._name}: the reply takes {len(raw)} bytes, at most {limits.MESSAGE_BYTES_MAX}; ask for less"
                )
            return raw
        except Exception as error:
            await _abort_for(self._name, error, context)

    async def _generated(self, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for reply in self._behaviour(self._take(request), context):
                yield reply
        except Exception as error:
            await _abort_for(self._name, error, context)

    async def _written(self, request: Any, context: Any) -> None:
        try:
            await self._behaviour(self._take(request), context)
        except Exception as error:
            await _abort_for(self._name, error, context)


async def _abort_for(method: str, error: Exception, context: Any) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):
        raise error  # the handler has answered already
    await abort_with(context, refusal(method, error))


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
            name: _Method(f"/{service}/{name}", handler).unary
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


def run_daemon(main: Callable[[asyncio.Event], Awaitable[int]]) -> int:
    """Runs a daemon on uvloop until it returns.

    Args:
        main: the daemon; its event is set by SIGTERM or SIGINT.

    Returns:
        The process's exit status.
    """

    async def supervised() -> int:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        return await main(stop)

    _raise_descriptor_limit()
    return uvloop.run(supervised())


def _raise_descriptor_limit() -> None:
    """Takes all descriptors that may be had: each client has some, and the usual 1,024 are for programs that select."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # more than the kernel allows by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
