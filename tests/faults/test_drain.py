"""SIGTERM while many callers are at it: health says so first, what is under way is finished, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import tqclient as tq
from tests.faults.mixed_load import MixedLoad, check
from tests.harness import Ledger, Supervisor, wait_until
from tqclient.wire.dialing import dial
from tqserver.local import Daemon, LocalCluster

LEASE = 1.0
CALLERS = 32
DRAIN_SECONDS = 10.0
WORK_BYTES = 20_000
"""Of the ledger: some 200 events."""
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def cluster() -> Iterator[LocalCluster]:
    # The arena outlives the node, as it does outside of tests.
    with LocalCluster(arena="256MiB", session_lease=LEASE, storage_args=["--unlink-on-exit=false"]) as running:
        yield running


class _Watch:
    """What a daemon says of its health, and when; `failure` is why it says no more, other than that it is done."""

    def __init__(self, channel: grpc.Channel, service: str) -> None:
        self.seen: list[tuple[int, float]] = []
        self.failure: grpc.StatusCode | None = None
        request = health_pb2.HealthCheckRequest(service=service)
        self._call: Any = health_pb2_grpc.HealthStub(channel).Watch(request)
        self._thread = threading.Thread(target=self._run, name="health-watch")
        self._thread.start()
        wait_until(lambda: self.seen, what="the first word")

    @property
    def statuses(self) -> list[int]:
        return [status for status, _ in self.seen]

    def _run(self) -> None:
        try:
            for reply in self._call:
                self.seen.append((reply.status, time.monotonic()))
        except grpc.RpcError as error:
            self.failure = error.code()

    def close(self) -> None:
        self._call.cancel()
        self._thread.join(60)


@contextmanager
def _watched(daemon: Daemon, service: str) -> Iterator[_Watch]:
    with dial(daemon.address) as channel:
        watch = _Watch(channel, service)
        try:
            yield watch
        finally:
            watch.close()


@pytest.mark.parametrize("name", ["controller", "storage"])
def test_sigterm_under_load_drains_and_loses_nothing(
    no_leaks: None, cluster: LocalCluster, supervisor: Supervisor, ledger: Ledger, seed: int, name: str
) -> None:
    daemon = cluster.controller if name == "controller" else cluster.storage[0]
    with tq.connect(cluster.address, timeout=30) as client:
        part = client.create_partition("part", lease=LEASE)
        load = MixedLoad(supervisor, ledger, cluster.address, "part", callers=CALLERS, seed=seed)
        for _ in range(2):
            goal = load.written_bytes + WORK_BYTES
            wait_until(lambda: load.written_bytes >= goal, what="work")  # noqa: B023
            with _watched(daemon, f"tq.v1.{name.capitalize()}") as watch:
                assert watch.statuses == [SERVING]
                start = time.monotonic()
                status = daemon.terminate(timeout=DRAIN_SECONDS + 5)
                took = time.monotonic() - start
                assert status == 0, daemon.log_tail()
                assert took <= DRAIN_SECONDS
                assert watch.statuses == [SERVING, NOT_SERVING]
                assert watch.failure is None  # it was told, not cut off
                assert watch.seen[1][1] < start + took
            daemon.restart(timeout=30)
        goal = load.written_bytes + WORK_BYTES
        wait_until(lambda: load.written_bytes >= goal, what="work goes on")
        load.stop()
        check(ledger, part)


def test_an_idle_daemon_that_somebody_watches_ends_at_once(cluster: LocalCluster) -> None:
    """A watch never ends by itself: it must not hold up the drain until its timeout."""
    for daemon, service in ((cluster.storage[0], "tq.v1.Storage"), (cluster.controller, "tq.v1.Controller")):
        with _watched(daemon, service) as watch:
            start = time.monotonic()
            assert daemon.terminate(timeout=DRAIN_SECONDS + 5) == 0, daemon.log_tail()
            assert time.monotonic() - start < DRAIN_SECONDS / 2
            assert watch.statuses == [SERVING, NOT_SERVING]
