"""What stands around every handler: each answer is a reply or a typed error.

A request that does not parse is INVALID_ARGUMENT (grpc.aio would say UNKNOWN), a `TQError` becomes its status with an
`ErrorDetail`, and anything else becomes INTERNAL, with the trace in the log. A call whose caller is gone is cancelled
by grpc.aio: its handler sees CancelledError, and must leave no waiter behind.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final, NoReturn

import grpc
from google.protobuf.message import DecodeError

from tqclient import limits
from tqclient.errors import InvalidArgument, TQError
from tqclient.wire.status import DETAIL_KEY, status_of, to_detail
from tqserver.refusal import refusal

DETAILS_CHARS_MAX: Final = 1024
"""Of an error's text: it travels twice in the trailing metadata, which clients bound."""


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
            wrapped = Method(method, handler).handler(
                request_streaming=handler.request_streaming, response_streaming=handler.response_streaming
            )
            self._wrapped[method] = wrapped
        return wrapped


class Method:
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
