"""What users import, and that the blocking and the asyncio API are the same."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from typing import Any

import pytest

import tqclient as tq
from tqclient import errors, lane_search
from tqclient.channel import TLS
from tqclient.errors import InvalidArgument, TQError
from tqclient.sizes import size_bytes


def test_every_name_loads() -> None:
    assert set(tq.__all__) <= set(dir(tq))
    for name in tq.__all__:
        assert getattr(tq, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        tq.no_such_name  # noqa: B018


def test_every_error_is_exported() -> None:
    tree = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, TQError)}
    assert tree <= set(tq.__all__)


def test_importing_the_wire_modules_loads_no_torch() -> None:
    program = (
        "import sys, tqclient, tqclient.errors, tqclient.limits, tqclient.schema, tqclient.wire.status\n"
        "sys.exit('torch' in sys.modules or 'tqclient.client' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def public(cls: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(cls) if not name.startswith("_")}


@pytest.mark.parametrize("name", ["Client", "Partition", "Consumer", "Batch"])
def test_signatures_agree(name: str) -> None:
    blocking, awaitable = public(getattr(tq, name)), public(getattr(tq.aio, name))
    assert blocking.keys() == awaitable.keys()
    for method, value in blocking.items():
        assert isinstance(value, property) == isinstance(awaitable[method], property)
        if callable(value):
            mine, theirs = inspect.signature(value), inspect.signature(awaitable[method])
            assert str(mine.parameters) == str(theirs.parameters), method


def test_connect_signatures_agree() -> None:
    assert inspect.signature(tq.connect).parameters == inspect.signature(tq.aio.connect).parameters


@pytest.mark.parametrize("wrong", ["garbage", "127.0.0.1:73236", "127.0.0.1:0", "dns:///node-b:7700", 7700])
def test_a_controller_has_a_host_and_a_port(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgument, match=f"address.*{wrong}"):
        tq.connect(wrong, timeout=0)
    monkeypatch.setenv("TQ_CONTROLLER", str(wrong))
    with pytest.raises(InvalidArgument, match=f"TQ_CONTROLLER: '{wrong}'"):
        asyncio.run(tq.aio.connect(timeout=0))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64GiB", 64 << 30), ("1.5KiB", 1536), ("10 MB", 10_000_000), ("7", 7), (4096, 4096), ("1b", 1)],
)
def test_sizes(text: str | int, expected: int) -> None:
    assert size_bytes(text, what="size") == expected


@pytest.mark.parametrize("text", ["", "much", "-1", "1.0001KiB", 0, -5, 1.5, True, "0"])
def test_what_is_no_size(text: Any) -> None:
    with pytest.raises(InvalidArgument, match="size="):
        size_bytes(text, what="size")


@pytest.mark.parametrize("wrong", ["a\nb", "a\n", " a", "é", b"a"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        InvalidArgument, match=r"^token: expected printable ASCII, and no blank or line break around it$"
    ):
        tq.connect("127.0.0.1:9", token=wrong, timeout=0)
    if isinstance(wrong, str):
        monkeypatch.setenv("TQ_TOKEN", wrong)
        with pytest.raises(InvalidArgument, match=r"^TQ_TOKEN: expected"):
            tq.connect("127.0.0.1:9", timeout=0)


def test_a_switch_is_on_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for word in ("", "on", "off"):
        monkeypatch.setenv("TQ_LANE", word)
        found[word] = lane_search.wanted()
    assert found == {"": True, "on": True, "off": False}
    monkeypatch.setenv("TQ_LANE", "maybe")
    with pytest.raises(InvalidArgument, match="TQ_LANE='maybe': expected on or off"):
        tq.connect("127.0.0.1:9", timeout=0)


def test_tls_files_go_together(tmp_path: Any) -> None:
    with pytest.raises(InvalidArgument, match="go together"):
        TLS(cert="client.pem")
    with pytest.raises(InvalidArgument, match="No such file"):
        TLS(ca=tmp_path / "absent.pem").credentials()


def test_tls_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"TQ_TLS_{name}", raising=False)
    assert TLS.from_environment() is None
    monkeypatch.setenv("TQ_TLS_CA", "/ca.pem")
    assert TLS.from_environment() == TLS(ca="/ca.pem")


def test_a_token_is_never_shown() -> None:
    from tqclient.channel import Access

    assert "secret" not in repr(Access("host:1", token="secret"))
