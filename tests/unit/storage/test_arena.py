from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tqclient.errors import InvalidArgument, StorageFull, TQError, Unavailable, UnsupportedVersion
from tqclient.limits import KIB, MIB
from tqclient.memory import Memory
from tqclient.wire.arena import HEADER_BYTES, ArenaHeader, engine_locked, lock_engine, lock_session
from tqserver import limits
from tqserver.storage.arena import Arena, TableFull, open_arena
from tqserver.storage.extents import Run
from tqserver.storage.prefault import Prefault


def opened(path: Path, *, node: str = "n0", file_bytes: int = 8 * MIB, segment_bytes: int = MIB) -> Arena:
    return open_arena(path, node=node, file_bytes=file_bytes, segment_bytes=segment_bytes)


def test_a_new_arena_is_allocated_private_and_says_who_it_is(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with opened(path) as arena:
        status = path.stat()
        assert arena.created
        assert stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_size == 8 * MIB
        assert status.st_blocks * 512 >= 8 * MIB
        header = ArenaHeader.from_bytes(path.read_bytes()[:HEADER_BYTES])
        assert header == arena.header
        assert (header.node, header.file_bytes, header.segment_bytes) == ("n0", 8 * MIB, MIB)
        assert header.arena != 0
        assert header.data_offset % 4096 == 0


def test_reopening_keeps_identity_bytes_sequence_generations_and_runs(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    runs = [Run(1, 7, 3, 4 * MIB, 5 * MIB, True), Run(2**63, 2**62, 2**61, 5 * MIB, 6 * MIB, False, 2**60)]
    with opened(path) as arena:
        identity = arena.header.arena
        assert [arena.table.next_generation() for _ in range(3)] == [1, 2, 3]
        arena.saw_sequence(9)
        arena.saw_sequence(5)  # never goes back by itself
        arena.data[5 * MIB] = 77
        gone = Run(3, 7, 3, 0, 1, True)
        for run in (*runs, gone):
            arena.table.add(run)
        arena.table.replace(gone, ())
    with opened(path) as arena:
        assert not arena.created
        assert arena.header.arena == identity
        assert arena.table.next_generation() == 4
        assert arena.controller_sequence == 9
        assert arena.data[5 * MIB] == 77
        assert sorted(arena.table.runs()) == sorted(runs)


def test_two_arenas_have_two_identities(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as first, opened(tmp_path / "b") as second:
        assert first.header.arena != second.header.arena


def test_only_the_file_that_is_served_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with opened(path) as former:
        path.unlink()  # somebody did, while it was served
        with opened(path) as later:
            former.unlink()
            assert path.exists()
            later.unlink()
            assert not path.exists()
            later.unlink()


def test_a_second_node_is_refused_and_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with opened(path) as arena:
        with pytest.raises(Unavailable, match="served by another process"):
            opened(path)
        assert path.exists()
        assert arena.writer_lock_held(3) is False
    opened(path).close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"file_bytes": 16 * MIB}, "was made with --arena-bytes 8MiB, not 16MiB"),
        ({"segment_bytes": 2 * MIB}, "was made with --segment-bytes 1MiB, not 2MiB"),
        ({"node": "n1"}, "belongs to node 'n0', not to 'n1'"),
    ],
)
def test_another_configuration_is_refused_and_the_file_stays(
    tmp_path: Path, settings: dict[str, object], message: str
) -> None:
    path = tmp_path / "a.arena"
    opened(path).close()
    before = path.read_bytes()
    with pytest.raises(InvalidArgument, match=message):
        opened(path, **settings)  # type: ignore[arg-type]
    assert path.read_bytes() == before


def test_a_file_of_somebody_else_is_refused_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    path.write_bytes(b"not yours" * 1000)
    with pytest.raises(InvalidArgument, match="not an arena file"):
        opened(path)
    assert path.read_bytes() == b"not yours" * 1000
    (tmp_path / "link").symlink_to(path)
    with pytest.raises(Unavailable):
        opened(tmp_path / "link")


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    opened(path).close()
    with path.open("r+b") as file:
        file.seek(8)
        file.write(b"\x63")
    with pytest.raises((UnsupportedVersion, InvalidArgument), match=str(path)):
        opened(path)


