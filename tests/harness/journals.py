"""What lies in the files of a controller's journal."""

from __future__ import annotations

from typing import Final

from tqserver.controller import wal

LOG: Final = "journal.db-wal"


def end_of(log: bytes) -> int:
    """Returns where the frames of a write-ahead log end, in bytes; behind it lies room."""
    page_bytes = int.from_bytes(log[8:12], "big")
    return wal.HEADER_BYTES + wal.scan(log).committed_frames * (wal.FRAME_HEADER_BYTES + page_bytes)
