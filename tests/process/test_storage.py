from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from tests.harness.supervisor import stop_processes
from tests.process.storage_rig import FakeController, Rig, wait_for
from tqclient.errors import InvalidArgument, LeaseExpired, SampleNotFound, StorageFull, Unavailable
from tqclient.limits import CHUNK_BYTES, EXTENT_ALIGN, MIB
from tqclient.wire.arena import lock_session
from tqclient.wire.packing import U64, pack_array
from tqclient.wire.v1 import storage_pb2
from tqserver import limits
from tqserver.storage.arena import open_arena


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    with Rig(tmp_path) as rig:
        rig.start(sessions=[1, 2])
        yield rig


def blob(length: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8).tobytes()


def test_life_of_an_extent(rig: Rig) -> None:
    data = blob(3 * CHUNK_BYTES + 17)
    window = rig.reserve(1, len(data))
    assert window.offset % 256 == 0
    assert window.length == 3 * CHUNK_BYTES + 256
    assert window.incarnation == rig.describe().incarnation
    rig.write(1, window, data)
    assert rig.used() == (0, window.length, 0)

    extent = (window.offset, len(data), window.generation, 1)
    rig.controller.sealed([extent])
    rig.wait_used(window.length, 0)
    assert rig.read(extent[:3]) == data
    parts = [(window.offset + start, length, window.generation) for start, length in ((5, 3), (0, 2 * MIB), (9, 0))]
    assert rig.read(*parts) == data[5:8] + data[: 2 * MIB]
    wait_for(lambda: rig.controller.usage.used_bytes == window.length)

    rig.controller.freed([extent])
    rig.wait_used(0, 0)
    with pytest.raises(SampleNotFound, match="was freed"):
        rig.read(extent[:3])
    assert rig.describe().controller_sequence == 3


def test_a_read_may_be_faster_than_the_order_that_seals(rig: Rig) -> None:
    window = rig.reserve(1, 1000)
    rig.write(1, window, b"x" * 1000)
    assert rig.read((window.offset, 1000, window.generation)) == b"x" * 1000


def test_read_sends_nothing_when_one_range_is_not_there(rig: Rig) -> None:
    window = rig.reserve(1, 2000)
    rig.write(1, window, b"x" * 2000)
    rig.controller.sealed([(window.offset, 1000, window.generation, 1)])
    rig.wait_used(1024, 1024)
    good = (window.offset, 1000, window.generation)
    for bad in (
        (window.offset, 1001, window.generation),
        (window.offset, 1000, window.generation + 1),
        (window.offset + 999, 2, window.generation),
        (window.offset - 1, 1, window.generation),
        (2**64 - 1, 2**64 - 1, window.generation),
        (0, 16, window.generation),
    ):
        with pytest.raises(SampleNotFound, match="no extent"):
            rig.read(good, bad)
    assert rig.read(good) == b"x" * 1000
    with pytest.raises(InvalidArgument, match="ranges: 23 bytes"):
        rig.call(
            lambda request, timeout: list(rig.stub.Read(request, timeout=timeout)),
            storage_pb2.ReadRequest(ranges=bytes(23)),
        )


def test_writes_are_bounded(rig: Rig) -> None:
    rig.reserve(2, 100)
    window = rig.reserve(1, 1000)
    before = rig.arena.read_bytes()[: window.offset]
    cases: list[tuple[dict[str, int], type[Exception], str]] = [
        ({"incarnation": 3}, LeaseExpired, "before this node restarted"),
        ({"generation": 99}, LeaseExpired, "has no window 99"),
        ({"session": 2}, LeaseExpired, "session 2 has no window"),
        ({"length": 999}, InvalidArgument, "more than the 999 bytes"),
        ({"length": 1001}, InvalidArgument, "1000 bytes came of 1001"),
        ({"length": 1025}, InvalidArgument, "not all in what is left"),
        ({"offset": 0}, InvalidArgument, "not all in what is left"),
        ({"offset": 2**64 - 256}, InvalidArgument, "not all in what is left"),
    ]
    for changes, error, message in cases:
        with pytest.raises(error, match=message):
            rig.write(1, window, b"y" * 1000, **changes)
    assert rig.arena.read_bytes()[: window.offset] == before
    rig.write(1, window, b"z" * 1000)
    assert rig.read((window.offset, 1000, window.generation)) == b"z" * 1000


