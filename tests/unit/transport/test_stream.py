"""What is particular to the grpc transport."""

from __future__ import annotations

import gc
import threading
import time

import pytest

from tests.unit.transport.fake_node import DATA_OFFSET, GENERATION, INCARNATION, FakeNode, Opener, extent, ranges
from tqclient.errors import LeaseExpired, SampleNotFound, Unavailable
from tqclient.limits import CHUNK_BYTES, MIB
from tqclient.transport import BufferPool, NodeTransport, Place, Read

OFFSET = DATA_OFFSET
SESSION = 4


@pytest.fixture
def stream(opener: Opener) -> NodeTransport:
    transport = opener("grpc")
    transport.session_opened(SESSION)
    return transport


def put(transport: NodeTransport, length: int, *, generation: int = GENERATION, timeout: float = 5) -> None:
    with transport.write(Place(OFFSET, length, generation, INCARNATION), session=SESSION, timeout=timeout) as target:
        target[:] = 1


def test_the_first_chunk_names_the_place(stream: NodeTransport, fake_node: FakeNode) -> None:
    put(stream, CHUNK_BYTES + 1)
    (first,) = fake_node.writes
    assert (first.session, first.generation, first.incarnation) == (SESSION, GENERATION, INCARNATION)
    assert (first.offset, first.length, len(first.data)) == (OFFSET, CHUNK_BYTES + 1, CHUNK_BYTES)


def test_only_merged_ranges_cross_the_wire(stream: NodeTransport, fake_node: FakeNode) -> None:
    stream.read(extent(OFFSET, 1000), ranges((500, 100), (0, 10), (550, 100), (10, 5)), timeout=5)
    assert fake_node.reads == [[[OFFSET, 15, GENERATION], [OFFSET + 500, 150, GENERATION]]]


def test_nothing_is_asked_for_when_nothing_is_wanted(stream: NodeTransport, fake_node: FakeNode) -> None:
    fetched = stream.read(extent(OFFSET, 1000), ranges((7, 0)), timeout=5)
    assert fetched.view(7, 0).shape == (0,)
    assert fake_node.reads == []


def test_many_extents_are_read_by_one_call_into_one_buffer(
    stream: NodeTransport, fake_node: FakeNode, pool: BufferPool
) -> None:
    fake_node.generations = {GENERATION, GENERATION + 1}
    wanted = [
        Read(extent(OFFSET, 1000), ranges((500, 100), (10, 5))),
        Read(extent(OFFSET + 4096, 70, generation=GENERATION + 1), ranges((0, 70))),
        Read(extent(OFFSET + 8192, 10), ranges()),
    ]
    fetched = stream.read_many(wanted, timeout=5)
    assert fake_node.reads == [
        [[OFFSET + 10, 5, GENERATION], [OFFSET + 500, 100, GENERATION], [OFFSET + 4096, 70, GENERATION + 1]]
    ]
    # To 152 and to 70, for 10 and 500 begin at 10 and 52 of a line of 64 bytes. All of it stays with any view.
    assert [each.owned_bytes for each in fetched] == [192 + 128] * 3
    assert pool.stats().misses == 1


@pytest.mark.parametrize(
    ("pairs", "shown"),
    [
        ([(0, 100), (300, 100)], True),  # four times as far as they are long
        ([(0, 100), (701, 100)], False),
        ([(0, MIB // 2), (MIB - 1000, 1000)], True),
        ([(0, MIB // 2), (MIB, 1000)], False),  # no room for a MiB that nobody wants
    ],
)
def test_a_little_between_runs_has_room_in_the_buffer(
    stream: NodeTransport, fake_node: FakeNode, pairs: list[tuple[int, int]], shown: bool
) -> None:
    (fetched,) = stream.read_many([Read(extent(OFFSET, 2 * MIB), ranges(*pairs))], timeout=5)
    assert (fetched.memory is not None) is shown
    assert [length for _, length, _ in fake_node.reads[0]] == [length for _, length in pairs]  # and yet is not sent
    assert fetched.owned_bytes < 4 * sum(length for _, length in pairs) + 128


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 4096])
def test_chunks_may_be_cut_anywhere(stream: NodeTransport, fake_node: FakeNode, chunk_bytes: int) -> None:
    content = bytes(range(256)) * 2
    with fake_node.path.open("r+b") as file:
        file.seek(OFFSET)
        file.write(content)
    fake_node.chunk_bytes = chunk_bytes
    fetched = stream.read(extent(OFFSET, 512), ranges((3, 100), (200, 1), (300, 212)), timeout=5)
    assert fetched.view(3, 100).tobytes() == content[3:103]
    assert fetched.view(200, 1).tobytes() == content[200:201]
    assert fetched.view(300, 212).tobytes() == content[300:]


@pytest.mark.parametrize(("extra_bytes", "complaint"), [(-1, "sent 1 bytes too few"), (3, "sent 3 bytes too many")])
def test_a_short_or_long_answer_is_unavailable(
    stream: NodeTransport, fake_node: FakeNode, extra_bytes: int, complaint: str
) -> None:
    fake_node.extra_bytes = extra_bytes
    with pytest.raises(Unavailable, match=complaint):
        stream.read(extent(OFFSET, 1000), ranges((0, 1000)), timeout=5)


def test_the_errors_of_the_node_come_through(stream: NodeTransport) -> None:
    with pytest.raises(SampleNotFound, match="no such extent") as missing:
        stream.read(extent(OFFSET, 10, generation=GENERATION + 1), ranges((0, 10)), timeout=5)
    assert missing.value.ids == (17,)
    with pytest.raises(LeaseExpired, match="window 6 is gone"):
        put(stream, 10, generation=GENERATION + 1)


def get(transport: NodeTransport, length: int, *, timeout: float = 5) -> None:
    transport.read(extent(OFFSET, length), ranges((0, length)), timeout=timeout).close()


@pytest.mark.parametrize("operation", [get, put], ids=lambda operation: operation.__name__)
def test_a_node_that_does_not_answer_is_unavailable_at_the_deadline(
    stream: NodeTransport, fake_node: FakeNode, operation
) -> None:
    fake_node.stalled = threading.Event()
    start = time.monotonic()
    try:
        with pytest.raises(Unavailable, match="DEADLINE_EXCEEDED"):
            operation(stream, 10, timeout=0.2)
        assert 0.15 < time.monotonic() - start < 2
    finally:
        fake_node.stalled.set()


def test_a_node_that_is_gone_is_unavailable(stream: NodeTransport, opener: Opener) -> None:
    opener.stop_node()
    with pytest.raises(Unavailable, match="storage node 'n0'"):
        stream.read(extent(OFFSET, 10), ranges((0, 10)), timeout=1)
    with pytest.raises(Unavailable, match="storage node 'n0'"):
        put(stream, 10, timeout=1)


def test_buffers_are_used_again_once_nobody_looks(stream: NodeTransport, pool: BufferPool) -> None:
    fetched = stream.read(extent(OFFSET, MIB), ranges((0, MIB)), timeout=5)
    view = fetched.view(5, 10)
    fetched.close()
    put(stream, MIB)
    assert (pool.stats().hits, pool.stats().misses) == (0, 2)
    del view, fetched
    gc.collect()
    for _ in range(3):
        stream.read(extent(OFFSET, MIB), ranges((0, MIB)), timeout=5).close()
        put(stream, MIB)
    assert (pool.stats().misses, pool.stats().live_bytes) == (2, 0)
