"""A whole cluster on this machine, as child processes: for tests, notebooks and demos.

    with LocalCluster(storage_nodes=1, arena="1GiB") as cluster:
        client = tq.connect(cluster.address)

Every daemon listens on a free port of the loopback address. Nothing of a cluster is left behind: not when it is
stopped, and not when the process that started it is killed. Each daemon then sees a pipe close, ends in an orderly way
and removes what is its own; what a killed daemon could not remove goes when the next cluster starts.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final

import grpc

from tqclient.errors import InvalidArgument, Unavailable
from tqclient.start import child_environment
from tqclient.wire.dialing import dial
from tqclient.wire.v1 import storage_pb2, storage_pb2_grpc
from tqserver.config import parse_size

_SHM: Final = Path("/dev/shm")
_OWNED: Final = re.compile(r"tq-local-(\d{1,7})-[0-9a-f]+.*")  # of our files and directories: the pid that made them
_NODE_LOCK: Final = struct.Struct("@hhqqi4x")  # struct flock
_POLL: Final = 0.01
_ORPHAN_DRAIN: Final = 15.0
"""Seconds that an orphaned daemon has for an orderly end."""
_LOG_TAIL_LINES: Final = 20


class Daemon:
    """One daemon of a cluster.

    Attributes:
        name: `controller`, `storage-0`, ...
        address: host:port; stays the same over `restart`.
        log: the file with everything it wrote to stderr.
    """

    def __init__(
        self, name: str, module: str, arguments: Sequence[str], scratch: Path, environ: Mapping[str, str]
    ) -> None:
        self.name = name
        self.address = ""
        self.log = scratch / f"{name}.log"
        self._module = module
        self._arguments = list(arguments)
        self._scratch = scratch
        self._environ = dict(environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline = -1
        self._ended_by_us = False

    @property
    def pid(self) -> int:
        """Process id of the present life, or of the last one."""
        if self._process is None:
            raise Unavailable(f"{self.name} was not started")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while it runs or before it was started."""
        return self._process.poll() if self._process is not None else None

    @property
    def died(self) -> bool:
        """Whether it ended without being told to."""
        return self.returncode is not None and not self._ended_by_us

    def launch(self) -> None:
        """Starts the process and returns at once."""
        if self._process is not None and self.returncode is None:
            raise InvalidArgument(f"{self.name} is running already")
        self._drop_lifeline()
        reader, self._lifeline = os.pipe()
        listen = ["--listen", self.address or "127.0.0.1:0"]
        command = [sys.executable, "-m", "tqserver.local", f"--lifeline={reader}", f"--scratch={self._scratch}"]
        self._ended_by_us = False
        try:
            with self.log.open("ab") as log:
                self._process = subprocess.Popen(
                    [*command, self._module, *listen, *self._arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    pass_fds=(reader,),
                    env=self._environ,
                    start_new_session=True,  # a Ctrl-C in the terminal is the parent's to handle
                )
        finally:
            os.close(reader)

    def wait_serving(self, deadline: float) -> None:
        """Waits until the daemon says that it is serving.

        Args:
            deadline: of `time.monotonic`.

        Raises:
            Unavailable: it ended, or took too long; the message ends with its log.
        """
        process = self._process
        if process is None or process.stdout is None:
            raise Unavailable(f"{self.name} was not started")
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(process.stdout.fileno(), 4096) if ready else b""
            if not piece:
                why = f"ended with status {process.wait()}" if ready else "was not serving in time"
                raise Unavailable(f"{self.name} {why}; its log:\n{self.log_tail()}")
            line += piece
        self.address = str(json.loads(line)["serving"])

    def log_tail(self) -> str:
        """Returns the last lines of its log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def kill(self) -> None:
        """Ends it with SIGKILL, and waits until it is gone. Does nothing when it is."""
        self._end(signal.SIGKILL, None)

    def terminate(self, timeout: float = 15.0) -> int:
        """Ends it with SIGTERM, or after `timeout` seconds with SIGKILL; returns its exit status."""
        self._end(signal.SIGTERM, timeout)
        return self.returncode or 0

    def restart(self, timeout: float = 15.0) -> None:
        """Starts it again on its former port, with its former data; returns when it serves.

        Args:
            timeout: seconds until it must serve. A process that still runs is terminated first.
        """
        self.terminate(timeout)
        self.launch()
        self.wait_serving(time.monotonic() + timeout)

    def _end(self, number: signal.Signals, timeout: float | None) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            self._ended_by_us = True
            process.send_signal(number)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout is not None:
            process.stdout.close()
        self._drop_lifeline()

    def _drop_lifeline(self) -> None:
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class LocalCluster:
    """A controller and some storage nodes, as child processes.

    Usable as a context manager, or with `start` and `stop`. Leaving the block raises when a daemon died by itself.

    Args:
        storage_nodes: how many.
        arena: size of each node's arena: bytes, or text such as "1GiB".
        session_lease: seconds that a client may be silent; None is the controller's default.
        data_dir: keeps journal, logs and arenas when the cluster stops, so that one that is started later over the same
            directory goes on with them. None: all of them are temporary.
        prefault: whether nodes touch their arena's pages in the background.
        mooncake: whether nodes run a transfer engine, as `tq-storage --mooncake`: auto, on, rdma or off. They listen on
            the loopback address, where auto runs none: an engine would be open to other hosts.
        log_level: of the daemons.
        controller_args: further flags of `tq-controller`.
        storage_args: further flags of `tq-storage`.
        environ: further variables for the daemons. Those of this process that begin with TQ_ are not passed on.
        start_timeout: seconds until all of them must serve.
    """

    def __init__(
        self,
        storage_nodes: int = 1,
        arena: str | int = "1GiB",
        *,
        session_lease: float | None = None,
        data_dir: str | os.PathLike[str] | None = None,
        prefault: bool = True,
        mooncake: str = "auto",
        log_level: str = "info",
        controller_args: Sequence[str] = (),
        storage_args: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        start_timeout: float = 30.0,
    ) -> None:
        self._nodes = storage_nodes
        self._arena_bytes = parse_size(arena) if isinstance(arena, str) else arena
        self._data_dir = Path(data_dir).absolute() if data_dir is not None else None
        self._start_timeout = start_timeout
        lease = [f"--session-lease={session_lease}"] if session_lease is not None else []
        self._controller_args = [*lease, f"--log-level={log_level}", *controller_args]
        self._storage_args = [
            f"--prefault={str(prefault).lower()}",
            f"--mooncake={mooncake}",
            f"--log-level={log_level}",
            *storage_args,
        ]
        own = {name: value for name, value in os.environ.items() if not name.startswith("TQ_")}
        self._environ = {**child_environment(own), **(environ or {})}
        self._pid = os.getpid()
        self._directory: Path | None = None
        self._arenas: list[Path] = []
        self._controller: Daemon | None = None
        self._storage: list[Daemon] = []

    @property
    def controller(self) -> Daemon:
        """The controller."""
        if self._controller is None:
            raise Unavailable("the cluster was not started")
        return self._controller

    @property
    def storage(self) -> Sequence[Daemon]:
        """The storage nodes."""
        return tuple(self._storage)

    @property
    def address(self) -> str:
        """host:port of the controller: what `tq.connect` takes."""
        return self.controller.address

    @property
    def directory(self) -> Path:
        """Where journal and logs lie."""
        if self._directory is None:
            raise Unavailable("the cluster was not started")
        return self._directory

    def start(self) -> LocalCluster:
        """Starts every daemon; returns when all of them serve and the nodes are attached.

        Raises:
            InvalidArgument: `data_dir` cannot be made or written to.
            Unavailable: one of them did not get there; the message ends with its log. All are stopped then.
        """
        if self._controller is not None:
            raise InvalidArgument("the cluster is running already")
        remove_stale()
        self._pid = os.getpid()
        own = f"tq-local-{self._pid}-{secrets.token_hex(4)}"
        if self._data_dir is None:
            self._directory = Path(tempfile.mkdtemp(prefix=own + "-"))
            scratch, stem = self._directory, own
        else:
            _make_directory(self._data_dir)
            scratch = self._directory = self._data_dir
            stem = "tq-data-" + hashlib.sha256(str(self._data_dir).encode()).hexdigest()[:16]
        deadline = time.monotonic() + self._start_timeout
        try:
            journal = f"--data-dir={self._directory / 'controller'}"
            self._controller = Daemon(
                "controller", "tqserver.controller.main", [journal, *self._controller_args], scratch, self._environ
            )
            self._controller.launch()
            self._controller.wait_serving(deadline)
            for index in range(self._nodes):
                self._arenas.append(_SHM / f"{stem}-{index}.arena")
                self._storage.append(self._node(index, scratch))
                self._storage[-1].launch()
            for daemon in self._storage:
                daemon.wait_serving(deadline)
            self.wait_attached(deadline - time.monotonic())
        except BaseException:
            self.stop()
            raise
        return self

    def _node(self, index: int, scratch: Path) -> Daemon:
        arguments = [
            f"--name=storage-{index}",
            f"--controller={self.address}",
            f"--arena-path={self._arenas[index]}",
            f"--arena-bytes={self._arena_bytes}",
            f"--unlink-on-exit={str(self._data_dir is None).lower()}",
            *self._storage_args,
        ]
        return Daemon(f"storage-{index}", "tqserver.storage.main", arguments, scratch, self._environ)

    def wait_attached(self, timeout: float = 15.0) -> None:
        """Waits until every storage node has its link to the controller.

        Raises:
            Unavailable: one has none after `timeout` seconds.
        """
        self._wait_nodes("is not attached", lambda node: node.attached, timeout)

    def wait_prefaulted(self, timeout: float = 120.0) -> None:
        """Waits until the pages of every arena are there: what is measured before pays for them.

        Raises:
            Unavailable: some are missing after `timeout` seconds, or there is no prefault.
        """
        self._wait_nodes(
            "has not touched all of its arena", lambda node: node.prefaulted_bytes == node.capacity_bytes, timeout
        )

    def _wait_nodes(self, failing: str, ready: Callable[[storage_pb2.DescribeNodeReply], bool], timeout: float) -> None:
        deadline = time.monotonic() + timeout
        for daemon in self._storage:
            with dial(daemon.address) as channel:
                stub = storage_pb2_grpc.StorageStub(channel)  # type: ignore[no-untyped-call,unused-ignore]
                while True:
                    with contextlib.suppress(grpc.RpcError):
                        left = max(_POLL, deadline - time.monotonic())
                        if ready(stub.DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=left)):
                            break
                    if daemon.died or time.monotonic() >= deadline:
                        raise Unavailable(f"{daemon.name} {failing}; its log:\n{daemon.log_tail()}")
                    time.sleep(_POLL)

    def stop(self) -> None:
        """Ends every daemon and, without a `data_dir`, removes what the cluster left on this machine.

        Repeatable; without effect in a forked child of the process that started them.
        """
        if self._pid != os.getpid():
            return
        for daemon in (*self._storage, *filter(None, (self._controller,))):
            daemon.terminate()
        if self._data_dir is None:
            for arena in self._arenas:
                arena.unlink(missing_ok=True)
            if self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)
        self._controller, self._directory = None, None
        self._storage, self._arenas = [], []

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pid != os.getpid():
            return
        daemons = [*self._storage, *filter(None, (self._controller,))]
        died = [f"{d.name} ended with status {d.returncode}; its log:\n{d.log_tail()}" for d in daemons if d.died]
        if isinstance(error, Exception):  # not when somebody just wanted to leave: Ctrl-C, sys.exit
            for daemon in daemons:
                sys.stderr.write(f"--- {daemon.name}, {daemon.log}\n{daemon.log_tail()}\n")
        self.stop()
        if died and error is None:
            raise Unavailable("\n".join(died))


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise InvalidArgument(
            f"data_dir {path}: {error.strerror}; give a directory that this process can make, or write to"
        ) from None


def remove_stale() -> None:
    """Removes what clusters left behind whose process and whose daemons are gone."""
    for directory in (_SHM, Path(tempfile.gettempdir())):
        for path in directory.glob("tq-local-*"):
            match = _OWNED.fullmatch(path.name)
            if match is None or _alive(int(match[1])):
                continue
            with contextlib.suppress(OSError):  # somebody else's, or gone meanwhile
                if path.is_dir():
                    shutil.rmtree(path)
                elif not _served(path):
                    path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _served(path: Path) -> bool:
    """Whether a node holds the arena's lock: in another container, where its pids are not ours."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _NODE_LOCK.pack(fcntl.F_WRLCK, 0, 0, 1, 0))
        return int(_NODE_LOCK.unpack(found)[0]) != fcntl.F_UNLCK
    finally:
        os.close(descriptor)


def _child(argv: Sequence[str]) -> int:
    """Runs one daemon in this process, which is a child of a LocalCluster, and ends it when the parent is gone."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--lifeline", type=int, required=True)
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args(argv)
    orphaned = threading.Event()

    def watch() -> None:
        os.read(options.lifeline, 1)  # nobody writes: it returns when the last writer is gone
        orphaned.set()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_ORPHAN_DRAIN)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    try:
        status: int = importlib.import_module(options.module).main(options.arguments)
        return status
    finally:
        if orphaned.is_set() and _OWNED.fullmatch(options.scratch.name):
            shutil.rmtree(options.scratch, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(_child(sys.argv[1:]))
