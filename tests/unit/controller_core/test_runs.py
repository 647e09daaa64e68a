"""Replies made short say the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.model.driver import Driver, unpack
from tqclient.errors import InvalidArgument
from tqclient.rows import ROWS_MAX, RowSet, ids_of
from tqclient.wire.packing import I64, U32, U64, pack_array, unpack_array
from tqclient.wire.v1 import common_pb2
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core.runs import ROWS_PER_RUN_MIN, blocks_of, shorten, write_ids

Piece = tuple[int, int, int, int]
"""Block, first row, first id, how many."""
PIECES = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 40), st.integers(1, 1 << 40), st.integers(1, 60)), max_size=6
)


def reply(pieces: list[Piece], attempts: list[int] | None = None) -> common_pb2.Rows:
    """Returns a reply in full: the rows of the pieces, one after the other."""
    rows = [(block, row + at, id_ + at) for block, row, id_, count in pieces for at in range(count)]
    blocks, numbers, ids = zip(*rows, strict=True) if rows else ((), (), ())
    message = common_pb2.Rows(ids=pack_array(ids, I64))
    message.placements.add(fields=["a", "b"], block=pack_array(blocks, U64), row=pack_array(numbers, U32))
    if attempts is not None:
        message.attempts = pack_array(attempts, U32)
    return message


def as_read(message: common_pb2.Rows) -> object:
    rows = RowSet.from_wire(message, ["b", "a"])
    runs = {field: [(run.block_id, run.rows.tolist()) for run in found] for field, found in rows.runs.items()}
    return rows.ids.tolist(), rows.attempts.tolist(), runs


def copied(message: common_pb2.Rows) -> common_pb2.Rows:
    other = common_pb2.Rows()
    other.CopyFrom(message)
    return other


@given(PIECES, st.data())
def test_what_is_read_is_the_same(pieces: list[Piece], data: st.DataObject) -> None:
    count = sum(piece[3] for piece in pieces)
    attempts = data.draw(st.none() | st.lists(st.integers(1, 2), min_size=count, max_size=count))
    message = reply(pieces, attempts)
    short = copied(message)
    shorten(short)
    assert as_read(short) == as_read(message)
    assert {*blocks_of(short.placements[0])} == {*blocks_of(message.placements[0])}
    assert short.ByteSize() <= message.ByteSize()


def test_a_put_that_is_claimed_whole_is_a_hundred_bytes() -> None:
    message = reply([(7, 0, 1_000, 8_192)], [1] * 8_192)
    assert message.ByteSize() > 8_192 * 24
    shorten(message)
    assert message.ByteSize() < 100
    assert blocks_of(message.placements[0]) == [7]
    assert as_read(message) == (
        list(range(1_000, 9_192)),
        [1] * 8_192,
        {field: [(7, list(range(8_192)))] for field in "ab"},
    )


def test_short_runs_stay_arrays() -> None:
    rows = ROWS_PER_RUN_MIN - 1
    message = reply([(1, 9, 50, rows), (1, 0, 10, rows)])
    before = copied(message)
    shorten(message)
    assert message == before


@pytest.mark.parametrize("counts", [[5], [-1], [4, 4], [ROWS_MAX + 1], [1 << 62, 1 << 62], [-1, 5]])
def test_runs_that_do_not_fit_are_refused(counts: list[int]) -> None:
    message = reply([(1, 0, 1, 4)])
    message.placements[0].ClearField("block")
    message.placements[0].ClearField("row")
    message.placements[0].runs = np.array([(1, 0, count) for count in counts], "<i8").tobytes()
    with pytest.raises(InvalidArgument, match=r"placement\.runs"):
        RowSet.from_wire(message, ["a"])


@pytest.mark.parametrize("first", [1 << 63, (1 << 64) - 1])
def test_a_run_where_no_row_can_be_is_refused(first: int) -> None:
    message = reply([(1, 0, 1, 4)])
    message.placements[0].ClearField("block")
    message.placements[0].ClearField("row")
    message.placements[0].runs = pack_array([(1, first, 4)], U64)
    with pytest.raises(InvalidArgument, match=rf"placement\.runs: a run of 4 rows from {first} on"):
        RowSet.from_wire(message, ["a"])


def test_ids_that_are_too_many_are_refused() -> None:
    message = common_pb2.Rows(id_runs=np.array([(1, 1 << 40)], "<i8").tobytes())
    with pytest.raises(InvalidArgument, match="id_runs"):
        RowSet.from_wire(message, [])


@pytest.mark.parametrize("ids", [[], [5], list(range(7, 90)), [1, 2, 3] * 20, list(range(20, 0, -1))])
def test_the_ids_of_a_put_are_the_same(ids: list[int]) -> None:
    reply = pb.CommitReply()
    write_ids(reply, np.array(ids, dtype=np.int64), runs=True)
    assert ids_of(reply, len(ids)).tolist() == ids
    assert bool(reply.id_runs) == (len(ids) > 80)
    with pytest.raises(InvalidArgument, match="ids"):
        ids_of(reply, len(ids) + 1)


def test_a_claim_is_answered_in_runs_to_who_reads_them_and_in_full_to_others(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    ids = driver.put(session, p, 40)
    short = driver.claim(session, p, 40, runs=True)
    assert_short(short.rows, ids, attempt=1)
    driver.settle(session, short.claim_id, ack=False)
    assert_full(driver.claim(session, p, 40).rows, ids, attempt=2)


def test_members_of_a_rank_are_each_answered_as_they_read(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    ids = driver.put(session, p, 40)
    first, second = (
        pb.Topology(dp=1, tp=2, pp=1, cp=1, ep=1, members=2, member=member, world_rank=member) for member in (0, 1)
    )
    assert_short(driver.claim(session, p, 40, runs=True, topology=first).rows, ids, attempt=1)
    assert_full(driver.claim(driver.open(), p, 40, topology=second).rows, ids, attempt=1)


def assert_short(rows: common_pb2.Rows, ids: list[int], *, attempt: int) -> None:
    assert not rows.ids
    assert not rows.attempts
    assert not rows.placements[0].block
    read = RowSet.from_wire(rows, ["a"])
    assert read.ids.tolist() == ids
    assert read.attempts.tolist() == [attempt] * len(ids)
    assert [run.rows.tolist() for run in read.runs["a"]] == [list(range(len(ids)))]


def assert_full(rows: common_pb2.Rows, ids: list[int], *, attempt: int) -> None:
    assert unpack(rows.ids) == ids
    assert unpack_array(rows.attempts, U32, what="attempts").tolist() == [attempt] * len(ids)
    assert unpack_array(rows.placements[0].row, U32, what="row").tolist() == list(range(len(ids)))
    assert not rows.id_runs
    assert not rows.attempt
    assert not rows.placements[0].runs


def test_a_put_is_answered_in_runs_to_who_reads_them(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    request = driver.commit(p, 40)
    request.runs = True
    short = driver.ok("commit", request, session=session)
    assert not short.ids
    assert ids_of(short, 40).tolist() == list(range(1, 41))
    full = driver.ok("commit", driver.commit(p, 40), session=session)
    assert unpack(full.ids) == list(range(41, 81))
    assert not full.id_runs
