"""Starting the daemons of peers."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

HOST: Final = "127.0.0.1"
START_SECONDS: Final = 20.0
STOP_SECONDS: Final = 10.0
_TAIL_BYTES: Final = 500


class Daemon:
    """One daemon, a child of this process.

    Args:
        command: program and arguments.
        address: `host:port` or the path of a socket, where it accepts connections once it is ready.
        directory: for its log.
        environ: the whole environment; None: that of this process.
    """

    def __init__(
        self, command: Sequence[str], address: str, directory: str, environ: Mapping[str, str] | None = None
    ) -> None:
        self._log = Path(directory) / f"{Path(command[0]).name}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environ)
        try:
            self._wait_ready(address)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends it, by force when it hangs."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_ready(self, address: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            with suppress(OSError), _connect(address):
                return
            time.sleep(0.02)
        tail = self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        raise RuntimeError(f"{self._log.stem} does not serve: {tail}")


def _connect(address: str) -> socket.socket:
    if "/" not in address:
        host, _, port = address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=1.0)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def free_port() -> int:
    """Returns a port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
