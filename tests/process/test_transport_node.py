"""Both transports against a real storage node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.harness import wait_until
from tests.process.storage_rig import Rig
from tqclient.errors import LeaseExpired, SampleNotFound, Unavailable
from tqclient.limits import CHUNK_BYTES
from tqclient.transport import BufferPool, NodeTransport, Place, open_transport
from tqclient.wire.v1 import common_pb2, controller_pb2, storage_pb2

pytestmark = pytest.mark.usefixtures("no_leaks")

LENGTH = 2 * CHUNK_BYTES + 100
SESSION = 1
DATA = np.random.default_rng(5).integers(0, 256, LENGTH, dtype=np.uint8)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as rig:
        rig.start(sessions=[SESSION])
        yield rig


def connect(rig: Rig, prefer: str) -> NodeTransport:
    described = rig.describe()
    node = controller_pb2.Node(name="n0", address=rig.daemon.address, arena=described.arena)
    return open_transport(node, prefer, channel=rig.channel, pool=BufferPool(), timeout=5)


@pytest.fixture(params=["shm", "grpc"])
def transport(request: pytest.FixtureRequest, rig: Rig) -> Iterator[NodeTransport]:
    transport = connect(rig, request.param)
    yield transport
    transport.close()


def put(transport: NodeTransport, window: storage_pb2.Window, session: int = SESSION) -> None:
    with transport.write(Place.at(window, 0, LENGTH), session=session, timeout=10) as target:
        np.copyto(target, DATA)


def get(transport: NodeTransport, window: storage_pb2.Window) -> bytes:
    extent = common_pb2.Extent(arena=transport.arena, offset=window.offset, length=LENGTH, generation=window.generation)
    ranges = np.array([[7, CHUNK_BYTES], [LENGTH - 5, 5]], dtype=np.uint64)
    fetched = transport.read(extent, ranges, timeout=10)
    return fetched.view(7, CHUNK_BYTES).tobytes() + fetched.view(LENGTH - 5, 5).tobytes()


EXPECTED = DATA[7 : 7 + CHUNK_BYTES].tobytes() + DATA[-5:].tobytes()


def seal(rig: Rig, window: storage_pb2.Window) -> tuple[int, int, int, int]:
    sealed = (window.offset, LENGTH, window.generation, 1)
    rig.controller.sealed([sealed])
    wait_until(lambda: rig.describe().sealed_bytes > 0, what="the extent is sealed")
    return sealed


def test_what_is_written_can_be_read(rig: Rig, transport: NodeTransport) -> None:
    transport.session_opened(SESSION)
    window = rig.reserve(SESSION, LENGTH, mapped=transport.mapped)
    put(transport, window)
    seal(rig, window)
    assert get(transport, window) == EXPECTED
    assert rig.read((window.offset, LENGTH, window.generation)) == DATA.tobytes()


def test_what_one_transport_wrote_another_reads(rig: Rig, transport: NodeTransport) -> None:
    transport.session_opened(SESSION)
    window = rig.reserve(SESSION, LENGTH, mapped=transport.mapped)
    put(transport, window)
    seal(rig, window)
    other = connect(rig, {"shm": "grpc", "grpc": "shm"}[transport.name])
    assert get(other, window) == EXPECTED
    other.close()


def test_it_serves_on_after_the_node_was_killed(rig: Rig, transport: NodeTransport) -> None:
    transport.session_opened(SESSION)
    window = rig.reserve(SESSION, LENGTH, mapped=transport.mapped)
    put(transport, window)
    sealed = seal(rig, window)
    rig.daemon.kill()
    if transport.name == "shm":
        assert get(transport, window) == EXPECTED  # the arena outlives its node
    else:
        with pytest.raises(Unavailable):
            get(transport, window)
    channel = rig.channel
    rig.start([sealed], [SESSION])
    assert rig.describe().arena == transport.arena
    wait_until(lambda: served(transport, window), what="the new incarnation serves")
    channel.close()


def served(transport: NodeTransport, window: storage_pb2.Window) -> bool:
    try:
        return get(transport, window) == EXPECTED
    except Unavailable:
        return False


def test_a_stream_knows_that_an_extent_was_freed(rig: Rig) -> None:
    transport = connect(rig, "grpc")
    transport.session_opened(SESSION)
    window = rig.reserve(SESSION, LENGTH)
    put(transport, window)
    rig.controller.freed([seal(rig, window)])
    wait_until(lambda: rig.describe().sealed_bytes == 0, what="the extent is freed")
    with pytest.raises(SampleNotFound):
        get(transport, window)
    transport.close()


def test_a_stream_cannot_write_for_an_ended_session(rig: Rig) -> None:
    transport = connect(rig, "grpc")
    transport.session_opened(SESSION)
    window = rig.reserve(SESSION, LENGTH)
    rig.controller.sessions(ended=[SESSION])
    wait_until(lambda: rig.describe().reserved_bytes == 0, what="the window comes back")
    with pytest.raises(LeaseExpired):
        put(transport, window)
    transport.close()


def test_a_window_in_use_is_quarantined_until_the_last_write_ends(rig: Rig) -> None:
    transport = connect(rig, "shm")
    transport.session_opened(SESSION)
    window = rig.reserve(SESSION, LENGTH, mapped=True)
    with transport.write(Place.at(window, 0, LENGTH), session=SESSION, timeout=None) as target:
        transport.session_closed(SESSION)
        rig.controller.sessions(ended=[SESSION])
        rig.wait_used(0, 0, window.length)
        target[:] = 1
    rig.wait_used(0, 0, 0)
    transport.close()
