"""The plots of `tq-bench compare` and `tq-bench soak`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.compare import OPERATIONS, Result
from benchmarks.figures import load_pyplot, save


def compare(result: Result, path: Path) -> None:
    """Draws the medians of each workload as bars, with their spread.

    Args:
        result: of the run.
        path: of the PNG.
    """
    groups = [(name, list(rows)) for name, rows in groupby(result.rows, key=lambda row: row.workload)]
    figure, axes = load_pyplot().subplots(len(groups) or 1, 1, figsize=(9, 1 + 4 * (len(groups) or 1)), squeeze=False)
    for (workload, rows), axis in zip(groups, axes[:, 0], strict=False):
        ways = list(dict.fromkeys((row.peer, row.way) for row in rows))
        for index, operation in enumerate(OPERATIONS):
            mine = {(row.peer, row.way): row.times for row in rows if row.operation == operation}
            medians = [mine[way].median_ms for way in ways]
            low = [mine[way].median_ms - mine[way].min_ms for way in ways]
            high = [mine[way].max_ms - mine[way].median_ms for way in ways]
            places = [number + (index - 1) * 0.27 for number in range(len(ways))]
            axis.barh(places, medians, height=0.25, xerr=[low, high], label=operation, error_kw={"lw": 0.7})
        axis.set_yticks(range(len(ways)), [f"{peer}: {way}" for peer, way in ways], fontsize=8)
        axis.invert_yaxis()
        axis.set_xscale("log")
        axis.set_xlabel("ms, median and range")
        axis.set_title(f"{workload}, {rows[0].size_bytes / 1e6:.1f} MB")
    if groups:
        axes[0, 0].legend()
    _save(figure, path)


def series(times_s: Sequence[float], lines: Mapping[str, Mapping[str, Sequence[float]]], path: Path) -> None:
    """Draws one panel for each quantity over time.

    Args:
        times_s: of the samples.
        lines: quantity → name of the line → one value for each time.
        path: of the PNG.
    """
    figure, axes = load_pyplot().subplots(len(lines), 1, figsize=(9, 2.5 * len(lines)), sharex=True, squeeze=False)
    for (quantity, named), axis in zip(lines.items(), axes[:, 0], strict=True):
        for name, values in named.items():
            axis.plot(times_s, values, label=name)
        axis.set_ylabel(quantity)
        axis.legend(fontsize=7)
    axes[-1, 0].set_xlabel("seconds")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    save(figure, path, dpi=110)