@pytest.mark.parametrize(
    ("file_bytes", "segment_bytes", "message"),
    [(MIB, MIB, "at least 4MiB"), (8 * MIB, 3 * MIB, "power of two"), (8 * MIB, 2048, "at least 4096")],
)
def test_sizes_that_cannot_work(tmp_path: Path, file_bytes: int, segment_bytes: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        opened(tmp_path / "a", file_bytes=file_bytes, segment_bytes=segment_bytes)
    assert not (tmp_path / "a").exists()


def test_a_file_system_that_is_too_small_is_refused_with_both_sizes() -> None:
    path = Path(f"/dev/shm/tq-test-{os.getpid()}.arena")
    room = os.statvfs("/dev/shm")
    too_much = (room.f_blocks * room.f_frsize // MIB + 1) * MIB
    with pytest.raises(StorageFull, match=r"do not fit, \d+ bytes are free there; give less with --arena-bytes"):
        opened(path, file_bytes=too_much)
    assert not path.exists()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TQError, match="No such file"):
        opened(tmp_path / "missing" / "a")


def test_writer_locks_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.arena"
    with opened(path) as arena:
        writer = os.open(path, os.O_RDWR)
        try:
            assert lock_session(writer, 7)
            assert (arena.writer_lock_held(7), arena.writer_lock_held(8)) == (True, False)
        finally:
            os.close(writer)
        assert not arena.writer_lock_held(7)


def test_a_full_table_says_so_ahead_of_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "WINDOWS_MAX", 4)
    monkeypatch.setattr(limits, "WINDOWS_SPARE", 2)
    with opened(tmp_path / "a") as arena:
        for index in range(4):
            assert arena.table.has_room() == (index < 2)
            arena.table.add(Run(index, 1, 1, index, index + 1, False))
        with pytest.raises(TableFull):
            arena.table.add(Run(9, 1, 1, 9, 10, False))


