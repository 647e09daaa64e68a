"""`tq` against a real service."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tqclient as tq
from tests.harness import Supervisor, wait_until
from tqclient.cli.main import main
from tqclient.wire.v1 import storage_pb2
from tqclient.wire.v1.storage_pb2_grpc import StorageStub
from tqserver.local import LocalCluster


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    """The address of a service with two samples in `train/0001`: both have tokens, the first one has a reward."""
    with LocalCluster(storage_nodes=1, arena="64MiB") as cluster, tq.connect(cluster.address) as client:
        part = client.create_partition("train/0001", consumers=["actor"], metadata={"num_microbatches": [4, 4]})
        ids = part.put(
            {"tokens": [torch.arange(5), torch.arange(3)], "prompt": ["1+1=", "2+2="]},
            keys=["a", "b"],
            groups=["p1", "p1"],
            tags=[{"status": "finished"}, {}],
            weight_version=7,
        )
        part.put({"reward": torch.tensor([0.5])}, ids=ids[:1])
        yield cluster.address


@pytest.fixture
def ask(service: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command and returns its exit code with what it printed, read as JSON."""

    def ask(*argv: str, code: int = 0) -> Any:
        assert main([*argv, "--controller", service, "--json"]) == code
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()][-1]

    return ask


def test_status_shows_the_node_and_the_path_to_it(ask: Any, service: str) -> None:
    status = wait_until(
        lambda: (found := ask("status"))["nodes"][0]["used_bytes"] > 0 and found,
        what="the node reports its use",
    )
    (node,) = status["nodes"]
    assert (status["address"], node["attached"], node["transport"]) == (service, True, "shm")
    assert 0 < node["used_bytes"] <= node["capacity_bytes"] <= 64 << 20


def test_partitions_are_listed_by_prefix(ask: Any) -> None:
    assert [each["name"] for each in ask("partitions", "train/")] == ["train/0001"]
    assert ask("partitions", "val/") == []


def test_show_counts_fields_and_consumers(ask: Any) -> None:
    shown = ask("show", "train/0001")
    assert shown["fields"]["tokens"] == {"written": 2, "form": "torch ragged int64[rows, *]"}
    assert shown["fields"]["reward"]["written"] == 1
    # Without fields of its own, a consumer waits for every field: only the first sample has them all.
    assert shown["consumers"]["actor"] == {"pending": 1, "ready": 1, "leased": 0, "consumed": 0, "dropped": 0}
    assert shown["metadata"] == {"num_microbatches": [4, 4]}


def test_peek_shows_what_a_sample_has(ask: Any) -> None:
    first = ask("peek", "train/0001", "--key", "a")
    assert first["fields"] == {
        "tokens": {"dtype": "int64", "shape": [5], "head": [0, 1, 2, 3, 4]},
        "prompt": "1+1=",
        "reward": {"dtype": "float32", "shape": [], "head": [0.5]},
    }
    assert (first["group"], first["tags"], first["weight versions"]) == ("p1", {"status": "finished"}, [7, 7])
    assert list(ask("peek", "train/0001", "--key", "b")["fields"]) == ["tokens", "prompt"]
    assert ask("peek", "train/0001", str(first["id"]), "--field", "prompt")["fields"] == {"prompt": "1+1="}


@pytest.mark.parametrize(
    ("argv", "code", "name"),
    [
        (["show", "train/9"], 4, "PartitionNotFound"),
        (["peek", "train/0001", "123456789"], 4, "SampleNotFound"),
        (["peek", "train/0001", "--key", "b", "--field", "reward"], 4, "SampleNotFound"),
    ],
)
def test_what_is_not_there_is_a_line_and_an_exit_code(
    service: str, argv: list[str], code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "--controller", service]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"tq: {name}: .+\n", err)


def test_a_controller_that_is_away_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--controller", "127.0.0.1:9", "--timeout", "0.2"]) == 3
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.endswith("; start one (tq up, tq-controller), or name it with --controller or TQ_CONTROLLER\n")


def test_clear_removes_what_was_selected(ask: Any, service: str) -> None:
    with tq.connect(service) as client:
        part = client.create_partition("scratch")
        ids = part.put({"x": torch.zeros(3)}, tags=[{"step": 1}, {"step": 2}, {"step": 1}])
        assert ask("clear", "scratch", "--tag", "step=1", "--yes") == {"removed": [int(ids[0]), int(ids[2])]}
        assert part.describe().samples == 1
        client.delete_partition("scratch")


