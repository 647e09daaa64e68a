"""What a command has to say, for people (a rich table) and for machines (JSON), and how values look in a cell."""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

HEAD_VALUES: Final = 6
"""Leading values of a tensor that a preview shows."""
TEXT_CHARS: Final = 72
"""Of a string in a preview."""
ITEMS_MAX: Final = 8
"""Leading entries of a list or dict that a preview shows."""
WIDE: Final = 10_000
"""Columns of what is no terminal."""
FOLDED_MIN: Final = 8
"""Columns that a folded cell has at least."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Report:
    """The outcome of a command.

    Attributes:
        data: what `--json` prints.
        view: what people see.
        code: the exit code.
    """

    data: Any
    view: RenderableType
    code: int = 0

    def write(self, console: Console, *, as_json: bool) -> None:
        """Prints the outcome in one of its two forms."""
        if as_json:
            escapes = not console.encoding.startswith("utf")
            console.file.write(json.dumps(self.data, ensure_ascii=escapes, allow_nan=False) + "\n")
        else:
            console.print(self.view, crop=False)


def console() -> Console:
    """Returns where commands print: a terminal in its width, a file or a pipe in lines as long as they need to be."""
    columns = os.environ.get("COLUMNS", "")
    if columns.strip("0"):
        return Console()
    if not sys.stdout.isatty():
        return Console(width=WIDE)
    return Console(width=shutil.get_terminal_size().columns if columns else None)  # rich would print nothing in 0


class _Table(Table):
    """A table whose columns stand closer where they would not all have room, and never give up their least width."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if Measurement.get(console, options.update(max_width=WIDE), self).maximum > options.max_width:
            self.padding = (0, 1, 0, 0)
        least = sum((column.min_width or 0) + 1 for column in self.columns)
        yield from super().__rich_console__(console, options.update(max_width=max(options.max_width, least)))


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Returns a table. A column that begins with `#` holds numbers, which are never folded.

    Where room is scarce, the last column folds; or all that hold text, where the last one holds numbers. Where that is
    not enough, lines are too long.
    """
    cells = [[f"{cell:,}" if type(cell) is int else printable(str(cell)) for cell in row] for row in rows]
    made = _Table(box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        numeric = column.startswith("#")
        folds = not numeric and (column is columns[-1] or columns[-1].startswith("#"))
        head = column.lstrip("#")
        widest = max(map(cell_len, (head, *(row[index] for row in cells))))
        made.add_column(
            head,
            justify="right" if numeric else "left",
            no_wrap=not folds,
            overflow="fold",
            min_width=min(widest, max(cell_len(head), FOLDED_MIN)) if folds else widest,
        )
    for row in cells:
        made.add_row(*map(escape, row))
    return made


def printable(text: str) -> str:
    """Returns text that moves no cursor: names are their users', and may hold anything."""
    return text if text.isprintable() else repr(text)[1:-1]


def size_text(size_bytes: int) -> str:
    """Shows bytes with three significant digits: `5 B`, `1.25 MiB`, `64.0 GiB`."""
    power = min(len(_UNITS) - 1, max(0, size_bytes.bit_length() - 1) // 10)
    size = size_bytes / 1024**power
    digits = 0 if power == 0 or size >= 100 else 1 if size >= 10 else 2
    return f"{size:{',' if power else ''}.{digits}f} {_UNITS[power]}"


def preview(value: Any) -> str:
    """Shows a value in a line: what it is, and how it begins."""
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        head = _head(value)
        more = " …" if _count(shape) > len(head) else ""
        return f"{str(dtype).removeprefix('torch.')}{list(shape)} {' '.join(f'{item}' for item in head)}{more}".rstrip()
    if isinstance(value, str | bytes):
        cut = value[:TEXT_CHARS]
        return repr(cut) + (f" … {len(value):,} in all" if len(value) > TEXT_CHARS else "")
    if isinstance(value, dict):
        inner = [f"{key}: {preview(item)}" for key, item in list(value.items())[:ITEMS_MAX]]
        return "{" + ", ".join(inner + ["…"] * (len(value) > ITEMS_MAX)) + "}"
    if isinstance(value, list | tuple):
        inner = [preview(item) for item in value[:ITEMS_MAX]] + ["…"] * (len(value) > ITEMS_MAX)
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(inner))
    return repr(value)


def plain(value: Any) -> Any:
    """Returns a value as JSON can say it: a tensor as its dtype, shape and first values, bytes as hexadecimal.

    What JSON has no word for (NaN, infinity, a date) becomes its text.
    """
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape is not None:
        head = [plain(item) for item in _head(value)]
        return {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "head": head}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, str | int) else str(value)


def _count(shape: Sequence[int]) -> int:
    return math.prod(int(size) for size in shape)


def _head(value: Any) -> list[Any]:
    flat = value.reshape(-1)[:HEAD_VALUES]
    items: list[Any] = flat.tolist()
    return [round(item, 4) if isinstance(item, float) else item for item in items]
