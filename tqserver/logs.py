"""Structured logs: one JSON object a line on stderr, over the standard library's logging.

log = logs.get("link")
log.info("attached", controller="127.0.0.1:7700", sequence=17)
# {"time": "2031-05-06T07:08:09.123Z", "level": "info", "program": "tq-storage", "event": "attached", ...}
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import sys
from typing import Final, TextIO

_FIELDS: Final = "tq_fields"


class _JsonLines(logging.Formatter):
    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.timezone.utc)
        line: dict[str, object] = {
            "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "program": self._program,
            "pid": os.getpid(),
            "logger": record.name.removeprefix("tqserver."),
            "event": record.getMessage(),
        }
        for key, value in getattr(record, _FIELDS, {}).items():
            line[key if key not in line else key + "_"] = value
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


class Log:
    """Writes events with named fields. Values that JSON cannot say are written as their `str`."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger

    def debug(self, event: str, /, **fields: object) -> None:
        """For whoever follows one call through the daemon."""
        self._write(logging.DEBUG, event, fields)

    def info(self, event: str, /, **fields: object) -> None:
        """Something that an operator wants to find later."""
        self._write(logging.INFO, event, fields)

    def warning(self, event: str, /, **fields: object) -> None:
        """Something is off, and the daemon copes."""
        self._write(logging.WARNING, event, fields)

    def error(self, event: str, /, **fields: object) -> None:
        """Something is wrong that the daemon cannot put right."""
        self._write(logging.ERROR, event, fields)

    def exception(self, event: str, /, **fields: object) -> None:
        """Like `error`, with the trace of the exception that is being handled."""
        self._write(logging.ERROR, event, fields, exc_info=True)

    def _write(self, level: int, event: str, fields: dict[str, object], *, exc_info: bool = False) -> None:
        if self._logger.isEnabledFor(level):
            # %-formatting is left out: an event with a percent sign is written as it is.
            self._logger.log(level, "%s", event, extra={_FIELDS: fields}, exc_info=exc_info)


def get(name: str) -> Log:
    """Returns the log of one part of a daemon, such as `storage.link`."""
    return Log(logging.getLogger("tqserver." + name))


def configure(level: str, program: str, *, stream: TextIO | None = None) -> None:
    """Sends every log of this process, also those of the libraries, to `stream` as JSON lines.

    Args:
        level: debug, info, warning or error. Libraries are kept at warning.
        program: the daemon's name, written on every line.
        stream: None is stderr.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(_JsonLines(program))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("tqserver").setLevel(level.upper())
