"""Directories that clients ask for: as many as a reply has room and time for, and few are remembered."""

from __future__ import annotations

import pytest

from tests.model.driver import Driver
from tqclient.wire.packing import U64, pack_array, unpack_blobs
from tqserver.controller import directories
from tqserver.controller.directories import Directories


@pytest.mark.parametrize(
    ("limit", "value", "count"),
    [
        ("DIRECTORIES_PER_REPLY_MAX", 3, 3),
        ("ROWS_REPLY_BYTES_MAX", 2 * len(b"directory") + 1, 2),
        ("SENT_PER_SESSION_MAX", 2, 5),
    ],
)
def test_as_many_directories_are_sent_as_there_is_room_for(
    limit: str, value: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directories, limit, value)
    driver = Driver()
    session = driver.open()
    driver.put(session, driver.partition(session), 5, blocks=[1] * 5)
    made = Directories(driver.core)
    asked = pack_array([5, 4, 3, 2, 1], U64)
    assert unpack_blobs(made.get(session, asked), what="directories") == [b"directory"] * count
    assert list(made._sent[session]) == [5, 4, 3, 2, 1][:count][-directories.SENT_PER_SESSION_MAX :]
    assert len(unpack_blobs(made.get(99, asked), what="directories")) == count  # of a session that has ended
    assert list(made._sent) == [session]
