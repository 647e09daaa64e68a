"""The hosts' fixtures; a failed test comes with what the daemons last said."""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from tests.faults.probe import LEASE
from tests.harness.leaks import leaks_nothing
from tests.hosts.cluster import HostCluster
from tqclient.limits import MIB

LOG_LINES = 15


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostCluster]:
    """A service over five hosts; a module that needs larger arenas or longer leases has ARENA_BYTES, LEASE_SECONDS."""
    directory = tmp_path_factory.mktemp("hosts")
    arena_bytes = getattr(request.module, "ARENA_BYTES", 24 * MIB)
    lease = getattr(request.module, "LEASE_SECONDS", LEASE)
    with leaks_nothing(), HostCluster(directory, arena_bytes=arena_bytes, lease=lease) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    running = getattr(item, "funcargs", {}).get("cluster")
    if report.failed and running is not None:
        for daemon in (running.controller, *running.storage.values()):
            lines = daemon.life.stderr.splitlines()[-LOG_LINES:]
            report.sections.append((f"log of {daemon.life.name}", "\n".join(lines)))
    return report
