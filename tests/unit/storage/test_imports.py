from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("tqserver.storage.extents", {"grpc", "asyncio", "mmap", "torch", "numpy"}),
        ("tqserver.storage.main", {"torch", "mooncake"}),
        ("tqserver.storage.engine_process", {"torch", "mooncake", "grpc", "asyncio"}),
        ("tqserver.local", {"torch"}),
    ],
)
def test_what_a_module_never_brings_in(module: str, absent: set[str]) -> None:
    program = f"import sys, {module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert absent & set(done.stdout.split()) == set()
