"""A file system with little room."""

from __future__ import annotations

import mmap
from contextlib import suppress
from pathlib import Path

from tests.harness.supervisor import Child, Supervisor


class SmallDisk:
    """A tmpfs that only processes started by `enter` see under its name; it goes with the test.

    Attributes:
        directory: where it is mounted, for those processes.
        outside: the same directory for all others.
        enter: command line in front of such a process' own.
    """

    def __init__(self, supervisor: Supervisor, directory: Path, size_bytes: int) -> None:
        directory.mkdir()
        mount = f"mount -t tmpfs -o size={size_bytes} tmpfs {directory} && echo mounted && exec sleep 300"
        enter = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount]
        holder: Child = supervisor.command(enter, name="disk")
        holder.wait_for("mounted")
        self.directory = directory
        self.outside = Path(f"/proc/{holder.pid}/root{directory}")
        self.enter = ["nsenter", "--target", str(holder.pid), "--user", "--mount", "--preserve-credentials"]

    def fill(self, size_bytes: int) -> None:
        """Takes so much of its room."""
        with self._filler.open("ab") as filler:
            filler.write(bytes(size_bytes))

    def fill_up(self) -> None:
        """Takes all of the room that is left."""
        with self._filler.open("ab", buffering=0) as filler, suppress(OSError):
            while True:
                filler.write(bytes(mmap.PAGESIZE))

    def free(self) -> None:
        """Gives back what was taken."""
        self._filler.unlink()

    @property
    def _filler(self) -> Path:
        return self.outside / "filler"
