"""What the run shows: a progress bar while it lasts, then a table and a plot."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from examples.grpo_addition.ledger import Account, Entry
from examples.grpo_addition.worker import REWARD_CONSUMER, TRAIN_CONSUMER

RISE_MIN: Final = 0.05
"""A mean reward that grew by less than this may be luck."""
DRAW_S: Final = 0.25
"""Between two looks of the progress bar."""
LINE_S: Final = 5.0
"""Between progress lines where there is no terminal."""


@dataclass(frozen=True)
class Curves:
    """What was learned, in the order in which samples were put.

    Attributes:
        rewards: float64 [samples]: of the samples that were scored.
        update_at: float64 [updates]: the place, on average, of the samples that an update learned from.
        staleness: float64 [updates]: the updates, on average, between the drawing of a sample and learning from it.
        redelivered_at: int64 [times]: the places of samples that were delivered again to a trainer.
    """

    rewards: np.ndarray
    update_at: np.ndarray
    staleness: np.ndarray
    redelivered_at: np.ndarray

    @classmethod
    def of(cls, account: Account) -> Curves:
        """Reads them off the ledgers."""
        scored, stepped, claimed = account.of("scored"), account.of("stepped"), account.ids("claimed", TRAIN_CONSUMER)
        order, places = np.unique(account.ids("scored"), return_index=True)  # ids grow in the order of puts
        _, first_deliveries = np.unique(claimed, return_index=True)
        return cls(
            rewards=np.array([reward for entry in scored for reward in entry["rewards"]])[places],
            update_at=np.array([np.searchsorted(order, entry["ids"]).mean() for entry in stepped]),
            staleness=np.array([entry["staleness"] for entry in stepped]),
            redelivered_at=np.searchsorted(order, np.delete(claimed, first_deliveries)),
        )

    def tenths(self) -> tuple[float, float]:
        """Mean reward of the first and of the last tenth of the samples."""
        tenth = len(self.rewards) // 10
        if tenth == 0:
            return float("nan"), float("nan")
        return float(self.rewards[:tenth].mean()), float(self.rewards[-tenth:].mean())

    def rose(self) -> bool:
        """Whether the mean reward grew by more than luck."""
        first, last = self.tenths()
        return last - first > RISE_MIN


class Live:
    """The progress bar, with the figures of the moment, and lines above it for what happens."""

    def __init__(self, console: Console, seconds: float) -> None:
        columns = (
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=12),
            TextColumn("{task.fields[figures]}"),
        )
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("starting", total=seconds, figures="")
        self._every_s = DRAW_S if console.is_terminal else LINE_S
        self._seconds = seconds
        self._clock_started_at = float("inf")
        self._shown_at = -float("inf")

    def __enter__(self) -> Live:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """Prints a line that stays."""
        self._progress.console.print(text, highlight=False)

    def start_clock(self) -> None:
        """The bar runs from here on."""
        self._clock_started_at = time.monotonic()

    def show(self, phase: str, account: Account) -> None:
        """Redraws the bar if that is due; where there is no terminal to draw on, prints a line now and then."""
        now = time.monotonic()
        if now - self._shown_at < self._every_s:
            return
        self._shown_at = now
        scored, stepped = account.of("scored")[-20:], account.of("stepped")
        reward = np.mean([entry["rewards"] for entry in scored]) if scored else 0.0
        seconds = min(max(0.0, now - self._clock_started_at), self._seconds)
        figures = (
            f"{seconds:.0f} s · {len(account.ids('put')):,} samples · v{stepped[-1]['version'] if stepped else 0} · "
            f"{account.redelivered(TRAIN_CONSUMER)} redelivered · reward [bold]{reward:.2f}[/]"
        )
        self._progress.update(self._task, description=phase, completed=seconds, figures=figures)
        if self._progress.disable:
            self.say(f"{phase} · {figures}")


def print_table(console: Console, account: Account, curves: Curves) -> None:
    """Prints what moved, how long it took, and what came of it."""
    table = Table(caption="Latencies include the wait for room, or for samples.", caption_justify="left")
    for heading in ("", "samples", "acked", "redelivered", "p50", "p99"):
        table.add_column(heading, justify="right" if heading else "left")
    put = account.of("put")
    table.add_row("put", f"{len(account.put_ids()):,}", "", "", *_latencies(put))
    for consumer in (REWARD_CONSUMER, TRAIN_CONSUMER):
        claimed, acked = len(account.ids("claimed", consumer)), len(account.ids("acked", consumer))
        again = account.redelivered(consumer)
        latencies = _latencies(account.of("claimed", consumer))
        table.add_row(f"claimed by {consumer}", f"{claimed:,}", f"{acked:,}", f"{again:,}", *latencies)
    table.add_row("cleared", f"{len(account.ids('cleared')):,}")
    console.print(table)
    first, last = curves.tenths()
    seconds = put[-1]["time"] - put[0]["time"]
    size_bytes = sum(entry["size_bytes"] for entry in put)
    console.print(
        f"{len(account.put_ids()) / seconds:,.0f} samples a second, {size_bytes:,} bytes of tensors in all\n"
        f"{len(curves.staleness):,} updates, of samples {curves.staleness.mean():.1f} versions old on average\n"
        f"mean reward {first:.2f} in the first tenth, [bold]{last:.2f}[/] in the last (1: every sum is right)",
        highlight=False,
    )


def _latencies(entries: list[Entry]) -> list[str]:
    return [f"{ms:,.1f} ms" for ms in np.percentile([entry["seconds"] * 1e3 for entry in entries], [50, 99])]


def plot(path: Path, account: Account, curves: Curves) -> None:
    """Draws reward and staleness over the samples, with the kills and the redeliveries marked, as a PNG file."""
    from matplotlib.figure import Figure  # needs no display, and takes a second to import

    put = account.of("put")
    put_times = [entry["time"] for entry in put]
    put_counts = np.cumsum([0] + [len(entry["ids"]) for entry in put])
    figure = Figure(figsize=(9, 6), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    window = max(1, len(curves.rewards) // 50)
    smooth = np.convolve(curves.rewards, np.ones(window) / window, mode="valid")
    top.plot(np.arange(len(smooth)) + window / 2, smooth, label=f"mean reward of {window:,} samples")
    top.set(ylabel="reward", ylim=(0, 1), title="A tiny transformer learns to add, off its own rollouts")
    bottom.plot(curves.update_at, curves.staleness, ".", markersize=2)
    bottom.set(
        ylabel="staleness, in versions",
        xlabel="samples, in the order put",
        yscale="symlog",
        ylim=(0, None),
    )
    for axes in (top, bottom):
        for number, kill in enumerate(account.of("killed")):
            at = put_counts[np.searchsorted(put_times, kill["time"])]
            axes.axvline(at, color="tab:red", linestyle="--", linewidth=1, label="kill -9" if number == 0 else None)
        floor = np.full(len(curves.redelivered_at), axes.get_ylim()[0])
        axes.plot(curves.redelivered_at, floor, "^", color="tab:orange", clip_on=False, label="delivered again")
        axes.grid(alpha=0.3)
    top.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def conclude(console: Console, account: Account, problems: list[str], path: Path) -> int:
    """Reports on a run that has ended.

    Args:
        console: where the table goes.
        account: the ledgers.
        problems: what the audit found.
        path: where the plot goes.

    Returns:
        The exit status: 1 when the audit found something or the reward did not rise.
    """
    curves = Curves.of(account)
    print_table(console, account, curves)
    plot(path, account, curves)
    console.print(f"plot: {path}", highlight=False)
    if not curves.rose():
        problems = [*problems, f"the mean reward did not rise by more than {RISE_MIN}"]
    for problem in problems:
        console.print(f"[red]wrong:[/] {problem}", highlight=False)
    if not problems:
        console.print("[green]ledger and partition agree:[/] nothing lost, nothing acked twice", highlight=False)
    return 1 if problems else 0
