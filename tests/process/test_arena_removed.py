"""The arena's file: removed by its node as it ends, and by others under it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.process.storage_rig import Rig, wait_for
from tqclient.wire.arena import lock_engine


@pytest.mark.parametrize("replaced", [False, True])
def test_a_node_says_that_its_arena_was_removed(tmp_path: Path, replaced: bool) -> None:
    with Rig(tmp_path) as rig:
        rig.start(sessions=[1])
        window = rig.reserve(1, 100)
        assert not rig.describe().arena_removed
        rig.arena.unlink()
        if replaced:
            rig.arena.write_bytes(b"another file")
        assert rig.describe().arena_removed
        told = "the arena's file was removed while it is in use"
        wait_for(lambda: told in rig.daemon.log.read_text())
        rig.write(1, window, b"x" * 100)
        assert rig.daemon.log.read_text().count(told) == 1
        assert rig.daemon.terminate() == 0
        assert rig.arena.exists() == replaced


def test_unlink_on_exit(tmp_path: Path) -> None:
    with Rig(tmp_path, "--unlink-on-exit") as rig:
        rig.start()
        assert rig.arena.exists()
        assert rig.daemon.terminate() == 0
        assert not rig.arena.exists()


def test_unlink_on_exit_also_when_the_signal_comes_before_the_node_serves(tmp_path: Path) -> None:
    """It died of the signal, and left the arena behind."""
    path = tmp_path / "node.arena"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    lock_engine(descriptor)  # so long it waits with the file open
    command = [sys.executable, "-m", "tqserver.storage.main", "--listen=127.0.0.1:0", "--unlink-on-exit"]
    command += [f"--arena-path={path}", "--arena-bytes=16MiB", "--controller=127.0.0.1:1"]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process = Path(f"/proc/{child.pid}")
        wait_for(lambda: b"--unlink-on-exit" in (process / "cmdline").read_bytes(), timeout=10)
        wait_for(lambda: any(os.path.realpath(each) == str(path) for each in (process / "fd").iterdir()), timeout=10)
        child.terminate()
        os.close(descriptor)
        assert child.wait(10) == 0
        assert not path.exists()
    finally:
        child.kill()
        child.wait()
