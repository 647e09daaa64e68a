from __future__ import annotations

import pytest

from tests.unit.client.fakes import FakeService
from tqclient.info import PartitionRef


@pytest.fixture
def service() -> FakeService:
    return FakeService()


@pytest.fixture
def ref() -> PartitionRef:
    return PartitionRef(1, "train", {})
