"""A core with one node, one session and its journal."""

from __future__ import annotations

import pytest

from tests.model.driver import Driver


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def session(driver: Driver) -> int:
    return driver.open()
