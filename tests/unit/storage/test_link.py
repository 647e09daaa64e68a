"""What a node tells its controller, and what ends a link; the link itself is in tests/process/test_storage.py."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from tests.harness.supervisor import PATIENCE_SECONDS
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import controller_pb2_grpc
from tqserver import limits
from tqserver.storage.extents import Usage
from tqserver.storage.link import Link


class FakeNode:
    """Has the usage that the test wants."""

    def __init__(self) -> None:
        self.attached = False
        self.capacity_bytes = 1000

    def look_at_writers(self) -> list[int]:
        return []

    def detached(self) -> None:
        self.attached = False

    def usage(self) -> Usage:
        return Usage(self.capacity_bytes, sealed=100, reserved=20, quarantined=3, free=self.capacity_bytes - 123)


class FakeCall:
    """Remembers what capacity it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    async def write(self, report: pb.NodeReport) -> None:
        assert report.usage.used_bytes == 123
        self.told.append(report.usage.capacity_bytes)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0)


def test_usage_is_told_once_the_node_is_attached_and_whenever_it_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WRITER_POLL", 0.0)
    monkeypatch.setattr(limits, "USAGE_INTERVAL", 0.0)

    async def scenario() -> None:
        node: Any = FakeNode()
        link = Link(node, address="", controller="", open_channel=lambda: None)  # type: ignore[arg-type,return-value]
        first, second = FakeCall(), FakeCall()
        reporting = asyncio.create_task(link._report_forever())
        link._call = first
        for _ in range(10):
            await asyncio.sleep(0)
        assert first.told == []
        node.attached = True
        await until(lambda: first.told == [1000])
        node.capacity_bytes = 3000
        await until(lambda: first.told == [1000, 3000])
        link._call = second
        await until(lambda: second.told == [3000])
        reporting.cancel()

    asyncio.run(scenario())


class RefusedCall:
    """Is refused by the controller as soon as it has heard so many reports."""

    def __init__(self, heard: int) -> None:
        self._heard = heard

    async def write(self, report: pb.NodeReport) -> None:
        if self._heard == 0:
            raise asyncio.InvalidStateError("RPC already finished.")
        self._heard -= 1

    async def read(self) -> pb.NodeOrder:
        none = grpc.aio.Metadata()
        raise grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, none, none, "call again later")

    def cancel(self) -> None:
        return


@pytest.mark.parametrize("heard", [0, 1, 2])
def test_a_controller_that_refuses_a_link_at_once_is_asked_again(heard: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LINK_BACKOFF_MAX", 0.0)
    attempts: list[RefusedCall] = []

    class Stub:
        def __init__(self, channel: object) -> None:
            pass

        def Attach(self, metadata: object) -> RefusedCall:  # noqa: N802
            attempts.append(RefusedCall(heard))
            return attempts[-1]

    monkeypatch.setattr(controller_pb2_grpc, "ControllerStub", Stub)

    async def scenario() -> None:
        node: Any = FakeNode()
        channel: Any = contextlib.nullcontext
        link = Link(node, address="", controller="there:7700", open_channel=channel)
        attaching = asyncio.create_task(link._attach_forever())
        await until(lambda: len(attempts) > 2 or attaching.done())
        assert not attaching.done()
        assert link._complaint == "controller there:7700: UNAVAILABLE: call again later"
        attaching.cancel()

    monkeypatch.setattr(Link, "_hello", lambda self: pb.NodeHello())
    asyncio.run(scenario())
