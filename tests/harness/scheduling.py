"""Which tests stay together on one worker, where several run side by side."""

from __future__ import annotations

from pathlib import PurePosixPath

from xdist.scheduler.loadscope import LoadScopeScheduling

ONE_AT_A_TIME = ("tests/faults", "tests/hosts")
"""Folders of tests that kill and stop what is under load, and then wait for leases to end."""


class ByFile(LoadScopeScheduling):
    """Those of one file share the cluster that it starts; those with faults do not meet one another."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def unit_of(nodeid: str) -> str:
    """What is handed to a worker as a whole with this test: its file, or all folders of `ONE_AT_A_TIME`."""
    file = PurePosixPath(nodeid.split("::", 1)[0])
    return "faults" if any(file.is_relative_to(folder) for folder in ONE_AT_A_TIME) else str(file)
