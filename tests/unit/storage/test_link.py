"""What a node tells its controller of its usage; the link itself is in tests/process/test_storage.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from tqclient.wire.v1 import controller_pb2 as pb
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
    deadline = time.monotonic() + 5
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
