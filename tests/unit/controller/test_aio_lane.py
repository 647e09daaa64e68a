"""Lanes as asyncio clients use them; what the daemon's end does is told in test_lane.py."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.harness import wait_until
from tests.unit.controller.test_lane import HEARTBEAT, Daemon, OverGrpc, silent
from tqclient.aio_lane import AioConnection, AioLane
from tqclient.channel import Access, Channels
from tqclient.driver import run_async
from tqclient.errors import InternalError, SampleNotFound, TQError, Unavailable
from tqclient.lane import IDLE_MAX
from tqclient.lane_search import FIND_AGAIN_SECONDS, CallTime
from tqclient.operations.effects import CONTROLLER, Call, Operation
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import lane_pb2

pytestmark = pytest.mark.usefixtures("patient_lanes")


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    daemon = Daemon()
    yield daemon
    daemon.close()


@asynccontextmanager
async def channels_of(daemon: Daemon) -> AsyncIterator[tuple[Channels, Any]]:
    channels = Channels(daemon.address, Access(daemon.address, "one").aio_channel, lane=AioLane)
    try:
        channels.stub(CONTROLLER)
        yield channels, channels._lanes[daemon.address]
    finally:
        for each in channels.take_all():
            await each.close()


async def beat(channels: Channels, session: int = 9, timeout: float = 10.0) -> int:
    def operation() -> Operation[pb.HeartbeatReply]:
        return (yield Call(CONTROLLER, "Heartbeat", pb.HeartbeatRequest(session=session), timeout))

    return (await run_async(operation(), channels)).epoch


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(wait_until, condition, what="the daemon or the client is as far")


async def at_once(condition: Callable[[], bool]) -> None:
    """As `until`, in the very turn of the event loop."""
    for _ in range(1_000_000):
        if condition():
            return
        await asyncio.sleep(0)
    pytest.fail("it did not come about")


async def served(channels: Channels) -> None:
    """Tries until the daemon answers."""
    while True:
        try:
            await beat(channels)
        except Unavailable:
            await asyncio.sleep(0.01)
        else:
            return


def test_calls_go_by_the_lane_once_the_daemon_has_answered(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, lane):
            assert await beat(channels) == 5  # over gRPC
            assert daemon.connections == 0
            for _ in range(3):
                assert await beat(channels) == 5
            assert (daemon.connections, len(lane._idle), len(lane._busy)) == (1, 1, 0)
            assert daemon.servicer.called == 4
            large = pb.HeartbeatRequest(session=9, dropped_pins=secrets.token_bytes(3 << 20))
            assert (await channels.stub(CONTROLLER).Heartbeat(large, timeout=10)).epoch == 5
            assert daemon.connections == 1
        await until(lambda: daemon.connections == 0)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("session", "error", "text"),
    [(1, SampleNotFound, "sample 4 is gone"), (2, InternalError, "Heartbeat: RuntimeError")],
)
def test_errors_are_those_of_grpc(daemon: Daemon, session: int, error: type[TQError], text: str) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, lane):
            await beat(channels)
            for _ in range(2):
                with pytest.raises(error, match=text) as caught:
                    await beat(channels, session)
                assert caught.value.ids == ((4,) if session == 1 else ())
            assert len(lane._idle) == 1  # the connection is as good as before

    asyncio.run(scenario())


def test_previews_are_passed_over(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, _):
            await beat(channels)
            request = pb.HeartbeatRequest(session=7, dropped_pins=bytes([3, 17, 1]))

            def operation() -> Operation[pb.HeartbeatReply]:
                return (yield Call(CONTROLLER, "Heartbeat", request, 10.0, pytest.fail))

            assert (await run_async(operation(), channels)).epoch == 5

    asyncio.run(scenario())


def test_a_caller_that_waits_no_longer_or_is_cancelled_ends_its_call(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, lane):
            await beat(channels)
            await beat(channels)  # it is found
            with pytest.raises(Unavailable, match="Heartbeat: the time is over"):
                await beat(channels, 3, timeout=0.1)
            await until(daemon.servicer.cancelled.is_set)
            daemon.servicer.waits.clear()
            daemon.servicer.cancelled.clear()
            call = asyncio.create_task(beat(channels, 3))
            await until(daemon.servicer.waits.is_set)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await until(daemon.servicer.cancelled.is_set)
            assert await beat(channels) == 5  # by a new connection
            assert (len(lane._idle), len(lane._busy)) == (1, 0)

    asyncio.run(scenario())


@pytest.mark.parametrize("turns", range(8))
def test_a_caller_that_is_cancelled_as_the_answer_comes_is_cancelled(daemon: Daemon, turns: int) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, lane):
            await beat(channels)
            await beat(channels)  # by the lane
            reader = lane._idle[0]._reader
            call = asyncio.create_task(beat(channels))
            await at_once(lambda: reader._waiter is not None)
            await at_once(reader._waiter.done)
            for _ in range(turns):  # of the event loop, since the answer is there
                await asyncio.sleep(0)
            if call.cancel():
                with pytest.raises(asyncio.CancelledError):
                    await call
            assert await beat(channels) == 5

    asyncio.run(scenario())


def test_calls_side_by_side_have_a_connection_each_and_few_are_kept(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, lane):
            await beat(channels)
            await beat(channels)  # it is found
            waiting = [asyncio.create_task(beat(channels, 3, 2.0)) for _ in range(2 * IDLE_MAX)]
            await until(lambda: daemon.connections == len(waiting))
            assert await beat(channels) == 5
            for ended in await asyncio.gather(*waiting, return_exceptions=True):
                assert isinstance(ended, Unavailable)
            assert await asyncio.gather(*(beat(channels) for _ in range(50))) == [5] * 50
            assert 1 <= len(lane._idle) <= IDLE_MAX
            await until(lambda: daemon.connections == len(lane._idle))

    asyncio.run(scenario())


def test_a_daemon_that_started_again_is_found_again_and_no_call_fails_for_it(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, _):
            await beat(channels)
            await beat(channels)
            await asyncio.to_thread(daemon.stop)
            with pytest.raises(Unavailable):
                await beat(channels, timeout=1.0)
            await asyncio.to_thread(daemon.start)
            await asyncio.wait_for(served(channels), 60)
            await beat(channels)
            assert daemon.connections == 1

    asyncio.run(scenario())


def test_closing_the_channels_ends_the_calls_under_way(daemon: Daemon) -> None:
    async def scenario() -> None:
        async with channels_of(daemon) as (channels, _):
            await beat(channels)
            stuck = asyncio.create_task(beat(channels, 3))
            await until(daemon.servicer.waits.is_set)
            for each in channels.take_all():
                await each.close()
            with pytest.raises(Unavailable):
                await asyncio.wait_for(stuck, 60)

    asyncio.run(scenario())


def test_who_does_not_know_the_secret_is_cut_off_and_who_listens_in_its_place_not_trusted(daemon: Daemon) -> None:
    async def pretend(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32))
        await reader.readexactly(64)
        writer.write(bytes(32))
        writer.close()

    async def scenario() -> None:
        wrong = lane_pb2.FindLaneReply(name=daemon.found.name, secret=secrets.token_bytes(32))
        with pytest.raises((OSError, EOFError)):
            await AioConnection.open(wrong, 10.0)
        name = f"tq-test-{secrets.token_hex(8)}"
        async with await asyncio.start_unix_server(pretend, f"\0{name}"):
            with pytest.raises(ConnectionError, match="is not the daemon"):
                await AioConnection.open(lane_pb2.FindLaneReply(name=name, secret=bytes(32)), 10.0)
        with pytest.raises(ConnectionRefusedError):
            await AioConnection.open(lane_pb2.FindLaneReply(name=name, secret=bytes(32)), 10.0)

    asyncio.run(scenario())


def test_a_lane_that_cannot_be_had_is_not_looked_for_at_each_call(daemon: Daemon) -> None:
    now = [0.0]
    asked = []

    class Finder:
        async def Find(self, request: Any, timeout: float) -> lane_pb2.FindLaneReply:  # noqa: N802
            asked.append(now[0])
            return lane_pb2.FindLaneReply(name="tq-lane-of-another-host", secret=bytes(32))

    async def scenario() -> None:
        channel = Access(daemon.address).aio_channel(daemon.address)
        lane = AioLane(channel, lambda: now[0])
        lane._finder = Finder()
        assert await lane.take(CallTime()) is None
        assert asked == []  # nobody has answered yet
        lane.search.answers = True
        for now[0] in (1.0, 2.0, FIND_AGAIN_SECONDS, FIND_AGAIN_SECONDS + 1.0):
            assert await lane.take(CallTime()) is None
        assert asked == [1.0, FIND_AGAIN_SECONDS + 1.0]
        await channel.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("step", ["find", "enter"])
def test_looking_for_a_lane_takes_its_time_from_the_call(daemon: Daemon, step: str) -> None:
    calls = OverGrpc()

    async def over_grpc(request: Any, timeout: float) -> Any:
        return calls(request, timeout)

    class Finder:
        async def Find(self, request: Any, timeout: float) -> lane_pb2.FindLaneReply:  # noqa: N802
            await asyncio.sleep(timeout)
            return lane_pb2.FindLaneReply()

    async def scenario() -> None:
        channel = Access(daemon.address).aio_channel(daemon.address)
        lane = AioLane(channel)
        lane.search.answers = True
        lane._finder = Finder()
        with silent(step) as lane.search.found:
            start = time.monotonic()
            await lane.method(HEARTBEAT, over_grpc)(pb.HeartbeatRequest(), timeout=1.0)
        await channel.close()
        calls.check(start, 1.0)

    asyncio.run(scenario())
