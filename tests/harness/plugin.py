"""The fixtures of the harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.leaks import forget_failure, leaks_nothing, load_engine
from tests.harness.ledger import Ledger
from tests.harness.supervisor import Supervisor


@pytest.fixture(scope="session")
def engine_loaded() -> None:
    """For tests that make transfer engines in this process."""
    load_engine()


@pytest.fixture
def no_leaks() -> Iterator[None]:
    """Fails the test when it leaves descriptors, threads, children or shared memory behind. Name it first."""
    with leaks_nothing():
        yield
        forget_failure()


@pytest.fixture
def patient_lanes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client goes over gRPC where a lane is not there in a quarter of a second: on a busy machine, none may be."""
    monkeypatch.setattr("tqclient.lane_search.FIND_SECONDS", 30.0)


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[Supervisor]:
    """Starts child processes, which end with the test."""
    directory = tmp_path / "processes"
    directory.mkdir()
    with Supervisor(directory) as running:
        yield running


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """A ledger of its own."""
    return Ledger(tmp_path / "ledger")
