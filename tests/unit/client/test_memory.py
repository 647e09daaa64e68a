from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tqclient.limits import MIB
from tqclient.memory import Memory


def mapped() -> list[str]:
    """What of the address space is mapped: without the files' names, which a heap that grows does not change."""
    return [line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if "[heap]" not in line]


@pytest.mark.parametrize("length", [1, 4096, 2 * MIB, 5 * MIB + 4097])
def test_a_file_is_mapped_where_its_huge_pages_fit_and_nothing_is_left_of_it(tmp_path: Path, length: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(os.urandom(length))
    spared = [np.empty(1 << 20, np.uint8) for _ in range(4)]  # the allocator need not map for what follows
    del spared
    with path.open("r+b") as file:
        for _ in range(3):
            memory = Memory(length, descriptor=file.fileno())
            end = memory.address + -(-length // 4096) * 4096
            assert memory.address % (2 * MIB) == 0
            assert f"{memory.address:x}-{end:x}" in mapped()  # and neither in front of it nor behind
            memory.array()[-1:] = 7
            del memory
    assert not any(str(path) in line for line in Path("/proc/self/maps").read_text().splitlines())
    assert path.read_bytes()[-1:] == b"\7"


def test_a_file_that_may_not_be_mapped_leaves_no_address_space_taken(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4 * MIB))
    with path.open("rb") as file:
        before = Path("/proc/self/statm").read_text().split()[0]
        for _ in range(20):
            with pytest.raises(PermissionError, match="cannot map 4194304 bytes"):
                Memory(4 * MIB, descriptor=file.fileno())
        after = Path("/proc/self/statm").read_text().split()[0]
    assert int(after) - int(before) < 4 * MIB // 4096  # of twenty
