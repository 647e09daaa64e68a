"""What commands say of a service, from descriptions made by hand."""

from __future__ import annotations

import argparse
import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from tqclient.cli.change import group_of, selection_of, tag_of
from tqclient.cli.doctor import Finding, node_findings, report_of
from tqclient.cli.look import partitions_report, sample_of, show_report, status_report
from tqclient.cli.report import Report
from tqclient.cli.top import Look, rates_of
from tqclient.cli.top import report_of as top_report
from tqclient.errors import SampleNotFound
from tqclient.info import ClusterInfo, FieldInfo, NodeInfo, PartitionInfo, Policy
from tqclient.schema import Form

NODE = NodeInfo("node-0", "127.0.0.1:7701", True, 1 << 30, 1 << 20, "shm", "same host")
CLUSTER = ClusterInfo("127.0.0.1:7700", 2, (NODE,), 3, 4, 5, 6000)
PARTITION = PartitionInfo(
    7,
    "train/0001",
    Policy(capacity_samples=100),
    False,
    3,
    10,
    2048,
    {
        "tokens": FieldInfo(Form("ragged", "torch", "int64"), 10),
        "reward": FieldInfo(Form("dense", "torch", "float32"), 4),
    },
    {"actor": {"pending": 6, "ready": 1, "leased": 2, "consumed": 1, "dropped": 0}},
)


def text_of(report: Report) -> list[str]:
    """The lines that people see, less blank ones and repeated spaces."""
    console = Console(file=io.StringIO(), width=200)
    report.write(console, as_json=False)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    return [" ".join(line.split()) for line in lines if line.strip()]


def data_of(report: Report) -> Any:
    """What programs read."""
    console = Console(file=io.StringIO())
    report.write(console, as_json=True)
    return json.loads(console.file.getvalue())  # type: ignore[attr-defined]


def test_status_names_each_node_and_why_its_path_was_taken() -> None:
    report = status_report(CLUSTER)
    assert "node-0 127.0.0.1:7701 attached 1.00 MiB 1.00 GiB shm" in text_of(report)
    assert "node-0: same host" in text_of(report)
    assert data_of(report)["nodes"][0]["used_bytes"] == 1 << 20
    assert data_of(report)["journal_sequence"] == 6000


def test_status_says_when_there_is_no_node() -> None:
    assert "no storage node has attached yet" in text_of(status_report(replace(CLUSTER, nodes=())))


def test_partitions_have_a_line_for_each_consumer() -> None:
    counts = {**PARTITION.counts, "critic": {"pending": 10, "ready": 0, "leased": 0, "consumed": 0, "dropped": 0}}
    report = partitions_report([replace(PARTITION, counts=counts)])
    lines = text_of(report)
    assert "train/0001 open 10 2.00 KiB actor 6 1 2 1 0" in lines
    assert "critic 10 0 0 0 0" in lines
    assert data_of(report)[0]["consumers"]["critic"]["pending"] == 10


def test_no_partitions_is_a_sentence_and_an_empty_list() -> None:
    assert text_of(partitions_report([])) == ["no partitions"]
    assert data_of(partitions_report([])) == []


def test_show_has_fields_policy_counts_and_metadata() -> None:
    partition = replace(PARTITION, inserted=12, delivered=9, accepted=11, running=3)
    report = show_report(partition, {"num_microbatches": [4, 4]})
    lines = text_of(report)
    assert "tokens 10 torch ragged int64[rows, *]" in lines
    assert "reward 4 torch dense float32[rows]" in lines
    assert "num_microbatches [4, 4]" in lines
    assert any("capacity_samples=100," in line for line in lines)
    assert "12 samples put so far, 9 delivered; 11 accepted and 3 running" in lines
    assert data_of(report)["metadata"] == {"num_microbatches": [4, 4]}
    assert [data_of(report)[name] for name in ("inserted", "delivered", "accepted", "running")] == [12, 9, 11, 3]
    assert data_of(report)["fields"]["reward"] == {"written": 4, "form": "torch dense float32[rows]"}


class FakeBatch:
    """One sample's answer, as `Partition.get` gives it."""

    ids = np.array([5])
    keys = ("k",)
    groups = ("prompt-1",)
    weight_versions = np.array([[6, 7]])
    tags = ({"status": "finished"},)

    def __init__(self, fields: list[str]) -> None:
        self.fields = fields

    def list(self, field: str) -> list[Any]:
        return [{"tokens": torch.arange(3)}[field]]


class FakePartition:
    """Sample 5 has `tokens` and lacks `reward`."""

    name = "train/0001"

    def describe(self) -> PartitionInfo:
        return PARTITION

    def get(self, ids: Any = None, *, keys: Any = None, fields: list[str]) -> FakeBatch:
        if (ids, keys) not in (([5], None), (None, ["k"])) or fields != ["tokens"]:
            raise SampleNotFound("no")
        return FakeBatch(fields)


