"""Which tests share a worker: as it is said, and as pytest and xdist do it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.harness.scheduling import unit_of

CONFTEST = """
import pytest
from tests.harness.scheduling import ByFile

@pytest.hookimpl
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""
TESTS = """
import os, pathlib, pytest

@pytest.mark.parametrize("index", range(4))
def test_where(index):
    worker = os.environ["PYTEST_XDIST_WORKER"]
    (pathlib.Path(os.environ["SEEN"]) / f"{pathlib.Path(__file__).stem}-{index}").write_text(worker)
"""


def test_files_and_folders_of_faults_are_units() -> None:
    assert unit_of("tests/unit/test_arrays.py::test_bounds[a::b]") == "tests/unit/test_arrays.py"
    assert unit_of("tests/unit/test_arrays.py::TestBounds::test_none") == "tests/unit/test_arrays.py"
    assert unit_of("tests/faults/test_drain.py::test_drain") == "faults"
    assert unit_of("tests/hosts/test_network.py::test_network") == "faults"
    assert unit_of("tests/unit/faults/test_own.py::test_own") == "tests/unit/faults/test_own.py"


def test_a_unit_runs_on_one_worker(tmp_path: Path) -> None:
    """With the pytest and the xdist that are installed: how one names tests to the other has changed before."""
    files = ["faults/test_fault_a", "faults/test_fault_b", "hosts/test_host", *(f"unit/test_{n}" for n in range(4))]
    for file in files:
        path = tmp_path / "tests" / f"{file}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(TESTS)
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").touch()
    seen = tmp_path / "seen"
    seen.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--import-mode=importlib"]
    root = Path(__file__).parents[3]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    subprocess.run(
        command, cwd=tmp_path, check=True, env=own | {"SEEN": str(seen), "PYTHONPATH": str(root)}, timeout=60
    )

    def workers(*stems: str) -> set[str]:
        return {file.read_text() for stem in stems for file in seen.glob(f"{stem}-*")}

    assert len(list(seen.iterdir())) == 4 * len(files)
    assert len(workers("test_fault_a", "test_fault_b", "test_host")) == 1
    assert all(len(workers(f"test_{n}")) == 1 for n in range(4))
    assert workers("test_*") == {"gw0", "gw1"}
