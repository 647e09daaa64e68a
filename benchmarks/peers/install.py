"""`tq-bench peers install`: an environment of its own for each peer."""

from __future__ import annotations

import subprocess
import venv
from collections.abc import Callable
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.peers import COMMON, Peer
from benchmarks.peers.process import home

_ERROR_LINES = 5


def install(peers: list[Peer], say: Callable[[str], None]) -> dict[str, str]:
    """Makes the environments that are missing, and brings the others up to date.

    Args:
        peers: of which those that run in ours need none.
        say: is told what happens.

    Returns:
        Environment → the end of what pip said, for those that could not be made. The others are not held up by it.
    """
    failures = {}
    for peer in {peer.environment: peer for peer in peers if peer.requirements is not None}.values():
        directory = home() / peer.environment
        say(f"{peer.environment}: {', '.join((*COMMON, *(peer.requirements or ())))} in {directory}")
        if reason := _install(directory, peer):
            failures[peer.environment] = reason
    return failures


def _install(directory: Path, peer: Peer) -> str:
    """Returns nothing, or why it failed."""
    python = directory / "bin" / "python"
    if not python.exists():
        venv.create(directory, with_pip=True)
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-input", "--upgrade"]
    # torch first, by itself: the exact version decides the build, and nothing else may ask for another.
    for requirements in (COMMON[:1], (*COMMON, *(peer.requirements or ()))):
        done = subprocess.run([*pip, *requirements], capture_output=True, text=True, check=False)
        if done.returncode:
            return "\n".join(done.stderr.strip().splitlines()[-_ERROR_LINES:])
    return ""


def versions(peer: Peer) -> dict[str, str]:
    """Returns the versions of what a peer's environment was made for; nothing where it is not installed."""
    if peer.requirements is None:
        return {}
    names = {name.partition("[")[0].partition("==")[0].lower() for name in (*COMMON, *peer.requirements)}
    if any(variable.startswith("RAY_") for variable, _ in peer.variables):
        names |= {"ray", "tensordict"}
    found = distributions(
        path=[str(path) for path in (home() / peer.environment / "lib").glob("python*/site-packages")]
    )
    return {one.name: one.version for one in found if one.name.lower() in names}
