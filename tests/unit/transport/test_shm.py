"""What is particular to the shm transport: mappings, locks and page faults."""

from __future__ import annotations

import errno
import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

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
    make_arena,
    ranges,
)
from tqclient import memory as memory_module
from tqclient.errors import TransportUnavailable, Unavailable
from tqclient.limits import MIB
from tqclient.memory import Memory
from tqclient.transport import NodeTransport, Place
from tqclient.transport.mapping import close_arena, open_arena
from tqclient.wire.arena import lock_session, session_locked, unlock_session

OFFSET = DATA_OFFSET
SESSION = 4
WHOLE = Place(OFFSET, FILE_BYTES - OFFSET, GENERATION, INCARNATION)


@pytest.fixture
def shm(opener: Opener) -> NodeTransport:
    return opener("shm")


@pytest.fixture
def node_descriptor(fake_node: FakeNode) -> Iterator[int]:
    """The arena as the storage node has it open."""
    descriptor = os.open(fake_node.path, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def descriptors_of(path: Path) -> int:
    found = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{name}") == str(path)
        except FileNotFoundError:
            continue
    return found


def mappings_of(path: Path) -> list[str]:
    return [line.split()[1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(path))]


def wait_for_warming() -> None:
    for thread in threading.enumerate():
        if thread.name == "tq-arena-warming":
            thread.join(60)


def test_the_lock_is_held_while_the_session_is_open(shm: NodeTransport, node_descriptor: int) -> None:
    assert not session_locked(node_descriptor, SESSION)
    shm.session_opened(SESSION)
    shm.session_opened(SESSION)
    assert session_locked(node_descriptor, SESSION)
    assert not session_locked(node_descriptor, SESSION + 1)
    shm.session_closed(SESSION)
    assert not session_locked(node_descriptor, SESSION)


def test_the_lock_is_held_until_the_last_write_ends(shm: NodeTransport, node_descriptor: int) -> None:
    shm.session_opened(SESSION)
    with shm.write(Place(OFFSET, 10, GENERATION, INCARNATION), session=SESSION, timeout=None):
        shm.session_closed(SESSION)
        assert session_locked(node_descriptor, SESSION)
        shm.close()
        assert session_locked(node_descriptor, SESSION)
    assert not session_locked(node_descriptor, SESSION)


def test_the_lock_outlives_a_transport_whose_successor_writes(
    opener: Opener, fake_node: FakeNode, node_descriptor: int
) -> None:
    former, later = opener("shm"), opener("shm")
    place = Place(OFFSET, 10, GENERATION, INCARNATION)
    former.session_opened(SESSION)
    with former.write(place, session=SESSION, timeout=None):
        former.close()
        later.session_opened(SESSION)
    assert session_locked(node_descriptor, SESSION)
    with later.write(place, session=SESSION, timeout=None):
        later.session_closed(SESSION)
        assert session_locked(node_descriptor, SESSION)
    assert not session_locked(node_descriptor, SESSION)
    later.session_opened(SESSION)
    assert session_locked(node_descriptor, SESSION)


def test_a_lock_that_is_held_elsewhere_is_unavailable(shm: NodeTransport, node_descriptor: int) -> None:
    lock_session(node_descriptor, SESSION)
    with pytest.raises(Unavailable, match="another process writes"):
        shm.session_opened(SESSION)
    unlock_session(node_descriptor, SESSION)
    shm.session_opened(SESSION)


def test_clients_of_one_process_share_the_mapping(opener: Opener, fake_node: FakeNode, node_descriptor: int) -> None:
    first, second = opener("shm"), opener("shm")
    for transport, session in ((first, 1), (second, 2)):
        transport.session_opened(session)
        with transport.write(Place(OFFSET, 10, GENERATION, INCARNATION), session=session, timeout=None):
            pass
        transport.read(extent(OFFSET, 10), ranges((0, 10)), timeout=None)
    assert descriptors_of(fake_node.path) == 1 + 1  # and the node's
    assert sorted(mappings_of(fake_node.path)) == ["r--s", "rw-s"]
    first.close()
    assert [session_locked(node_descriptor, session) for session in (1, 2)] == [False, True]
    assert second.read(extent(OFFSET, 10), ranges((0, 10)), timeout=None).view(0, 10).shape == (10,)
    second.close()
    assert descriptors_of(fake_node.path) == 1
    assert mappings_of(fake_node.path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "tq-arena-warming"]


def test_a_mapping_lives_as_long_as_a_view_of_it(shm: NodeTransport, fake_node: FakeNode) -> None:
    view = shm.read(extent(OFFSET, 10), ranges((0, 10)), timeout=None).view(2, 3)
    shm.close()
    assert mappings_of(fake_node.path) == ["r--s"]
    assert view.tolist() == [0, 0, 0]
    del view
    gc.collect()
    assert mappings_of(fake_node.path) == []


def test_a_view_shows_the_arena_without_a_copy_and_cannot_be_written(shm: NodeTransport, node_descriptor: int) -> None:
    view = shm.read(extent(OFFSET, 4), ranges((0, 4)), timeout=None).view(0, 4)
    os.pwrite(node_descriptor, b"\1\2\3\4", OFFSET)
    assert view.tolist() == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="read-only"):
        view[0] = 1


