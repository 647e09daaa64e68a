from __future__ import annotations

import mmap
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.harness import Supervisor, wait_until
from tests.harness.leaks import Holdings, leaks_nothing
from tests.harness.supervisor import is_stopped

TICKS = "import time\nprint('up', flush=True)\nwhile True: time.sleep(0.01)"
COUNTERS = """
import sys, threading
import numpy as np
counts = np.memmap(sys.argv[1], np.uint8, "r+")

def count(i):  # most of it outside the interpreter's lock, so that threads run side by side
    while True: np.add(counts[i::4], 1, out=counts[i::4])

for i in range(4): threading.Thread(target=count, args=(i,)).start()
print("up", flush=True)
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_kill_stop_and_resume(supervisor: Supervisor) -> None:
    child = supervisor.python(TICKS)
    assert child.wait_for("up") == "up"
    child.stop()
    assert child.stopped
    assert child.running
    child.resume()
    wait_until(lambda: not child.stopped, what="it goes on")
    child.stop()
    child.kill()
    assert child.wait() == -signal.SIGKILL
    assert not child.running


def test_a_process_has_stopped_when_no_thread_of_it_runs(supervisor: Supervisor, tmp_path: Path) -> None:
    shared = tmp_path / "counts"
    shared.write_bytes(bytes(1 << 20))
    child = supervisor.python(COUNTERS, shared)
    child.wait_for("up")
    for _ in range(50):
        child.stop()
        assert is_stopped(child.pid)
        before = shared.read_bytes()
        time.sleep(0.005)
        assert shared.read_bytes() == before
        child.resume()
        wait_until(lambda before=before: shared.read_bytes() != before, what="it goes on")  # type: ignore[misc]
    child.kill()
    assert is_stopped(child.pid)


def test_everything_ends_with_the_block(tmp_path: Path) -> None:
    fork = "import os, sys\npid = os.fork()\nif pid: print(pid, flush=True)\nopen(sys.argv[1]).read()"
    os.mkfifo(tmp_path / "open")
    with (tmp_path / "open").open("r+b", buffering=0):  # so long, none of them ends by itself
        with Supervisor(tmp_path) as supervisor:
            parent, orphan = (supervisor.python(fork, tmp_path / "open") for _ in range(2))
            pids = [int(child.wait_for("").strip()) for child in (parent, orphan)]
            orphan.kill()
            parent.stop()
            assert all(map(alive, pids))
        assert not parent.running
        wait_until(lambda: not any(map(alive, pids)), what="grandchildren are gone")


def test_output_arguments_and_environment(supervisor: Supervisor) -> None:
    program = "import os, sys\nprint(sys.argv[1:], os.environ['TQ_X'])\nprint('bad', file=sys.stderr)\nsys.exit(3)"
    child = supervisor.python(program, 1, "two", env={"TQ_X": "y"})
    assert child.wait() == 3
    assert child.stdout == "['1', 'two'] y\n"
    assert child.stderr == "bad\n"


def test_failures_quote_the_output(supervisor: Supervisor) -> None:
    ended = supervisor.python("print('hello')", name="greeter")
    with pytest.raises(AssertionError, match=r"greeter ended without printing 'bye'(?s:.*)hello"):
        ended.wait_for("bye")
    running = supervisor.python(TICKS)
    with pytest.raises(AssertionError, match=r"not within 0\.05 s: child-1 prints 'never'"):
        running.wait_for("never", timeout=0.05)
    with pytest.raises(AssertionError, match=r"child-1 did not end within 0\.05 s"):
        running.wait(timeout=0.05)


def test_nothing_left_behind_passes(no_leaks: None) -> None:
    thread = threading.Thread(target=lambda: None)
    thread.start()
    with open(os.devnull):
        thread.join()


def test_what_is_left_behind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.leaks.GRACE_SECONDS", 0.05)
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-over")
    path = Path(f"/dev/shm/tq-test-leak-{os.getpid()}")
    pages: list[mmap.mmap] = []
    before = Holdings.now()

    def leave() -> None:
        with leaks_nothing():
            thread.start()
            with path.open("xb+") as file:
                file.truncate(4096)
                pages.append(mmap.mmap(file.fileno(), 4096))

    try:
        with pytest.raises(AssertionError, match="left behind:") as failure:
            leave()
        for leak in (f": {path}", "thread left-over", "mapping "):
            assert leak in str(failure.value)
        assert f"file {path}" not in str(failure.value)  # it is in use
        release.set()
        thread.join()
        pages.pop().close()
        assert Holdings.now().leaked_since(before) == [f"file {path}"]
    finally:
        release.set()
        path.unlink()
    assert Holdings.now().leaked_since(before) == []
