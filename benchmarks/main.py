"""The `tq-bench` command.

What a command needs is imported when it runs: each process that it spawns imports this module again.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path
from signal import SIGHUP, SIGTERM
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.arguments import DRAW, count, output, picture, seed, size, transport
from tqclient.errors import TQError
from tqclient.limits import MIB

# Into a file or a pipe, rich would fold the table to 80 columns.
CONSOLE = Console(width=None if sys.stdout.isatty() else 120)


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit code. SIGTERM and SIGHUP end it as Ctrl-C does, in order."""
    arguments = _parser().parse_args(argv)
    with _ended_in_order():
        return _measure(arguments)


@contextmanager
def _ended_in_order() -> Iterator[None]:
    """Has signals that ask for an end leave through every `finally`: daemons, arenas and directories go with them."""
    asked = [number for number in (SIGTERM, SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]  # else: nohup
    for number in asked:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in asked:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)  # as of a process that died of it


def _measure(arguments: argparse.Namespace) -> int:
    report: dict[str, Any] = {"machine": machine.describe()}
    CONSOLE.print("  ".join(f"{key} {value}" for key, value in report["machine"].items()))
    try:
        report.update(arguments.command(arguments))
    except TQError as error:
        sys.stderr.write(f"tq-bench: {type(error).__name__}: {error}\n")
        return 1
    draw = report.pop(DRAW, None)
    kept = [_keep(arguments.json, lambda path: path.write_text(json.dumps(report, indent=2) + "\n"))]
    kept += [_keep(arguments.plot, draw)] if draw is not None else []
    return int(report.get("failed", False) or not all(kept))


def _keep(path: Path | None, write: Callable[[Path], object]) -> bool:
    """Writes a file, if one was asked for. What it has no room for costs a line, not what else was measured."""
    if path is None:
        return True
    try:
        write(path)
    except OSError as error:
        sys.stderr.write(f"tq-bench: {path}: {error.strerror or error}; the figures are in the tables above\n")
        return False
    return True


