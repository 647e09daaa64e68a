"""What a controller makes of a journal that was cut, or in which a bit flipped, while it was down."""

from __future__ import annotations

import random
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.harness import Supervisor
from tests.harness.journals import LOG, end_of
from tests.process.controller_daemon import Client, Controller
from tqclient import errors
from tqclient.wire.v1 import controller_pb2 as pb

COMMANDS = 24
DATABASE = "journal.db"
REFUSED_STATUS = 1


@dataclass
class _Wreck:
    """The files of a controller that made `COMMANDS` partitions and was killed, and copies of them to be damaged."""

    supervisor: Supervisor
    directory: Path
    files: dict[str, bytes]

    def __post_init__(self) -> None:
        self._copies = 0

    def with_file(self, name: str, content: bytes) -> Controller:
        """Returns a controller, not yet started, over a copy in which one file is another."""
        self._copies += 1
        copy = self.directory / f"copy-{self._copies}"
        copy.mkdir(mode=0o700)
        for each, original in self.files.items():
            (copy / each).write_bytes(content if each == name else original)
        return Controller(self.supervisor, copy)


def _made(supervisor: Supervisor, directory: Path, *, checkpointed: bool) -> _Wreck:
    daemon = Controller(supervisor, directory / "whole")
    daemon.start()
    client = daemon.client()
    for number in range(COMMANDS):
        client.create(f"p{number:02d}")
    if checkpointed:
        daemon.child.terminate()
        assert daemon.child.wait() == 0
    else:
        daemon.child.kill()
    daemon.close()
    files = {path.name: path.read_bytes() for path in daemon.data_dir.iterdir()}
    shutil.rmtree(daemon.data_dir)
    return _Wreck(supervisor, directory, files)


@pytest.fixture
def killed(supervisor: Supervisor, tmp_path: Path) -> _Wreck:
    return _made(supervisor, tmp_path, checkpointed=False)


@pytest.fixture
def ended(supervisor: Supervisor, tmp_path: Path) -> _Wreck:
    return _made(supervisor, tmp_path, checkpointed=True)


def _flipped(data: bytes, bit: int) -> bytes:
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    return bytes(damaged)


def _names(client: Client) -> list[str]:
    listed = client.call("ListPartitions", pb.ListPartitionsRequest(prefix="p")).partitions
    return [each.name for each in listed]


def test_a_journal_that_was_cut_anywhere_serves_a_clean_prefix_and_goes_on(killed: _Wreck, seed: int) -> None:
    rng = random.Random(seed)
    log, end = killed.files[LOG], end_of(killed.files[LOG])
    everything = [f"p{number:02d}" for number in range(COMMANDS)]
    # One place in each fifth of the log, its last byte, none of it, and none of the room behind it either.
    cuts = [rng.randrange(end * fifth // 5, end * (fifth + 1) // 5) for fifth in range(5)]
    kept = []
    for length in [*cuts, end - 1, end, len(log)]:
        daemon = killed.with_file(LOG, log[:length])
        daemon.start()
        client = daemon.client()
        names = _names(client)
        assert names == everything[: len(names)], f"cut at {length}"
        kept.append(len(names))
        for name in names[-1:]:
            with pytest.raises(errors.PartitionExists):
                client.create(name)
        client.create("p-after")
        daemon.child.kill()
        daemon.start()
        assert _names(client) == sorted([*names, "p-after"])
        daemon.child.kill()
        daemon.close()
    assert kept == sorted(kept)
    assert kept[0] < kept[3] < COMMANDS
    assert kept[-3:] == [COMMANDS - 1, COMMANDS, COMMANDS]


def test_a_bit_that_flips_amid_the_journal_is_refused_by_file_and_sequence(killed: _Wreck, seed: int) -> None:
    rng = random.Random(seed)
    log, end = killed.files[LOG], end_of(killed.files[LOG])
    for half in (range(end // 10, end // 2), range(end // 2, end * 8 // 10)):
        bit = rng.choice(half) * 8 + rng.randrange(8)
        daemon = killed.with_file(LOG, _flipped(log, bit))
        assert daemon.spawn().wait() == REFUSED_STATUS, f"bit {bit}"
        assert f"copy-{killed._copies}/{LOG}" in daemon.child.stderr
        assert daemon.child.stdout == ""
        last_good = int(daemon.child.stderr.split("the last record before it is ")[1].split(".")[0])
        assert (daemon.data_dir / LOG).read_bytes() == _flipped(log, bit)  # the evidence is left alone
        assert not list(daemon.data_dir.glob("examined-*"))
        # Whoever accepts the loss gets exactly what comes before: the start, the session, and then the partitions.
        daemon.start("--accept-data-loss")
        client = daemon.client()
        assert _names(client) == [f"p{number:02d}" for number in range(last_good - 2)]
        daemon.child.kill()
        daemon.close()


def test_a_bit_that_flips_in_a_checkpointed_journal_is_refused_or_matters_to_nobody(ended: _Wreck, seed: int) -> None:
    rng = random.Random(seed)
    database = ended.files[DATABASE]
    first = database.index(b"p00")  # within the records of the oldest command
    refused = 0
    for byte in (first, *(rng.randrange(len(database)) for _ in range(3))):
        daemon = ended.with_file(DATABASE, _flipped(database, byte * 8 + rng.randrange(8)))
        child = daemon.spawn()
        if "serving" in _first_words(daemon):
            client = Client(daemon.channel())
            assert _names(client) == [f"p{number:02d}" for number in range(COMMANDS)]
            child.kill()
        else:
            assert child.wait() == REFUSED_STATUS
            assert f"copy-{ended._copies}/{DATABASE}" in child.stderr
            refused += 1
        daemon.close()
        if byte == first:
            assert refused, "a record that changed was taken for the one that was written"
            assert "the records from 3 on do not verify" in child.stderr


def _first_words(daemon: Controller) -> str:
    """What it prints first: that it serves, or nothing before it ends."""
    try:
        line = daemon.child.wait_for("serving")
    except AssertionError:
        assert not daemon.child.running
        return ""
    daemon.address = line.split('"')[3]
    return line
