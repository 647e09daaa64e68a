"""What a container or a unit lets its processes have of memory; the pages of an arena are counted there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_OWN: Final = Path("/proc/self/cgroup")
_MOUNTED: Final = Path("/sys/fs/cgroup")


def memory_limit(own: Path = _OWN, mounted: Path = _MOUNTED) -> int | None:
    """Returns the fewest bytes that this process's cgroup, or one around it, is limited to; None: it has no limit.

    Args:
        own: names its cgroup, of version 2 (`0::PATH`) and of version 1 (`N:memory:PATH`).
        mounted: where the cgroups are.
    """
    found = []
    for file in _files(own, mounted):
        with contextlib.suppress(OSError, ValueError):  # it is not there, or says `max`
            found.append(int(file.read_text()))
    return min(found, default=None)


def _files(own: Path, mounted: Path) -> Iterator[Path]:
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            root, name = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        inner = Path(path.lstrip("/"))  # as seen from the host: within a container, only its end or nothing is there
        yield from (root / each / name for each in (inner, *inner.parents))
