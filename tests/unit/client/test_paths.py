"""The open paths of one client to its storage nodes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.client.fake_transport import FakeTransport
from tests.unit.client.fakes import FakeService


@pytest.mark.parametrize("opening", ["opened", "better_tried"])
def test_a_path_that_is_opened_while_all_are_closed_is_closed_too(service: FakeService, opening: str) -> None:
    """A client that was closed kept the arena mapped, and open, for the life of the process."""
    node, paths = service.first, service.state.paths
    late: Any = FakeTransport(node)
    paths.close()
    getattr(paths, opening)(node.node, late)
    assert late.closed
    assert paths.get(node.node) is None