def test_sealed_bytes_are_never_written_again(rig: Rig) -> None:
    window = rig.reserve(1, 4096)
    rig.write(1, window, b"a" * 4096)
    rig.controller.sealed([(window.offset + 1024, 1000, window.generation, 1)])
    rig.wait_used(1024, 3072)
    with pytest.raises(InvalidArgument, match="what is left"):
        rig.write(1, window, b"b" * 1, offset=window.offset + 1024)
    rig.write(1, window, b"c" * 1024)
    rig.write(1, window, b"d" * 2048, offset=window.offset + 2048)
    assert rig.read((window.offset + 1024, 1000, window.generation)) == b"a" * 1000


def test_closing_a_window_and_ending_a_session_give_everything_back(rig: Rig) -> None:
    first, second = rig.reserve(1, MIB), rig.reserve(1, MIB)
    rig.controller.sealed([(first.offset, 256, first.generation, 1)])
    for _ in range(2):
        rig.close_window(1, first, first.offset + 512)
    rig.wait_used(256, MIB + 256)
    with pytest.raises(InvalidArgument, match="belongs to session 1"):
        rig.close_window(2, second, second.offset)
    rig.controller.sessions(ended=[1])
    rig.wait_used(256, 0)
    with pytest.raises(LeaseExpired, match="session 1 has ended"):
        rig.reserve(1, 1)
    with pytest.raises(LeaseExpired, match="has no window"):
        rig.write(1, second, b"late")
    rig.controller.freed([(first.offset, 256, first.generation, 1)])
    rig.wait_used(0, 0)


def test_reserve_waits_for_a_session_that_is_news(rig: Rig) -> None:
    call = rig.stub.Reserve.future(storage_pb2.ReserveRequest(session=3, partition_id=1, length=1), timeout=10)
    assert not call.done()
    rig.controller.sessions(opened=[3])
    assert call.result().length == 256
    start = time.monotonic()
    with pytest.raises(LeaseExpired, match="session 4 is not known"):
        rig.reserve(4, 1)
    assert 0.9 < time.monotonic() - start < 3


def test_full(rig: Rig) -> None:
    capacity = rig.describe().capacity_bytes
    rig.reserve(1, capacity - MIB)
    with pytest.raises(
        StorageFull, match=f"2097152 bytes do not fit: 1048576 of {capacity} bytes are free, 1048576 of them"
    ):
        rig.reserve(2, 2 * MIB)
    rig.reserve(2, MIB)
    with pytest.raises(StorageFull, match="0 of"):
        rig.reserve(2, 1)


