"""Claims: who gets which samples, when, and what becomes of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.model.driver import BLOCK_BYTES, Driver, claim_request, client_id, ids, unpack
from tqclient import limits
from tqclient.errors import (
    ClaimTimeout,
    InvalidArgument,
    LeaseExpired,
    PartitionNotFound,
    SampleNotFound,
    Sealed,
    TQError,
)
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Readiness
from tqserver.controller.core import limits as core_limits


def _request(driver: Driver, session: int, partition: int, batch: int, **options: Any) -> pb.ClaimRequest:
    request = pb.ClaimRequest(partition_id=partition, consumer="x", batch_size=batch)
    request.mutation.client_id, request.mutation.request, request.mutation.session = (1).to_bytes(16, "big"), 1, session
    for name, value in options.items():
        getattr(request, name).extend(value) if name == "fields" else setattr(request, name, value)
    return request


def _seal(driver: Driver, session: int, partition: int) -> None:
    driver.ok("seal_partition", pb.SealPartitionRequest(partition_id=partition), session=session)


def test_fifo_and_consumers_do_not_disturb_each_other(driver: Driver, session: int) -> None:
    p = driver.partition(session, consumers=["x", "y"])
    driver.put(session, p, 5)
    assert unpack(driver.claim(session, p, 2).rows.ids) == [1, 2]
    assert unpack(driver.claim(session, p, 2).rows.ids) == [3, 4]
    assert unpack(driver.claim(session, p, 3, consumer="y").rows.ids) == [1, 2, 3]
    assert driver.counts(p, "x") == (0, 1, 4, 0, 0)


def test_released_samples_come_before_newer_ones_with_their_attempts(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 6)
    first = driver.claim(session, p, 2)
    driver.claim(session, p, 2)
    driver.settle(session, first.claim_id, ack=False)
    again = driver.claim(session, p, 3)
    assert unpack(again.rows.ids) == [1, 2, 5]
    assert np.frombuffer(again.rows.attempts, "<u4").tolist() == [2, 2, 1]


def test_ready_means_every_named_field(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    assert driver.core.readiness(_request(driver, session, p, 1, fields=["a", "r"])) is Readiness.WAIT
    driver.put(session, p, 1, ["r"], ids=[2])
    assert driver.core.ready_count(_request(driver, session, p, 1, fields=["r", "a"])) == 1
    claim = driver.claim(session, p, 1, ["r", "a"])
    assert unpack(claim.rows.ids) == [2]
    assert [field.name for field in claim.fields] == ["r", "a"]


def test_no_fields_means_all_that_the_partition_has_when_granted(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2)
    driver.put(session, p, 1, ["r"], ids=[2])
    claim = driver.claim(session, p, 1)
    assert unpack(claim.rows.ids) == [2]
    assert [field.name for field in claim.fields] == ["a", "r"]


def test_counts_follow_the_fields_of_the_latest_claim(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    driver.put(session, p, 1, ["r"], ids=[1])
    assert driver.counts(p) == (2, 1, 0, 0, 0)  # by all fields
    driver.claim(session, p, 1, ["a"])
    assert driver.counts(p) == (0, 2, 1, 0, 0)  # by a alone


def test_timeout_says_what_is_missing_and_changes_nothing(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2)
    with pytest.raises(ClaimTimeout, match="2 samples are ready"):
        driver.claim(session, p, 3)
    assert driver.counts(p) == (0, 2, 0, 0, 0)


def test_sealed_partition_hands_out_what_is_left_and_then_ends(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    request = _request(driver, session, p, 2)
    first = driver.claim(session, p, 2)
    assert driver.core.readiness(request) is Readiness.WAIT
    _seal(driver, session, p)
    assert driver.core.readiness(request) is Readiness.READY
    last = driver.claim(session, p, 2)
    assert unpack(last.rows.ids) == [3]
    assert driver.core.readiness(request) is Readiness.WAIT  # the leased may come back
    driver.settle(session, last.claim_id)
    driver.settle(session, first.claim_id, ack=False)
    assert unpack(driver.claim(session, p, 9).rows.ids) == [1, 2]
    driver.settle(session, 3)
    assert driver.core.readiness(request) is Readiness.DRAINED
    with pytest.raises(Sealed):
        driver.claim(session, p, 2)


def test_sealed_partition_waits_for_pending_columns(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2)
    driver.put(session, p, 1, ["r"], ids=[1])
    _seal(driver, session, p)
    assert driver.core.readiness(_request(driver, session, p, 2, fields=["r"])) is Readiness.WAIT
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(2)), session=session)
    assert driver.core.readiness(_request(driver, session, p, 2, fields=["r"])) is Readiness.READY


def test_sample_is_dead_after_its_last_attempt_and_can_be_requeued(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_attempts=2)
    driver.put(session, p, 2)
    for _ in range(2):
        driver.settle(session, driver.claim(session, p, 1).claim_id, ack=False)
    assert driver.counts(p) == (0, 1, 0, 0, 1)
    dead = driver.core.list_dead(p, "x")
    assert (unpack(dead.ids), np.frombuffer(dead.attempts, "<u4").tolist()) == ([1], [2])
    with pytest.raises(SampleNotFound) as caught:
        driver.ok("requeue", pb.RequeueRequest(partition_id=p, consumer="x", ids=ids(1, 2)), session=session)
    assert caught.value.ids == (2,)
    driver.ok("requeue", pb.RequeueRequest(partition_id=p, consumer="x", ids=ids(1)), session=session)
    claim = driver.claim(session, p, 1)
    assert (unpack(claim.rows.ids), claim.rows.attempts) == ([1], b"\x01\0\0\0")


def test_version_drops_ready_samples_now_and_leased_ones_on_release(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_staleness=2)
    driver.put(session, p, 3, versions=[1, 1, 4])
    claim = driver.claim(session, p, 1)
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=4), session=session)
    assert driver.counts(p) == (0, 1, 1, 0, 1)
    driver.settle(session, claim.claim_id, ack=False)
    assert driver.counts(p) == (0, 1, 0, 0, 2)
    assert driver.core.list_dead(p, "x").ids == b""  # stale is not dead
    with pytest.raises(InvalidArgument, match="older"):
        driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=3), session=session)


def test_upsert_with_newer_weights_makes_a_stale_sample_ready_again(driver: Driver, session: int) -> None:
    p = driver.partition(session, consumers=[], max_staleness=1)
    driver.put(session, p, 1, keys=["k"], versions=[1])
    driver.claim(session, p, 1, consumer="early")
    driver.settle(session, 1, ack=False)
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=3), session=session)
    assert driver.core.ready_count(_request(driver, session, p, 1)) == 0  # x waits for its first claim
    driver.put(session, p, 1, keys=["k"], versions=[2], upsert=True)
    assert driver.core.ready_count(_request(driver, session, p, 1)) == 1
    assert driver.counts(p, "early") == (0, 1, 0, 0, 0)


def test_late_consumer_sees_every_live_sample_but_stale_ones(driver: Driver, session: int) -> None:
    p = driver.partition(session, consumers=[], max_staleness=0)
    driver.put(session, p, 3, versions=[0, 1, 1])
    driver.ok("set_version", pb.SetVersionRequest(partition_id=p, version=1), session=session)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(2)), session=session)
    assert not driver.core.describe_partition(p).consumers
    assert unpack(driver.claim(session, p, 1, consumer="late").rows.ids) == [3]
    assert driver.counts(p, "late") == (0, 0, 1, 0, 1)


def test_waiting_does_not_make_a_consumer(driver: Driver, session: int) -> None:
    p = driver.partition(session, consumers=[])
    before = driver.core.snapshot()
    assert driver.core.readiness(_request(driver, session, p, 1)) is Readiness.WAIT
    assert driver.core.snapshot() == before
    driver.put(session, p, 1)
    assert driver.core.readiness(_request(driver, session, p, 1)) is Readiness.READY
    driver.core.check_invariants()


def test_cleared_rows_of_a_claim_can_be_acked_and_are_not_redelivered(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 2, blocks=[1, 1])
    claim = driver.claim(session, p, 2)
    driver.ok("clear", pb.ClearRequest(partition_id=p, ids=ids(1)), session=session)
    assert len(driver.sealed) == 2  # the claim may still be read
    driver.settle(session, claim.claim_id, ack=False)
    assert len(driver.sealed) == 1
    assert unpack(driver.claim(session, p, 1).rows.ids) == [2]


def test_claim_outlives_its_partition(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    claim = driver.claim(session, p, 1)
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    assert len(driver.sealed) == 1
    driver.settle(session, claim.claim_id)
    assert driver.sealed == set()
    driver.core.check_invariants()


def test_reset_makes_everything_unconsumed_and_ends_claims(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    driver.settle(session, driver.claim(session, p, 1).claim_id)
    held = driver.claim(session, p, 1)
    driver.ok("reset_consumer", pb.ResetConsumerRequest(partition_id=p, consumer="x"), session=session)
    assert driver.counts(p) == (0, 3, 0, 0, 0)
    with pytest.raises(LeaseExpired):
        driver.settle(session, held.claim_id)
    assert driver.claim(session, p, 3).rows.attempts == b"\x01\0\0\0" * 3


def test_ack_of_another_session_is_refused(driver: Driver, session: int) -> None:
    p, other = driver.partition(session), driver.open()
    driver.put(session, p, 1)
    claim = driver.claim(session, p, 1)
    with pytest.raises(LeaseExpired):
        driver.settle(other, claim.claim_id)
    driver.settle(session, claim.claim_id)
    with pytest.raises(LeaseExpired):
        driver.settle(session, claim.claim_id)
    assert driver.counts(p) == (0, 0, 0, 1, 0)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"consumer": "stranger"}, InvalidArgument, "it has: x"),
        ({"consumer": ""}, InvalidArgument, "empty"),
        ({"batch_size": 0}, InvalidArgument, "batch_size"),
        ({"batch_size": limits.ROWS_PER_CLAIM_MAX + 1}, InvalidArgument, "batch_size"),
        ({"fields": ["a", "a"]}, InvalidArgument, "twice"),
        ({"partition_id": 99}, PartitionNotFound, "99"),
    ],
)
def test_impossible_claims_are_refused_before_they_wait(
    driver: Driver, session: int, options: dict[str, Any], error: type[TQError], says: str
) -> None:
    p = driver.partition(session)
    request = _request(driver, session, p, 1, **options)
    with pytest.raises(error, match=says):
        driver.core.readiness(request)
    assert type(driver.send("claim", request, session=session).error) is error


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [("best", b"", "there are: fifo"), ("fifo", b"\x81\xa1n\x01", "no parameters"), ("fifo", b"\xc1", "msgpack")],
)
def test_sampler_must_be_known(driver: Driver, session: int, name: str, params: bytes, says: str) -> None:
    request = _request(driver, session, driver.partition(session), 1)
    request.sampler.name, request.sampler.params = name, params
    with pytest.raises(InvalidArgument, match=says):
        driver.core.readiness(request)


def test_readiness_refuses_an_ended_session(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    request = _request(driver, session, p, 1)
    driver.send("end_session", journal_pb2.EndSession(session=session))
    with pytest.raises(LeaseExpired):
        driver.core.readiness(request)


def test_more_field_sets_than_views_are_still_right(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_limits, "VIEWS_PER_CONSUMER_MAX", 16)
    p = driver.partition(session)
    names = [f"f{i}" for i in range(20)]
    driver.put(session, p, 2, names)
    for name in names * 2:
        assert driver.core.ready_count(_request(driver, session, p, 1, fields=[name])) == 2
    claim = driver.claim(session, p, 1)
    assert all(driver.core.ready_count(_request(driver, session, p, 1, fields=[name])) == 1 for name in names)
    driver.settle(session, claim.claim_id, ack=False)
    driver.core.check_invariants()


def test_a_block_that_a_claim_will_be_granted_whole_and_in_order_is_foretold(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(core_limits, "FORETOLD_BYTES_MIN", BLOCK_BYTES)
    p = driver.partition(session)
    put = driver.commit(p, 4, ["a", "b"])
    first = unpack(driver.ok("commit", put, session=session).ids)

    def foretold(batch: int, **options: Any) -> pb.BlockWrite | None:
        request = claim_request(p, batch, **options)
        request.mutation.client_id, request.mutation.session = client_id(1), session
        return driver.core.foretell(request)

    assert foretold(4) == foretold(4, fields=["b"]) == put.blocks[0]
    assert foretold(3) is None  # not all of it
    assert foretold(5) is None  # it has to wait
    assert foretold(4, sampler="lifo") is None  # in another order
    before = driver.core.snapshot()
    assert foretold(4) is not None
    assert driver.core.snapshot() == before
    monkeypatch.setattr(core_limits, "FORETOLD_BYTES_MIN", BLOCK_BYTES + 1)
    assert foretold(4) is None
    monkeypatch.setattr(core_limits, "FORETOLD_BYTES_MIN", BLOCK_BYTES)
    driver.ok("commit", driver.commit(p, 4, ["b"], ids=first, upsert=True), session=session)
    assert foretold(4) is None  # its fields lie in two blocks
    assert foretold(4, fields=["a"]) == put.blocks[0]
    driver.claim(session, p, 1)
    driver.put(session, p, 1, ["a", "b"])
    assert foretold(4, fields=["a"]) is None  # three rows of it, and one of another


def test_nothing_is_foretold_of_a_partition_that_is_gone(driver: Driver, session: int) -> None:
    with pytest.raises(PartitionNotFound):
        driver.core.foretell(_request(driver, session, 77, 1))