def _parser() -> argparse.ArgumentParser:
    from benchmarks import comparing, workloads

    parser = argparse.ArgumentParser(prog="tq-bench", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parent = argparse.ArgumentParser(add_help=False)
    parent.add_argument("--json", type=output, metavar="FILE", help="write every figure there as well")

    put_get = commands.add_parser("run", parents=[parent], help="put and get, beside plain copies of the same bytes")
    put_get.add_argument(
        "workloads", nargs="*", metavar="WORKLOAD", help=", ".join(workloads.WORKLOADS) + "; all if none is named"
    )
    put_get.add_argument("--repeats", type=count, default=9, help="warm rounds (default 9)")
    put_get.add_argument("--seed", type=seed, default=0)
    put_get.add_argument("--transport", type=transport, default="shm", help="auto, shm or grpc (default shm)")
    put_get.add_argument("--arena", type=size, default="2GiB", help="of the storage node (default 2GiB)")
    put_get.set_defaults(command=_run)

    blocked = commands.add_parser("claims", parents=[parent], help="what blocked claims cost the others")
    blocked.add_argument("--waiting", type=count, default=1000, help="claims blocked on the server (default 1000)")
    blocked.add_argument("--calls", type=count, default=2000, help="describe calls in each half (default 2000)")
    blocked.set_defaults(command=_claims)

    bridges = commands.add_parser(
        "bridge", parents=[parent], help="a rollout with and without its schedule, and by hand"
    )
    bridges.add_argument("--samples", type=count, default=256, help="of each rollout, in 4 shards (default 256)")
    bridges.add_argument("--repeats", type=count, default=30, help="rounds that count (default 30)")
    bridges.add_argument("--seed", type=seed, default=0)
    bridges.add_argument("--arena", type=size, default="1GiB", help="of the storage node (default 1GiB)")
    bridges.set_defaults(command=_bridge)

    starts = commands.add_parser("start", parents=[parent], help="how soon the daemons serve")
    starts.add_argument("--repeats", type=count, default=5, help="starts of each (default 5)")
    starts.add_argument("--arena", type=size, default="1GiB", help="of the storage node (default 1GiB)")
    starts.set_defaults(command=_start)

    growing = commands.add_parser("growth", parents=[parent], help="whether cost grows as the work does")
    growing.add_argument("--repeats", type=count, default=9, help="rounds that count (default 9)")
    growing.add_argument("--scale", choices=("full", "small"), default="full", help="small is for tests (default full)")
    growing.set_defaults(command=_growth)

    paths = commands.add_parser("transport", parents=[parent], help="the same bytes over every path, and over Mooncake")
    paths.add_argument("paths", nargs="*", metavar="PATH", help="such as memcpy, mooncake, 'raw engine'; all if none")
    paths.add_argument("--repeats", type=count, default=9, help="rounds that count (default 9)")
    paths.add_argument("--seed", type=seed, default=0)
    paths.add_argument(
        "--staging", type=size, metavar="SIZE", help="TQ_MOONCAKE_STAGING of our client (default: its own)"
    )
    paths.add_argument("--arena", type=size, default="3GiB", help="of the storage node (default 3GiB)")
    paths.set_defaults(command=_transport)

    _add_scale(commands.add_parser("scale", parents=[parent], help="what a claim costs as a partition grows"))
    comparing.add(commands, parent, CONSOLE)
    return parser


def _add_scale(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("samplers", nargs="*", metavar="SAMPLER", help="such as fifo, 'seqlen balanced'; all if none")
    parser.add_argument("--sizes", type=count, nargs="+", metavar="ROWS", help="default 1000 10000 100000 1000000")
    parser.add_argument("--repeats", type=count, default=300, help="claims of each kind (default 300)")
    parser.add_argument("--waiting", type=count, default=1000, help="claims that one put wakes (default 1000)")
    parser.add_argument("--groups", type=count, default=10_000, help="of 8 that arrive shuffled (default 10000)")
    parser.add_argument("--plot", type=picture, metavar="FILE", default="scale.png", help="default scale.png")
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--arena", type=size, default="1GiB", help="of the storage node (default 1GiB)")
    parser.set_defaults(command=_scale)


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
            megabytes = f"{result.size_bytes / 1e6:.1f}"
            table.add_row(result.workload, megabytes, operation, f"{result.cold_ms[operation]:.2f}", str(spread), ratio)
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


def _bridge(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import bridge

    result = bridge.run(
        samples=arguments.samples, repeats=arguments.repeats, seed=arguments.seed, arena=arguments.arena
    )
    what = f"{result.samples} samples, {result.size_bytes / 1e6:.1f} MB"
    table = Table(f"publish and fetch {what}", "ms: median (min–max)", "count")
    for name, spread in result.ways.items():
        table.add_row(name, str(spread), str(spread.count))
    CONSOLE.print(table)
    CONSOLE.print(f"with the schedule: × {result.schedule_ratio:.2f} without it, × {result.hand_ratio:.2f} by hand")
    return {"bridge": asdict(result)}


def _start(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import start

    results = start.run(repeats=arguments.repeats, arena=arguments.arena)
    table = Table("daemon", "ms until it serves: median (min–max)", "count")
    for daemon, spread in results.items():
        table.add_row(daemon, str(spread), str(spread.count))
    CONSOLE.print(table)
    return {"start": {daemon: asdict(spread) for daemon, spread in results.items()}}


def _growth(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import growth

    found = growth.run(repeats=arguments.repeats, scale=arguments.scale)
    table = Table("with", "of", "operation", "ms: median (min–max)", "then", "×", "at most", "")
    for work, rows in groupby(found, key=lambda each: each.work):
        for each in rows:
            verdict = "passed" if each.passed else "failed"
            times = str(each.less), str(each.more), f"{each.factor:.2f}", f"{each.bound:g}"
            table.add_row(work, each.kind, each.operation, *times, verdict)
        table.add_section()
    CONSOLE.print(table)
    figures = [{**asdict(each), "factor": each.factor, "passed": each.passed} for each in found]
    return {"growth": figures, "failed": not all(each.passed for each in found)}


def _transport(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks import transport as measuring

    known = {path.name: path for path in measuring.PATHS}
    names = arguments.paths or list(known)
    if unknown := sorted(set(names) - known.keys()):
        raise SystemExit(f"tq-bench: no path {', '.join(unknown)}; there are {', '.join(known)}")
    result = measuring.run(
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
        CONSOLE.print(f"{name} failed: {failure}", markup=False)
    for name, (before, after) in result.registrations.items():
        CONSOLE.print(f"memory registrations, {name}: {before} before the counted rounds, {after} after")
    return {"transport": asdict(result)}


def _scale(arguments: argparse.Namespace) -> dict[str, Any]:
    from benchmarks.scale import claims, plot, run

    samplers = arguments.samplers or list(claims.SAMPLERS)
    if unknown := sorted(set(samplers) - claims.SAMPLERS.keys()):
        raise SystemExit(f"tq-bench: no sampler {', '.join(unknown)}; there are {', '.join(claims.SAMPLERS)}")
    result = run.run(
        sizes=arguments.sizes or run.SIZES,
        samplers=samplers,
        repeats=arguments.repeats,
        waiting=arguments.waiting,
        group_count=arguments.groups,
        seed=arguments.seed,
        arena=arguments.arena,
    )
    table = Table("claim of 64 by", "samples", "p50 ms", "p99 ms", "× smallest", "first claim ms")
    for sampler, rows in groupby(result.claims, key=lambda cost: cost.sampler):
        least: float | None = None
        for cost in rows:
            least = least or cost.times.median_ms
            table.add_row(
                sampler,
                f"{cost.rows:,}",
                f"{cost.times.median_ms:.2f}",
                f"{cost.times.p99_ms:.2f}",
                f"{cost.times.median_ms / least:.2f}",
                f"{cost.first_ms:.1f}",
            )
        table.add_section()
    CONSOLE.print(table)
    wake, groups = result.wake, result.groups
    others = Table("what", "p50 ms", "p99 ms", "max ms", "count")
    for name, spread in {
        f"one put wakes {wake.waiting}: each": wake.each,
        f"one put wakes {wake.waiting}: the last": wake.last,
        "the same put, nobody waits": wake.put_alone,
        "the controller's CPU until the last": wake.controller_cpu,
        f"{groups.groups} shuffled groups: put": groups.put,
        f"{groups.groups} shuffled groups: claim": groups.claim,
        f"{groups.groups} shuffled groups: too few": groups.refused,
    }.items():
        others.add_row(
            name, f"{spread.median_ms:.2f}", f"{spread.p99_ms:.2f}", f"{spread.max_ms:.2f}", str(spread.count)
        )
    CONSOLE.print(others)
    watching = Table("a watcher of", "listing ms", "change p50 ms", "change p99 ms")
    for each in result.watching:
        times = each.change
        watching.add_row(f"{each.rows:,}", f"{each.listing_ms:.1f}", f"{times.median_ms:.2f}", f"{times.p99_ms:.2f}")
    CONSOLE.print(watching)
    CONSOLE.print(f"cost against size: {arguments.plot}", markup=False)
    return {"scale": asdict(result), DRAW: partial(plot.draw, result.claims)}


def _digits(value: float) -> str:
    """Says a value in three digits, or in as many as it has in front of the point."""
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    raise SystemExit(main())
