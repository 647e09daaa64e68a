"""Partitions as wholes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.model.driver import Driver, ids
from tqclient import limits
from tqclient.errors import InvalidArgument, PartitionExists, PartitionNotFound
from tqclient.wire.packing import pack_blobs
from tqclient.wire.v1 import controller_pb2 as pb
from tqserver.controller.core import PartitionGone, ReadinessChanged
from tqserver.controller.core import limits as limits_of_core


def test_new_partition_is_described_with_its_defaults(driver: Driver, session: int) -> None:
    request = pb.CreatePartitionRequest(name="p", consumers=["x"], metadata={"m": b"1"})
    partition = driver.ok("create_partition", request, session=session).partition
    assert partition == driver.core.describe_partition(0, "p") == driver.core.describe_partition(1)
    policy = partition.policy
    assert (policy.staleness, policy.replicas, policy.max_attempts, policy.lease_ms) == ("drop", 1, 5, 10_000)
    assert not policy.HasField("max_staleness")
    assert (partition.version, partition.sealed, dict(partition.metadata)) == (-1, False, {"m": b"1"})


@pytest.mark.parametrize("name", ["", "a\x00b", "tab\t", "é" * (limits.NAME_BYTES_MAX // 2 + 1)])
def test_names_are_checked(driver: Driver, session: int, name: str) -> None:
    with pytest.raises(InvalidArgument):
        driver.partition(session, name)
    with pytest.raises(InvalidArgument):
        driver.partition(session, "p", consumers=[name])


@pytest.mark.parametrize(
    "policy",
    [
        {"staleness": "wait"},
        {"replicas": 4},
        {"capacity_bytes": 0},
        {"capacity_samples": 0},
        {"lease_ms": 1},
        {"max_attempts": 1 << 20},
    ],
)
def test_policies_that_cannot_be_kept_are_refused(driver: Driver, session: int, policy: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        driver.partition(session, **policy)


def _exist_ok(**policy: Any) -> pb.CreatePartitionRequest:
    return pb.CreatePartitionRequest(name="p", consumers=["y", "x"], policy=pb.Policy(**policy), exist_ok=True)


def test_exist_ok_returns_the_partition_and_adds_consumers(driver: Driver, session: int) -> None:
    p = driver.partition(session, max_attempts=5)
    driver.put(session, p, 2)
    partition = driver.ok("create_partition", _exist_ok(), session=session).partition  # 5 is the default
    assert (partition.partition_id, [c.name for c in partition.consumers]) == (p, ["x", "y"])
    assert driver.counts(p, "y") == (0, 2, 0, 0, 0)


@pytest.mark.parametrize(
    ("policy", "says"), [({"max_attempts": 4}, "max_attempts=5, not 4"), ({"max_staleness": 0}, "max_staleness=None")]
)
def test_exist_ok_with_other_policies_says_which(
    driver: Driver, session: int, policy: dict[str, Any], says: str
) -> None:
    driver.partition(session)
    with pytest.raises(PartitionExists, match=says):
        driver.ok("create_partition", _exist_ok(**policy), session=session)


def test_name_is_taken_without_exist_ok(driver: Driver, session: int) -> None:
    driver.partition(session)
    with pytest.raises(PartitionExists, match="exist_ok"):
        driver.partition(session)


def test_deleted_partition_is_gone_and_its_name_is_free(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 3)
    name = driver.core.describe_partition(p).name
    outcome = driver.send("delete_partition", pb.DeletePartitionRequest(partition_id=p), session=session)
    assert PartitionGone(p, name) in outcome.effects
    assert driver.sealed == set()
    with pytest.raises(PartitionNotFound):
        driver.core.describe_partition(p)
    assert driver.partition(session) == p + 1
    driver.core.check_invariants()


def test_seal_is_repeatable_and_wakes_once(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    request = pb.SealPartitionRequest(partition_id=p)
    assert ReadinessChanged(p) in driver.send("seal_partition", request, session=session).effects
    again = driver.send("seal_partition", request, session=session)
    assert (again.error, again.effects) == (None, ())


def test_metadata_is_set_and_deleted_in_one_go(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.ok("set_metadata", pb.SetMetadataRequest(partition_id=p, set={"a": b"1", "b": b"2"}), session=session)
    request = pb.SetMetadataRequest(partition_id=p, set={"c": b"3"}, delete=["a", "never"])
    assert dict(driver.ok("set_metadata", request, session=session).partition.metadata) == {"b": b"2", "c": b"3"}
    with pytest.raises(InvalidArgument):
        driver.ok("set_metadata", pb.SetMetadataRequest(partition_id=p, set={"a": b""}, delete=["a"]), session=session)


def test_deleting_much_metadata_costs_as_much_as_there_is(driver: Driver, session: int) -> None:
    """A request that is journaled and then keeps the controller busy for hours would do so again at each start."""
    p, keys = driver.partition(session), [f"key-{number}" for number in range(20_000)]
    driver.ok("set_metadata", pb.SetMetadataRequest(partition_id=p, set=dict.fromkeys(keys, b"")), session=session)
    others = [f"other-{number}" for number in range(20_000)]
    request = pb.SetMetadataRequest(partition_id=p, delete=[*others, *keys[1:]])
    start = time.process_time()
    assert dict(driver.ok("set_metadata", request, session=session).partition.metadata) == {"key-0": b""}
    assert time.process_time() - start < 5  # it takes 0.05; by a scan for each key, 60


def test_too_many_names_are_refused_before_they_are_compared(driver: Driver, session: int) -> None:
    names = [f"consumer-{number}" for number in range(200_000)]
    start = time.process_time()
    with pytest.raises(InvalidArgument, match="200001 names, at most 256"):
        driver.partition(session, consumers=[*names, names[-1]])
    assert time.process_time() - start < 5


def test_tags_nested_deeper_than_they_can_be_compared_are_refused(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)

    def tags(depth: int) -> bytes:
        return b"\x81\xa1t" + b"\x91" * (depth - 1) + b"\x01"  # {"t": [[...1...]]}

    for depth in (limits_of_core.TAGS_DEPTH_MAX + 1, 1000):
        deep = pack_blobs([tags(depth)])
        for kind, request in (
            ("set_tags", pb.SetTagsRequest(partition_id=p, ids=ids(1), tags=deep)),
            ("clear", pb.ClearRequest(partition_id=p, tags=tags(depth))),
        ):
            with pytest.raises(InvalidArgument, match="nested deeper than 64"):
                driver.ok(kind, request, session=session)
    fitting = tags(limits_of_core.TAGS_DEPTH_MAX)
    driver.ok("set_tags", pb.SetTagsRequest(partition_id=p, ids=ids(1), tags=pack_blobs([fitting])), session=session)
    assert len(driver.ok("clear", pb.ClearRequest(partition_id=p, tags=fitting), session=session).ids) == 8


def test_metadata_has_a_limit_in_all(driver: Driver, session: int) -> None:
    p, half = driver.partition(session), bytes(limits.METADATA_BYTES_MAX // 2)
    driver.ok("set_metadata", pb.SetMetadataRequest(partition_id=p, set={"a": half}), session=session)
    with pytest.raises(InvalidArgument, match=str(limits.METADATA_BYTES_MAX)):
        driver.ok("set_metadata", pb.SetMetadataRequest(partition_id=p, set={"b": half}), session=session)


def test_list_is_by_prefix_and_name(driver: Driver, session: int) -> None:
    for name in ("train/2", "val", "train/1"):
        driver.partition(session, name)
    assert [p.name for p in driver.core.list_partitions("train/")] == ["train/1", "train/2"]
    listed = driver.core.list_partitions()
    assert next(listed).name == "train/1"
    deleted = driver.core.describe_partition(0, "train/2").partition_id
    driver.ok("delete_partition", pb.DeletePartitionRequest(partition_id=deleted), session=session)
    assert [p.name for p in listed] == ["val"]


def test_cluster_counts(driver: Driver, session: int) -> None:
    p = driver.partition(session)
    driver.put(session, p, 1)
    driver.claim(session, p, 1)
    described = driver.core.describe()
    assert (described.sessions, described.claims, described.epoch) == (1, 1, 1)
    assert described.journal_sequence == driver.core.sequence == len(driver.log)
