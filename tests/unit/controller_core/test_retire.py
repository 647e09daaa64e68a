"""Retirement, producers and shards: what a partition's end and its parts look like from outside the core."""

from __future__ import annotations

import tracemalloc

import msgpack
import pytest

from tests.model.driver import Driver, claim_request, client_id, ids, unpack
from tqclient.errors import ClaimTimeout, PartitionExists, ProducersGone, SampleNotFound, Sealed
from tqclient.policy import Policy
from tqclient.wire.v1 import controller_pb2 as pb
from tqclient.wire.v1 import journal_pb2
from tqserver.controller.core import Core, limits
from tqserver.controller.core.partition import Partition


def seal(driver: Driver, session: int, partition: int) -> pb.Partition:
    request = pb.SealPartitionRequest(partition_id=partition)
    return driver.ok("seal_partition", request, session=session).partition


def restored(driver: Driver) -> Core:
    core = Core.restore(driver.core.snapshot(), 0.0)
    core.check_invariants()
    assert core.snapshot() == driver.core.snapshot()
    return core


def drained(driver: Driver, session: int, **policy: bool) -> int:
    partition = driver.partition(session, **policy)
    driver.put(session, partition, 3)
    seal(driver, session, partition)
    driver.settle(session, driver.claim(session, partition, 3).claim_id)
    return partition


def test_a_partition_retires_with_the_last_ack(driver: Driver, session: int) -> None:
    described = driver.core.describe_partition(drained(driver, session))
    assert (described.retired, described.samples, described.bytes) == (True, 3, 0)
    assert [(c.name, c.consumed) for c in described.consumers] == [("x", 3)]
    driver.core.check_invariants()
    again = restored(driver).describe_partition(described.partition_id)
    assert again == described


