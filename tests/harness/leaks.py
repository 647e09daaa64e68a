"""What this process holds, before and after a test: descriptors, threads, children, shared memory."""

from __future__ import annotations

import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.harness.supervisor import POLL_SECONDS, wait_until
from tqclient.lane import Lane
from tqclient.limits import MIB

SHM: Final = Path("/dev/shm")
GRACE_SECONDS: Final = 30.0
"""Threads and sockets that were told to end may take so long."""
SOCKET_SECONDS: Final = 5.0
"""So long is waited for a socket that not every build of the transfer engine opens."""
# gRPC keeps its poller for the life of the process; an event loop that leaks shows up by its sockets.
_SHARED_DESCRIPTORS: Final = ("anon_inode:[eventpoll]", "anon_inode:[eventfd]", "/dev/null", "/dev/urandom", "/proc/")

_CLUSTER_FILE: Final = re.compile(r"tq-local-(\d+)-")  # of `LocalCluster`: the pid that made it


@dataclass(frozen=True)
class Holdings:
    """What a process holds.

    Attributes:
        descriptors: (number, what it is open on).
        threads: Python's, by (ident, name).
        children: pids.
        mappings: lines of shared mappings of files in /dev/shm.
        shm_files: names; without those of a cluster that another process runs, whose affair they are.
    """

    descriptors: frozenset[tuple[int, str]]
    threads: frozenset[tuple[int | None, str]]
    children: frozenset[int]
    mappings: frozenset[str]
    shm_files: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        """Counts."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return cls(
            descriptors=frozenset(_descriptors()),
            threads=frozenset((thread.ident, thread.name) for thread in threading.enumerate()),
            children=frozenset(_children()),
            mappings=frozenset(line.split(maxsplit=1)[0] for line in lines if f" {SHM}/" in line),
            shm_files=frozenset(name for name in os.listdir(SHM) if not _is_foreign(name)),
        )

    def leaked_since(self, before: Holdings) -> list[str]:
        """Describes what is held now and was not before; of files in /dev/shm, those that no process uses."""
        new = self.descriptors - before.descriptors
        kept = _kept_by_lanes() if new else set()
        leaks = [f"descriptor {number}: {target}" for number, target in new if number not in kept]
        leaks += [f"thread {name}" for _, name in self.threads - before.threads]
        leaks += [f"child process {pid}" for pid in self.children - before.children]
        leaks += [f"mapping {line}" for line in self.mappings - before.mappings]
        new_files = self.shm_files - before.shm_files
        if new_files:
            used = _inodes_in_use()
            leaks += [f"file {SHM}/{name}" for name in sorted(new_files) if _inode(SHM / name) not in used]
        # A file may have any name; one that cannot be encoded would end the run of all tests, by no name of a test.
        return [leak.encode(errors="backslashreplace").decode() for leak in leaks]


@contextmanager
def leaks_nothing() -> Iterator[None]:
    """Fails when its block leaves behind what was not there before."""
    before = Holdings.now()
    yield
    if (engine := sys.modules.get("tqclient.transport.mooncake.engine")) is not None:
        engine.end_parked()  # they are kept for the peers to come, with their sockets
    deadline = time.monotonic() + GRACE_SECONDS
    while leaks := Holdings.now().leaked_since(before):
        gc.collect()
        if time.monotonic() >= deadline:
            raise AssertionError("left behind:\n  " + "\n  ".join(leaks))
        time.sleep(POLL_SECONDS)


def forget_failure() -> None:
    """Drops the traceback that pytest keeps of a test that failed: what its frames hold has not leaked.

    Views of an arena do: the failure was told as a mapping that was left behind, half a minute later.
    """
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, name):
            delattr(sys, name)


def load_engine() -> None:
    """Makes a first transfer engine: the library keeps a few descriptors from then on, which no test has leaked.

    One of them, a datagram socket, is opened by a thread of the library's, which a busy machine lets come late.
    """
    from tqclient.transport.mooncake.engine import Engine

    Engine("127.0.0.1", "", MIB).release()
    with suppress(AssertionError):  # other builds of the library may do without
        wait_until(_has_datagram_socket, timeout=SOCKET_SECONDS, what="the library's thread has its socket")


def _has_datagram_socket() -> bool:
    sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    datagram = {f"socket:[{each[6]}]" for each in sockets if each[4] == "0002"}  # of this network, whoever's they are
    return any(target in datagram for _, target in _descriptors())


def _is_foreign(shm_file: str) -> bool:
    maker = _CLUSTER_FILE.match(shm_file)
    return maker is not None and int(maker[1]) != os.getpid() and Path(f"/proc/{maker[1]}").exists()


def _descriptors() -> Iterator[tuple[int, str]]:
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one that listed the folder
            target = os.readlink(f"/proc/self/fd/{name}")
            if not target.startswith(_SHARED_DESCRIPTORS):
                yield int(name), target


def _kept_by_lanes() -> set[int]:
    """The connections that open clients keep for their next calls; how many depends on which calls met by chance."""
    lanes = [each for each in gc.get_objects() if type(each) is Lane and not each._closed]
    return {connection._socket.fileno() for lane in lanes for connection in list(lane._idle)}


def _children() -> Iterator[int]:
    for task in os.listdir("/proc/self/task"):
        with suppress(FileNotFoundError):  # the thread has ended
            yield from map(int, Path(f"/proc/self/task/{task}/children").read_text().split())


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _inodes_in_use() -> set[int | None]:
    """Inodes of files in /dev/shm that some process of this machine has open or mapped; None: of one that is gone.

    Not their names: the C library makes a semaphore under another name than it has from then on.
    """
    used: set[int | None] = {None}
    prefix = f"{SHM}/"
    for process in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(f"/proc/{process}/fd"):
                with suppress(OSError):
                    descriptor = f"/proc/{process}/fd/{number}"
                    if os.readlink(descriptor).startswith(prefix):
                        used.add(os.stat(descriptor).st_ino)
            for line in Path(f"/proc/{process}/maps").read_text().splitlines():
                if f" {prefix}" in line:
                    used.add(int(line.split(maxsplit=5)[4]))
    return used
