"""The parts of an engine's process that need no engine; the rest is in tests/process/test_engine.py."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any

import pytest

from tqclient.errors import TransportUnavailable
from tqclient.limits import MIB
from tqclient.wire import mooncake
from tqclient.wire.arena import engine_locked
from tqserver import limits
from tqserver.storage import engine_process
from tqserver.storage.arena import open_arena
from tqserver.storage.engine_process import EngineFailed, arguments, map_anywhere, open_locked, start, warm

ARGUMENTS = ["--arena-path=/a", "--arena=1", "--parent=1"]


class FakeEngine:
    """Says of each call what the test wants, and remembers the calls."""

    def __init__(self, **results: int) -> None:
        self.results = results
        self.calls: list[tuple[Any, ...]] = []

    def TransferEngine(self) -> FakeEngine:  # noqa: N802
        return self

    def get_rpc_port(self) -> int:
        return 15_123

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> int:
            self.calls.append((name, *arguments))
            return self.results.get(name, 0)

        return call


def unmap(base: int, length: int) -> None:
    munmap = ctypes.CDLL(None).munmap
    munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    assert munmap(base, length) == 0


def test_the_file_is_mapped_at_another_address_each_time(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * MIB)
    with path.open("r+b") as file:
        bases = [map_anywhere(file.fileno(), MIB) for _ in range(4)]
        assert len(set(bases)) == 4
        ctypes.memset(bases[0] + MIB - 1, ord("y"), 1)
        assert [ctypes.string_at(base + MIB - 2, 2) for base in bases] == [b"xy"] * 4
        for base in bases:
            unmap(base, MIB)
    with path.open("rb") as file, pytest.raises(EngineFailed, match="mapping 1048576 bytes of the arena: Permission"):
        map_anywhere(file.fileno(), MIB)


@pytest.mark.parametrize("advice", [23, 9999], ids=["populate", "the kernel cannot"])
def test_populating_changes_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, advice: int) -> None:
    monkeypatch.setattr("tqserver.storage.populate.MADV_POPULATE_WRITE", advice)
    monkeypatch.setattr(limits, "PREFAULT_STEP_BYTES", 8192)
    path = tmp_path / "a"
    path.write_bytes(os.urandom(5 * 4096))
    before = path.read_bytes()
    with path.open("r+b") as file:
        base = map_anywhere(file.fileno(), len(before))
    warm(base, len(before))
    assert ctypes.string_at(base, len(before)) == path.read_bytes() == before
    unmap(base, len(before))


def test_the_arena_must_be_the_one_that_the_node_serves(tmp_path: Path) -> None:
    with open_arena(tmp_path / "a", node="n", file_bytes=8 * MIB, segment_bytes=4 * MIB) as arena:
        identity = arena.header.arena
        descriptor, header = open_locked(arena.path, identity)
        assert (header.arena, header.file_bytes) == (identity, 8 * MIB)
        with arena.path.open("r+b") as looker:
            assert engine_locked(looker.fileno())
            os.close(descriptor)
            assert not engine_locked(looker.fileno())
        with pytest.raises(EngineFailed, match=f"holds arena {identity:x}, not 1"):
            open_locked(arena.path, 1)


def test_everything_is_registered_once_and_then_read_at_the_end_of_what_is_there() -> None:
    engine = FakeEngine()
    options = arguments([*ARGUMENTS, "--host=fd00::1", "--devices=mlx5_0"])
    made, facts = start(options, engine, 0x1000, 64, 48)
    assert made is engine
    assert facts == {
        "segment": "[fd00::1]:15123",
        "base": 0x1000,
        "registered_bytes": 64,
        "protocol": "tcp",
        "registrations": 1,
        "pid": os.getpid(),
    }
    assert [name for name, *_ in engine.calls] == ["initialize", "register_memory", "transfer_sync_read"]
    assert engine.calls[0] == ("initialize", "fd00::1", "P2PHANDSHAKE", "tcp", "mlx5_0")
    assert engine.calls[1] == ("register_memory", 0x1000, 64)
    assert (engine.calls[2][1], *engine.calls[2][3:]) == ("[fd00::1]:15123", 0x102F, 1)


@pytest.mark.parametrize(
    ("call", "status", "reason"),
    [
        ("initialize", -1, r"initialize\('h', devices=''\) returned -1"),
        ("register_memory", -7, "register_memory of 64 bytes returned -7"),
        ("transfer_sync_read", -1, "cannot be read from h:15123; can this host reach itself by that name"),
    ],
)
def test_each_no_of_the_library_is_told(call: str, status: int, reason: str) -> None:
    with pytest.raises(EngineFailed, match=reason):
        start(arguments([*ARGUMENTS, "--host=h"]), FakeEngine(**{call: status}), 0x1000, 64, 64)


def test_rdma_is_what_was_opened_and_not_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    options = arguments([*ARGUMENTS, "--host=h", "--rdma"])
    engine = FakeEngine()
    with pytest.raises(TransportUnavailable, match="RDMA is required, and the engine found no adapter"):
        start(options, engine, 0x1000, 64, 64)
    assert engine.calls == [("initialize", "h", "P2PHANDSHAKE", "rdma", "")]

    monkeypatch.setattr(mooncake, "protocol_in_use", lambda: "rdma")
    arena = ctypes.create_string_buffer(64)
    engine = FakeEngine()
    assert start(options, engine, ctypes.addressof(arena), 64, 64)[1]["protocol"] == "rdma"
    assert [name for name, *_ in engine.calls] == ["initialize", "register_memory"]  # no target that is registered
    with pytest.raises(EngineFailed, match="returned -1; is the limit of locked memory"):
        start(options, FakeEngine(register_memory=-1), ctypes.addressof(arena), 64, 64)


def test_options_reach_the_library_through_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", environ)
    engine_process.pass_through(arguments([*ARGUMENTS, "--host=h"]))
    assert environ == {}
    engine_process.pass_through(arguments([*ARGUMENTS, "--host=h", "--ports", "20000", "20100", "--gid-index=3"]))
    assert environ == {"MC_MIN_RPC_PORT": "20000", "MC_MAX_RPC_PORT": "20100", "MC_GID_INDEX": "3"}
