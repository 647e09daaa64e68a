"""Watching a partition, for asyncio callers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import grpc

from tqclient.changes import Change
from tqclient.errors import TQError
from tqclient.operations.effects import CONTROLLER
from tqclient.operations.watch import Watcher, ended
from tqclient.wire.status import from_rpc_error
from tqclient.wire.v1 import controller_pb2 as pb

if TYPE_CHECKING:
    from tqclient.aio import Client


async def watch(client: Client, watcher: Watcher) -> AsyncGenerator[Change, None]:
    """Yields changes until nothing changed for the timeout."""
    while True:
        try:
            request = await client._run(watcher.begin())
        except TQError as error:
            await client._run(watcher.recover(error))
            continue
        call = client._channels.stub(CONTROLLER).Watch(request)
        try:
            while True:
                message = await _next(call, watcher.remaining())
                if message is None:
                    return
                for change in watcher.feed(message):
                    yield change
                watcher.wait()
        except TQError as error:
            failure = error
        finally:
            if not client._state.forked:
                call.cancel()
        await client._run(watcher.recover(failure))


async def _next(call: Any, seconds: float | None) -> pb.Change | None:
    """Returns the next message, or None when there is none in time; raises what ended the stream."""
    reading = asyncio.ensure_future(call.read())
    try:
        in_time, _ = await asyncio.wait([reading], timeout=seconds)
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait([reading])
    if not in_time:
        return None
    if reading.cancelled():  # the client was closed
        raise ended()
    try:
        message = reading.result()
    except grpc.RpcError as error:
        raise from_rpc_error(error, peer="controller: Watch") from None
    if message is grpc.aio.EOF:
        raise ended()
    found: pb.Change = message
    return found
