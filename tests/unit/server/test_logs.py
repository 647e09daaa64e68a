from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from tqserver import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    root, package = logging.getLogger(), logging.getLogger("tqserver")
    before = root.handlers[:], root.level, package.level
    stream = io.StringIO()
    logs.configure("info", "tq-test", stream=stream)
    yield stream
    root.handlers[:], root.level, package.level = before[0], before[1], before[2]
    root.setLevel(before[1])
    package.setLevel(before[2])


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_object(stream: io.StringIO) -> None:
    logs.get("link").info("attached 100%", sequence=17, where={"host": "a"}, odd=object, event="both\nlines")
    (line,) = lines(stream)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(line.pop("time")))
    assert isinstance(line.pop("pid"), int)
    assert line == {
        "level": "info",
        "program": "tq-test",
        "logger": "link",
        "event": "attached 100%",
        "sequence": 17,
        "where": {"host": "a"},
        "odd": "<class 'object'>",
        "event_": "both\nlines",
    }


def test_levels_are_kept_and_libraries_are_held_at_warning(stream: io.StringIO) -> None:
    log = logs.get("x")
    log.debug("quiet")
    log.warning("off")
    log.error("wrong")
    logging.getLogger("library").info("chatty")
    logging.getLogger("library").warning("worth %d", 3)
    assert [(line["logger"], line["event"]) for line in lines(stream)] == [
        ("x", "off"),
        ("x", "wrong"),
        ("library", "worth 3"),
    ]


def test_a_trace_travels_in_its_line(stream: io.StringIO) -> None:
    try:
        raise KeyError("lost")
    except KeyError:
        logs.get("x").exception("failed", id=3)
    (line,) = lines(stream)
    assert line["level"] == "error"
    assert "KeyError: 'lost'" in str(line["trace"])