def test_doctor_tries_every_path(ask: Any) -> None:
    report = ask("doctor", "--write")
    verdicts = {finding["subject"].split(" to ")[0]: finding["verdict"] for finding in report["findings"]}
    assert report["healthy"]
    assert (verdicts["transport shm"], verdicts["transport grpc"], verdicts["transport mooncake"]) == (
        "ok",
        "ok",
        "note",
    )
    assert verdicts["transport shm: put and get"] == verdicts["transport grpc: put and get"] == "ok"
    calls = {name: finding["detail"] for finding in report["findings"] if (name := finding["subject"])[:5] == "calls"}
    assert calls == dict.fromkeys(["calls to the controller", "calls to node storage-0"], "by its lane, a Unix socket")
    assert ask("partitions", "tq-doctor/") == []


def test_doctor_finds_a_node_whose_arena_was_removed(capsys: pytest.CaptureFixture[str]) -> None:
    """Its blocks go with its process, and nothing was broken."""
    with LocalCluster(arena="8MiB") as cluster:
        command = ["doctor", "--controller", cluster.address, "--json"]
        assert main(command) == 0
        subjects = [finding["subject"] for finding in json.loads(capsys.readouterr().out)["findings"]]
        assert "arena of storage-0" not in subjects
        with tq.connect(cluster.address) as client:
            channel = client._connection.channels.channel(cluster.storage[0].address)
            described = StorageStub(channel).DescribeNode(storage_pb2.DescribeNodeRequest(), timeout=5)
            Path(described.arena_path).unlink()
        assert main(command) == 1
        report = json.loads(capsys.readouterr().out)
        (found,) = [finding for finding in report["findings"] if finding["verdict"] == "bad"]
        assert (found["subject"], report["healthy"]) == ("arena of storage-0", False)
        assert "start the node again" in found["remedy"]
        with tq.connect(cluster.address) as client:
            assert "was removed while the node serves it" in client.describe().nodes[0].reason


def test_doctor_finds_a_controller_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--controller", "127.0.0.1:9", "--timeout", "0.2", "--json"]) == 1
    bad = [each for each in json.loads(capsys.readouterr().out)["findings"] if each["verdict"] == "bad"]
    assert [each["subject"] for each in bad] == ["controller 127.0.0.1:9"]


def test_top_looks_as_often_as_it_was_told(service: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--count", "2", "--interval", "0.05", "--json", "--controller", service]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["rates"] == {}
    assert second["rates"]["train/0001: samples"] == 0.0


@pytest.mark.parametrize("form", [[], ["--json"]], ids=str)
def test_top_prints_each_look_at_once_where_there_is_no_terminal(
    supervisor: Supervisor, service: str, form: list[str]
) -> None:
    top = [sys.executable, "-m", "tqclient.cli", "top", "--interval", "3600", "--controller", service, *form]
    child = supervisor.command(top, name="top", env={"PYTHONUNBUFFERED": ""})
    child.wait_for("train/0001")
    child.signal(signal.SIGINT)
    assert child.wait() == 130


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data-dir", "/proc/tq"], "data_dir /proc/tq: No such file or directory; give a directory"),
        (["--data-dir", "/dev/null"], "data_dir /dev/null: File exists; give a directory"),
        (["--listen", "192.0.2.1:0"], "cannot listen on 192.0.2.1:0: Cannot assign requested address"),
    ],
    ids=str,
)
def test_up_says_why_it_cannot(supervisor: Supervisor, flags: list[str], message: str) -> None:
    child = supervisor.command([sys.executable, "-m", "tqclient.cli", "up", "--arena", "16MiB", *flags], name="up")
    assert child.wait() == 1
    assert message in child.stderr
    assert "Traceback" not in child.stderr


def test_up_serves_until_it_is_interrupted(supervisor: Supervisor) -> None:
    command = [sys.executable, "-m", "tqclient.cli", "up", "--listen", "127.0.0.1:0", "--arena", "64MiB"]
    child = supervisor.command(command, name="up")
    address = child.wait_for("TQ_CONTROLLER=").partition("TQ_CONTROLLER=")[2]
    assert main(["status", "--controller", address]) == 0
    child.signal(signal.SIGINT)
    assert child.wait() == 0
    assert "Traceback" not in child.stderr
