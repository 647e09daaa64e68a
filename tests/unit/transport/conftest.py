"""A fake storage node, and transports to it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.transport.fake_node import FakeNode, Opener, make_arena
from tqclient.transport import BufferPool, NodeTransport


@pytest.fixture
def fake_node(tmp_path: Path) -> FakeNode:
    return FakeNode(make_arena(tmp_path / "arena"))


@pytest.fixture
def pool() -> BufferPool:
    return BufferPool()


@pytest.fixture
def opener(fake_node: FakeNode, pool: BufferPool) -> Iterator[Opener]:
    opener = Opener(fake_node, pool)
    yield opener
    opener.close()


@pytest.fixture(params=["shm", "grpc"])
def transport(request: pytest.FixtureRequest, opener: Opener) -> NodeTransport:
    """Each transport in turn: what they have in common is tested once."""
    return opener(request.param)
