"""Crash and error points for fault tests, set with `TQ_FAILPOINT=name:action[:nth]`; without it, `hit` does nothing.

Actions: `exit` ends the process as `kill -9` would, with status `EXIT_STATUS`; `EIO` and `ENOSPC` raise that OSError.
The point fires at its nth pass, counted from 1 (the default), and at no other. Commas separate several points.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from typing import Final

EXIT_STATUS: Final = 86

BEFORE_COMMIT: Final = "journal-before-commit"
AFTER_COMMIT: Final = "journal-after-commit"
COMMIT: Final = "journal-commit"
APPLY: Final = "apply"
AFTER_APPLY: Final = "after-apply"
SNAPSHOT_BEFORE: Final = "snapshot-before"
SNAPSHOT_MIDDLE: Final = "snapshot-middle"
SNAPSHOT_AFTER: Final = "snapshot-after"
POINTS: Final = (
    BEFORE_COMMIT,
    COMMIT,
    AFTER_COMMIT,
    APPLY,
    AFTER_APPLY,
    SNAPSHOT_BEFORE,
    SNAPSHOT_MIDDLE,
    SNAPSHOT_AFTER,
)
"""In the order of a command's life; `journal-commit` stands for the commit itself (an fsync that fails)."""
REPLAY: Final = "replay"
"""Passed by a start, for each record that it applies."""

_ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC}


class Failpoints:
    """The points that are armed.

    Args:
        spec: as in `TQ_FAILPOINT`; empty arms none.

    Raises:
        ValueError: an unknown point or action: a typo would make a test pass for nothing.
    """

    def __init__(self, spec: str = "") -> None:
        self._armed: dict[str, tuple[str, int]] = {}
        self._passes: dict[str, int] = {}
        for part in filter(None, spec.split(",")):
            name, _, rest = part.partition(":")
            action, _, nth = rest.partition(":")
            if name not in (*POINTS, REPLAY) or action not in ("exit", *_ERRORS) or not (nth or "1").isdecimal():
                raise ValueError(
                    f"failpoint {part!r}: want NAME:ACTION[:NTH], NAME one of {', '.join((*POINTS, REPLAY))}"
                )
            self._armed[name] = (action, int(nth or 1))

    @classmethod
    def from_env(cls, env: Mapping[str, str] = os.environ) -> Failpoints:
        """Reads `TQ_FAILPOINT`."""
        return cls(env.get("TQ_FAILPOINT", ""))

    def hit(self, name: str) -> None:
        """Passes a point: does what it is armed for, or nothing.

        Raises:
            OSError: the point is armed with an error, and this is its pass.
        """
        if name not in self._armed:
            return
        action, nth = self._armed[name]
        self._passes[name] = self._passes.get(name, 0) + 1
        if self._passes[name] != nth:
            return
        if action == "exit":
            os._exit(EXIT_STATUS)
        raise OSError(_ERRORS[action], f"failpoint {name}")


_process = Failpoints.from_env()


def hit(name: str) -> None:
    """Passes a point of this process."""
    _process.hit(name)
