"""The limit of memory of a cgroup, in both versions and in what lies around it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tqclient.limits import MIB
from tqserver.storage.arena import open_arena
from tqserver.storage.cgroup import memory_limit
from tqserver.storage.main import warn_of_limit

UNLIMITED_V1 = "9223372036854771712\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        ("0::/\n", {}, None),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {"memory.max": "1048576\n"}, 1 << 20),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n", "memory.max": "8192\n"}, 4096),
        ("0::/of/the/host\n", {"memory.max": "8192\n"}, 8192),
        ("4:memory:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "4096\n"}, 4096),
        ("4:cpu,memory:/job\n", {"memory/memory.limit_in_bytes": UNLIMITED_V1}, int(UNLIMITED_V1)),
        ("3:cpuset:/job\n", {"memory.max": "4096\n"}, None),
        ("nonsense", {"memory.max": "none of it\n"}, None),
    ],
)
def test_the_tightest_limit_around_this_process_is_found(
    tmp_path: Path, own: str, files: dict[str, str], expected: int | None
) -> None:
    (tmp_path / "own").write_text(own)
    for name, text in files.items():
        file = tmp_path / "mounted" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert memory_limit(tmp_path / "own", tmp_path / "mounted") == expected


def test_where_there_are_no_cgroups_there_is_no_limit(tmp_path: Path) -> None:
    assert memory_limit(tmp_path / "own", tmp_path) is None


@pytest.mark.parametrize(("limit", "warns"), [(None, False), (8 * MIB, False), (8 * MIB - 1, True)])
def test_an_arena_that_the_limit_leaves_no_room_for_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, limit: int | None, warns: bool
) -> None:
    with open_arena(tmp_path / "a", node="n", file_bytes=8 * MIB, segment_bytes=4 * MIB) as arena:
        warn_of_limit(arena, limit)
    assert ["--arena-bytes" in record.getMessage() for record in caplog.records] == [True] * warns
