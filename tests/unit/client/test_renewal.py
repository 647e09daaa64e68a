"""Channels that are opened anew when their files change; `test_channel` has them before a daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tqclient.errors import InvalidArgument
from tqclient.renewal import RECHECK_SECONDS, RenewedChannel


class Opened:
    """A channel that tells which one it is."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.closed = False

    def unary_unary(self, path: str, *, serializer: str) -> Any:
        return lambda request, timeout: (self.number, path, serializer, request, timeout)

    def close(self) -> None:
        self.closed = True


class Rig:
    """A renewed channel, its file, and all that was opened."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.off = False
        self.file = folder / "ca.pem"
        self.replace("first")
        self.opened: list[Opened] = []
        self.channel = RenewedChannel([self.file], self.open, lambda: self.now)
        self.method = self.channel.unary_unary("/path", serializer="s")

    def open(self) -> Opened:
        if self.off:
            raise InvalidArgument("TLS: half of it")
        self.opened.append(Opened(len(self.opened) + 1))
        return self.opened[-1]

    def replace(self, text: str) -> None:
        """As whoever rotates it: another file under its name."""
        fresh = self.file.with_name("fresh")
        fresh.write_text(text)
        os.replace(fresh, self.file)

    def later(self) -> int:
        """Which channel a call takes that is made a while later."""
        self.now += RECHECK_SECONDS
        number, *rest = self.method("request", timeout=5)
        assert rest == ["/path", "s", "request", 5]
        return int(number)


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


def test_calls_take_the_channel_of_the_latest_files(rig: Rig) -> None:
    assert (rig.later(), rig.later()) == (1, 1)
    rig.replace("second")
    assert rig.method("request", timeout=5)[0] == 1  # it was looked at just now
    assert (rig.later(), rig.later()) == (2, 2)
    rig.replace("third")
    assert rig.later() == 3
    assert [channel.closed for channel in rig.opened] == [True, False, False]  # calls may be under way on the last one
    rig.channel.close()
    assert [channel.closed for channel in rig.opened] == [True, True, True]


def test_files_that_are_off_or_away_leave_the_former_ones_in_force(rig: Rig) -> None:
    rig.replace("second")
    rig.off = True
    assert rig.later() == 1
    rig.off = False
    assert rig.later() == 2
    rig.file.unlink()
    assert rig.later() == 2
    rig.replace("third")
    assert rig.later() == 3


def test_one_that_is_closed_is_not_opened_again(rig: Rig) -> None:
    rig.channel.close()
    rig.replace("second")
    assert rig.later() == 1
    assert [channel.closed for channel in rig.opened] == [True]
