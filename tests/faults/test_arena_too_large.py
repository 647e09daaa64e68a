"""A /dev/shm that is smaller than the arena: refused at the start, never met later as SIGBUS."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness.supervisor import ROOT
from tqclient.limits import MIB

# A file system of our own over /dev/shm, seen by nobody else. A node that serves is told to end at once; what lies in
# /dev/shm is listed then.
SCRIPT = """
python=$1 arena_bytes=$2
run_node() {
    # Without prefault, every page that is there was promised by the file system.
    set -- --listen=127.0.0.1:0 --name=small --prefault=false --arena-bytes=$arena_bytes
    coproc node { exec "$python" -m tqserver.storage.main "$@"; }
    pid=$node_PID
    read -r line <&"${node[0]}" && echo "$line" && kill -TERM $pid
    wait $pid
}
mount -t tmpfs -o size=$3 tmpfs /dev/shm || exit 99
eval "$4"
run_node
status=$?
ls --size --block-size=1 /dev/shm >&2
exit $status
"""


def start_node(shm_bytes: int, arena_bytes: int, before: str = "") -> subprocess.CompletedProcess[str]:
    namespace = ["unshare", "--user", "--map-root-user", "--mount"]
    arguments = [sys.executable, str(arena_bytes), str(shm_bytes), before]
    command = [*namespace, "bash", "-c", SCRIPT, "start_node", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, cwd=ROOT)


def refusal(done: subprocess.CompletedProcess[str]) -> str:
    """Returns why it refused; everything but that has been checked."""
    assert done.returncode == 1, done
    assert done.stdout == "", "it said that it serves"
    lines = [line for line in done.stderr.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stderr
    entry = json.loads(lines[0])
    assert (entry["level"], entry["event"]) == ("error", "cannot serve")
    return str(entry["reason"])


def test_a_shm_smaller_than_the_arena_is_refused(no_leaks: None) -> None:
    done = start_node(4 * MIB, 64 * MIB)
    assert refusal(done) == (
        "arena file /dev/shm/tq-small.arena: 64MiB do not fit, 4194304 bytes are free there; "
        "give less with --arena-bytes, or make /dev/shm bigger"
    )
    assert "total 0" in done.stderr, "it took memory that it cannot use, or left a file"


def test_a_shm_that_others_have_filled_is_refused(no_leaks: None) -> None:
    done = start_node(12 * MIB, 8 * MIB, "head -c 5242880 /dev/zero > /dev/shm/other")
    assert "8MiB do not fit, 7340032 bytes are free there" in refusal(done)
    assert "total 5242880" in done.stderr
    assert "tq-small" not in done.stderr.rpartition("total")[2]


def test_an_arena_that_lost_its_pages_is_refused_and_kept(no_leaks: None) -> None:
    """A copy with holes, as `cp` makes it, has the right length: its pages would be missing one by one."""
    make = (
        "run_node >/dev/null 2>&1; cd /dev/shm; cp --sparse=always tq-small.arena holes; mv holes tq-small.arena; "
        "head -c 5242880 /dev/zero > other; cd - >/dev/null"
    )
    done = start_node(12 * MIB, 8 * MIB, make)
    assert "8MiB do not fit" in refusal(done)
    assert "tq-small.arena" in done.stderr.rpartition("total")[2]


def test_a_shm_as_large_as_the_arena_is_enough(no_leaks: None) -> None:
    done = start_node(8 * MIB, 8 * MIB)
    assert done.returncode == 0, done
    assert json.loads(done.stdout)["arena"] == "/dev/shm/tq-small.arena"
    assert "total 8388608" in done.stderr


@pytest.mark.parametrize("arena_bytes", [8 * MIB + 4096, 1 << 40])
def test_a_page_more_than_there_is_is_too_much(arena_bytes: int, no_leaks: None) -> None:
    assert "8388608 bytes are free there" in refusal(start_node(8 * MIB, arena_bytes))
