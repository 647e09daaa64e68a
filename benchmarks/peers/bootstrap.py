"""Started by path in a peer's interpreter, isolated from the environment of ours: makes `benchmarks` importable there.

Only this one package: the folder that it lies in may hold everything else that we have installed.
"""

import sys
import types
from pathlib import Path


def install(root: str) -> None:
    """Makes the modules of the package at this path importable; nothing of it is imported yet."""
    package = types.ModuleType("benchmarks")
    package.__path__ = [root]
    sys.modules.setdefault("benchmarks", package)


if __name__ == "__main__":
    install(str(Path(__file__).parents[1]))
    from benchmarks.peers.host import main

    main(int(sys.argv[1]))
