"""The standard health service (`grpc.health.v1`), whose watches end with the daemon.

The one that comes with gRPC keeps every watch open for ever: a drain would wait for it until its timeout, and a
balancer that watches is the normal case.
"""

# The methods carry the names of health.proto.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME: Final = "grpc.health.v1.Health"
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc,unused-ignore]
    """Says whether the daemon (service `""`) and each of its services serves; used within its event loop."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _SERVING}
        self._changed = asyncio.Event()
        self._ended = False

    def serve(self, services: Iterable[str]) -> None:
        """These services serve from here on."""
        self._statuses.update(dict.fromkeys(services, _SERVING))
        self._tell()

    def end(self) -> None:
        """Nothing serves any more. Watches say so, and end."""
        self._ended = True
        self._statuses = dict.fromkeys(self._statuses, _NOT_SERVING)
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:
        """Answers once; NOT_FOUND for a service that is not here."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Says the status, and each other one that follows, until the daemon ends."""
        said = None
        while True:
            changed, ended = (
                self._changed,
                self._ended,
            )  # taken first: what changes while this one is sent is not missed
            status = self._statuses.get(request.service, _UNKNOWN)
            if status != said:
                said = status
                yield health_pb2.HealthCheckResponse(status=status)
            if ended:
                return
            await changed.wait()