def test_a_mapped_writer_needs_its_lock_and_is_quarantined_until_it_is_gone(rig: Rig) -> None:
    with pytest.raises(InvalidArgument, match="session 1 holds no writer lock"):
        rig.reserve(1, 4096, mapped=True)
    writer = os.open(rig.arena, os.O_RDWR)
    try:
        assert lock_session(writer, 1)
        window = rig.reserve(1, 4096, mapped=True)
        rig.controller.sessions(ended=[1])
        rig.wait_used(0, 0, 4096)
        others = rig.reserve(2, rig.describe().capacity_bytes // 2)
        assert others.offset + others.length <= window.offset or others.offset >= window.offset + 4096
    finally:
        os.close(writer)
    assert rig.wait_used(0, others.length, 0) < 1.0


def test_a_writer_that_dies_is_reported_once_and_its_bytes_come_back(rig: Rig) -> None:
    program = (
        "import os, sys\n"
        "from tqclient.wire.arena import lock_session\n"
        "assert lock_session(os.open(sys.argv[1], os.O_RDWR), 1)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(rig.arena)]
    writer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"locked\n"
        rig.reserve(1, MIB, mapped=True)
        rig.reserve(2, 256)  # writes through the node: needs no lock, and is not taken for dead
        stop_processes(writer.pid)
        rig.wait_used(0, MIB + 256)
        assert rig.controller.gone.empty()
        writer.kill()
    start = time.monotonic()
    assert rig.controller.gone.get(timeout=60) == 1
    rig.controller.sessions(ended=[1])
    rig.wait_used(0, 256)
    assert time.monotonic() - start < 1.0
    assert rig.controller.gone.empty()


def test_killed_node_comes_back_with_its_blocks_and_spares_bytes_that_writers_still_touch(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        first = rig.start(sessions=[1, 2, 3], sequence=10)
        sealed, freed = rig.reserve(1, 2 * MIB), rig.reserve(1, MIB)
        data = blob(2 * MIB - 100)
        rig.write(1, sealed, data)
        extents = [(sealed.offset, len(data), sealed.generation, 1), (freed.offset, MIB, freed.generation, 1)]
        rig.controller.sealed(extents, sequence=17)
        writer = os.open(rig.arena, os.O_RDWR)
        assert lock_session(writer, 2)
        alive = rig.reserve(2, MIB, mapped=True)
        ended = rig.reserve(3, MIB)
        rig.wait_used(3 * MIB, 2 * MIB)
        generations = [w.generation for w in (sealed, freed, alive, ended)]
        rig.kill()

        rig.launch()
        with pytest.raises(Unavailable, match="restarted and has not reached the controller"):
            rig.read(extents[0][:3])
        second = rig.controller.hellos.get(timeout=10)
        assert (second.node.name, second.node.arena) == ("n0", first.node.arena)
        assert second.node.incarnation != first.node.incarnation
        assert (first.seen_sequence, second.seen_sequence) == (0, 17)
        rig.controller.sync(extents[:1], [1, 2], sequence=20)
        rig.wait_used(2 * MIB, MIB)
        assert rig.read(extents[0][:3]) == data
        with pytest.raises(SampleNotFound, match="no extent"):
            rig.read(extents[1][:3])
        with pytest.raises(LeaseExpired, match="before this node restarted"):
            rig.write(2, alive, b"x")

        taken: list[range] = []
        while (free := rig.describe().capacity_bytes - sum(rig.used())) >= 256 * 1024:
            window = rig.reserve(1, 2 * MIB if free > 8 * MIB else 64 * 1024)
            assert window.generation > max(generations)
            taken.append(range(window.offset, window.offset + window.length))
        for keep in (sealed, alive):
            assert not any(r.start < keep.offset + keep.length and keep.offset < r.stop for r in taken)

        # A mapped writer of the former life may still commit what it wrote.
        reserved = sum(map(len, taken))
        rig.controller.sealed([(alive.offset, MIB, alive.generation, 1)], sequence=21)
        rig.wait_used(3 * MIB, reserved)
        os.close(writer)
        assert "ERROR" not in rig.daemon.log.read_text().upper().replace("LAST ERROR", "")


def test_a_reservation_without_a_reply_is_repeated_or_closed_after_a_kill(tmp_path: Path) -> None:
    with Rig(tmp_path) as rig:
        rig.start(sessions=[5, 6])
        requests = [
            storage_pb2.ReserveRequest(session=session, partition_id=1, length=4096, ticket=3, tickets_below=3)
            for session in (5, 6)
        ]
        granted = [rig.call(rig.stub.Reserve, request) for request in requests]  # say the replies were lost
        rig.reserve(5, 8192)
        rig.kill()
        rig.launch()
        closing = rig.stub.CloseWindow.future(  # the node does not know yet that the session lives
            storage_pb2.CloseWindowRequest(session=5, tickets=pack_array([3], U64)), timeout=5
        )
        with pytest.raises(grpc.FutureTimeoutError):
            closing.result(0.2)
        rig.attach(sessions=[5, 6])
        assert closing.result(60).all
        assert rig.used() == (0, 4096 + 8192, 0)
        with pytest.raises(InvalidArgument, match="ticket 3 of session 5 was closed"):
            rig.call(rig.stub.Reserve, requests[0])
        again = rig.call(rig.stub.Reserve, requests[1])
        assert (again.generation, again.offset, again.length) == (granted[1].generation, granted[1].offset, 4096)
        assert again.incarnation != granted[1].incarnation
        assert rig.used() == (0, 4096 + 8192, 0)


def test_a_ticket_that_is_closed_before_the_node_hears_of_its_session_is_granted_nothing(rig: Rig) -> None:
    """The close was dropped in silence: the Reserve, which came after it, took bytes until its session's end."""
    close = storage_pb2.CloseWindowRequest(session=9, tickets=pack_array([3, 4], U64))
    closing = rig.stub.CloseWindow.future(close, timeout=5)
    with pytest.raises(grpc.FutureTimeoutError):
        closing.result(0.2)
    rig.controller.sessions(opened=[9])
    assert closing.result(60).all
    for ticket in (3, 4):
        with pytest.raises(InvalidArgument, match=f"ticket {ticket} of session 9 was closed"):
            rig.call(rig.stub.Reserve, storage_pb2.ReserveRequest(session=9, length=1, ticket=ticket, tickets_below=3))
    assert rig.used() == (0, 0, 0)
    assert rig.call(rig.stub.CloseWindow, storage_pb2.CloseWindowRequest(session=8, tickets=close.tickets)).all  # ended


def test_a_ticket_is_not_closed_by_a_node_that_may_not_know_of_its_session(rig: Rig) -> None:
    rig.controller.stop()
    wait_for(lambda: not rig.describe().attached)
    with pytest.raises(Unavailable, match="no link to the controller"):
        rig.call(rig.stub.CloseWindow, storage_pb2.CloseWindowRequest(session=9, tickets=pack_array([3], U64)))


def test_a_window_that_is_cut_into_more_pieces_than_the_table_has_rows(tmp_path: Path) -> None:
    """Every other granule of it is committed: nobody waits for long, and no block is lost, then or after a restart."""
    with Rig(tmp_path, arena_bytes=32 * MIB) as rig:
        rig.start(sessions=[1, 2])
        other = rig.reserve(2, 1000)
        rig.write(2, other, b"k" * 1000)
        count = limits.WINDOWS_MAX + 100
        window = rig.reserve(1, 2 * count * EXTENT_ALIGN)
        offsets = range(window.offset + EXTENT_ALIGN, window.offset + window.length, 2 * EXTENT_ALIGN)
        rig.write(1, window, bytes(range(1, 129)) * (window.length // 128))
        extents = [(other.offset, 1000, other.generation, 1)]
        extents += [(offset, 128, window.generation, 1) for offset in offsets]
        sealed = 1024 + count * EXTENT_ALIGN
        rig.controller.sealed(extents)
        rig.wait_used(sealed, count * EXTENT_ALIGN)
        with pytest.raises(StorageFull, match="the arena's table holds no more"):
            rig.reserve(2, 1)
        rig.kill()
        rig.start(extents, [1, 2])
        rig.wait_used(sealed, count * EXTENT_ALIGN)
        assert rig.read(extents[0][:3]) == b"k" * 1000
        assert rig.read(extents[1][:3], extents[-1][:3]) == bytes(range(1, 129)) * 2
        rig.controller.sessions(ended=[1])
        rig.wait_used(sealed, 0)
        assert rig.reserve(2, 1).length == EXTENT_ALIGN
        assert "ERROR" not in rig.daemon.log.read_text().upper().replace("LAST ERROR", "")


def test_a_node_keeps_for_a_while_what_its_controller_forgot_in_a_restart(rig: Rig) -> None:
    windows = [rig.reserve(1, 4096) for _ in range(2)]
    known, forgotten = [(window.offset, 4096, window.generation, 1) for window in windows]
    rig.controller.sealed([known, forgotten])
    rig.wait_used(8192, 0)
    rig.controller.sync([known], [1], sequence=5, grace_ms=60_000)
    assert rig.used() == (8192, 0, 0)
    rig.read(forgotten[:3])
    restarted = time.monotonic()
    rig.controller.sync([known], [1], sequence=5, grace_ms=400)  # once more
    rig.wait_used(4096, 0)
    assert time.monotonic() - restarted >= 0.3  # and not at once
    with pytest.raises(SampleNotFound):
        rig.read(forgotten[:3])
    rig.read(known[:3])
    rig.controller.sync([], [1], sequence=6)  # the link broke, no more: what was freed meanwhile is free
    rig.wait_used(0, 0)


def test_link_is_opened_again_and_an_older_controller_is_not_obeyed(rig: Rig) -> None:
    window = rig.reserve(1, 1000)
    rig.write(1, window, b"k" * 1000)
    rig.controller.sealed([(window.offset, 1000, window.generation, 1)], sequence=40)
    rig.wait_used(1024, 0)
    port = rig.controller.port
    rig.controller.stop()
    wait_for(lambda: not rig.describe().attached)
    assert rig.read((window.offset, 1000, window.generation)) == b"k" * 1000  # goes on without a controller
    assert rig.reserve(2, 100).length == 256
    with pytest.raises(Unavailable, match="no link to the controller"):
        rig.reserve(9, 100)
    rig.controller = FakeController(port)
    rig.controller.refuse = "sequence 40 was seen"
    wait_for(lambda: "sequence 40 was seen" in rig.daemon.log.read_text())
    assert rig.used() == (1024, 256, 0)
    rig.controller.refuse = None
    hello = rig.attach([(window.offset, 1000, window.generation, 1)], [2, 9], sequence=41)
    assert hello.seen_sequence == 40
    assert rig.used() == (1024, 256, 0)


def test_a_malformed_order_breaks_the_link_and_not_the_node(rig: Rig) -> None:
    rig.controller._put(5, sealed={"extents": bytes(31)})
    rig.attach([], [1])
    assert "extents: 31 bytes" in rig.daemon.log.read_text()


def test_serves_within_a_second_without_torch_and_ends_with_0(tmp_path: Path) -> None:
    with Rig(tmp_path, "--prefault=true") as rig:
        elapsed = []
        for _ in range(3):  # the fastest counts: other tests may be running
            started = time.monotonic()
            rig.launch()
            elapsed.append(time.monotonic() - started)
            rig.kill()
        rig.launch()
        assert "torch" not in Path(f"/proc/{rig.daemon.pid}/maps").read_text()
        assert stat.S_IMODE(rig.arena.stat().st_mode) == 0o600
        rig.wait_populated()
        assert rig.daemon.terminate() == 0
        assert rig.arena.exists()
    assert min(elapsed) < 1.0


def run_storage(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tqserver.storage.main", "--listen=127.0.0.1:0", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_two_nodes_never_share_an_arena(rig: Rig) -> None:
    rig.wait_populated()
    before = rig.describe()
    second = run_storage(f"--arena-path={rig.arena}", "--arena-bytes=16MiB", "--name=n0")
    assert second.returncode == 1
    assert second.stdout == ""
    assert "is served by another process" in second.stderr
    assert rig.describe() == before


def test_a_tmpfs_that_is_too_small_is_refused_at_the_start(tmp_path: Path) -> None:
    script = (
        f"mount -t tmpfs -o size=6m tmpfs {tmp_path} && exec {sys.executable} -m tqserver.storage.main "
        f"--listen=127.0.0.1:0 --arena-path={tmp_path}/a.arena --arena-bytes=8MiB"
    )
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 1
    assert "8MiB do not fit, 6291456 bytes are free there" in done.stderr
    assert done.stdout == ""


def test_a_port_that_is_taken_is_an_error(rig: Rig, tmp_path: Path) -> None:
    done = run_storage(f"--listen={rig.daemon.address}", f"--arena-path={tmp_path}/b", "--arena-bytes=8MiB")
    assert done.returncode == 1
    assert "the port is in use" in done.stderr
    assert "GRPC" not in done.stderr
    assert all(json.loads(line) for line in done.stderr.splitlines())


@pytest.mark.parametrize("flag", ["--listen=192.0.2.1:0", "--token-file=absent", "--tls-ca=absent"])
def test_a_start_that_fails_leaves_no_arena_and_takes_none_away(tmp_path: Path, flag: str) -> None:
    arena = tmp_path / "a"
    failed = run_storage(f"--arena-path={arena}", "--arena-bytes=8MiB", flag)
    assert (failed.returncode, arena.exists()) == (1, False)
    assert flag.partition("=")[2].partition(":")[0] in failed.stderr
    open_arena(arena, node="storage-0", file_bytes=16 * MIB, segment_bytes=64 * MIB).close()
    assert run_storage(f"--arena-path={arena}", "--arena-bytes=16MiB", flag).returncode == 1
    assert arena.exists()


def test_help_and_print_config() -> None:
    done = run_storage("--help")
    assert done.returncode == 0
    assert "--arena-bytes SIZE" in done.stdout
    done = run_storage("--print-config", "--arena-bytes=2GiB")
    assert done.returncode == 0
    assert 'arena_bytes = "2GiB"  # flag --arena-bytes' in done.stdout
    assert run_storage("--name=../x").returncode == 2


def test_neither_a_bad_message_nor_an_unknown_method_hurts(rig: Rig) -> None:
    for method, expected in (
        ("/tq.v1.Storage/Reserve", grpc.StatusCode.INVALID_ARGUMENT),
        ("/tq.v1.Storage/Read", grpc.StatusCode.INVALID_ARGUMENT),
        ("/tq.v1.Storage/Nothing", grpc.StatusCode.UNIMPLEMENTED),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            list(rig.channel.unary_stream(method)(b"\xff\xff\xff", timeout=5))
        assert caught.value.code() is expected
    assert rig.describe().attached
