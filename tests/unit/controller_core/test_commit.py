"""Puts: what becomes visible, what is refused, and that a refusal changes nothing."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest

from tests.model.driver import ARENA, BLOCK_BYTES, NODE, Driver, ids, unpack
from tqclient import limits
from tqclient.errors import (
    BackpressureTimeout,
    DuplicateKey,
    InvalidArgument,
    LeaseExpired,
    PartitionNotFound,
    SampleNotFound,
    SchemaMismatch,
    Sealed,
    TQError,
)
from tqclient.schema import Form
from tqclient.wire.packing import I64, pack_array, pack_blobs, pack_strings
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Freed, RoomChanged
from tqserver.controller.core import Sealed as SealedExtents


def test_ids_ascend_over_all_partitions_and_are_never_reused(driver: Driver, session: int) -> None:
    p, q = driver.partition(session, "p"), driver.partition(session, "q")
    assert driver.put(session, p, 3) == [1, 2, 3]
    assert driver.put(session, q, 2) == [4, 5]
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1, 2, 3)), session=session)
    assert driver.put(session, p, 1) == [6]


def test_blocks_hold_their_rows_in_order(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 5, ["a", "b"], blocks=[2, 3])
    reply = driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(4, 1, 2, 5)), driver.now)
    (placement,) = reply.rows.placements  # a and b were put together
    assert list(placement.fields) == ["a", "b"]
    assert unpack(placement.block) == [2, 1, 1, 2]
    assert np.frombuffer(placement.row, "<u4").tolist() == [1, 0, 1, 2]
    record = driver.core.block(2)
    assert record is not None
    assert (record.rows, record.directory, record.extents[0][:3]) == (3, b"directory", (NODE, ARENA, BLOCK_BYTES))


def test_commit_orders_its_extents_sealed(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    outcome = driver.send("commit", driver.commit(p, 2, blocks=[1, 1]), session=session)
    (sealed,) = [effect for effect in outcome.effects if isinstance(effect, SealedExtents)]
    assert (sealed.node, sealed.arena) == (NODE, ARENA)
    assert sealed.extents.tolist() == [[0, BLOCK_BYTES, 1, p], [BLOCK_BYTES, BLOCK_BYTES, 1, p]]


def test_rows_carry_what_was_put_beside_the_fields(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, keys=["k", ""], groups=["", 7], versions=[3, -1], tags=[{}, {"s": 1}])
    rows = driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(2, 1)), driver.now).rows
    assert rows.keys == pack_strings(["", "k"])
    assert rows.groups == pack_blobs([b"\x07", b""])
    assert unpack(rows.version_min) == unpack(rows.version_max) == [-1, 3]
    assert rows.tags == pack_blobs([b"\x81\xa1s\x01", b""])
    assert rows.attempts == b""


def _malformed() -> list[tuple[str, Any]]:
    def field(name: str, value: Any) -> Any:
        return lambda request: setattr(request, name, value)

    def extent(**values: Any) -> Any:
        return lambda request: [setattr(request.blocks[0].extents[0], name, value) for name, value in values.items()]

    def keys(*values: str) -> Any:
        return lambda request: request.keys.CopyFrom(pack_strings(list(values)))

    return [
        ("no rows", field("rows", 0)),
        ("too many rows", field("rows", limits.ROWS_PER_PUT_MAX + 1)),
        ("ids cut short", field("ids", b"1234567")),
        ("ids for one row", field("ids", ids(1))),
        ("ids twice", field("ids", ids(1, 1))),
        ("versions without maximum", field("version_min", ids(1, 2))),
        ("keys for one row", keys("a")),
        ("keys twice", keys("a", "a")),
        ("key with a newline", keys("a\n", "b")),
        ("key too long", keys("a" * (limits.NAME_BYTES_MAX + 1), "b")),
        ("key not UTF-8", lambda r: r.keys.CopyFrom(pack_blobs([b"\xff", b""]))),
        ("keys with ids", lambda r: (keys("a", "b")(r), field("ids", ids(1, 2))(r))),
        ("group is a map", lambda r: r.groups.CopyFrom(pack_blobs([b"\x80", b""]))),
        ("group is no msgpack", lambda r: r.groups.CopyFrom(pack_blobs([b"\xc1", b""]))),
        ("tags are a list", lambda r: r.tags.CopyFrom(pack_blobs([b"\x90", b""]))),
        ("tags cut short", lambda r: r.tags.CopyFrom(pack_blobs([b"\x81", b""]))),
        ("packed ends descend", lambda r: (keys("ab", "c")(r), setattr(r.keys, "ends", b"\x03\0\0\0\x02\0\0\0"))),
        ("skip of two", field("skip", b"\x02\x00")),
        ("skip without keys", field("skip", b"\x01\x00")),
        ("no field", lambda r: r.ClearField("fields")),
        ("field twice", lambda r: r.fields.append(r.fields[0])),
        ("field without form", lambda r: setattr(r.fields[0], "form", b"")),
        ("field with a control character", lambda r: setattr(r.fields[0], "name", "a\x07")),
        ("no block", lambda r: r.ClearField("blocks")),
        ("block rows do not add up", lambda r: setattr(r.blocks[0], "rows", 3)),
        ("block without extents", lambda r: r.blocks[0].ClearField("extents")),
        ("two replicas", lambda r: r.blocks[0].extents.append(r.blocks[0].extents[0])),
        ("empty extent", extent(length=0)),
        ("extent off the grid", extent(offset=1)),
        ("extent wraps", extent(offset=(1 << 64) - 256)),
        ("unknown node", extent(node="stranger")),
        ("unknown arena", extent(arena=1)),
        ("wait too long", field("wait_ms", limits.WAIT_MAX_MS + 1)),
    ]


@pytest.mark.parametrize(("what", "spoil"), _malformed(), ids=[what for what, _ in _malformed()])
def test_malformed_commit_is_refused_whole(driver: Driver, session: int, what: str, spoil: Any) -> None:
    p = driver.partition(session)
    request = driver.commit(p, 2, versions=[1, 2] if "versions" in what else None)
    if "versions" in what:
        request.version_max = b""
    spoil(request)
    outcome = driver.send("commit", request, session=session)
    assert type(outcome.error) is InvalidArgument
    assert outcome.effects == ()
    assert driver.core.describe_partition(p).samples == 0
    assert driver.synced() == set()
    driver.core.check_invariants()


def test_check_refuses_before_the_journal(driver: Driver, session: int) -> None:
    request = driver.commit(driver.partition(session), 2)
    request.mutation.client_id, request.mutation.request, request.mutation.session = bytes(16), 1, session
    driver.core.check(journal_pb2.Command(commit=request))
    request.ids = b"123"
    with pytest.raises(InvalidArgument, match="ids"):
        driver.core.check(journal_pb2.Command(commit=request))
    with pytest.raises(InvalidArgument, match="empty"):
        driver.core.check(journal_pb2.Command())


@pytest.mark.parametrize(
    ("offset", "refused"), [(0, True), (256, True), (512, False), (-256, True)], ids=["same", "inside", "next", "into"]
)
def test_bytes_are_committed_once(driver: Driver, session: int, offset: int, refused: bool) -> None:
    p = driver.partition(session)
    driver.offset = 4096
    driver.put(session, p, 1)
    driver.offset = 4096 + offset
    outcome = driver.send("commit", driver.commit(p, 1), session=session)
    assert (type(outcome.error) is InvalidArgument) is refused


def test_bytes_stay_committed_after_their_sample_is_cleared(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert driver.synced() == set()
    driver.offset = 0
    with pytest.raises(InvalidArgument, match="committed before"):
        driver.put(session, p, 1)


def test_overlap_within_one_commit_is_refused(driver: Driver, session: int) -> None:
    request = driver.commit(driver.partition(session), 2, blocks=[1, 1])
    request.blocks[1].extents[0].offset = 256
    assert type(driver.send("commit", request, session=session).error) is InvalidArgument


def test_duplicate_key_names_rows_and_samples(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3, keys=["a", "b", "c"])
    with pytest.raises(DuplicateKey) as caught:
        driver.put(session, p, 3, keys=["x", "c", "a"])
    assert (caught.value.rows, caught.value.existing_ids) == ((1, 2), (3, 1))
    assert driver.core.describe_partition(p).samples == 3


def test_skipped_rows_keep_their_sample(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, keys=["a", "b"])
    assert driver.put(session, p, 3, keys=["b", "new", "a"], skip=[1, 0, 1]) == [2, 3, 1]
    reply = driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(1, 2, 3)), driver.now)
    assert unpack(reply.rows.placements[0].block) == [1, 1, 2]


def test_commit_of_skipped_rows_alone_frees_its_extent_at_once(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1, keys=["a"])
    before = set(driver.sealed)
    outcome = driver.send("commit", driver.commit(p, 1, keys=["a"], skip=[1]), session=session)
    assert [type(e) for e in outcome.effects if isinstance(e, SealedExtents | Freed)] == [SealedExtents, Freed]
    assert driver.sealed == before
    assert driver.core.describe_partition(p).bytes == BLOCK_BYTES


def test_skip_of_a_row_cleared_meanwhile_puts_it_anew(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    assert driver.put(session, p, 1, keys=["a"], skip=[1]) == [1]
    assert driver.counts(p) == (0, 1, 0, 0, 0)


def test_upsert_replaces_fields_and_leaves_progress_alone(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, ["a", "b"], keys=["k", "l"])
    claim = driver.claim(session, p, 1)
    assert driver.put(session, p, 1, ["a"], keys=["k"], upsert=True) == [1]
    assert driver.counts(p) == (0, 1, 1, 0, 0)
    assert len(driver.sealed) == 2
    driver.settle(session, claim.claim_id)
    assert driver.put(session, p, 2, ["a", "b"], keys=["k", "l"], upsert=True) == [1, 2]
    assert len(driver.sealed) == 1  # nothing lies in the first two blocks now


def test_claim_in_flight_keeps_the_replaced_block(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1, keys=["k"])
    claim = driver.claim(session, p, 1)
    driver.put(session, p, 1, keys=["k"], upsert=True)
    assert len(driver.sealed) == 2
    driver.settle(session, claim.claim_id)
    assert {extent[0] for extent in driver.sealed} == {BLOCK_BYTES}


def test_column_joins_existing_rows_once(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    assert driver.put(session, p, 2, ["reward"], ids=[3, 1]) == [3, 1]
    with pytest.raises(DuplicateKey, match="reward") as caught:
        driver.put(session, p, 2, ["reward"], ids=[2, 1])
    assert (caught.value.ids, caught.value.rows) == ((1,), (1,))
    fields = {field.name: field.written for field in driver.core.describe_partition(p).fields}
    assert fields == {"a": 3, "reward": 2}


def test_column_for_missing_samples_names_them(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    with pytest.raises(SampleNotFound) as caught:
        driver.put(session, p, 3, ["b"], ids=[9, 1, 7])
    assert (caught.value.ids, caught.value.rows) == ((9, 7), (0, 2))
    assert [field.name for field in driver.core.describe_partition(p).fields] == ["a"]


def test_column_widens_the_version_span(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1, versions=[5])
    driver.put(session, p, 1, ["b"], ids=[1], versions=[7])
    rows = driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(1)), driver.now).rows
    assert (unpack(rows.version_min), unpack(rows.version_max)) == ([5], [7])


def test_first_put_fixes_the_form(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    other = Form("dense", "torch", "int64", (2,)).to_bytes()
    with pytest.raises(SchemaMismatch, match="'a'"):
        driver.put(session, p, 1, ["b", "a"], form=other)
    assert [field.name for field in driver.core.describe_partition(p).fields] == ["a"]


def test_sealed_partition_takes_columns_but_no_samples(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=p), session=session)
    with pytest.raises(Sealed):
        driver.put(session, p, 1)
    assert driver.put(session, p, 1, ["b"], ids=[1]) == [1]


def test_capacity_is_never_exceeded_and_a_clear_makes_room(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_samples=3)
    driver.put(session, p, 2)
    request = driver.commit(p, 2)
    assert driver.demand(request).lacks
    assert type(driver.send("commit", request, session=session).error) is BackpressureTimeout
    outcome = driver.send("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert RoomChanged(p) in outcome.effects
    assert not driver.demand(request).lacks
    assert driver.send("commit", request, session=session).error is None
    with pytest.raises(InvalidArgument, match="capacity_samples is 3"):
        driver.demand(driver.commit(p, 4))


def test_byte_capacity_counts_sealed_blocks(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_bytes=2 * BLOCK_BYTES)
    driver.put(session, p, 2)
    driver.put(session, p, 1, ["b"], ids=[1])  # a column always fits: without it the samples could never be consumed
    assert driver.core.describe_partition(p).bytes == 2 * BLOCK_BYTES
    assert driver.demand(driver.commit(p, 1)).lacks
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert driver.core.describe_partition(p).bytes == BLOCK_BYTES
    with pytest.raises(InvalidArgument, match="capacity_bytes"):
        driver.demand(driver.commit(p, 3, blocks=[1, 1, 1]))


def test_a_put_of_existing_keys_needs_no_room(driver: Driver, session: int) -> None:
    p = driver.partition(session, capacity_samples=1)
    driver.put(session, p, 1, keys=["a"])
    assert not driver.demand(driver.commit(p, 1, keys=["a"])).lacks
    assert not driver.demand(driver.commit(p, 1, keys=["a"])).draws
    assert driver.demand(driver.commit(p, 1, keys=["new"])).draws
    assert driver.put(session, p, 1, keys=["a"], upsert=True) == [1]


def test_commit_after_the_session_ended_is_refused(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.send("end_session", journal_pb2.EndSession(session=session))
    with pytest.raises(LeaseExpired):
        driver.put(session, p, 1)


def test_stale_on_arrival_is_dropped_for_everyone(driver: Driver, session: int) -> None:
    p = driver.partition(session, consumers=["x", "y"], max_staleness=1)
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=5), session=session)
    driver.put(session, p, 4, versions=[3, 4, 5, -1])
    assert driver.counts(p, "x") == driver.counts(p, "y") == (0, 3, 0, 0, 1)
    assert unpack(driver.claim(session, p, 3).rows.ids) == [2, 3, 4]


@pytest.mark.parametrize(
    ("selector", "cleared"),
    [
        ({}, []),
        ({"ids": ids(3, 1, 99, 3)}, [1, 3]),
        ({"keys": pack_strings(["ab", "zz"])}, [2]),
        ({"groups": pack_blobs([b"\xa1g"])}, [1, 2]),
        ({"groups": pack_blobs([b""])}, []),
        ({"tags": b"\x81\xa1s\x01"}, [1, 3]),
        ({"tags": b"\x81\xa1s\xc3"}, []),  # True is not 1
        ({"prefix": "a"}, [1, 2]),
    ],
)
def test_clear_selects(driver: Driver, session: int, selector: dict[str, Any], cleared: list[int]) -> None:
    p = driver.partition(session)
    driver.put(
        session, p, 3, keys=["aa", "ab", "b"], groups=["g", "g", ""], tags=[{"s": 1}, {"s": 2}, {"s": 1, "t": 2}]
    )
    reply = driver.ok("clear", pb.ClearRequest(partition_id=p, **selector), session=session)
    assert unpack(reply.ids) == cleared
    assert driver.core.describe_partition(p).samples == 3 - len(cleared)
    driver.core.check_invariants()


@pytest.mark.parametrize("selector", [{"ids": ids(1), "prefix": "a"}, {"prefix": ""}, {"tags": b"\x80"}])
def test_clear_refuses_ambiguous_selectors(driver: Driver, session: int, selector: dict[str, Any]) -> None:
    p = driver.partition(session)
    with pytest.raises(InvalidArgument):
        driver.ok("clear", pb.ClearRequest(partition_id=p, **selector), session=session)


def test_cleared_key_may_be_put_again_as_another_sample(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1, keys=["a"])
    driver.ok("clear", pb.ClearRequest(partition_id=p, prefix="a"), session=session)
    assert driver.put(session, p, 1, keys=["a"]) == [2]


@pytest.mark.parametrize(
    ("request_of", "error"),
    [
        (lambda p: {"ids": ids(1, 5)}, SampleNotFound),
        (lambda p: {"keys": pack_strings(["a", "nope"])}, SampleNotFound),
        (lambda p: {"ids": ids(1), "fields": ["b"]}, SampleNotFound),
        (lambda p: {"ids": ids(1), "fields": ["never"]}, SampleNotFound),
        (lambda p: {"ids": ids(1), "keys": pack_strings(["a"])}, InvalidArgument),
        (lambda p: {"ids": b"123"}, InvalidArgument),
        (lambda p: {"partition_id": p + 1}, PartitionNotFound),
        (lambda p: {"session": 77}, LeaseExpired),
    ],
)
def test_locate_refuses_and_pins_nothing(driver: Driver, session: int, request_of: Any, error: type[TQError]) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, keys=["a", "c"])
    driver.put(session, p, 1, ["b"], ids=[2])
    request = pb.LocateRequest(**{"session": session, "partition_id": p, **request_of(p)})
    with pytest.raises(error):
        driver.core.locate(request, driver.now)
    driver.core.check_invariants()
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1, 2)), session=session)
    assert driver.sealed == set()


def test_tags_merge_and_null_deletes(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, tags=[{"a": 1, "b": 1}, {}])
    tags = pack_blobs([b"\x82\xa1a\xc0\xa1c\x02"] * 2)  # {"a": None, "c": 2}
    driver.ok("set_tags", pb.SetTagsRequest(partition_id=p, ids=ids(1, 2), tags=tags), session=session)
    rows = driver.core.locate(pb.LocateRequest(session=session, partition_id=p, ids=ids(1, 2)), driver.now).rows
    assert rows.tags == pack_blobs([b"\x82\xa1b\x01\xa1c\x02", b"\x81\xa1c\x02"])


def test_long_lived_partition_does_not_grow_for_ever(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    rows, kept = 500, []
    for turn in range(20):
        new = driver.put(session, p, rows, keys=[f"{turn}-{i}" for i in range(rows)], groups=[turn] * rows)
        kept.append(new[-1])
        driver.ok("clear", pb.ClearRequest(partition_id=p, ids=pack_array(new[:-1], I64)), session=session)
    driver.core.check_invariants()
    partition = driver.core._state.partitions[p]
    assert partition.samples.live == 20
    assert partition.samples.capacity <= 4096  # 10,000 samples went through
    assert unpack(driver.claim(session, p, 20).rows.ids) == kept
    located = driver.core.locate(
        pb.LocateRequest(session=session, partition_id=p, keys=pack_strings(["3-499"])), driver.now
    )
    assert unpack(located.rows.ids) == [kept[3]]


def _pad(name: str, size_bytes: int) -> bytes:
    """Encoded tags with one text, of so many bytes in all: one for the map, 1 + 1 for the name, 3 for the length."""
    return bytes(msgpack.packb({name: "x" * (size_bytes - 6)}))


def test_tags_that_exceed_their_bound_when_merged_are_refused_and_change_nothing(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    half = limits.TAGS_BYTES_MAX // 2
    request = driver.commit(p, 2, keys=["k", "l"])
    request.tags.CopyFrom(pack_blobs([_pad("a", half), b""]))
    driver.ok("commit", request, session=session)

    def set_tags(*tags: bytes) -> Any:
        request = pb.SetTagsRequest(partition_id=p, ids=ids(2, 1), tags=pack_blobs(list(tags)))
        return driver.send("set_tags", request, session=session).error

    before = _durable(driver)
    # Two maps in one have one head: half + (half + 2) - 1 is one byte too many.
    for error, row in (
        (set_tags(_pad("z", 100), _pad("b", half + 2)), 1),
        (_upsert_error(driver, session, p, [_pad("z", 100), _pad("b", half + 2)], keys=["new", "k"]), 1),
    ):
        assert type(error) is InvalidArgument
        assert "sample 1 would" in str(error)
        assert f"{limits.TAGS_BYTES_MAX + 1} bytes of them, at most {limits.TAGS_BYTES_MAX}" in str(error)
        assert (error.ids, error.rows) == ((1,), (row,))
        assert _durable(driver) == before
    assert set_tags(_pad("z", 100), _pad("b", half + 1)) is None
    assert set_tags(b"", _pad("b", half + 2)) is not None
    assert set_tags(b"", bytes(msgpack.packb({"a": None, "c": "y" * (half - 100)}))) is None  # a null makes room


def _durable(driver: Driver) -> Any:
    """The state but for the journal's sequence, which every command moves."""
    state = msgpack.unpackb(driver.core.snapshot(), strict_map_key=False)
    state["counters"][0] = 0
    return state


def _upsert_error(driver: Driver, session: int, p: int, tags: list[bytes], *, keys: list[str]) -> Any:
    request = driver.commit(p, len(tags), keys=keys, upsert=True)
    request.tags.CopyFrom(pack_blobs(tags))
    return driver.send("commit", request, session=session).error


def test_tags_of_a_new_sample_that_grow_when_they_are_stored_are_refused_by_row(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    # 5 bytes a number on the wire, 9 in the table, where every float is a double.
    numbers = [0.5] * (limits.TAGS_BYTES_MAX // 9 + 1)
    grows = bytes(msgpack.packb({"f": numbers}, use_single_float=True))
    request = driver.commit(p, 2)
    request.tags.CopyFrom(pack_blobs([b"", grows]))
    error = driver.send("commit", request, session=session).error
    assert type(error) is InvalidArgument
    assert "the sample of row 1" in str(error)
    assert (error.ids, error.rows) == ((), (1,))
    assert driver.core.describe_partition(p).samples == 0
