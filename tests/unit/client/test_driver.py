from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Generator
from typing import Any

import grpc
import pytest

from tqclient.driver import run_async, run_sync
from tqclient.errors import SampleNotFound, Unavailable
from tqclient.operations.effects import CONTROLLER, Call, Operation, Sleep, Work
from tqclient.wire.status import DETAIL_KEY, to_detail
from tqclient.wire.v1 import controller_pb2 as pb

REQUEST = pb.DescribeClusterRequest()


class Refusal(grpc.RpcError):
    def __init__(self, status: grpc.StatusCode, trailing: Any = ()) -> None:
        self._status, self._trailing = status, trailing

    def code(self) -> grpc.StatusCode:
        return self._status

    def details(self) -> str:
        return "said the peer"

    def trailing_metadata(self) -> Any:
        return self._trailing


class Stubs:
    """Answers calls in turn; blocking and asyncio callers alike."""

    def __init__(self, *answers: Any, awaitable: bool) -> None:
        self.answers, self.awaitable = list(answers), awaitable
        self.seen: list[tuple[str, float]] = []

    def stub(self, target: str) -> Any:
        self.target = target
        return self

    def DescribeCluster(self, request: Any, timeout: float) -> Any:  # noqa: N802
        self.seen.append((self.target, timeout))
        answer = self.answers.pop(0)

        def reply() -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        async def reply_later() -> Any:
            return reply()

        return reply_later() if self.awaitable else reply()


Run = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def run(request: pytest.FixtureRequest) -> Run:
    def start(operation: Generator[Any, Any, Any], *answers: Any) -> Any:
        stubs = Stubs(*answers, awaitable=request.param == "async")
        if request.param == "sync":
            return run_sync(operation, stubs), stubs.seen
        return asyncio.run(run_async(operation, stubs)), stubs.seen

    return start


def test_every_effect_is_answered(run: Run) -> None:
    def operation() -> Operation[Any]:
        reply = yield Call(CONTROLLER, "DescribeCluster", REQUEST, 2.5)
        thread = yield Work(threading.get_ident)
        nothing = yield Sleep(0.001)
        return reply, thread, nothing

    (reply, thread, nothing), seen = run(operation(), "reply")
    assert reply == "reply"
    assert isinstance(thread, int)
    assert nothing is None
    assert seen == [(CONTROLLER, 2.5)]


def test_errors_arrive_as_the_daemon_meant_them(run: Run) -> None:
    detail = to_detail(SampleNotFound("sample 7", ids=[7])).SerializeToString()

    def operation() -> Operation[list[Any]]:
        caught = []
        for _ in range(2):
            try:
                yield Call("node:1", "DescribeCluster", REQUEST, 1.0)
            except (SampleNotFound, Unavailable) as error:
                caught.append(error)
        return caught

    refusals = Refusal(grpc.StatusCode.NOT_FOUND, ((DETAIL_KEY, detail),)), Refusal(grpc.StatusCode.UNAVAILABLE)
    (first, second), _ = run(operation(), *refusals)
    assert first.ids == (7,)
    assert second.message.startswith("storage node node:1: DescribeCluster: UNAVAILABLE")


def test_what_work_raises_arrives_as_it_is(run: Run) -> None:
    def fail() -> None:
        raise MemoryError("none left")

    def operation() -> Operation[str]:
        try:
            yield Work(fail)
        except MemoryError as error:
            return str(error)
        return "nothing was raised"

    assert run(operation())[0] == "none left"


def test_what_the_operation_raises_leaves_it(run: Run) -> None:
    def operation() -> Operation[None]:
        yield Sleep(0)
        raise Unavailable("the deadline came")

    with pytest.raises(Unavailable, match="the deadline came"):
        run(operation())


def test_an_error_does_not_drag_the_rpc_along(run: Run) -> None:
    def operation() -> Operation[None]:
        yield Call(CONTROLLER, "DescribeCluster", REQUEST, 1.0)

    with pytest.raises(Unavailable) as caught:
        run(operation(), Refusal(grpc.StatusCode.UNAVAILABLE))
    assert caught.value.__context__ is None


def test_a_cancelled_operation_can_clean_up() -> None:
    ended = []

    def operation() -> Operation[None]:
        try:
            yield Sleep(60)
        finally:
            ended.append(True)

    async def main() -> None:
        task = asyncio.create_task(run_async(operation(), Stubs(awaitable=True)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert ended == [True]


def test_a_cancelled_operation_ends_only_once_its_thread_touches_nothing_any_more() -> None:
    started, go_on = threading.Event(), threading.Event()
    written: list[str] = []

    def write() -> None:
        started.set()
        go_on.wait(10)
        written.append("all of it")

    def operation() -> Operation[None]:
        yield Work(write)

    async def cancel_twice() -> None:
        task = asyncio.ensure_future(run_async(operation(), Stubs(awaitable=True)))
        await asyncio.to_thread(started.wait, 10)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert written == ["all of it"]

    asyncio.run(cancel_twice())


def test_an_error_of_a_blocking_call_is_no_reference_cycle() -> None:
    """What the frames of a failed call hold, buffers and batches, goes at once."""

    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)

    def fail() -> None:
        raise SampleNotFound("nothing")

    def operation(kept: Held) -> Operation[None]:
        yield Work(fail)
        assert kept

    gc.disable()
    try:
        with contextlib.suppress(SampleNotFound):
            run_sync(operation(held), Stubs(awaitable=False))
        del held
        assert gone() is None
    finally:
        gc.enable()
