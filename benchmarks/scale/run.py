"""The whole of `tq-bench scale`, on a cluster of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from rich.progress import Progress

import tqclient as tq
from benchmarks.scale import claims, groups, listing, wake
from benchmarks.scale.peer import SESSION_LEASE
from tqserver.local import LocalCluster

SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
BATCH_ROWS: Final = 64


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one run.

    Attributes:
        batch_rows: of each claim.
        claims: by sampler and size.
        growth: sampler → median of the largest partition over that of the smallest.
        wake: one put and many who wait.
        groups: groups that arrive shuffled.
        watching: what a watcher is told, by size.
    """

    batch_rows: int
    claims: list[claims.Cost]
    growth: dict[str, float]
    wake: wake.Wake
    groups: groups.Groups
    watching: list[listing.Watching]


def run(
    *,
    sizes: Sequence[int],
    samplers: Sequence[str],
    repeats: int,
    waiting: int,
    group_count: int,
    seed: int,
    arena: str,
) -> Result:
    """Measures one thing after the other.

    Args:
        sizes: samples in a partition.
        samplers: names in `claims.SAMPLERS`.
        repeats: claims that count, of each sampler at each size.
        waiting: claims that one put wakes.
        group_count: groups that arrive shuffled.
        seed: of lengths, priorities and orders.
        arena: of the storage node.
    """
    rng = np.random.default_rng(seed)
    with (
        LocalCluster(storage_nodes=1, arena=arena, session_lease=SESSION_LEASE) as cluster,
        tq.connect(cluster.address, timeout=120) as client,
        Progress(transient=True) as progress,
    ):
        waking = wake.measure(client, cluster, waiting=waiting, repeats=WAKES)
        grouped = groups.measure(client, cluster.address, groups=group_count, seed=seed)
        parts = {rows: client.create_partition(f"bench/{rows}") for rows in sorted(set(sizes))}
        filling = progress.add_task("filling partitions", total=sum(parts))
        for rows, part in parts.items():
            claims.fill(part, rows, rng, lambda count: progress.advance(filling, count))
        claiming = progress.add_task("claims", total=len(samplers) * (claims.WARM_UP + repeats))
        costs = claims.measure(
            cluster.address,
            parts,
            samplers=samplers,
            batch_rows=BATCH_ROWS,
            repeats=repeats,
            tick=lambda: progress.advance(claiming),
        )
        watching = listing.measure(cluster.address, parts, repeats=repeats)
    return Result(BATCH_ROWS, costs, {name: claims.growth(costs, name) for name in samplers}, waking, grouped, watching)


WAKES: Final = 15
