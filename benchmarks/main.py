"""The `tq-bench` command.

What a command needs is imported when it runs: each process that it spawns imports this module again.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from tqclient.limits import MIB

# Into a file or a pipe, rich would fold the table to 80 columns.
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = _parser().parse_args(argv)
    report: dict[str, Any] = {"machine": machine.describe()}
    CONSOLE.print("  ".join(f"{key} {value}" for key, value in report["machine"].items()))
    report.update(arguments.command(arguments))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    from benchmarks import workloads

    parser = argparse.ArgumentParser(prog="tq-bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--json", type=Path, metavar="FILE", help="write every figure there as well")

    put_get = commands.add_parser("run", parents=[parent], help="put and get, beside plain copies of the same bytes")
    put_get.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=", ".join(workloads.WORKLOADS) + "; all if none is named"
    )
    put_get.add_argument("--repeats", type=int, default=9, help="warm rounds (default 9)")
    put_get.add_argument("--seed", type=int, default=0)
    put_get.add_argument("--transport", default="shm", help="auto, shm or grpc (default shm)")
    put_get.add_argument("--arena", default="2GiB", help="of the storage node (default 2GiB)")
    put_get.set_defaults(command=_run)

    blocked = commands.add_parser("claims", parents=[parent], help="what blocked claims cost the others")
    blocked.add_argument("--waiting", type=int, default=1000, help="claims blocked on the server (default 1000)")
    blocked.add_argument("--calls", type=int, default=2000, help="describe calls in each half (default 2000)")
    blocked.set_defaults(command=_claims)

    starts = commands.add_parser("start", parents=[parent], help="how soon the daemons serve")
    starts.add_argument("--repeats", type=int, default=5, help="starts of each (default 5)")
    starts.add_argument("--arena", default="1GiB", help="of the storage node (default 1GiB)")
    starts.set_defaults(command=_start)

    paths = commands.add_parser("transport", parents=[parent], help="the same bytes over every path, and over Mooncake")
    paths.add_argument("paths", nargs="*", metavar="PATH", help="such as memcpy, mooncake, 'raw engine'; all if none")
    paths.add_argument("--repeats", type=int, default=9, help="rounds that count (default 9)")
    paths.add_argument("--seed", type=int, default=0)
    paths.add_argument("--staging", metavar="SIZE", help="TQ_MOONCAKE_STAGING of our client (default: its own)")
    paths.add_argument("--arena", default="3GiB", help="of the storage node (default 3GiB)")
    paths.set_defaults(command=_transport)
    return parser


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import run, workloads

    names = arguments.workloads or list(workloads.WORKLOADS)
    unknown = sorted(set(names) - workloads.WORKLOADS.keys())
    if unknown:
        raise SystemExit(f"tq-bench: no workload {', '.join(unknown)}; there are {', '.join(workloads.WORKLOADS)}")
    results = run.run(
        names, repeats=arguments.repeats, seed=arguments.seed, transport=arguments.transport, arena=arguments.arena
    )
    table = Table("workload", "MB", "operation", "cold ms", "warm ms: median (min–max)", "× plain copy")
    for result in results:
        for operation, spread in result.warm.items():
            ratio = ", ".join(f"{ratio:.2f}" for ratio in result.ratios(operation))
            size = f"{result.size_bytes / 1e6:.1f}"
            table.add_row(result.workload, size, operation, f"{result.cold_ms[operation]:.2f}", str(spread), ratio)
        table.add_section()
    CONSOLE.print(table)
    used = Table("workload", "process", "CPU s", "peak RSS MiB", "minor faults")
    for result in results:
        for process, usage in result.processes.items():
            peak = f"{usage.rss_peak_bytes / MIB:.0f}"
            used.add_row(result.workload, process, f"{usage.cpu_s:.1f}", peak, f"{usage.minor_faults}")
        used.add_section()
    CONSOLE.print(used)
    return {"run": [asdict(result) for result in results]}


def _claims(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import claims

    result = claims.run(waiting=arguments.waiting, calls=arguments.calls)
    table = Table("what", "p50 ms", "p99 ms", "max ms", "count")
    rows = {
        "describe, idle": result.idle,
        f"describe, {result.waiting} claims blocked": result.blocked,
        "wake, one by one": result.wake_one,
        "wake, all at once": result.wake_all,
    }
    for name, spread in rows.items():
        table.add_row(
            name, f"{spread.median_ms:.2f}", f"{spread.p99_ms:.2f}", f"{spread.max_ms:.2f}", str(spread.count)
        )
    CONSOLE.print(table)
    CONSOLE.print(
        f"describe p99 rose by {result.blocked.p99_ms - result.idle.p99_ms:.2f} ms, "
        f"the controller by {result.controller_grown_bytes / MIB:.1f} MiB"
    )
    return {"claims": asdict(result)}


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import start

    results = start.run(repeats=arguments.repeats, arena=arguments.arena)
    table = Table("daemon", "ms until it serves: median (min–max)", "count")
    for daemon, spread in results.items():
        table.add_row(daemon, str(spread), str(spread.count))
    CONSOLE.print(table)
    return {"start": {daemon: asdict(spread) for daemon, spread in results.items()}}


def _transport(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import transport

    known = {path.name: path for path in transport.PATHS}
    names = arguments.paths or list(known)
    if unknown := sorted(set(names) - known.keys()):
        raise SystemExit(f"tq-bench: no path {', '.join(unknown)}; there are {', '.join(known)}")
    result = transport.run(
        [known[name] for name in names],
        repeats=arguments.repeats,
        seed=arguments.seed,
        arena=arguments.arena,
        staging=arguments.staging,
    )
    table = Table("path", "timed", "ms: median (min–max)", "GB/s", "speed ÷ raw engine")
    for operation, rows in groupby(result.rows, key=lambda row: row.operation):
        table.add_row(f"[bold]{operation}")
        for row in rows:
            median, least, most = map(_digits, (row.times.median_ms, row.times.min_ms, row.times.max_ms))
            speed = "" if row.speed is None else f"{row.speed:.2f}"
            table.add_row(
                f"  {row.path}", row.timed, f"{median} ({least}–{most})", _digits(row.gigabytes_per_second), speed
            )
        table.add_section()
    CONSOLE.print(table)
    for name, failure in result.failures.items():
        CONSOLE.print(f"{name} failed: {failure}")
    for name, (before, after) in result.registrations.items():
        CONSOLE.print(f"memory registrations, {name}: {before} before the counted rounds, {after} after")
    return {"transport": asdict(result)}


def _digits(value: float) -> str:
    """Says a value in three digits, or in as many as it has in front of the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
