"""What a leak check finds in /dev/shm, and what it leaves to the processes that use it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import leaks
from tests.harness.leaks import SHM, Holdings, leaks_nothing


@pytest.fixture
def file() -> Iterator[Path]:
    path = SHM / f"tq-leak-{uuid.uuid4().hex}"
    yield path
    for left in SHM.glob(f"{path.name}*"):
        left.unlink()


def found() -> list[str]:
    return Holdings.now().leaked_since(Holdings(*map(frozenset, ((), (), (), (), ()))))


def test_a_file_that_nobody_uses_is_found(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.05)
    with pytest.raises(AssertionError, match=f"file {file}"), leaks_nothing():
        file.write_bytes(b"bytes")


def test_a_file_that_is_open_or_mapped_somewhere_is_left_to_whoever_uses_it(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, mmap.PAGESIZE)
    assert f"file {file}" not in found()
    mapped = mmap.mmap(descriptor, mmap.PAGESIZE)
    os.close(descriptor)
    other = file.with_suffix(".link")
    os.link(file, other)
    file.unlink()
    assert f"file {other}" not in found()
    mapped.close()
    assert f"file {other}" in found()


def test_a_semaphore_is_in_use_for_as_long_as_there_is_one() -> None:
    lock: Any = multiprocessing.get_context("spawn").Lock()
    file = SHM / f"sem.{lock._semlock.name.removeprefix('/')}"
    assert file.exists()
    assert f"file {file}" not in found()