def test_an_arena_that_took_the_place_of_another_is_mapped_anew(fake_node: FakeNode) -> None:
    first = open_arena(str(fake_node.path), ARENA)
    fake_node.path.unlink()
    make_arena(fake_node.path, arena=2)
    with pytest.raises(TransportUnavailable, match="another host"):
        open_arena(str(fake_node.path), ARENA)
    second = open_arena(str(fake_node.path), 2)
    assert (first.header.arena, second.header.arena) == (ARENA, 2)
    close_arena(first)
    close_arena(second)


def test_a_file_without_permission_is_refused(fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TransportUnavailable, match=r"cannot open .*: Permission denied"):
        open_arena(str(fake_node.path), ARENA)


def test_using_populated_pages_faults_none_in(shm: NodeTransport) -> None:
    shm.session_opened(SESSION)
    with shm.write(WHOLE, session=SESSION, timeout=None) as target:
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        target[::4096] = 1
        written = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    fetched = shm.read(extent(OFFSET, WHOLE.length), ranges((0, WHOLE.length)), timeout=None)
    view = fetched.view(0, WHOLE.length)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    total = int(view[::4096].sum())
    read = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before
    pages = WHOLE.length // 4096
    assert total == pages
    assert written < pages / 100
    assert read < pages / 100


def test_the_whole_arena_is_warmed_behind_the_first_use(shm: NodeTransport) -> None:
    fetched = shm.read(extent(OFFSET, WHOLE.length), ranges((0, 1)), timeout=None)
    wait_for_warming()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    shm.read(extent(OFFSET, WHOLE.length), ranges((0, WHOLE.length)), timeout=None).view(0, WHOLE.length).sum()
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < WHOLE.length // 4096 / 100
    fetched.close()


@pytest.mark.parametrize("writable", [True, False])
def test_a_kernel_without_populate_still_works(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    monkeypatch.setattr(memory_module, "_MADV_POPULATE_READ", 9999)
    monkeypatch.setattr(memory_module, "_MADV_POPULATE_WRITE", 9999)
    descriptor = os.open(fake_node.path, os.O_RDWR)
    memory = Memory(FILE_BYTES, descriptor=descriptor, writable=writable)
    os.close(descriptor)
    memory.populate(0, FILE_BYTES)
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    assert int(memory.array()[DATA_OFFSET:].sum()) == 0
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < FILE_BYTES // 4096 / 100


def test_pages_behind_the_end_of_the_file_are_an_error_and_no_signal(shm: NodeTransport, fake_node: FakeNode) -> None:
    os.truncate(fake_node.path, MIB)
    shm.session_opened(SESSION)
    with (
        pytest.raises(Unavailable, match=r"bytes \["),
        shm.write(Place(4 * MIB, MIB, GENERATION, INCARNATION), session=SESSION, timeout=None),
    ):
        pytest.fail("a target was handed out")
    with pytest.raises(Unavailable, match=r"bytes \["):
        shm.read(extent(4 * MIB, MIB), ranges((0, MIB)), timeout=None)


def test_a_forked_child_reads_on_but_neither_writes_nor_keeps_locks(
    shm: NodeTransport, fake_node: FakeNode, node_descriptor: int
) -> None:
    os.pwrite(node_descriptor, b"seen", OFFSET)
    shm.session_opened(SESSION)
    with shm.write(Place(OFFSET + 256, 4, GENERATION, INCARNATION), session=SESSION, timeout=None):
        view = shm.read(extent(OFFSET, 4), ranges((0, 4)), timeout=None).view(0, 4)
        hold_read, hold_write = os.pipe()
        ready_read, ready_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(hold_write)
            good = view.tobytes() == b"seen" and mappings_of(fake_node.path) == ["r--s"]
            try:
                with shm.write(Place(OFFSET, 4, GENERATION, INCARNATION), session=SESSION, timeout=None):
                    good = False
            except Unavailable:
                pass
            own = open_arena(str(fake_node.path), ARENA)
            own.lock_session(SESSION + 1)
            good = good and session_locked(node_descriptor, SESSION + 1)
            close_arena(own)
            os.write(ready_write, b"1" if good else b"0")
            os.read(hold_read, 1)  # stays alive until the parent has looked at its locks
            os._exit(0)
    os.close(hold_read)
    assert os.read(ready_read, 1) == b"1"
    assert session_locked(node_descriptor, SESSION)
    shm.close()
    released = not session_locked(node_descriptor, SESSION)
    os.close(hold_write)
    os.waitpid(child, 0)
    os.close(ready_read)
    os.close(ready_write)
    assert released


def test_numpy_holds_memory_by_its_views() -> None:
    memory = Memory(8192)
    address = memory.address
    view = memory.array()[4096:].view(np.uint64)
    del memory
    gc.collect()
    assert view.ctypes.data == address + 4096
    view[:] = 3
    assert int(view.sum()) == 3 * 512


def test_closing_does_not_wait_for_the_whole_arena_to_be_warmed(
    fake_node: FakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    pieces: list[int] = []

    def populate(memory: Memory, start: int, stop: int) -> None:
        if threading.current_thread().name == "tq-arena-warming":
            pieces.append(start)
            begun.set()
            go_on.wait(10)

    monkeypatch.setattr(Memory, "populate", populate)
    mapping = open_arena(str(fake_node.path), ARENA)
    mapping.source(OFFSET, np.array([(0, 10)], np.int64))
    assert begun.wait(10)
    closing = threading.Thread(target=close_arena, args=(mapping,))
    closing.start()
    assert mapping._closed.wait(10)
    go_on.set()
    closing.join(60)
    assert len(pieces) == 1 < FILE_BYTES // (2 * MIB)
