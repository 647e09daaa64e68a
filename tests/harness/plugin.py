"""The fixtures of the harness."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.leaks import leaks_nothing, load_engine
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
