"""What the numbers were measured on, and what a process has used."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "grpcio",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
    "mooncake-transfer-engine-non-cuda",
    "numpy",
    "protobuf",
    "torch",
    "xxhash",
)


def describe() -> dict[str, str]:
    """Returns the machine and the versions that matter, as text for people."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{os.cpu_count()} × {cpu}",
        "memory": f"{memory_bytes / 2**30:.1f} GiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load": f"{os.getloadavg()[0]:.2f}",
        **{package: found for package in PACKAGES if (found := _version(package))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a process has used since its start.

    Attributes:
        cpu_s: user and system seconds of all its threads.
        rss_peak_bytes: the largest resident set so far; shared pages count.
        minor_faults: pages that were mapped without I/O.
    """

    cpu_s: float
    rss_peak_bytes: int
    minor_faults: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Reads `/proc` for a live process."""
        # The command name in parentheses may hold spaces; the fields behind it are fixed.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        status = Path(f"/proc/{pid}/status").read_text()
        peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        return cls(ticks / os.sysconf("SC_CLK_TCK"), peak_kib * 1024, int(fields[7]))

    @classmethod
    def of_all(cls, pids: Iterable[int]) -> Usage:
        """Adds up processes; what has ended meanwhile counts as nothing. Pages that they share are counted for each."""
        total = cls(0.0, 0, 0)
        for pid in pids:
            with suppress(FileNotFoundError, ProcessLookupError, StopIteration):
                used = cls.of(pid)
                total = cls(
                    total.cpu_s + used.cpu_s,
                    total.rss_peak_bytes + used.rss_peak_bytes,
                    total.minor_faults + used.minor_faults,
                )
        return total


def children_of(pid: int) -> set[int]:
    """Returns the processes below one, at any depth."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(FileNotFoundError, ProcessLookupError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    found: set[int] = set()
    waiting = [pid]
    while waiting:
        for child in parents.get(waiting.pop(), []):
            found.add(child)
            waiting.append(child)
    return found
