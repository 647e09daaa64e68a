"""The core is pure: it can be imported, and so run, without any I/O library."""

from __future__ import annotations

import subprocess
import sys


def test_import_leaves_io_libraries_out() -> None:
    script = (
        "import sys, tqserver.controller.core; "
        "print([m for m in ('grpc', 'asyncio', 'torch', 'uvloop', 'sqlite3') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