@pytest.mark.parametrize(("sample_id", "key"), [(5, None), (None, "k")])
def test_peek_shows_the_fields_that_are_there(sample_id: int | None, key: str | None) -> None:
    values, facts = sample_of(FakePartition(), sample_id, key, None)  # type: ignore[arg-type]
    assert list(values) == ["tokens"]
    assert facts == {
        "id": 5,
        "key": "k",
        "group": "prompt-1",
        "weight versions": [6, 7],
        "tags": {"status": "finished"},
    }


@pytest.mark.parametrize(("sample_id", "fields"), [(5, ["reward"]), (6, None)], ids=["lacks-the-field", "is-not-there"])
def test_peek_raises_for_what_is_not_there(sample_id: int, fields: list[str] | None) -> None:
    with pytest.raises(SampleNotFound):
        sample_of(FakePartition(), sample_id, None, fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("node", "verdict"),
    [
        (NODE, "ok"),
        (replace(NODE, attached=False), "bad"),
        (replace(NODE, transport="", reason="grpc: refused"), "bad"),
    ],
    ids=["fine", "detached", "unreachable"],
)
def test_doctor_judges_a_node(node: NodeInfo, verdict: str) -> None:
    (finding,) = node_findings(replace(CLUSTER, nodes=(node,)))
    assert finding.verdict == verdict


def test_doctor_misses_nodes() -> None:
    (finding,) = node_findings(replace(CLUSTER, nodes=()))
    assert finding.verdict == "bad"


def test_doctor_fails_for_what_is_bad_alone() -> None:
    note, bad = Finding("transport mooncake", "note", "not here"), Finding("controller", "bad", "away", "start one")
    assert (report_of([note]).code, data_of(report_of([note]))["healthy"]) == (0, True)
    assert (report_of([note, bad]).code, data_of(report_of([note, bad]))["healthy"]) == (1, False)


@pytest.mark.parametrize(
    ("text", "tag"),
    [
        ("status=finished", ("status", "finished")),
        ("step=3", ("step", 3)),
        ("ok=true", ("ok", True)),
        ('n="3"', ("n", "3")),
        ("a=b=c", ("a", "b=c")),
        ("empty=", ("empty", "")),
    ],
)
def test_a_tag_is_read_as_json_where_it_is_any(text: str, tag: tuple[str, Any]) -> None:
    assert tag_of(text) == tag


@pytest.mark.parametrize("text", ["status", "=x", ""])
def test_a_tag_without_name_or_value_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        tag_of(text)


def test_a_group_that_is_a_number_is_an_int() -> None:
    assert [group_of("12"), group_of("-1"), group_of("p12")] == [12, -1, "p12"]


def test_a_selection_has_what_was_given_alone() -> None:
    given = argparse.Namespace(id=None, key=None, prefix=None, group=None, tag=[("a", 1), ("b", "x")])
    assert selection_of(given) == {"tags": {"a": 1, "b": "x"}}


def test_top_has_rates_between_two_looks() -> None:
    later_counts = {"actor": {**PARTITION.counts["actor"], "consumed": 5}}
    new = replace(PARTITION, partition_id=8, name="val", samples=3, counts={})
    before = Look(10.0, CLUSTER, [PARTITION])
    later = Look(
        12.0, replace(CLUSTER, journal_sequence=6100), [replace(PARTITION, samples=9, counts=later_counts), new]
    )
    rates = {
        "changes": 50.0,
        "train/0001: samples": -0.5,
        "train/0001: acknowledged by actor": 2.0,
        "val: samples": 1.5,
    }
    assert rates_of(later, before) == rates
    assert "train/0001: acknowledged by actor 2.0" in text_of(top_report(later, before))
    assert data_of(top_report(later, before))["rates"] == rates
    assert "nothing moves" in text_of(top_report(before, None))


def test_top_shows_no_more_than_a_screen_takes_and_says_so() -> None:
    found = [replace(PARTITION, name=f"train/{index:04}", partition_id=index) for index in range(1_000)]
    later = [replace(info, samples=info.samples + 1) for info in found]
    report = top_report(Look(12.0, CLUSTER, later), Look(10.0, CLUSTER, found), rows_max=2)
    shown = text_of(report)
    assert [line.split()[0] for line in shown if line.startswith("train/")] == [
        "train/0000:",
        "train/0001:",
        "train/0000",
        "train/0001",
    ]
    assert shown[-1] == "and 998 more partitions"
    assert shown.index("per second") < shown.index("and 998 more partitions")
    assert (len(report.data["partitions"]), report.data["rates"]["train/0999: samples"]) == (1_000, 0.5)
