"""For programs whose stdout a test reads, while they load a library that prints as well."""

from __future__ import annotations

import os
import sys


def keep_to_python() -> None:
    """Leaves stdout to what Python prints: what a library writes to the descriptor goes to stderr."""
    sys.stdout.flush()
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
