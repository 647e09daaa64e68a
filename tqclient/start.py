"""How the commands start: Ctrl-C ends them quietly, with 130, while what they need is still being imported, too."""

from __future__ import annotations

import importlib
import os
import signal
from typing import Any, Final

EXIT_INTERRUPTED: Final = 130


def run(module: str) -> Any:
    """Imports a module and runs its `main`.

    Returns:
        What that returned, or 130 when it was interrupted: the exit status.
    """
    asked = signal.getsignal(signal.SIGINT)
    if asked is signal.default_int_handler:  # else Ctrl-C is ignored
        # An exception may come out of an import as another one, or not at all.
        signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    command = importlib.import_module(module)
    signal.signal(signal.SIGINT, asked)
    try:
        return command.main()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
