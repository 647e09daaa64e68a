from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import msgpack
import numpy as np
import pytest
import torch

from benchmarks import workloads
from benchmarks.machine import Usage, children_of
from benchmarks.peers import COMMON, OURS, PEERS, Peer, forms, install
from benchmarks.peers.host import Setup
from benchmarks.peers.process import HOME, opened
from benchmarks.soak import judge

MIXED: workloads.Columns = {
    "dense": torch.arange(6).view(3, 2),
    "long": [torch.arange(2000) + row for row in range(3)],
    "short": [torch.arange(row + 1) for row in range(3)],
    "text": ["a", "b", "c"],
    "nested": [{"x": torch.ones(2), "n": [1]}, None, {"x": torch.zeros(1), "n": []}],
}


def test_forms_lose_nothing() -> None:
    expected = workloads.digest(MIXED)
    samples = forms.samples(MIXED)
    assert len(samples) == 3
    assert workloads.digest(forms.from_samples(samples)) == expected
    packed = [msgpack.packb(sample, default=forms.msgpack_default) for sample in samples]
    unpacked = [msgpack.unpackb(data, object_hook=forms.msgpack_hook) for data in packed]
    assert workloads.digest(forms.from_samples(unpacked)) == expected
    columns = forms.numpy_columns(MIXED)
    assert isinstance(columns["long"], list)
    assert [part.tolist() for part in columns["short"]] == [[0, 0, 1, 0, 1, 2], [0, 1, 3, 6]]
    assert workloads.digest(forms.from_numpy_columns(columns)) == expected


def test_lists_of_tensors_become_jagged_tensors() -> None:
    columns = forms.jagged(MIXED)
    assert [name for name in columns if columns[name] is not MIXED[name]] == ["long", "short"]
    assert columns["short"].layout == torch.jagged
    assert [row.tolist() for row in columns["short"].unbind()] == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        ("regular", ["default", "copy=False", "in place"]),
        ("multimodal", ["default", "copy=False", "jagged tensors", "in place"]),
        ("jagged", ["default", "copy=False", "jagged tensors"]),
        ("small", ["default", "copy=False"]),
    ],
)
def test_each_batch_goes_the_ways_that_suit_it(workload: str, expected: list[str]) -> None:
    setup = setup_of(workload)
    assert list(PEERS[OURS].ways_for(tensors=setup.tensors, lists=setup.lists)) == expected


def test_arrays_move_out_of_a_value_and_back() -> None:
    value = {"a": [np.arange(3), "text"], "b": (np.ones((2, 2), np.float32), None)}
    arrays: list[Any] = []
    skeleton = pickle.loads(pickle.dumps(forms.split(value, arrays)))
    assert list(forms.slots(skeleton)) == [("<i8", (3,)), ("<f4", (2, 2))]
    back = forms.fill(skeleton, arrays)
    assert back["a"][0] is arrays[0]
    assert back["b"][0] is arrays[1]
    assert (back["a"][1], back["b"][1]) == ("text", None)


