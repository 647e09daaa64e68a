"""The picture of what a claim costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import load_pyplot, save
from benchmarks.scale.claims import Cost


def draw(costs: Sequence[Cost], file: Path) -> None:
    """Writes cost against size, both on logarithmic axes: the medians drawn through, the 99th percentiles broken."""
    figure, axes = load_pyplot().subplots(figsize=(8, 5), layout="constrained")
    for sampler in dict.fromkeys(cost.sampler for cost in costs):
        mine = [cost for cost in costs if cost.sampler == sampler]
        rows = [cost.rows for cost in mine]
        (line,) = axes.plot(rows, [cost.times.median_ms for cost in mine], marker="o", label=sampler)
        axes.plot(rows, [cost.times.p99_ms for cost in mine], linestyle=":", linewidth=1, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="samples in the partition", ylabel="claim, ms: p50, and p99 dotted")
    axes.grid(visible=True, which="both", alpha=0.2)
    figure.legend(loc="outside right upper")
    save(figure, file, dpi=120)
