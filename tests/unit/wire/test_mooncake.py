from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tqclient.errors import TransportUnavailable
from tqclient.wire import mooncake


def test_settings_are_set_unless_the_user_has_set_them() -> None:
    environ = {"MC_TRANSFER_TIMEOUT": "60", "MC_TCP_PROTO": "2", "HOME": "/"}
    mooncake.configure(environ)
    assert environ == {**mooncake.SETTINGS, "MC_TRANSFER_TIMEOUT": "60", "MC_TCP_PROTO": "2", "HOME": "/"}
    # The order of the timers: the transport's own first, so that a buffer is quiet when the transfer is given up.
    own = [int(mooncake.SETTINGS[f"MC_TCP_{name}_TIMEOUT_SEC"]) for name in ("STATUS", "PROGRESS")]
    assert max(own) < int(mooncake.SETTINGS["MC_TRANSFER_TIMEOUT"])


@pytest.mark.parametrize(
    "setting", ["MC_TCP_PROTO=1", "MC_USE_TENT=1", "MC_USE_TENT=", "MC_USE_TEV1=0", "MC_TCP_ENABLE_CONNECTION_POOL=0"]
)
def test_settings_that_break_promises_are_refused(setting: str) -> None:
    name, _, value = setting.partition("=")
    with pytest.raises(TransportUnavailable, match=f"{setting} is set, and .*; unset it"):
        mooncake.configure({name: value})


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (ModuleNotFoundError("No module named 'mooncake'"), r"not installed: pip install 'tq-dataplane\[mooncake\]'"),
        (
            ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory"),
            r"apt-get install libibverbs1 libnuma1 libcurl4 \(libibverbs",
        ),
        (ImportError("libcurl.so.4: cannot open shared object file"), "apt-get install"),
        (
            ImportError("libcudart.so.12: cannot open shared object file"),
            r"needs CUDA.*pip install 'tq-dataplane\[mooncake\]' \(libcudart",
        ),
        (ImportError("undefined symbol: x"), "cannot be loaded: undefined symbol: x"),
    ],
)
def test_a_library_that_is_missing_is_explained_in_one_line(error: ImportError, advice: str) -> None:
    line = mooncake.explain(error)
    assert re.search(advice, line)
    assert "\n" not in line


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    """In a process of its own, where a module of the same name fails as a broken installation does."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "engine.py").write_text("raise ImportError('libnuma.so.1: cannot open shared object file')\n")
    program = (
        "from tqclient.wire import mooncake\ntry: mooncake.load()\nexcept Exception as e: print(type(e).__name__, e)"
    )
    path = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    done = subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("TransportUnavailable mooncake needs system libraries: apt-get install")


def test_the_protocol_is_what_was_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mooncake.protocol_in_use() == "tcp"
    monkeypatch.setattr(os, "readlink", lambda _: "/dev/infiniband/uverbs0")
    assert mooncake.protocol_in_use() == "rdma"


@pytest.fixture
def own_environ() -> Iterator[None]:
    """What the test sets in the environment, loading included, ends with it: later tests' children would have it."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def test_a_host_of_the_other_family_is_refused_once_the_library_is_loaded(
    own_environ: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    monkeypatch.setitem(sys.modules, "mooncake.engine", ModuleType("mooncake.engine"))
    with pytest.raises(TransportUnavailable, match="speaks IPv4 in this process, and fd00::1 is IPv6"):
        mooncake.load("fd00::1")
    monkeypatch.setenv("MC_USE_IPV6", "1")
    mooncake.load("fd00::1")


def test_the_first_host_chooses_the_family(own_environ: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MC_USE_IPV6", raising=False)
    monkeypatch.delitem(sys.modules, "mooncake.engine", raising=False)
    monkeypatch.setattr("importlib.import_module", ModuleType)
    mooncake.load("10.0.0.1")
    assert "MC_USE_IPV6" not in os.environ
    mooncake.load("fd00::1")
    assert os.environ["MC_USE_IPV6"] == "1"