def _filled(driver: Driver, session: int, name: str, rows: int) -> int:
    """Returns a partition that is sealed, with all that samples can have."""
    partition = driver.partition(session, name, consumers=["x", "y"])
    keys, tags = [f"{name}-{row}" for row in range(rows)], [{"n": row} for row in range(rows)]
    driver.put(session, partition, rows, ["a", "b"], keys=keys, groups=[row // 2 for row in range(rows)], tags=tags)
    seal(driver, session, partition)
    return partition


def _drain(driver: Driver, session: int, partition: int, rows: int) -> None:
    for consumer in ("x", "y"):
        claim = driver.claim(session, partition, rows, consumer=consumer, sampler="group", params={"size": 2})
        settled_below = driver.requests[1]
        settle = pb.SettleRequest(claim_id=claim.claim_id, verdict=pb.VERDICT_ACK)
        driver.ok("settle", settle, session=session, settled_below=settled_below)
    driver.log.clear()


@pytest.mark.parametrize("rows", [500, 3000])  # below and above what is compacted
def test_nothing_stays_of_a_partition_but_its_description(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    monkeypatch.setattr(limits, "RETIRED_CHANGES_BYTES_MAX", 1)

    def retire(number: int) -> None:
        _drain(driver, session, _filled(driver, session, f"step-{number}", rows), rows)

    retire(0)
    tracemalloc.start()
    try:
        retire(1)
        before, snapshot = tracemalloc.get_traced_memory()[0], len(driver.core.snapshot())
        for number in range(2, 12):
            retire(number)
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(driver.core.snapshot()) - snapshot < 10 * 1_500
    assert kept < 10 * 20_000
    described = driver.core.describe_partition(0, "step-0")
    assert (described.retired, [field.written for field in described.fields]) == (True, [rows, rows])
    assert restored(driver).describe_partition(0, "step-0") == described
    driver.core.check_invariants()


def test_a_snapshot_of_before_says_more_of_a_retired_partition_and_takes_no_more_room(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = _filled(driver, session, "p", 500)
    with monkeypatch.context() as before:
        before.setattr(Partition, "give_up_room", lambda _: None)
        _drain(driver, session, partition, 500)
        snapshot = driver.core.snapshot()
    core = Core.restore(snapshot, 0.0)
    core.check_invariants()
    assert core.describe_partition(partition) == driver.core.describe_partition(partition)
    assert len(core.snapshot()) < len(snapshot) - 500 * 20


def test_who_watches_is_told_of_every_end_and_who_comes_back_too_late_begins_anew(
    driver: Driver, session: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = [_filled(driver, session, f"step-{number}", 10) for number in range(4)]
    begun = [driver.core._state.partitions[each].changes.latest for each in partitions]
    sizes = []
    for partition, sequence in zip(partitions, begun, strict=True):
        claim = driver.claim(session, partition, 10, consumer="x")
        driver.settle(session, claim.claim_id)
        driver.settle(session, driver.claim(session, partition, 10, consumer="y").claim_id)
        told = driver.core.changes(partition, sequence)
        assert isinstance(told, list)
        assert [each.WhichOneof("change") for each in told] == ["settled", "settled", "removed", "partition"]
        assert told[-1].partition.partition.retired
        sizes.append(driver.core._state.partitions[partition].changes.size_bytes)
    assert all(isinstance(driver.core.changes(*each), list) for each in zip(partitions, begun, strict=True))
    monkeypatch.setattr(limits, "RETIRED_CHANGES_BYTES_MAX", sizes[0] + sizes[3] + 1_000)
    changed = pb.SetMetadataRequest(partition_id=partitions[0], set={"note": b"1"})
    driver.ok("set_metadata", changed, session=session)  # this one changed last
    remembered = [isinstance(driver.core.changes(*each), list) for each in zip(partitions, begun, strict=True)]
    assert remembered == [True, False, False, True]
    (listed,) = driver.core.changes(partitions[1], begun[1])
    assert (listed.listing.complete, listed.listing.ids) == (True, b"")
    assert driver.core.changes(partitions[1], listed.sequence) == []
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=partitions[0]), session=session)
    assert driver.core._state.retired._bytes == driver.core._state.partitions[partitions[3]].changes.size_bytes


def test_keep_keeps_the_samples(driver: Driver, session: int) -> None:
    described = driver.core.describe_partition(drained(driver, session, keep=True))
    assert not described.retired
    assert described.bytes > 0


def test_what_knows_no_retirement_is_kept(driver: Driver, session: int) -> None:
    """A journal or snapshot of an earlier version, and a client of one."""
    request = pb.CreatePartitionRequest(name="p", consumers=["x"], policy=pb.Policy(max_attempts=2))
    partition = driver.ok("create_partition", request, session=session).partition.partition_id
    driver.put(session, partition, 3)
    seal(driver, session, partition)
    driver.settle(session, driver.claim(session, partition, 3).claim_id)
    replayed = Core()
    for command, sequence in driver.log:
        replayed.apply(command, 0.0, sequence)
    for core in (driver.core, replayed, restored(driver)):
        described = core.describe_partition(partition)
        assert not described.retired
        assert described.bytes > 0
        assert Policy.from_wire(described.policy).keep


@pytest.mark.parametrize(("made", "asked"), [(None, False), (None, True), (False, None)])
def test_who_knows_no_retirement_has_no_say_in_it(
    driver: Driver, session: int, made: bool | None, asked: bool | None
) -> None:
    first = pb.CreatePartitionRequest(name="p", policy=pb.Policy(keep=made))
    second = pb.CreatePartitionRequest(name="p", policy=pb.Policy(keep=asked), exist_ok=True)
    partition = driver.ok("create_partition", first, session=session).partition
    assert driver.ok("create_partition", second, session=session).partition == partition
    assert partition.policy.HasField("keep") == (made is not None)


def test_a_partition_that_retires_is_not_one_that_is_kept(driver: Driver, session: int) -> None:
    driver.partition(session)
    other = pb.CreatePartitionRequest(name="p", consumers=["x"], policy=pb.Policy(keep=True), exist_ok=True)
    with pytest.raises(PartitionExists, match="keep=False, not True"):
        driver.ok("create_partition", other, session=session)


def test_a_partition_without_named_consumers_never_retires(driver: Driver, session: int) -> None:
    partition = driver.partition(session, consumers=())
    driver.put(session, partition, 3)
    driver.settle(session, driver.claim(session, partition, 3).claim_id)
    assert not seal(driver, session, partition).retired


def test_a_seal_after_the_last_ack_retires_and_says_so(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    driver.put(session, partition, 2)
    driver.settle(session, driver.claim(session, partition, 2).claim_id)
    assert seal(driver, session, partition).retired
    assert seal(driver, session, partition).retired


def test_every_consumer_must_be_done(driver: Driver, session: int) -> None:
    partition = driver.partition(session, consumers=("x", "y"))
    driver.put(session, partition, 2)
    seal(driver, session, partition)
    driver.settle(session, driver.claim(session, partition, 2).claim_id)
    assert not driver.core.describe_partition(partition).retired
    driver.settle(session, driver.claim(session, partition, 2, consumer="y").claim_id)
    assert driver.core.describe_partition(partition).retired


def test_a_dead_sample_keeps_the_partition(driver: Driver, session: int) -> None:
    partition = driver.partition(session, max_attempts=1)
    driver.put(session, partition, 2)
    seal(driver, session, partition)
    driver.settle(session, driver.claim(session, partition, 2).claim_id, ack=False)
    assert not driver.core.describe_partition(partition).retired
    dead = driver.core.list_dead(partition, "x").ids
    driver.ok("requeue", pb.RequeueRequest(partition_id=partition, consumer="x", ids=dead), session=session)
    driver.settle(session, driver.claim(session, partition, 2).claim_id)
    assert driver.core.describe_partition(partition).retired


def test_a_retired_partition_refuses_with_the_remedy(driver: Driver, session: int) -> None:
    partition = drained(driver, session)
    refused = [
        ("reset_consumer", pb.ResetConsumerRequest(partition_id=partition, consumer="x")),
        ("requeue", pb.RequeueRequest(partition_id=partition, consumer="x", ids=ids(1))),
    ]
    for kind, request in refused:
        error = driver.send(kind, request, session=session).error
        assert isinstance(error, Sealed)
        assert "keep=True" in str(error)
    claim = driver.send("claim", claim_request(partition, 1), session=session)
    assert isinstance(claim.error, Sealed)
    locate = pb.LocateRequest(session=session, partition_id=partition, ids=ids(1))
    with pytest.raises(SampleNotFound, match="retired"):
        driver.core.locate(locate, 0.0)
    cleared = driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(1)), session=session)
    assert not unpack(cleared.ids)
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=partition), session=session)
    driver.core.check_invariants()


