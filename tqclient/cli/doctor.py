"""`tq doctor`: what works from here, what does not, and why."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import shutil
import time
import uuid
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
from rich.console import Group
from rich.text import Text

from tqclient.cli.connection import START_ONE, connect, controller_address
from tqclient.cli.prove import library_text, proof_of
from tqclient.cli.report import Report, size_text, table
from tqclient.errors import TQError
from tqclient.info import ClusterInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

    from tqclient.client import Client

WRITE_BYTES: Final = 1 << 20
NODE_SECONDS: Final = 5.0
"""How long a storage node that was reached may take to describe itself once more."""
SHARED_MEMORY: Final = Path("/dev/shm")

Verdict = Literal["ok", "note", "bad"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        subject: what was looked at.
        verdict: `ok`; `note`: something is not to be had here, and nothing depends on it; `bad`: something is broken.
        detail: what was found.
        remedy: what to do about it.
    """

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds this module's command to the parser."""
    doctor = commands.add_parser(
        "doctor",
        parents=[common],
        allow_abbrev=False,
        help="which daemons and transports work from here, and why not; exits with 1 when something is broken",
    )
    doctor.add_argument(
        "--write", action="store_true", help="also put 1 MiB over each path, read it back, and remove it"
    )
    doctor.add_argument(
        "--rdma",
        action="store_true",
        help="prove that RDMA works: between two engines here and, with --controller, to every node; fails otherwise",
    )
    doctor.set_defaults(run=lambda arguments: report_of(examine(arguments)))


def report_of(findings: list[Finding]) -> Report:
    """Returns the findings, and 1 as exit code when one is bad."""
    rows = [
        (each.verdict, each.subject, f"{each.detail} → {each.remedy}" if each.remedy else each.detail)
        for each in findings
    ]
    bad = sum(each.verdict == "bad" for each in findings)
    closing = f"{bad} of {len(findings)} findings are bad" if bad else "nothing is broken"
    view = Group(table(["", "subject", "finding"], rows), "", Text(closing))
    data = {"healthy": not bad, "findings": [dataclasses.asdict(each) for each in findings]}
    return Report(data, view, code=1 if bad else 0)


def examine(arguments: argparse.Namespace) -> list[Finding]:
    """Looks at this machine, then at the controller, then at every path to every storage node."""
    findings = [_versions(), _shared_memory(), _library()]
    if arguments.rdma:
        findings += _rdma_findings(arguments)
        if not _names_controller(arguments):
            return findings
    address = controller_address(arguments)
    try:
        with connect(arguments) as client:
            started = time.monotonic()
            cluster = client.describe()
            elapsed_ms = (time.monotonic() - started) * 1000
            calls = _call_findings(client._connection.channels.channel, address, cluster)
            removed = _arena_findings(client._connection.channels.channel, cluster)
    except TQError as error:
        remedy = START_ONE if error.retryable else ""
        return [*findings, Finding(f"controller {address}", "bad", str(error), remedy)]
    detail = f"answered in {elapsed_ms:.0f} ms; start {cluster.epoch}, {cluster.sessions} sessions"
    findings.append(Finding(f"controller {address}", "ok", detail))
    findings += node_findings(cluster) + removed + calls
    return findings + [
        finding for name in _transports() for finding in _path_findings(arguments, name, write=arguments.write)
    ]


def node_findings(cluster: ClusterInfo) -> list[Finding]:
    """Judges the storage nodes as `auto` reaches them."""
    if not cluster.nodes:
        return [Finding("storage nodes", "bad", "none has ever attached", "start tq-storage with --controller")]
    findings = []
    for node in cluster.nodes:
        subject = f"node {node.name} {node.address}"
        if not node.attached:
            findings.append(Finding(subject, "bad", "its link to the controller is down", "look at its log"))
        elif not node.transport:
            findings.append(
                Finding(subject, "bad", f"no path from here: {node.reason}", "is its address right from here?")
            )
        else:
            used = f"{size_text(node.used_bytes)} of {size_text(node.capacity_bytes)} in use"
            findings.append(Finding(subject, "ok", f"over {node.transport}: {node.reason}; {used}"))
    return findings


def _call_findings(channel: Callable[[str], grpc.Channel], controller: str, cluster: ClusterInfo) -> list[Finding]:
    """Tells by which way clients call the daemons from here."""
    from tqclient.lane import why_not

    daemons = [("the controller", controller)]
    daemons += [(f"node {node.name}", node.address) for node in cluster.nodes if node.attached]
    findings = []
    for name, address in daemons:
        reason = why_not(channel(address))
        detail = "by its lane, a Unix socket" if reason is None else f"over gRPC: {reason}"
        findings.append(Finding(f"calls to {name}", "ok" if reason is None else "note", detail))
    return findings


