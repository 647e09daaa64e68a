"""Pictures, by matplotlib, which is loaded when one is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def load_pyplot() -> Any:
    """Returns matplotlib's pyplot, which draws to files alone."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def form_of(path: Path) -> str:
    """Returns the form of a picture by its file's name; a PNG where that says nothing."""
    return path.suffix.removeprefix(".").lower() or "png"


def save(figure: Any, path: Path, dpi: int) -> None:
    """Writes a figure, under that very name, and drops it."""
    figure.savefig(path, dpi=dpi, format=form_of(path))
    load_pyplot().close(figure)
