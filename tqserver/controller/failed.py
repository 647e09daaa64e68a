"""Which records could not be applied by the process that had just journaled them.

Such a process ends before it answers anybody, so a start may pass over that record; a record that fails in a start and
is not known here may have been acknowledged. Each has a file `failed-SEQUENCE`, which holds a digest of the record: in
a journal that was restored from a copy, the sequence may be another record's by now.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import xxhash

_PREFIX: Final = "failed-"


def sync_directory(path: Path) -> None:
    """Makes the names in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class FailedRecords:
    """The files of one data directory.

    Args:
        directory: that exists.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._digests: dict[int, str] = {}
        for path in directory.glob(f"{_PREFIX}*"):
            number = path.name.removeprefix(_PREFIX)
            if number.isdecimal() and path.is_file():
                # One that a crash cut short matches no record: nothing is passed over then.
                self._digests[int(number)] = path.read_text(errors="replace").partition("\n")[0]

    def __contains__(self, item: tuple[int, bytes]) -> bool:
        """Whether this (sequence, record) is one of them."""
        sequence, record = item
        return sequence in self._digests and self._digests[sequence] == _digest(record)

    def add(self, sequence: int, record: bytes, reason: str) -> None:
        """Names a record, durably.

        Args:
            sequence: of the record.
            record: its bytes.
            reason: for people.

        Raises:
            OSError: it may not be durable.
        """
        path = self._path(sequence)
        digest = _digest(record)
        with open(path, "w", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(f"{digest}\n{reason}\n")
            file.flush()
            os.fsync(file.fileno())
        sync_directory(self._directory)
        self._digests[sequence] = digest

    def forget_outside(self, first: int, last: int) -> None:
        """Removes those that no start will come across: a snapshot covers them, or the journal ends before them.

        Raises:
            OSError: some of them are left.
        """
        for sequence in [sequence for sequence in self._digests if not first <= sequence <= last]:
            self._path(sequence).unlink(missing_ok=True)
            del self._digests[sequence]

    def _path(self, sequence: int) -> Path:
        return self._directory / f"{_PREFIX}{sequence:020d}"


def _digest(record: bytes) -> str:
    return xxhash.xxh3_64(record).hexdigest()