def register(driver: Driver, session: int, partition: int, *, client: int = 1) -> int:
    request = pb.RegisterProducerRequest(partition_id=partition)
    return int(driver.ok("register_producer", request, session=session, client=client).registered)


def end(driver: Driver, session: int) -> None:
    driver.journal(journal_pb2.Command(end_session=journal_pb2.EndSession(session=session)))


def on_behalf_of(request: pb.ClaimRequest, session: int) -> pb.ClaimRequest:
    request.mutation.client_id, request.mutation.session = client_id(1), session
    return request


def refusal(driver: Driver, session: int, partition: int, batch: int) -> object:
    return driver.send("claim", claim_request(partition, batch), session=session).error


def test_claims_fail_once_the_last_producer_died(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    first, second = driver.open(2), driver.open(3)
    assert register(driver, first, partition, client=2) == 1
    assert register(driver, second, partition, client=3) == 2
    assert register(driver, second, partition, client=3) == 2
    driver.put(session, partition, 2)
    end(driver, first)
    assert not isinstance(refusal(driver, session, partition, 4), ProducersGone)
    end(driver, second)
    error = refusal(driver, session, partition, 4)
    assert isinstance(error, ProducersGone)
    assert "2 samples are ready" in str(error)
    assert "seal()" in str(error)
    assert restored(driver).describe_partition(partition).producers == 0
    seal(driver, session, partition)
    assert len(unpack(driver.claim(session, partition, 4).rows.ids)) == 2


def test_claims_for_a_field_fail_once_its_last_producer_died_after_the_seal(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    rollout, scorer = driver.open(2), driver.open(3)
    register(driver, rollout, partition, client=2)
    rows = driver.put(session, partition, 3, ["a"])
    end(driver, rollout)
    seal(driver, session, partition)
    wanted = {"batch": 2, "fields": ["a", "score"]}

    def refused() -> object:
        return driver.send("claim", claim_request(partition, **wanted), session=session).error

    assert isinstance(refused(), ClaimTimeout)  # the seal dealt with that death
    register(driver, scorer, partition, client=3)
    driver.put(session, partition, 1, ["score"], ids=rows[:1])
    assert isinstance(refused(), ClaimTimeout)
    end(driver, scorer)
    seal(driver, session, partition)  # it is sealed already
    error = refused()
    assert isinstance(error, ProducersGone)
    assert "1 samples are ready" in str(error)
    assert "2 lack a field. Write the fields" in str(error)
    with pytest.raises(ProducersGone):
        restored(driver).readiness(on_behalf_of(claim_request(partition, **wanted), session))
    assert unpack(driver.claim(session, partition, 1, ["a", "score"]).rows.ids) == rows[:1]
    driver.put(session, partition, 2, ["score"], ids=rows[1:])
    assert unpack(driver.claim(session, partition, **wanted).rows.ids) == rows[1:]
    assert isinstance(refused(), ClaimTimeout)  # what is leased may come again


def test_a_producer_that_left_in_good_order_leaves_claims_waiting(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    first, second = driver.open(2), driver.open(3)
    register(driver, first, partition, client=2)
    register(driver, second, partition, client=3)
    end(driver, first)
    for _ in range(2):
        unregister = pb.UnregisterProducerRequest(partition_id=partition)
        driver.ok("unregister_producer", unregister, session=second, client=3)
    assert not isinstance(refusal(driver, session, partition, 1), ProducersGone)
    driver.core.check_invariants()


def test_another_producer_ends_the_refusals(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    first, second = driver.open(2), driver.open(3)
    register(driver, first, partition, client=2)
    end(driver, first)
    assert isinstance(refusal(driver, session, partition, 1), ProducersGone)
    register(driver, second, partition, client=3)
    assert not isinstance(refusal(driver, session, partition, 1), ProducersGone)


def test_shards_have_their_own_metadata_and_count_their_samples(driver: Driver, session: int) -> None:
    partition = driver.partition(session)
    request = pb.SetMetadataRequest(partition_id=partition, set={"sizes": b"1"}, shard=3)
    driver.ok("set_metadata", request, session=session)
    sample_ids = driver.put(session, partition, 3)
    tags = pb.SetTagsRequest(partition_id=partition, ids=ids(*sample_ids))
    packed = [msgpack.packb({"shard": shard}) for shard in (3, 3, 5)]
    tags.tags.data = b"".join(packed)
    tags.tags.ends = b"".join((sum(map(len, packed[: n + 1]))).to_bytes(4, "little") for n in range(3))
    driver.ok("set_tags", tags, session=session)
    shards = driver.core.describe_partition(partition).shards
    assert {n: (dict(s.metadata), s.samples) for n, s in shards.items()} == {3: ({"sizes": b"1"}, 2), 5: ({}, 1)}
    driver.ok("clear", pb.ClearRequest(partition_id=partition, ids=ids(*sample_ids[1:])), session=session)
    shards = restored(driver).describe_partition(partition).shards
    assert {n: s.samples for n, s in shards.items()} == {3: 1}
    driver.core.check_invariants()
