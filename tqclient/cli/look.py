"""Commands that look and change nothing: status, partitions, show, peek."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.text import Text

from tqclient.cli.connection import reach
from tqclient.cli.report import Report, plain, preview, printable, size_text, table
from tqclient.errors import SampleNotFound
from tqclient.info import STATES, ClusterInfo, PartitionInfo

if TYPE_CHECKING:
    from tqclient.partition import Partition


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds this module's commands to the parser."""
    status = commands.add_parser(
        "status", parents=[common], allow_abbrev=False, help="the controller, its storage nodes, what is in use"
    )
    status.set_defaults(run=_status)

    partitions = commands.add_parser(
        "partitions", parents=[common], allow_abbrev=False, help="partitions, and how far consumers are"
    )
    partitions.add_argument("prefix", metavar="PREFIX", nargs="?", default="", help="of the names to list")
    partitions.set_defaults(run=_partitions)

    show = commands.add_parser(
        "show", parents=[common], allow_abbrev=False, help="one partition: fields, consumers, policy, metadata"
    )
    show.add_argument("partition", metavar="PARTITION")
    show.set_defaults(run=_show)

    peek = commands.add_parser(
        "peek", parents=[common], allow_abbrev=False, help="one sample: what it is, and how its values begin"
    )
    peek.add_argument("partition", metavar="PARTITION")
    sample = peek.add_mutually_exclusive_group(required=True)
    sample.add_argument("id", metavar="ID", type=int, nargs="?")
    sample.add_argument("--key", help="of the sample, instead of its id")
    peek.add_argument("--field", action="append", help="show only this one (repeatable)")
    peek.set_defaults(run=_peek)


def _status(arguments: argparse.Namespace) -> Report:
    with reach(arguments) as client:
        return status_report(client.describe())


def status_report(cluster: ClusterInfo) -> Report:
    """Returns the service as a table of nodes under a line of counts."""
    nodes = [
        (
            node.name,
            node.address,
            "attached" if node.attached else "away",
            size_text(node.used_bytes),
            size_text(node.capacity_bytes),
            node.transport or "none",
        )
        for node in cluster.nodes
    ]
    counts = (
        f"controller {cluster.address}: start {cluster.epoch}, {cluster.journal_sequence:,} changes, "
        f"{cluster.sessions:,} sessions, {cluster.claims:,} claims held, {cluster.waiting_claims:,} waiting"
    )
    columns = ["node", "address", "state", "#used", "#capacity", "path from here"]
    view = table(columns, nodes) if nodes else Text("no storage node has attached yet")
    reasons = [Text(f"{node.name}: {node.reason}") for node in cluster.nodes]
    return Report(dataclasses.asdict(cluster), Group(Text(counts), "", view, "", *reasons))


def _partitions(arguments: argparse.Namespace) -> Report:
    with reach(arguments) as client:
        return partitions_report(client.partitions(arguments.prefix))


def partitions_report(found: Sequence[PartitionInfo]) -> Report:
    """Returns partitions as a table with a line for each of their consumers."""
    rows: list[Sequence[object]] = []
    for info in found:
        first: tuple[object, ...] = (info.name, _state(info), info.samples, size_text(info.bytes))
        for consumer, counts in sorted(info.counts.items()) or [("", {})]:
            rows.append((*first, consumer, *(counts.get(state, "") for state in STATES)))
            first = ("", "", "", "")
    columns = ["partition", "state", "#samples", "#bytes", "consumer", *(f"#{state}" for state in STATES)]
    return Report([_as_data(info) for info in found], table(columns, rows) if rows else Text("no partitions"))


def _show(arguments: argparse.Namespace) -> Report:
    with reach(arguments) as client:
        partition = client.partition(arguments.partition)
        return show_report(partition.describe(), partition.metadata.to_dict())


def show_report(info: PartitionInfo, metadata: Mapping[str, Any]) -> Report:
    """Returns all that is known of a partition."""
    policy = {name: value for name, value in dataclasses.asdict(info.policy).items() if value is not None}
    version = "" if info.version is None else f", weight version {info.version}"
    head = f"{printable(info.name)}: {_state(info)}, {info.samples:,} samples, {size_text(info.bytes)}{version}"
    parts: list[Any] = [
        Text(head),
        Text(", ".join(f"{name}={value}" for name, value in policy.items())),
        Text(
            f"{info.inserted:,} samples put so far, {info.delivered:,} delivered; "
            f"{info.accepted:,} accepted and {info.running:,} running"
        ),
        "",
        table(["field", "#written", "form"], [(name, each.written, each.form) for name, each in info.fields.items()]),
        "",
        table(
            ["consumer", *(f"#{state}" for state in STATES)],
            [(name, *(counts[state] for state in STATES)) for name, counts in sorted(info.counts.items())],
        ),
    ]
    if metadata:
        parts += ["", table(["metadata", "value"], [(key, preview(value)) for key, value in sorted(metadata.items())])]
    return Report({**_as_data(info), "metadata": plain(metadata)}, Group(*parts))


def _peek(arguments: argparse.Namespace) -> Report:
    with reach(arguments) as client:
        partition = client.partition(arguments.partition)
        values, facts = sample_of(partition, arguments.id, arguments.key, arguments.field)
    head = ", ".join(f"{name} {preview(value)}" for name, value in facts.items() if value is not None)
    view = Group(Text(head), "", table(["field", "value"], [(name, preview(value)) for name, value in values.items()]))
    return Report({**plain(facts), "fields": {name: plain(value) for name, value in values.items()}}, view)


def sample_of(
    partition: Partition, sample_id: int | None, key: str | None, fields: list[str] | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns one sample's values, those of fields that it has, and what else is known of it.

    Raises:
        SampleNotFound: there is no such sample, or it lacks a field that was asked for.
    """
    select: dict[str, Any] = {"ids": [sample_id]} if key is None else {"keys": [key]}
    batches = []
    for names in [fields] if fields else [[name] for name in partition.describe().fields]:
        try:
            batches.append(partition.get(fields=names, **select))
        except SampleNotFound:
            if fields:
                raise
    if not batches:
        where = f"id {sample_id}" if key is None else f"key {key!r}"
        raise SampleNotFound(f"partition {partition.name!r} has no sample with {where}, or it has no field yet")
    first = batches[0]
    facts = {
        "id": int(first.ids[0]),
        "key": first.keys[0],
        "group": first.groups[0],
        "weight versions": first.weight_versions[0].tolist() if first.weight_versions[0][0] >= 0 else None,
        "tags": first.tags[0] or None,
    }
    return {name: batch.list(name)[0] for batch in batches for name in batch.fields}, facts


def _state(info: PartitionInfo) -> str:
    return "sealed" if info.sealed else "open"


def _as_data(info: PartitionInfo) -> dict[str, Any]:
    fields = {name: {"written": each.written, "form": str(each.form)} for name, each in info.fields.items()}
    return {
        "partition_id": info.partition_id,
        "name": info.name,
        "sealed": info.sealed,
        "version": info.version,
        "samples": info.samples,
        "bytes": info.bytes,
        "inserted": info.inserted,
        "delivered": info.delivered,
        "accepted": info.accepted,
        "running": info.running,
        "policy": dataclasses.asdict(info.policy),
        "fields": fields,
        "consumers": {name: dict(counts) for name, counts in info.counts.items()},
    }
