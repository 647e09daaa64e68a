"""The options about the arena, the transfer engine and the controller."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from tqclient.errors import InvalidArgument
from tqclient.limits import MIB
from tqserver.config import ConfigError, resolve
from tqserver.storage.arena import open_arena
from tqserver.storage.engine import Engine, NoEngine
from tqserver.storage.main import StorageConfig, engine_host, make_engine
from tqserver.storage.node import Node


def config(**flags: str) -> StorageConfig:
    return resolve(StorageConfig, flags, program="tq-storage", environ={}).config


@pytest.mark.parametrize(("path", "file"), [("a/b.arena", Path.cwd() / "a/b.arena"), ("/a/b", Path("/a/b"))])
def test_clients_are_told_where_the_arena_lies_whatever_their_directory_is(path: str, file: Path) -> None:
    assert config(arena_path=path).arena_file == file


@pytest.mark.parametrize(
    ("flags", "host"),
    [
        ({}, "127.0.0.1"),
        ({"listen": "10.0.0.7:7701"}, "10.0.0.7"),
        ({"listen": "0.0.0.0:7701", "advertise": "node-3.cluster:7701"}, "node-3.cluster"),
        ({"listen": "[fd00::1]:7701"}, "fd00::1"),
        ({"listen": "0.0.0.0:7701", "mooncake_host": "10.9.9.9"}, "10.9.9.9"),
    ],
)
def test_the_engine_is_told_under_the_host_that_clients_are_told(flags: dict[str, str], host: str) -> None:
    assert engine_host(config(**flags)) == host


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        ({"mooncake": "off"}, "switched off with --mooncake=off"),
        ({}, "reach this node at 127.0.0.1, .* --mooncake=on starts one"),
        ({"listen": "[::1]:1"}, "reach this node at ::1"),
        ({"listen": "localhost:1"}, "reach this node at localhost"),
        ({"mooncake": "on"}, None),
        ({"mooncake": "rdma"}, None),
        ({"listen": "10.0.0.7:1"}, None),
        ({"mooncake_host": "10.0.0.7"}, None),
    ],
)
def test_which_nodes_have_an_engine(tmp_path: Path, flags: dict[str, str], refusal: str | None) -> None:
    async def made() -> Engine | NoEngine:
        with open_arena(tmp_path / "a", node="n", file_bytes=8 * MIB, segment_bytes=4 * MIB) as arena:
            return make_engine(config(**flags), Node(arena), arena, asyncio.Event())

    engine = asyncio.run(made())
    assert engine.endpoint is None
    assert engine.expected == (refusal is None)
    assert isinstance(engine, Engine if refusal is None else NoEngine)
    assert re.search(refusal or "the engine is being started", engine.refusal)


def test_options_are_parsed() -> None:
    parsed = config(
        mooncake_ports="20000-20100", mooncake_gid_index="3", mooncake_devices="mlx5_0", quarantine_seconds="2m"
    )
    assert (parsed.mooncake_ports, parsed.mooncake_gid_index) == ((20_000, 20_100), 3)
    assert (parsed.mooncake_devices, parsed.quarantine_seconds) == ("mlx5_0", 120.0)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("mooncake", "maybe", "'maybe' is none of auto, on, rdma, off"),
        ("mooncake_ports", "20000", "is no range of ports"),
        ("mooncake_ports", "20100-20000", "is no range of ports"),
        ("mooncake_ports", "80-90", "is no range of ports"),
        ("mooncake_ports", "20000-20006", "20000-20006: at least 8 ports"),
        ("mooncake_ports", "65000-65536", "is no range of ports"),
        ("mooncake_host", "10.0.0.7:80", "is no name or address of a host"),
        ("mooncake_host", "[fd00::7]", "is no name or address of a host"),
        ("mooncake_host", "", "is no name or address of a host"),
        ("listen", "127.0.0.1:99999", "there is no port 99999; write one from 0 to 65535"),
        ("advertise", "node-b", "'node-b' is no HOST:PORT"),
        ("advertise", "node-b:0", "there is no port 0"),
        ("controller", "unix:/run/tq", "is no HOST:PORT"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, value: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(**{name: value})


def test_the_first_token_is_shown_to_the_controller(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(b"\n the first one \r\nother\n")
    assert config(token_file=str(path)).link_metadata() == (("authorization", "Bearer the first one"),)
    assert config().link_metadata() == ()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"\n", "no token in it"), (b"t\xff\n", "line 1 is no token"), (b"a\x01b", "line 1 is no token")],
)
def test_a_link_says_what_it_cannot_show(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_bytes(content)
    with pytest.raises(InvalidArgument, match=f"token_file {path}: {reason}"):
        config(token_file=str(path)).link_metadata()
