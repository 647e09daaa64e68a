"""`tq-bench compare`, `peers` and `soak` on the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from benchmarks.arguments import DRAW, count, minutes, picture, seed, transport
from benchmarks.peers import MEMCPY, OURS, PEERS, Peer
from tqclient.limits import MIB

if TYPE_CHECKING:
    from benchmarks import compare, soak


def add(commands: Any, parent: argparse.ArgumentParser, console: Console) -> None:
    """Adds the commands to the parser of `tq-bench`."""
    from benchmarks.compare import GROUPS, ROWS

    known = ", ".join((*GROUPS, ROWS))
    sides = commands.add_parser("compare", parents=[parent], help="the same batches through us and through our peers")
    sides.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"{known}; all if none is named")
    sides.add_argument("--peers", nargs="+", metavar="PEER", help=f"{', '.join(PEERS)}; all if none is named")
    sides.add_argument("--repeats", type=count, default=9, help="warm rounds (default 9)")
    sides.add_argument("--seed", type=seed, default=0)
    sides.add_argument("--scale", choices=("full", "small"), default="full", help="small is for tests (default full)")
    sides.add_argument("--plot", type=picture, metavar="FILE", help="draw it there, as a PNG")
    sides.set_defaults(command=lambda arguments: _compare(arguments, console))

    others = commands.add_parser("peers", help="the environments of the peers")
    actions = others.add_subparsers(required=True, metavar="ACTION")
    installing = actions.add_parser("install", parents=[parent], help="make or update them")
    installing.add_argument("peers", nargs="*", metavar="PEER", help="all if none is named")
    installing.set_defaults(command=lambda arguments: _install(arguments, console))
    listing = actions.add_parser("list", parents=[parent], help="what is installed, and where")
    listing.set_defaults(command=lambda arguments: _list(console))

    going = commands.add_parser("soak", parents=[parent], help="whether what it uses stays level while it goes on")
    going.add_argument("--minutes", type=minutes, default=10.0, help="in all (default 10)")
    going.add_argument("--workload", default="jagged", help="that goes round (default jagged)")
    going.add_argument("--seed", type=seed, default=0)
    going.add_argument("--scale", choices=("full", "small"), default="full", help="small is for tests (default full)")
    going.add_argument("--transport", type=transport, default="auto", help="auto, shm, mooncake or grpc (default auto)")
    going.add_argument("--plot", type=picture, metavar="FILE", help="draw it there, as a PNG")
    going.set_defaults(command=lambda arguments: _soak(arguments, console))


def _chosen(names: Sequence[str] | None) -> list[Peer]:
    if unknown := sorted(set(names or ()) - PEERS.keys()):
        raise SystemExit(f"tq-bench: no peer {', '.join(unknown)}; there are {', '.join(PEERS)}")
    return [PEERS[name] for name in names or PEERS]


def _compare(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    from benchmarks import charts, compare
    from benchmarks.peers.install import versions

    known = (*compare.GROUPS, compare.ROWS)
    names = arguments.workloads or known
    if unknown := sorted(set(names) - set(known)):
        raise SystemExit(f"tq-bench: no workload {', '.join(unknown)}; there are {', '.join(known)}")
    peers = _chosen(arguments.peers)
    found = {peer.name: versions(peer) for peer in peers if peer.requirements is not None}
    for name, packages in found.items():
        console.print(f"{name}: {'  '.join(f'{package} {version}' for package, version in sorted(packages.items()))}")
    result = compare.run(compare.Plan(names, peers, arguments.repeats, arguments.seed, arguments.scale))
    _print_rows(result, console)
    _print_costs(result, console)
    _print_rates(result, console)
    for failure in result.failures:
        way = f", {failure.way}" if failure.way else ""
        console.print(f"{failure.workload}: {failure.peer}{way} failed: {failure.reason}", markup=False)
    failed = any(failure.peer in (OURS, MEMCPY) for failure in result.failures)
    return {"peers": found, "compare": asdict(result), "failed": failed, DRAW: partial(charts.compare, result)}


def _print_rows(result: compare.Result, console: Console) -> None:
    from benchmarks.compare import END_TO_END, GET, PUT

    if not result.rows:
        return
    warm = Table("workload", "MB", "peer", "way", "end to end, ms", "put, ms", "get, ms", "× ours")
    cold = Table("workload", "peer", "way", "first: end to end, ms", "put, ms", "get, ms")
    rows = {(row.workload, row.peer, row.way, row.operation): row for row in result.rows}
    lanes = list(dict.fromkeys(key[:3] for key in rows))
    last = lanes[0][0]
    for workload, peer, way in lanes:
        if workload != last:
            warm.add_section()
            cold.add_section()
            last = workload
        found = [rows[workload, peer, way, operation] for operation in (END_TO_END, PUT, GET)]
        base = rows.get((workload, OURS, PEERS[OURS].ways[0], END_TO_END))
        ratio = f"{found[0].times.median_ms / base.times.median_ms:.2f}" if base else ""
        size = f"{found[0].size_bytes / 1e6:.1f}"
        warm.add_row(workload, size, peer, way, *[str(row.times) for row in found], ratio)
        cold.add_row(workload, peer, way, *[f"{row.cold_ms:.2f}" for row in found])
    console.print(warm)
    console.print(cold)


def _print_costs(result: compare.Result, console: Console) -> None:
    if not result.costs:
        return
    table = Table("workload", "peer", "way", "process", "CPU ms a batch", "peak RSS MiB")
    for cost in result.costs:
        peak = f"{cost.rss_peak_bytes / MIB:.0f}"
        table.add_row(cost.workload, cost.peer, cost.way, cost.part, f"{cost.cpu_ms:.0f}", peak)
    console.print(table)


def _print_rates(result: compare.Result, console: Console) -> None:
    if not result.rates:
        return
    table = Table("producers", "peer", "way", "one-row puts a second", "p50 ms", "p99 ms")
    for rate in result.rates:
        times = rate.times
        table.add_row(
            str(rate.producers),
            rate.peer,
            rate.way,
            f"{rate.calls_per_s:.0f}",
            f"{times.median_ms:.2f}",
            f"{times.p99_ms:.2f}",
        )
    console.print(table)


def _install(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    from benchmarks.peers.install import install

    failures = install(_chosen(arguments.peers), lambda line: console.print(line, markup=False))
    for environment, reason in failures.items():
        console.print(f"{environment} was not installed: {reason}", markup=False)
    return {"install": {"failures": failures}, "failed": bool(failures)}


def _list(console: Console) -> dict[str, Any]:
    from benchmarks.peers.install import versions
    from benchmarks.peers.process import home

    table = Table("peer", "ways", "environment", "installed")
    found = {peer.name: versions(peer) for peer in PEERS.values()}
    for peer in PEERS.values():
        where = "ours" if peer.requirements is None else str(home() / peer.environment)
        packages = ", ".join(f"{name} {version}" for name, version in sorted(found[peer.name].items()))
        table.add_row(peer.name, "; ".join(peer.ways), where, packages)
    console.print(table)
    return {"peers": found}


def _soak(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    from benchmarks import charts, soak, workloads

    if arguments.workload not in workloads.WORKLOADS:
        raise SystemExit(f"tq-bench: no workload {arguments.workload}; there are {', '.join(workloads.WORKLOADS)}")
    result = soak.run(
        minutes=arguments.minutes,
        workload=arguments.workload,
        seed=arguments.seed,
        scale=arguments.scale,
        transport=arguments.transport,
    )
    _print_verdicts(result, console)
    draw = partial(charts.series, result.times_s, soak.lines(result.samples))
    return {"soak": {**asdict(result), "passed": result.passed}, "failed": not result.passed, DRAW: draw}


def _print_verdicts(result: soak.Result, console: Console) -> None:
    table = Table("process", "quantity", "after warm-up", "at the end", "range", "bound", "")
    for verdict in result.verdicts:
        table.add_row(
            verdict.process,
            verdict.quantity,
            f"{verdict.first:.0f}",
            f"{verdict.last:.0f}",
            f"{verdict.low:.0f}–{verdict.high:.0f}",
            verdict.bound,
            "passed" if verdict.passed else "failed",
        )
    console.print(table)
    console.print(
        f"{result.batches} batches of {result.size_bytes / 1e6:.1f} MB; ms: put {result.put}, "
        f"claim {result.take}, get {result.get}: {'passed' if result.passed else 'failed'}"
    )
