"""What the documents point at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")])
LINK = re.compile(r"\[[^]]*\]\(([^)#:\s]+)(?:#[^)]*)?\)")
# `docs/decisions/`, `tests/model/test_x.py::test_y`: a path in code style, from the root of the repository.
PATH = re.compile(r"`((?:benchmarks|deploy|docs|examples|proto|tests|tqclient|tqserver)/[\w./-]*)(?:::(\w+))?`")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(document: Path) -> None:
    text = document.read_text()
    links = [document.parent / target for target in LINK.findall(text)]
    paths = [(ROOT / target, test) for target, test in PATH.findall(text)]
    assert [str(path) for path in [*links, *(path for path, _ in paths)] if not path.exists()] == []
    assert [test for path, test in paths if test and f"def {test}(" not in path.read_text()] == []
