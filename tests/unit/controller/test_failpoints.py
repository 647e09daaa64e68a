"""Failpoints: silent unless armed, and armed only by name."""

from __future__ import annotations

import errno

import pytest

from tqserver import failpoints
from tqserver.failpoints import Failpoints


def test_nothing_happens_unless_armed() -> None:
    for name in (*failpoints.POINTS, failpoints.REPLAY):
        Failpoints().hit(name)
        Failpoints.from_env({}).hit(name)


def test_an_error_comes_at_its_pass_alone() -> None:
    points = Failpoints.from_env({"TQ_FAILPOINT": "journal-commit:ENOSPC:2,snapshot-middle:EIO"})
    points.hit("journal-commit")
    with pytest.raises(OSError, match="journal-commit") as caught:
        points.hit("journal-commit")
    assert caught.value.errno == errno.ENOSPC
    points.hit("journal-commit")
    with pytest.raises(OSError, match="snapshot-middle") as caught:
        points.hit("snapshot-middle")
    assert caught.value.errno == errno.EIO


@pytest.mark.parametrize("spec", ["nowhere:exit", "journal-commit", "journal-commit:explode", "journal-commit:EIO:1:2"])
def test_a_typo_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match="want NAME:ACTION"):
        Failpoints(spec)
