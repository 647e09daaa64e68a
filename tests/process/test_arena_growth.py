"""An arena whose file system has no room left when it should grow: smaller, said to be so, and whole once there is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import SmallDisk, Supervisor
from tests.process.storage_rig import Rig, wait_for
from tests.process.test_engine import peer_reads
from tqclient.errors import StorageFull
from tqclient.limits import MIB
from tqserver import limits
from tqserver.storage.arena import open_arena

ARENA_BYTES = 16 * MIB
ALLOCATED_BYTES = 4 * MIB
GROWN_SECONDS = limits.ALLOCATE_RETRY + 3

pytestmark = pytest.mark.usefixtures("no_leaks")


@pytest.fixture
def disk(supervisor: Supervisor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SmallDisk:
    """Holds the arena of a node that died just after its start; others have filled the rest."""
    disk = SmallDisk(supervisor, tmp_path / "disk", ARENA_BYTES + MIB)
    monkeypatch.setattr(limits, "ARENA_FIRST_BYTES", ALLOCATED_BYTES)
    open_arena(disk.outside / "arena", node="n0", file_bytes=ARENA_BYTES, segment_bytes=limits.SEGMENT_BYTES).close()
    disk.fill_up()
    return disk


@pytest.fixture
def rig(tmp_path: Path, disk: SmallDisk) -> Iterator[Rig]:
    with Rig(tmp_path, "--mooncake=on", arena=disk.outside / "arena", arena_bytes=ARENA_BYTES) as rig:
        yield rig


def write_at(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def test_an_engine_serves_what_there_is_and_what_comes_later(rig: Rig, disk: SmallDisk) -> None:
    rig.start(sessions=[1])
    endpoint = rig.describe().mooncake
    assert (endpoint.registered_bytes, endpoint.registrations) == (ARENA_BYTES, 1)
    write_at(rig.arena, ALLOCATED_BYTES - 3, b"end")
    assert peer_reads(endpoint, ALLOCATED_BYTES - 3, 3) == b"end"
    disk.free()
    wait_for(lambda: rig.describe().capacity_bytes > ALLOCATED_BYTES, GROWN_SECONDS)
    write_at(rig.arena, ARENA_BYTES - 3, b"END")
    assert peer_reads(endpoint, ARENA_BYTES - 3, 3) == b"END"
    assert rig.describe().mooncake == endpoint


def test_the_controller_is_told_what_there_is_and_when_it_is_more(rig: Rig, disk: SmallDisk) -> None:
    whole_bytes = rig.start(sessions=[1]).node.capacity_bytes
    now_bytes = rig.describe().capacity_bytes
    assert ARENA_BYTES - 3 * MIB < whole_bytes < ARENA_BYTES
    assert ALLOCATED_BYTES - 3 * MIB < now_bytes < ALLOCATED_BYTES
    wait_for(lambda: rig.controller.usage.capacity_bytes == now_bytes)
    with pytest.raises(StorageFull, match=f"{now_bytes} of {now_bytes} bytes are free"):
        rig.reserve(1, ALLOCATED_BYTES)
    disk.free()
    wait_for(lambda: rig.controller.usage.capacity_bytes == whole_bytes, GROWN_SECONDS)
    assert rig.reserve(1, ALLOCATED_BYTES).length == ALLOCATED_BYTES
