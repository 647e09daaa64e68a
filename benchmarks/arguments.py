"""What the options of `tq-bench` may be: what is off is refused before anything is measured."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path
from typing import Final

from benchmarks.figures import form_of
from tqclient.errors import InvalidArgument
from tqclient.sizes import size_bytes

DRAW: Final = "draw"
"""Key of a command's report under which it has what writes its picture to a path."""


def count(text: str) -> int:
    """Parses a whole number above 0."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def seed(text: str) -> int:
    """Parses a whole number, 0 or more."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number")
    return int(text)


def minutes(text: str) -> float:
    """Parses a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of minutes above 0")
    return number


def size(text: str) -> str:
    """Checks a size such as `64MiB`."""
    try:
        size_bytes(text, what="SIZE")
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def transport(text: str) -> str:
    """Checks the name of a transport."""
    from tqclient.transport import check_name

    try:
        return check_name(text)
    except InvalidArgument as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output(text: str) -> Path:
    """Checks that a file can be written, before what it is to hold takes minutes to measure."""
    path = Path(text)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is no file that can be written")
    return path


def picture(text: str) -> Path:
    """Checks, as early, that a file can be written and that it can be drawn: by matplotlib, in a form that it knows."""
    path = output(text)
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError("needs matplotlib: pip install 'tq-dataplane[bench]'")
    form = form_of(path)
    if form != "png":
        from matplotlib.backend_bases import FigureCanvasBase

        if form not in (known := FigureCanvasBase.get_supported_filetypes()):
            raise argparse.ArgumentTypeError(f"{text!r}: there are {', '.join(known)}")
    return path
