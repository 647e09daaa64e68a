"""The lock of a mapped writer, as other processes see it: it ends with the writer, and not before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import Child, Supervisor, wait_until
from tests.unit.transport.fake_node import ARENA, DATA_OFFSET, make_arena
from tqclient.wire.arena import session_locked

pytestmark = pytest.mark.usefixtures("no_leaks")

SESSION = 11
PATTERN = 0xA5
# Maps the arena, locks the session, and copies into it for ever; with `fork`, a child is left that does nothing.
WRITER = f"""
import os, sys
import numpy as np
from tqclient.transport.mapping import open_arena
mapping = open_arena(sys.argv[1], {ARENA})
mapping.lock_session({SESSION})
target = mapping.target({DATA_OFFSET}, 1 << 20)
if "fork" in sys.argv and os.fork() == 0:
    print("forked", flush=True)
    sys.stdin.read()
    sys.exit()
source = np.full(1 << 20, {PATTERN}, dtype=np.uint8)
print("writing", flush=True)
while True:
    np.copyto(target, source)
"""


@pytest.fixture
def arena(tmp_path: Path) -> Path:
    return make_arena(tmp_path / "arena")


@pytest.fixture
def descriptor(arena: Path) -> Iterator[int]:
    """The arena as the storage node has it open."""
    descriptor = os.open(arena, os.O_RDWR)
    yield descriptor
    os.close(descriptor)


def start(supervisor: Supervisor, arena: Path, *arguments: str) -> Child:
    writer = supervisor.python(WRITER, arena, *arguments, name="writer")
    writer.wait_for("writing")
    return writer


def first_byte(descriptor: int) -> int:
    return os.pread(descriptor, 1, DATA_OFFSET)[0]


def test_a_killed_writer_loses_its_lock_at_once(supervisor: Supervisor, arena: Path, descriptor: int) -> None:
    writer = start(supervisor, arena)
    assert session_locked(descriptor, SESSION)
    writer.kill()
    wait_until(lambda: not session_locked(descriptor, SESSION), what="the lock is gone")
    # From here on, nothing of it can land any more.
    os.pwrite(descriptor, bytes(1), DATA_OFFSET)
    assert first_byte(descriptor) == 0


def test_a_stopped_writer_keeps_its_lock_and_goes_on_writing(
    supervisor: Supervisor, arena: Path, descriptor: int
) -> None:
    writer = start(supervisor, arena)
    writer.stop()
    assert session_locked(descriptor, SESSION)
    os.pwrite(descriptor, bytes(1 << 20), DATA_OFFSET)
    writer.resume()
    wait_until(lambda: first_byte(descriptor) == PATTERN, what="the late write lands")
    assert session_locked(descriptor, SESSION)


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_writer(
    supervisor: Supervisor, arena: Path, descriptor: int
) -> None:
    writer = start(supervisor, arena, "fork")
    writer.wait_for("forked")
    writer.kill()
    wait_until(lambda: not session_locked(descriptor, SESSION), what="the lock is gone")
    os.killpg(writer.pid, 0)  # the child is still there
