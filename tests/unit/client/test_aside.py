"""Calls of the main thread that a signal interrupts; its handler raises, as that of Ctrl-C does."""

from __future__ import annotations

import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from tests.harness.supervisor import wait_until
from tqclient.aside import Aside
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import controller_pb2_grpc, storage_pb2, storage_pb2_grpc

INTERRUPTS = 100


class Interrupted(BaseException):
    """What the handler raises."""


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Has SIGUSR1 raise `Interrupted` in the main thread, which sets what is yielded, unless that is set."""
    heard = threading.Event()

    def interrupt(*_: Any) -> None:
        if not heard.is_set():
            heard.set()
            raise Interrupted

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGUSR1, before)


def strike() -> None:
    """Interrupts the main thread: a signal to the process may be taken by another one, and then wakes nobody."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGUSR1)


class Service(controller_pb2_grpc.ControllerServicer, storage_pb2_grpc.StorageServicer):
    def DescribeCluster(self, request: Any, context: Any) -> pb.DescribeClusterReply:  # noqa: N802
        return pb.DescribeClusterReply(epoch=5)

    def Read(self, request: Any, context: Any) -> Iterator[storage_pb2.ReadChunk]:  # noqa: N802
        yield from (storage_pb2.ReadChunk(data=bytes([byte])) for byte in range(8))

    def Write(self, request: Any, context: Any) -> storage_pb2.WriteReply:  # noqa: N802
        list(request)
        return storage_pb2.WriteReply()


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(ThreadPoolExecutor(4))
    controller_pb2_grpc.add_ControllerServicer_to_server(Service(), server)
    storage_pb2_grpc.add_StorageServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


@pytest.fixture
def aside() -> Iterator[Aside]:
    aside = Aside()
    yield aside
    aside.close()


@pytest.mark.parametrize("kind", ["unary", "future", "answers", "requests"])
def test_a_channel_serves_others_after_every_interrupt(no_leaks: None, address: str, kind: str) -> None:
    aside = Aside()
    channel = aside.channel(dial(address))
    controller: Any = controller_pb2_grpc.ControllerStub(channel)  # type: ignore[no-untyped-call]
    storage: Any = storage_pb2_grpc.StorageStub(channel)  # type: ignore[no-untyped-call]
    request = pb.DescribeClusterRequest()
    calls = {
        "unary": lambda: controller.DescribeCluster(request, timeout=10),
        "future": lambda: controller.DescribeCluster.future(request, timeout=10).result(),
        "answers": lambda: list(storage.Read(storage_pb2.ReadRequest(), timeout=10)),
        "requests": lambda: storage.Write(iter([storage_pb2.WriteChunk()] * 2), timeout=10),
    }
    calls[kind]()
    epochs: list[int] = []
    with interruptible() as heard:
        for turn in range(INTERRUPTS):
            heard.clear()
            timer = threading.Timer(0.0005 + turn % 16 * 0.0001, strike)
            with pytest.raises(Interrupted):  # noqa: PT012
                timer.start()
                while True:
                    calls[kind]()
            timer.join()
            other = threading.Thread(
                target=lambda: epochs.append(controller.DescribeCluster(request, timeout=10).epoch), daemon=True
            )
            other.start()
            other.join(60)
            assert len(epochs) == turn + 1, "the channel's lock was left taken"
    channel.close()
    aside.close()


def test_what_is_interrupted_goes_on(no_leaks: None) -> None:
    aside, go_on, ended = Aside(), threading.Event(), threading.Event()

    def insist() -> None:
        while not heard.wait(0.05):  # a signal just before the main thread begins to wait does not wake it
            strike()
        go_on.wait(60)
        ended.set()

    with interruptible() as heard, pytest.raises(Interrupted):
        aside.run(insist)
    assert not ended.is_set()
    assert aside.run(lambda: 7) == 7  # by another thread
    go_on.set()
    assert ended.wait(10)
    aside.close()
    assert aside.run(lambda: 8) == 8  # and who comes late
    wait_until(lambda: all(thread.name != "tq-aside" for thread in threading.enumerate()), what="its threads end")


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_of_a_call_is_held_once_it_has_returned(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """The buffers of a call counted as in use until its thread, which had answered, came to run again."""

    class Held:
        pass

    class SlowQueue:
        """Holds the thread up that puts an answer into it."""

        def __init__(self) -> None:
            self._queue: SimpleQueue[Any] = SimpleQueue()
            self.get = self._queue.get

        def put(self, item: Any) -> None:
            self._queue.put(item)
            del item
            if threading.current_thread() is not threading.main_thread():
                goes_on.wait(60)

    def call(argument: Held) -> Held:
        if fails:
            raise ZeroDivisionError
        return Held()

    monkeypatch.setattr("tqclient.aside.SimpleQueue", SlowQueue)
    aside, goes_on, argument = Aside(), threading.Event(), Held()
    held = [weakref.ref(argument)]
    with suppress(ZeroDivisionError):
        held.append(weakref.ref(aside.run(partial(call, argument))))
    del argument
    assert [each() for each in held] == [None] * (1 if fails else 2)
    goes_on.set()
    aside.close()


def test_results_errors_and_who_runs_it(aside: Aside) -> None:
    with pytest.raises(ZeroDivisionError):
        aside.run(lambda: 1 // 0)
    with pytest.raises(StopIteration):
        aside.run(lambda: next(iter([])))
    names = [aside.run(lambda: threading.current_thread().name) for _ in range(3)]
    assert names == ["tq-aside"] * 3
    assert len(aside._hands) == 1
    nested = aside.run(lambda: aside.run(lambda: threading.current_thread().name))
    assert nested == "tq-aside"
    with ThreadPoolExecutor(1, "own") as threads:
        own = threads.submit(aside.run, lambda: threading.current_thread().name)
    assert own.result().startswith("own")


def test_who_can_have_no_thread_runs_it_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    aside = Aside()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert aside.run(lambda: threading.current_thread().name) == "MainThread"
    assert aside.run(lambda: threading.current_thread().name) == "tq-aside"
    with monkeypatch.context() as patch:
        patch.setattr(sys, "is_finalizing", lambda: True)  # those that there are have stopped
        assert aside.run(lambda: threading.current_thread().name) == "MainThread"
    aside.close()
