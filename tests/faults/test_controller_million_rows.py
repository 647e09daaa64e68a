"""A controller with a million samples is killed, and serves again in two seconds."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import wait_until
from tests.process.controller_daemon import DIRECTORY, FORM, Controller, daemon, ids_of
from tqclient import limits
from tqclient.wire.packing import pack_strings
from tqclient.wire.v1 import common_pb2 as common
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.journal import SqliteJournal

__all__ = ["daemon"]

ROWS = 1_000_000
ROWS_PER_PUT = 1_000
EXTENT_BYTES = 256
SERVING_CPU_SECONDS = 3.0
SERVING_SECONDS = 30.0
"""The promise is 2 s by the clock. A machine that does other things takes longer, by its processors' time as well: that
is what is judged, and by the clock only that it serves at all."""
DICTS = 7
"""A processor that is slow at present may take as long as so many dicts of as many keys take it."""
TICKS = os.sysconf("SC_CLK_TCK")


def _mutations() -> Iterator[common.Mutation]:
    for request in itertools.count(1):
        session = 0 if request == 1 else 1
        yield common.Mutation(client_id=bytes(16), request=request, settled_below=request, session=session)


def _commands() -> Iterator[journal_pb2.Command]:
    """The life of a controller that a million keyed samples of three fields were put into."""
    mutations = _mutations()
    hello = pb.NodeHello(node=pb.Node(name="node", address="127.0.0.1:1", arena=7, incarnation=1))
    yield journal_pb2.Command(attach_node=hello)
    session = pb.OpenSessionRequest(mutation=next(mutations), version="0", wire_version=limits.WIRE_VERSION)
    yield journal_pb2.Command(open_session=session)
    partition = pb.CreatePartitionRequest(mutation=next(mutations), name="part", consumers=["c"])
    yield journal_pb2.Command(create_partition=partition)
    fields = [pb.Field(name=name, form=FORM) for name in "xyz"]
    for start in range(0, ROWS, ROWS_PER_PUT):
        extent = common.Extent(
            node="node", arena=7, offset=start * EXTENT_BYTES, length=EXTENT_BYTES, generation=start + 1
        )
        put = pb.CommitRequest(
            mutation=next(mutations),
            partition_id=1,
            rows=ROWS_PER_PUT,
            keys=pack_strings([f"key-{row}" for row in range(start, start + ROWS_PER_PUT)]),
            fields=fields,
            blocks=[pb.BlockWrite(extents=[extent], directory=DIRECTORY, rows=ROWS_PER_PUT)],
        )
        yield journal_pb2.Command(commit=put)


@pytest.fixture
def filled(daemon: Controller) -> Controller:
    journal = SqliteJournal(daemon.data_dir)
    records = [command.SerializeToString() for command in _commands()]
    for start in range(0, len(records), 100):
        journal.append(records[start : start + 100])
    journal.close()
    return daemon


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _dict_seconds() -> float:
    began = time.process_time()
    keys = {f"key-{number}": number for number in range(ROWS)}
    assert len(keys) == ROWS
    return time.process_time() - began


def _start(daemon: Controller, *flags: str) -> None:
    """Starts; it must serve in time, by its own processor time."""
    daemon.spawn(*flags)
    line = daemon.child.wait_for("serving", timeout=SERVING_SECONDS)
    used = _cpu_seconds(daemon.child.pid)
    if used > SERVING_CPU_SECONDS:
        dict_seconds = _dict_seconds()
        assert used <= DICTS * dict_seconds, f"{used} s; a dict of as many keys took {dict_seconds} s"
    daemon.address = line.split('"')[3]


def _check(daemon: Controller, claimed: int) -> int:
    """Everything is there, from the first sample to the last, and the next claim brings the next sample."""
    client = daemon.client()
    info = client.call("DescribePartition", pb.DescribePartitionRequest(name="part")).partition
    assert (info.samples, [(field.name, field.written) for field in info.fields]) == (ROWS, [(f, ROWS) for f in "xyz"])
    keys = pack_strings(["key-0", "key-500000", "key-999999"])
    located = client.call("Locate", pb.LocateRequest(session=client.session, partition_id=1, keys=keys, fields=["x"]))
    first, middle, last = ids_of(located.rows.ids)
    assert (middle - first, last - first) == (500_000, 999_999)
    claim = client.claim(1, 1)
    assert ids_of(claim.rows.ids) == [first + claimed]
    client.settle(claim.claim_id)
    assert client.counts(1)["consumed"] == claimed + 1
    return claimed + 1


def test_it_serves_two_seconds_after_a_kill_from_records_alone_and_from_a_snapshot(filled: Controller) -> None:
    whole_replay = ("--replay-budget", "60")  # no snapshot: the longest way there is
    _start(filled, *whole_replay)
    claimed = _check(filled, 0)
    assert not list(filled.data_dir.glob("snapshot-*"))
    filled.child.kill()
    _start(filled, "--replay-budget", "0.001")
    claimed = _check(filled, claimed)
    wait_until(lambda: _snapshots(filled), what="a snapshot")
    filled.child.kill()
    _start(filled)
    claimed = _check(filled, claimed)
    assert claimed == 3


def _snapshots(daemon: Controller) -> list[Path]:
    return [path for path in daemon.data_dir.glob("snapshot-*") if not path.suffix]