@pytest.mark.parametrize("advice", [23, 9999], ids=["populate", "fall back"])
def test_prefault_brings_every_page_in_and_changes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: int
) -> None:
    monkeypatch.setattr("tqserver.storage.populate.MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(limits, "PREFAULT_STEP_BYTES", MIB)
    with opened(tmp_path / "a") as arena:
        arena.data[4 * MIB :] = np.random.default_rng(1).integers(0, 256, 4 * MIB, dtype=np.uint8)
        before = arena.data.copy()
        prefault = Prefault(arena, _no_growth, populate=True)
        assert prefault.done_bytes == 0
        prefault.start()
        prefault._thread.join()
        assert prefault.done_bytes == 8 * MIB
        assert np.array_equal(arena.data, before)
        prefault.stop()


def _huge_bytes(array: np.ndarray[Any, Any]) -> int:
    """How much of a mapping of a file is huge pages, by the kernel's account of it."""
    start = f"{array.ctypes.data:x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    next(line for line in lines if line.startswith(start))
    return next(int(line.split()[1]) * KIB for line in lines if line.startswith("ShmemPmdMapped:"))


@pytest.mark.parametrize("wanted", [True, False])
def test_prefault_brings_pages_together_in_huge_ones_for_every_mapping(*, wanted: bool) -> None:
    path = Path(f"/dev/shm/tq-test-huge-{os.getpid()}.arena")
    try:
        with opened(path) as arena:
            arena.data[MIB:] = np.random.default_rng(1).integers(0, 256, 7 * MIB, dtype=np.uint8)
            before = arena.data.copy()
            with path.open("rb") as file:
                other = Memory(8 * MIB, descriptor=file.fileno(), writable=False)
            seen = other.array()
            assert np.array_equal(seen, before)
            prefault = Prefault(arena, _no_growth, populate=True, huge_pages=wanted)
            prefault.start()
            prefault._thread.join()
            huge = prefault.huge_pages_bytes
            assert huge in (
                range(0, 8 * MIB + 1, 2 * MIB) if wanted else (0,)
            )  # as much as there was room in one piece
            other.populate(0, 8 * MIB)
            assert _huge_bytes(arena.data) == _huge_bytes(seen) == huge
            assert np.array_equal(seen, before)
            assert np.array_equal(arena.data, before)
    finally:
        path.unlink(missing_ok=True)


def test_an_arena_is_not_opened_while_an_engine_of_its_former_life_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a"
    opened(path).close()
    engines = [os.open(path, os.O_RDWR) for _ in range(2)]
    for engine in engines:  # side by side, as when one replaces the other
        lock_engine(engine)
    monkeypatch.setattr(limits, "ENGINE_GONE_WAIT", 0.05)
    with pytest.raises(Unavailable, match=r"an engine of its former node still runs after 0\.05 s"):
        opened(path)
    os.close(engines.pop())
    with path.open("r+b") as looker:
        assert engine_locked(looker.fileno())
    monkeypatch.undo()
    end = threading.Timer(0.05, os.close, engines)
    end.start()
    with opened(path) as arena:  # waited for the last one
        assert not arena.created
    end.join()


def test_prefault_that_was_never_started_stops(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as arena:
        Prefault(arena, _no_growth, populate=True).stop()


def test_a_large_arena_is_allocated_behind_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARENA_FIRST_BYTES", 4 * MIB)
    monkeypatch.setattr(limits, "ALLOCATE_STEP_BYTES", 3 * MIB)
    sizes: list[int] = []
    path = tmp_path / "a"
    with opened(path, file_bytes=12 * MIB) as arena:
        assert arena.allocated_bytes == 4 * MIB
        assert path.stat().st_blocks * 512 < 5 * MIB
        prefault = Prefault(arena, sizes.append, populate=False)
        prefault.start()
        prefault._thread.join()
        assert sizes == [7 * MIB, 10 * MIB, 12 * MIB]
        assert (arena.allocated_bytes, prefault.done_bytes) == (12 * MIB, 0)
        assert path.stat().st_blocks * 512 >= 12 * MIB
    with opened(path, file_bytes=12 * MIB) as arena:
        assert arena.allocated_bytes == 12 * MIB


def test_room_that_is_lost_behind_the_start_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARENA_FIRST_BYTES", 4 * MIB)
    monkeypatch.setattr(limits, "ALLOCATE_RETRY", 0.01)
    allocate, refusals, sizes = os.posix_fallocate, [errno.ENOSPC] * 3, list[int]()
    with opened(tmp_path / "a") as arena:

        def full_at_first(descriptor: int, start: int, length: int) -> None:
            if refusals:
                raise OSError(refusals.pop(), "No space left on device")
            allocate(descriptor, start, length)

        monkeypatch.setattr(os, "posix_fallocate", full_at_first)
        prefault = Prefault(arena, sizes.append, populate=True)
        prefault.start()
        prefault._thread.join(60)
        assert sizes == [8 * MIB]
        assert (arena.allocated_bytes, prefault.done_bytes, refusals) == (8 * MIB, 8 * MIB, [])


def test_room_that_never_comes_does_not_hold_the_end_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "ARENA_FIRST_BYTES", 4 * MIB)
    with opened(tmp_path / "a") as arena:

        def full(descriptor: int, start: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        prefault = Prefault(arena, _no_growth, populate=True)
        prefault.start()
        prefault.stop()
        assert (arena.allocated_bytes, prefault.done_bytes) == (4 * MIB, 0)


def test_a_file_whose_allocation_was_cut_short_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies in the allocated part is served at once, even where there is no room for the rest by now."""
    monkeypatch.setattr(limits, "ARENA_FIRST_BYTES", 4 * MIB)
    monkeypatch.setattr(limits, "ALLOCATE_STEP_BYTES", 1 * MIB)
    path = tmp_path / "a"
    with opened(path) as arena:
        assert arena.allocate_more()
    with monkeypatch.context() as patch:
        patch.setattr("tqserver.storage.arena._free_bytes", lambda _: 0)
        with opened(path) as arena:
            assert arena.allocated_bytes == 5 * MIB
    with opened(path) as arena:
        assert [arena.allocate_more() for _ in range(4)] == [True, True, True, False]
        assert arena.allocated_bytes == 8 * MIB
        assert path.stat().st_blocks * 512 >= 8 * MIB


@pytest.mark.parametrize("allocated_bytes", [0, 9 * MIB, 1 << 63])
def test_an_allocated_length_that_cannot_be_is_refused(tmp_path: Path, allocated_bytes: int) -> None:
    path = tmp_path / "a"
    opened(path).close()
    with path.open("r+b") as file:
        file.seek(4096 + 8)
        file.write(allocated_bytes.to_bytes(8, "little"))
    with pytest.raises(InvalidArgument, match=f"{allocated_bytes} bytes of it cannot be allocated"):
        opened(path)


def _no_growth(allocated_bytes: int) -> None:
    raise AssertionError(allocated_bytes)
