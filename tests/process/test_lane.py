"""The lanes of real daemons."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import tqclient as tq
from tests.harness import leaks, wait_until
from tests.harness.leaks import leaks_nothing
from tqclient.codec import Column
from tqclient.lane import Connection
from tqclient.lane_search import CallTime
from tqclient.limits import MIB
from tqclient.operations.ahead import ReadAhead
from tqclient.operations.read import Holdings
from tqclient.rows import RowSet
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import lane_pb2
from tqclient.wire.v1.lane_pb2_grpc import LaneStub
from tqserver.local import LocalCluster

pytestmark = pytest.mark.usefixtures("patient_lanes")

LARGE = 4 * MIB
"""A put of so many bytes reserves room at the storage node."""


def lane_of(address: str) -> lane_pb2.FindLaneReply:
    with dial(address) as channel:
        return LaneStub(channel).Find(lane_pb2.FindLaneRequest(), timeout=5)


def lane_connections(pid: int) -> int:
    """How many ends of lanes a process holds, the one that it listens at included."""
    unix = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    inodes = {fields[6] for fields in unix if len(fields) > 7 and fields[7].startswith("@tq-lane-")}
    held = 0
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except FileNotFoundError:  # it was closed meanwhile
            continue
        held += target.startswith("socket:[") and target[len("socket:[") : -1] in inodes
    return held


def test_every_daemon_is_called_by_its_lane(cluster: LocalCluster) -> None:
    daemons = {cluster.controller.pid: cluster.address, cluster.storage[0].pid: cluster.storage[0].address}
    names = {lane_of(address).name for address in daemons.values()}
    assert len(names) == 2
    assert all(name.startswith("tq-lane-") for name in names)
    assert [lane_connections(pid) for pid in daemons] == [1, 1]
    with tq.connect(cluster.address) as client:
        part = client.create_partition("p")
        for _ in range(3):  # the first call of a daemon goes over gRPC, and asks for the lane
            part.put({"values": np.zeros((1, LARGE), np.uint8)})
        assert all(lane_connections(pid) > 1 for pid in daemons)


def test_without_lanes_every_call_goes_over_grpc(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_LANE", "off")
    with tq.connect(cluster.address) as client:
        part = client.create_partition("p")
        for _ in range(3):
            part.put({"values": np.zeros((1, LARGE), np.uint8)})
        assert [lane_connections(pid) for pid in (cluster.controller.pid, cluster.storage[0].pid)] == [1, 1]


def test_an_asyncio_client_calls_by_the_lanes_too(cluster: LocalCluster) -> None:
    daemons = (cluster.controller.pid, cluster.storage[0].pid)

    async def scenario() -> None:
        async with tq.aio.connect(cluster.address) as client:
            part = await client.create_partition("p")
            for _ in range(3):
                await part.put({"values": np.zeros((1, LARGE), np.uint8)})
            lanes = client._channels._lanes.values()
            assert [1 <= len(lane._idle) + len(lane._busy) <= 2 for lane in lanes] == [True, True]  # and a heartbeat's
            assert all(lane_connections(pid) > 1 for pid in daemons)

    asyncio.run(scenario())


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether what was read ahead became the batch, claim by claim."""
    found: list[bool] = []
    take = ReadAhead.take

    def noted(ahead: ReadAhead, rows: RowSet, holdings: Holdings) -> dict[str, Column] | None:
        columns = take(ahead, rows, holdings)
        found.append(columns is not None)
        return columns

    monkeypatch.setattr(ReadAhead, "take", noted)
    return found


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("lanes", [True, False])
def test_a_claim_that_waits_reads_ahead_what_a_lane_previews(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch, taken: list[bool], lanes: bool, copy: bool
) -> None:
    monkeypatch.setenv("TQ_LANE", "on" if lanes else "off")
    with (
        tq.connect(cluster.address) as client,
        tq.connect(cluster.address) as other,
        ThreadPoolExecutor(1) as thread,
    ):
        part = client.create_partition("p", consumers=["c"])
        consumer = other.partition("p").consumer("c", fields=["values", "uid"])
        for number, put in [(0, 4), (1, 4), (2, 4), (3, 2), (4, 6), (5, 4)]:
            claim = thread.submit(consumer.claim, 4, copy=copy, timeout=30)
            wait_until(lambda: client.describe().waiting_claims == 1, what="the claim waits")
            values = np.arange(put * 1000).reshape(put, 1000) + number
            part.put({"values": values, "uid": [f"{number} {row}" for row in range(put)]})
            if put < 4:  # the claim goes on waiting, for rows of two blocks
                part.put({"values": values, "uid": [f"{number} {row}" for row in range(put)]})
                expected = [*range(put), *range(put)]
            else:
                expected = list(range(4))
            with claim.result(30) as batch:
                assert batch["uid"] == [f"{number} {row}" for row in expected]
                assert np.array_equal(batch["values"], values[expected])
                batch.verify()
            if put > 4:
                part.clear(ids=consumer.claim(put - 4, timeout=30).ids)
    # For the first one, the lane is not found yet, nor the path to the node opened.
    assert taken[1:] == ([True, True, False, False, False, True] if lanes else [False] * 6)


def test_a_claim_that_need_not_wait_reads_ahead_too(cluster: LocalCluster, taken: list[bool]) -> None:
    with tq.connect(cluster.address) as client:
        part = client.create_partition("p", consumers=["c"])
        consumer = part.consumer("c")
        for number, (put, batch) in enumerate([(4, 4), (4, 4), (8, 4), (0, 4), (4, 4)]):
            values = np.arange(put * 20_000).reshape(put, 20_000) + number
            if put:
                part.put({"values": values})
            with consumer.claim(batch, timeout=30) as claimed:
                if put:
                    assert np.array_equal(claimed["values"], values[:batch])
    # The first one opens the path to the node; the third and fourth are halves of a block.
    assert taken[1:] == [True, False, False, True]


def test_connections_that_a_client_keeps_for_its_next_calls_are_not_left_behind(cluster: LocalCluster) -> None:
    with tq.connect(cluster.address) as client:
        for _ in range(2):
            client.describe()
        lane = client._connection.channels._lanes[cluster.address]
        with leaks_nothing():
            taken = [lane.take(CallTime()) for _ in range(3)]
            for connection in taken:
                lane.put_back(connection)
        with lane._lock:  # the client's heartbeat may have one of them, or left one of its own beside them
            assert set(taken) <= {*lane._idle, *lane._busy}


def test_a_connection_that_nobody_keeps_is_left_behind(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.1)
    found = lane_of(cluster.address)
    with pytest.raises(AssertionError, match=r"left behind:\s+descriptor \d+: socket"), leaks_nothing():
        connection = Connection(found, 10)
    connection.close()
