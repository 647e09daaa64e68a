"""What every transport promises."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.unit.transport.fake_node import (
    ARENA,
    DATA_OFFSET,
    FILE_BYTES,
    GENERATION,
    INCARNATION,
    FakeNode,
    Opener,
    extent,
    ranges,
)
from tqclient.errors import InvalidArgument, LeaseExpired, Unavailable
from tqclient.limits import CHUNK_BYTES, MIB
from tqclient.transport import NodeTransport, Place, Read
from tqclient.wire.v1 import storage_pb2

OFFSET = DATA_OFFSET + 256
SESSION = 4


def place(offset: int, length: int) -> Place:
    return Place(offset, length, GENERATION, INCARNATION)


def pattern(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


def in_file(node: FakeNode, offset: int, length: int) -> bytes:
    return node.path.read_bytes()[offset : offset + length]


def test_many_extents_are_read_as_each_by_itself(fake_node: FakeNode, transport: NodeTransport) -> None:
    content = pattern(8192)
    with fake_node.path.open("r+b") as file:
        file.seek(DATA_OFFSET)
        file.write(content.tobytes())
    wanted = [
        Read(extent(DATA_OFFSET + 64 * index, 600), ranges(*pairs))
        for index, pairs in enumerate([[(3, 100), (300, 300)], [], [(0, 600)], [(599, 1), (0, 1), (0, 1)], [(7, 0)]])
    ]
    together = transport.read_many(wanted, timeout=5)
    assert len(together) == len(wanted)
    for index, (found, (place, asked)) in enumerate(zip(together, wanted, strict=True)):
        alone = transport.read(place, asked, timeout=5)
        for offset, length in asked.tolist():
            view = found.view(offset, length)
            start = 64 * index + offset
            assert view.tobytes() == alone.view(offset, length).tobytes() == content[start : start + length].tobytes()
            assert not length or view.ctypes.data % 64 == offset % 64
            if length and found.memory is not None:
                memory, begin = found.memory
                assert np.shares_memory(memory[begin + offset : begin + offset + length], view)
        with pytest.raises(InvalidArgument, match="were not fetched"):
            found.view(200, 150 if index != 2 else 500)
    nothing = transport.name != "shm"  # of what was not asked for, nor of a byte at each end
    assert [each.memory is None for each in together] == [False, nothing, False, nothing, nothing]
    together[0].close()
    assert together[0].memory is None
    assert transport.read_many([], timeout=5) == []
    with pytest.raises(InvalidArgument, match="a range of 601 bytes at 0 of an extent of 600 bytes"):
        transport.read_many([wanted[0], Read(extent(DATA_OFFSET, 600), ranges((0, 601)))], timeout=5)
    with pytest.raises(Unavailable, match="arena"):
        transport.read_many([wanted[0], Read(extent(DATA_OFFSET, 600, arena=ARENA + 1), ranges((0, 6)))], timeout=5)


@pytest.mark.parametrize("length", [0, 1, 63, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 7])
def test_bytes_are_in_place_when_the_block_ends(fake_node: FakeNode, transport: NodeTransport, length: int) -> None:
    data = pattern(length)
    transport.session_opened(SESSION)
    with transport.write(place(OFFSET, length), session=SESSION, timeout=5) as target:
        assert (target.shape, target.dtype, target.flags.writeable) == ((length,), np.uint8, True)
        assert target.ctypes.data % 64 == 0
        target[:] = data
    assert in_file(fake_node, OFFSET, length) == data.tobytes()
    assert in_file(fake_node, OFFSET - 256, 256) == bytes(256)
    assert in_file(fake_node, OFFSET + length, 256) == bytes(256)


def test_an_exception_in_the_block_comes_through(fake_node: FakeNode, transport: NodeTransport) -> None:
    def fail() -> None:
        with transport.write(place(OFFSET, 10), session=SESSION, timeout=5) as target:
            target[:] = 1
            raise KeyError("mine")

    transport.session_opened(SESSION)
    with pytest.raises(KeyError, match="mine"):
        fail()
    with transport.write(place(OFFSET, 10), session=SESSION, timeout=5) as target:
        target[:] = 2
    assert in_file(fake_node, OFFSET, 10) == b"\x02" * 10


def test_ranges_are_read_as_asked_for(fake_node: FakeNode, transport: NodeTransport) -> None:
    data = pattern(2 * MIB)
    with fake_node.path.open("r+b") as file:
        file.seek(OFFSET)
        file.write(data.tobytes())
    wanted = [(2 * MIB - 5, 5), (100, 28), (128, 72), (0, 1), (150, 10), (777, 0), (MIB - 3, MIB // 2)]
    fetched = transport.read(extent(OFFSET, 2 * MIB), ranges(*wanted), timeout=5)
    for offset, length in [*wanted, (100, 100), (110, 3)]:
        view = fetched.view(offset, length)
        assert view.tobytes() == data[offset : offset + length].tobytes()
        assert length == 0 or view.ctypes.data % 64 == offset % 64
    for offset, length in [(1, 1), (99, 2), (199, 2), (2 * MIB - 5, 6)]:
        with pytest.raises(InvalidArgument, match="were not fetched"):
            fetched.view(offset, length)


def test_views_outlive_what_they_came_from(fake_node: FakeNode, transport: NodeTransport) -> None:
    with fake_node.path.open("r+b") as file:
        file.seek(OFFSET)
        file.write(b"kept")
    fetched = transport.read(extent(OFFSET, 4), ranges((0, 4)), timeout=5)
    view = fetched.view(0, 4)
    fetched.close()
    fetched.close()
    with pytest.raises(Unavailable, match="closed"):
        fetched.view(0, 4)
    transport.close()
    del fetched
    gc.collect()
    assert view.tobytes() == b"kept"


@pytest.mark.parametrize(
    ("offset", "length"),
    [(0, 10), (DATA_OFFSET - 256, 10), (FILE_BYTES - 256, 257), (FILE_BYTES, 1), (2**63, 2**63), (OFFSET + 1, 1)],
)
def test_a_place_out_of_bounds_is_refused(transport: NodeTransport, offset: int, length: int) -> None:
    transport.session_opened(SESSION)
    with (
        pytest.raises(InvalidArgument, match="no place"),
        transport.write(place(offset, length), session=SESSION, timeout=5),
    ):
        pytest.fail("a target was handed out")


@pytest.mark.parametrize(("offset", "length"), [(0, 10), (FILE_BYTES - 256, 257), (2**64 - 256, 512)])
def test_an_extent_out_of_bounds_is_refused(transport: NodeTransport, offset: int, length: int) -> None:
    with pytest.raises(InvalidArgument, match="out of the arena"):
        transport.read(extent(offset, length), ranges((0, 1)), timeout=5)


def test_an_extent_of_another_arena_is_unavailable(transport: NodeTransport) -> None:
    with pytest.raises(Unavailable, match="0000000000000007"):
        transport.read(extent(OFFSET, 10, arena=7), ranges((0, 10)), timeout=5)


def test_a_range_out_of_the_extent_is_refused(transport: NodeTransport) -> None:
    with pytest.raises(InvalidArgument, match="11 bytes at 0 of an extent of 10"):
        transport.read(extent(OFFSET, 10), ranges((0, 11)), timeout=5)


def test_writing_needs_an_open_session(transport: NodeTransport) -> None:
    with pytest.raises(LeaseExpired), transport.write(place(OFFSET, 1), session=SESSION, timeout=5):
        pytest.fail("a target was handed out")
    transport.session_opened(SESSION)
    transport.session_closed(SESSION)
    with pytest.raises(LeaseExpired), transport.write(place(OFFSET, 1), session=SESSION, timeout=5):
        pytest.fail("a target was handed out")


def test_a_closed_transport_refuses_and_finishes_what_it_began(fake_node: FakeNode, transport: NodeTransport) -> None:
    transport.session_opened(SESSION)
    with transport.write(place(OFFSET, 4), session=SESSION, timeout=5) as target:
        transport.close()
        target[:] = 8
    assert in_file(fake_node, OFFSET, 4) == b"\x08" * 4
    with pytest.raises(Unavailable, match="closed"):
        transport.read(extent(OFFSET, 4), ranges((0, 4)), timeout=5)
    with pytest.raises(Unavailable, match="closed"):
        transport.session_opened(SESSION + 1)
    transport.close()


def test_threads_write_and_read_at_once(transport: NodeTransport) -> None:
    transport.session_opened(SESSION)
    length = 200_000

    def work(worker: int) -> bool:
        offset = DATA_OFFSET + worker * (1 << 18)
        data = pattern(length, worker)
        with transport.write(place(offset, length), session=SESSION, timeout=30) as target:
            np.copyto(target, data)
        fetched = transport.read(extent(offset, length), ranges((3, length - 3)), timeout=30)
        return bool(np.array_equal(fetched.view(3, length - 3), data[3:]))

    with ThreadPoolExecutor(8) as executor:
        assert all(executor.map(work, range(32)))


def test_place_is_cut_from_the_front_of_a_window() -> None:
    window = storage_pb2.Window(offset=4096, length=1000, generation=3, incarnation=4)
    assert Place.at(window, 512, 100) == Place(4608, 100, 3, 4)


def test_it_says_what_it_is(transport: NodeTransport, opener: Opener) -> None:
    assert transport.mapped == (transport.name == "shm")
    assert transport.arena == ARENA
    assert "storage node 'n0'" in transport.reason
    assert (f"({opener.address})" in transport.reason) == (not transport.mapped)  # a mapping outlives the address