def _arena_findings(channel: Callable[[str], grpc.Channel], cluster: ClusterInfo) -> list[Finding]:
    """Finds the nodes whose arena's file was removed from under them."""
    import grpc

    from tqclient.wire.v1 import storage_pb2
    from tqclient.wire.v1.storage_pb2_grpc import StorageStub

    findings = []
    for node in cluster.nodes:
        if not node.transport:  # it was not reached, which is a finding already
            continue
        try:
            described = StorageStub(channel(node.address)).DescribeNode(  # type: ignore[no-untyped-call]
                storage_pb2.DescribeNodeRequest(), timeout=NODE_SECONDS
            )
        except grpc.RpcError as error:
            findings.append(Finding(f"arena of {node.name}", "bad", f"the node does not answer ({error.code().name})"))
            continue
        if described.arena_removed:
            detail = f"{described.arena_path} was removed while the node serves it: the blocks go when that ends"
            remedy = "let them be consumed, or put elsewhere, then start the node again"
            findings.append(Finding(f"arena of {node.name}", "bad", detail, remedy))
    return findings


def _transports() -> list[str]:
    from tqclient.transport.select import OPENERS

    return list(OPENERS)


def _path_findings(
    arguments: argparse.Namespace, transport: str, *, otherwise: Verdict = "note", write: bool = False
) -> list[Finding]:
    """Requires one transport for every node; a path that is not to be had is a note, as another one may serve."""
    from tqclient.transport.select import ALIASES

    subject = f"transport {transport}"
    name = ALIASES.get(transport, transport)
    try:
        with connect(arguments, transport=transport) as client:
            nodes = [node for node in client.describe().nodes if node.attached]
            findings = [
                Finding(f"{subject} to {node.name}", "ok" if node.transport == name else otherwise, node.reason)
                for node in nodes
            ]
            if write and any(node.transport == name for node in nodes):
                findings.append(_round_trip(client, subject))
    except TQError as error:
        return [Finding(subject, otherwise, str(error))]
    return findings


def _names_controller(arguments: argparse.Namespace) -> bool:
    return bool(arguments.controller or os.environ.get("TQ_CONTROLLER"))


def _library() -> Finding:
    try:
        return Finding("mooncake library", "ok", library_text())
    except TQError as error:
        return Finding("mooncake library", "note", error.message)


def _rdma_findings(arguments: argparse.Namespace) -> list[Finding]:
    """Proves RDMA between two engines of this process, then to each node of the controller, if one was named."""
    proved, detail = proof_of()
    findings = [Finding("RDMA here", "ok" if proved else "bad", detail)]
    if _names_controller(arguments):
        findings += _path_findings(arguments, "rdma", otherwise="bad", write=True)
    return findings


def _round_trip(client: Client, subject: str) -> Finding:
    """Puts values into a partition of its own, reads them back, and removes it."""
    sent = np.random.default_rng().integers(0, 256, WRITE_BYTES, dtype=np.uint8).reshape(1, -1)
    name = f"tq-doctor/{uuid.uuid4().hex}"
    partition = client.create_partition(name)
    try:
        started = time.monotonic()
        ids = partition.put({"bytes": sent})
        put_ms = (time.monotonic() - started) * 1000
        received = partition.get(ids)["bytes"]
        get_ms = (time.monotonic() - started) * 1000 - put_ms
    except TQError as error:
        return Finding(f"{subject}: put and get", "bad", f"{type(error).__name__}: {error}")
    finally:
        client.delete_partition(name)
    if not np.array_equal(received, sent):
        return Finding(f"{subject}: put and get", "bad", "other bytes came back", "report this as a bug, with the logs")
    size = size_text(WRITE_BYTES)
    return Finding(f"{subject}: put and get", "ok", f"{size} put in {put_ms:.1f} ms, read back in {get_ms:.1f} ms")


def _versions() -> Finding:
    versions = " ".join(f"{name} {metadata.version(name)}" for name in ("tq-dataplane", "grpcio", "protobuf", "numpy"))
    return Finding("this client", "ok", f"{versions}, Python {platform.python_version()}, pid {os.getpid()}")


def _shared_memory() -> Finding:
    if not os.access(SHARED_MEMORY, os.R_OK | os.W_OK | os.X_OK):
        return Finding("shared memory", "note", f"{SHARED_MEMORY} cannot be used", "mount a tmpfs there")
    usage = shutil.disk_usage(SHARED_MEMORY)
    return Finding(
        "shared memory", "ok", f"{size_text(usage.free)} of {size_text(usage.total)} free in {SHARED_MEMORY}"
    )
