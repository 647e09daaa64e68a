"""`tq top`: the service as it changes."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.console import Group
from rich.live import Live
from rich.text import Text

from tqclient.cli.connection import reach
from tqclient.cli.look import partitions_report, status_report
from tqclient.cli.report import Report, console, table
from tqclient.errors import InvalidArgument
from tqclient.info import ClusterInfo, PartitionInfo

INTERVAL_MAX: Final = 86_400.0
"""Seconds: a day."""


@dataclass(frozen=True)
class Look:
    """The service at one moment.

    Attributes:
        seconds: on a monotonic clock.
        cluster: the controller and its nodes.
        partitions: all of them.
    """

    seconds: float
    cluster: ClusterInfo
    partitions: Sequence[PartitionInfo]


def add_commands(commands: Any, common: argparse.ArgumentParser) -> None:
    """Adds this module's command to the parser."""
    top = commands.add_parser(
        "top", parents=[common], allow_abbrev=False, help="status and partitions, live, with rates; Ctrl-C ends it"
    )
    top.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="between two looks [%(default)s]")
    top.add_argument("--count", metavar="N", type=int, help="looks to take; without it, until Ctrl-C")
    top.set_defaults(run=_top)


def _top(arguments: argparse.Namespace) -> Report:
    if not 0 < arguments.interval <= INTERVAL_MAX or (arguments.count is not None and arguments.count < 1):
        raise InvalidArgument(f"--interval and --count must be above 0, and --interval at most {INTERVAL_MAX:.0f}")
    out = console()
    # What is no terminal, or cannot move its cursor, gets one look below the other.
    moves = sys.stdout.isatty() and not out.is_dumb_terminal and not arguments.json
    live = Live(console=out, transient=True, auto_refresh=False) if moves else None
    with reach(arguments) as client, live or contextlib.nullcontext():
        before: Look | None = None
        for taken in itertools.count(1):
            look = Look(time.monotonic(), client.describe(), client.partitions())
            report = report_of(look, before)
            if taken == arguments.count:
                return report
            if live is not None:
                live.update(report_of(look, before, rows_max=out.height).view, refresh=True)
            else:
                report.write(out, as_json=arguments.json)
                out.file.flush()  # a pipe's reader sees it now, not when 8 KiB are there
            before = look
            time.sleep(arguments.interval)
    raise AssertionError("count() has no end")


def report_of(look: Look, before: Look | None, rows_max: int | None = None) -> Report:
    """Returns a look, with rates since the one before.

    Args:
        look: what is there.
        before: the look before, if there was one.
        rows_max: rates and partitions that people are shown at most, as on a screen; None shows all.
    """
    status, partitions = status_report(look.cluster), partitions_report(look.partitions)
    rates = rates_of(look, before) if before else {}
    rows = [(name, f"{rate:,.1f}") for name, rate in rates.items() if rate][:rows_max]
    moving = table(["per second", "#"], rows) if rows else Text("nothing moves")
    data = {"cluster": status.data, "partitions": partitions.data, "rates": rates}
    shown = partitions_report(look.partitions[:rows_max]).view
    left_out = len(look.partitions[rows_max:]) if rows_max is not None else 0
    more: list[Any] = ["", Text(f"and {left_out:,} more partitions")] if left_out else []
    return Report(data, Group(status.view, "", moving, "", shown, *more))


def rates_of(look: Look, before: Look) -> dict[str, float]:
    """Returns what changed per second: changes, and by partition new samples and what each consumer acknowledged.

    A partition that is new counts from nothing; what fell (samples that were cleared) is negative.
    """
    elapsed = look.seconds - before.seconds
    changes = {"changes": look.cluster.journal_sequence - before.cluster.journal_sequence}
    former = {info.partition_id: info for info in before.partitions}
    for info in look.partitions:
        old = former.get(info.partition_id)
        changes[f"{info.name}: samples"] = info.samples - (old.samples if old else 0)
        for consumer, counts in info.counts.items():
            counts_before = old.counts.get(consumer, {}) if old else {}
            changes[f"{info.name}: acknowledged by {consumer}"] = counts["consumed"] - counts_before.get("consumed", 0)
    return {name: round(change / elapsed, 3) for name, change in changes.items()}