@pytest.mark.parametrize("adapter", sorted({peer.adapter for peer in PEERS.values()}))
def test_both_ends_of_an_adapter_can_be_made(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer's library is in the peer's environment alone; what an adapter defines needs none of it."""
    for library in ("ray", "redis", "transfer_queue", "omegaconf", "mooncake", "mooncake.store", "tensordict"):
        monkeypatch.setitem(sys.modules, library, MagicMock())
    monkeypatch.delitem(sys.modules, f"benchmarks.peers.{adapter}", raising=False)
    module = importlib.import_module(f"benchmarks.peers.{adapter}")
    monkeypatch.delitem(sys.modules, f"benchmarks.peers.{adapter}")
    for end in (module.Source, module.Target):
        assert not getattr(end, "__abstractmethods__", frozenset()), f"{end}: serve() could not make it"
        assert callable(end.commands)
        assert callable(end.close)


def installed(home: Path, name: str) -> None:
    """Stands in for an environment: its interpreter is this one, without this one's path."""
    program = home / name / "bin" / "python"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    program.chmod(0o700)


def setup_of(workload: str) -> Setup:
    return Setup.of(workload, 0, "small")


@pytest.mark.parametrize("workload", ["small", "rollout"])
def test_a_peer_runs_in_the_interpreter_of_its_environment(
    no_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workload: str
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    installed(tmp_path, "elsewhere")
    peer = Peer("fake", "memcpy", ("copy",), requirements=("nothing",), environment="elsewhere")
    with opened(peer, setup_of(workload)) as ends:
        (source,) = ends.sources
        assert ends.target is not None
        plain, written = source.call("stamp", 7)
        source.call("prepare", "copy", 1)
        ends.target.send("take", "copy", workload == "rollout")
        start, returned = source.call("put", "copy", 1)
        _, end = ends.target.receive()
        assert start < returned < end
        assert ends.target.call("digest", "copy") == written
        assert (plain == written) == (workload != "rollout")
        assert {part: used.rss_peak_bytes > 0 for part, used in ends.usage().items()} == {
            "producer": True,
            "consumer": True,
            "storage": True,
        }
        elapsed, times = source.call("burst", "copy", 10, 2, 0.01)
        assert elapsed >= 0.01
        assert len(times) > 1
        with pytest.raises(RuntimeError, match=r"TypeError: .*positional argument"):
            source.call("prepare")


def test_a_peer_that_is_not_installed_says_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    with (
        pytest.raises(RuntimeError, match="not installed: tq-bench peers install redis"),
        opened(PEERS["redis"], setup_of("small")),
    ):
        pass


def test_the_exact_torch_comes_first_and_a_failure_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(HOME, str(tmp_path))
    commands: list[list[str]] = []

    def pip(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        broken = "ray" in command
        return subprocess.CompletedProcess(command, int(broken), "", "one\nNo matching distribution" if broken else "")

    monkeypatch.setattr(install.subprocess, "run", pip)
    for name in ("ray", "redis", "transferqueue"):
        installed(tmp_path, name)
    failures = install.install([PEERS[name] for name in PEERS if name != "mooncake"], lambda line: None)
    assert failures == {"ray": "one\nNo matching distribution"}
    # One environment serves both of TransferQueue's backends; ours and memcpy need none.
    assert [Path(command[0]).parents[1].name for command in commands[::2]] == ["transferqueue", "ray", "redis"]
    assert {command[-1] for command in commands[::2]} == {COMMON[0]} == {"torch==2.13.0"}
    assert all(COMMON[0] in command for command in commands)


def test_usage_of_processes_adds_up_and_leaves_out_those_that_ended() -> None:
    mine = Usage.of(os.getpid())
    both = Usage.of_all([os.getpid(), os.getpid(), 2**22 + 1])
    assert both.rss_peak_bytes >= 2 * mine.rss_peak_bytes
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in children_of(os.getpid())


def test_a_quantity_may_move_by_a_twentieth_after_the_warm_up() -> None:
    samples = {
        "node": {
            "RSS MiB": [50.0, 100.0, 105.0, 95.0],
            "open files": [20.0, 20.0, 20.0, 22.0],
            "threads": [9.0, 10.0, 10.0, 10.0],
            "minor faults": [0.0, 1000.0, 1500.0, 2000.0],
            "registrations": [0.0, 1.0, 1.0, 2.0],
        }
    }
    # 100 batches of 256 pages: 10 faults a batch are under a twentieth of those, 12.8.
    verdicts = {verdict.quantity: verdict for verdict in judge(samples, 1, 100, 256 * os.sysconf("SC_PAGE_SIZE"))}
    assert {name: verdict.passed for name, verdict in verdicts.items()} == {
        "RSS MiB": True,
        "open files": False,
        "threads": True,
        "minor faults": True,
        "registrations": False,
    }
    assert (verdicts["RSS MiB"].first, verdicts["RSS MiB"].low, verdicts["RSS MiB"].high) == (100.0, 95.0, 105.0)
    # What it is held against is no single value, which may be a valley or a peak.
    level = [50.0, 97.0, *[100.0] * 30, 104.0]
    verdict, risen = judge({"node": {"RSS MiB": level, "threads": [*level, 106.0]}}, 1, 100, 1)
    assert (verdict.first, verdict.low, verdict.passed, risen.passed) == (100.0, 97.0, True, False)
    few, many = judge({"a": {"threads": [10.0, 12.0, 10.0]}, "b": {"threads": [10.0, 11.0, 13.0]}}, 0, 100, 1)
    assert (few.passed, many.passed) == (True, False)
    fewer = judge(samples, 1, 70, 256 * os.sysconf("SC_PAGE_SIZE"))
    assert {verdict.quantity for verdict in fewer if not verdict.passed} >= {"minor faults"}
