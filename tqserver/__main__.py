"""What `tq up` becomes: `python -m tqserver`."""

from __future__ import annotations

import sys
from typing import Any

from tqclient.start import run


def main() -> Any:
    """Runs it; returns its exit status."""
    return run("tqserver.up")


if __name__ == "__main__":
    sys.exit(main())
