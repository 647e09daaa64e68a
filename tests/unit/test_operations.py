"""The option tables of docs/operations.md are those of the daemons.

python -m tests.unit.test_operations      writes them
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
SECTION = re.compile(r"(<!-- begin (\S+)\.(\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table_of(config: Any) -> str:
    """The options of a daemon's config class as a Markdown table."""
    lines = ["| option | default | what it is |", "| --- | --- | --- |"]
    for field in dataclasses.fields(config):
        kind, flag = field.metadata["kind"], "--" + field.name.replace("_", "-")
        default = "unset" if field.default is None else f"`{kind.show(field.default)}`"
        cells = (f"`{flag} {kind.metavar}`", default, field.metadata["help"])
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return "".join(f"{line}\n" for line in lines)


def with_fresh_tables(text: str) -> str:
    """The document with each table as it should be."""

    def fresh(match: re.Match[str]) -> str:
        begin, module, name, _, end = match.groups()
        return begin + table_of(getattr(importlib.import_module(module), name)) + end

    return SECTION.sub(fresh, text)


def test_the_option_tables_are_those_of_the_daemons() -> None:
    text = DOCUMENT.read_text()
    assert len(SECTION.findall(text)) == 2
    assert text == with_fresh_tables(text), f"run: python -m {__name__}"


if __name__ == "__main__":
    DOCUMENT.write_text(with_fresh_tables(DOCUMENT.read_text()))
