"""What a leak check finds in /dev/shm, and what it leaves to the processes that use it."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import leaks
from tests.harness.leaks import SHM, Holdings, forget_failure, leaks_nothing


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


def test_a_file_whose_name_is_no_text_is_found_by_what_can_be_printed(file: Path) -> None:
    odd = file.with_suffix(".\udcff")
    odd.touch()
    assert f"file {file}.\\udcff" in found()


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


def test_what_the_frames_of_a_failed_test_hold_has_not_leaked(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A view of an arena was told as a mapping that was left behind, beside the failure, and after a long wait."""
    monkeypatch.setattr(leaks, "GRACE_SECONDS", 0.05)

    def fail() -> None:
        with file.open("w+b") as opened:
            opened.truncate(mmap.PAGESIZE)
            view = memoryview(mmap.mmap(opened.fileno(), mmap.PAGESIZE))
        file.unlink()
        raise ZeroDivisionError(view.nbytes)

    with leaks_nothing():
        try:
            fail()
        except ZeroDivisionError as error:  # as pytest keeps it
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        assert any(leak.startswith("mapping") for leak in found())
        forget_failure()
