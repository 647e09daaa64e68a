"""The two drivers of operations: over blocking stubs, and over asyncio stubs."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import grpc

from tqclient import threads
from tqclient.errors import TQError
from tqclient.lane import Method
from tqclient.operations.effects import CONTROLLER, Call, Effect, Operation, Work
from tqclient.wire.status import from_rpc_error

T = TypeVar("T")


class Stubs(Protocol):
    """Gives the stub of a daemon."""

    def stub(self, target: str) -> Any:
        """Returns the stub of a `Call.target`; its methods block, or are awaitable, as the driver needs it.

        Raises:
            InvalidArgument: the client is closed.
        """
        ...


def run_sync(operation: Operation[T], stubs: Stubs) -> T:
    """Runs an operation to its end in this thread.

    Args:
        operation: just made, not yet started.
        stubs: blocking ones.

    Returns:
        What the operation returns; it raises what the operation raises.
    """
    failure: BaseException | None = None
    try:
        effect = next(operation)
        while True:
            reply: Any = None
            failure = None
            try:
                reply = _perform(effect, stubs)
            except BaseException as error:
                failure = _translate(error, effect, stubs)
            effect = operation.send(reply) if failure is None else operation.throw(failure)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()
        failure = None  # its traceback holds this frame


async def run_async(operation: Operation[T], stubs: Stubs) -> T:
    """Runs an operation to its end in this event loop; blocking work runs in a thread.

    Args:
        operation: just made, not yet started.
        stubs: asyncio ones.

    Returns:
        What the operation returns; it raises what the operation raises.
    """
    failure: BaseException | None = None
    try:
        effect = next(operation)
        while True:
            reply: Any = None
            failure = None
            try:
                reply = await _perform_async(effect, stubs)
            except BaseException as error:
                failure = _translate(error, effect, stubs)
            effect = operation.send(reply) if failure is None else operation.throw(failure)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        operation.close()
        failure = None  # its traceback holds this frame


def _perform(effect: Effect, stubs: Stubs) -> Any:
    if isinstance(effect, Call):
        method = getattr(stubs.stub(effect.target), effect.method)
        if effect.preview is not None and isinstance(method, Method):
            return method(effect.request, timeout=effect.timeout, preview=effect.preview)
        return method(effect.request, timeout=effect.timeout)
    if isinstance(effect, Work):
        return effect.run()
    return time.sleep(effect.seconds)


async def _perform_async(effect: Effect, stubs: Stubs) -> Any:
    if isinstance(effect, Call):
        return await getattr(stubs.stub(effect.target), effect.method)(effect.request, timeout=effect.timeout)
    if isinstance(effect, Work):
        return await _in_thread(effect)
    return await asyncio.sleep(effect.seconds)


async def _in_thread(effect: Work) -> Any:
    """Runs blocking work; when it is cancelled, ends only once the thread is done, and touches nothing any more."""
    work = threads.begin(effect.run)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        while not work.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([work])
        if not work.cancelled():
            work.exception()  # looked at, or asyncio complains of it
        raise


def _translate(error: BaseException, effect: Effect, stubs: Stubs) -> BaseException:
    if not isinstance(effect, Call) or isinstance(error, TQError) or not isinstance(error, Exception):
        return error
    if isinstance(error, grpc.RpcError):
        peer = "controller" if effect.target == CONTROLLER else f"storage node {effect.target}"
        return from_rpc_error(error, peer=f"{peer}: {effect.method}")
    try:
        stubs.stub(effect.target)
    except TQError as closed:  # by another thread, between the stub was taken and called; grpc has its own words for it
        return closed
    return error
