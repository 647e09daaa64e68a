"""The blocking client against real daemons, over each transport."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tests.harness.supervisor import wait_until
from tqserver.local import LocalCluster

TRANSPORTS = ("shm", "grpc")
_numbers = itertools.count()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB", session_lease=2.0) as running:
        yield running


@pytest.fixture(scope="module", params=TRANSPORTS)
def client(shared_cluster: LocalCluster, request: pytest.FixtureRequest) -> Iterator[tq.Client]:
    with tq.connect(shared_cluster.address, transport=request.param, timeout=10) as connected:
        yield connected


@pytest.fixture
def other(shared_cluster: LocalCluster) -> Iterator[tq.Client]:
    with tq.connect(shared_cluster.address, timeout=10) as connected:
        yield connected


@pytest.fixture
def part(client: tq.Client) -> Iterator[tq.Partition]:
    partition = client.create_partition(f"part-{next(_numbers)}")
    yield partition
    client.delete_partition(partition.name)


def counts(part: tq.Partition, consumer: str) -> dict[str, int]:
    return {state: count for state, count in part.describe().counts[consumer].items() if count}


SAMPLES = {
    "tokens": [torch.arange(n) for n in (3, 1, 4)],
    "rewards": torch.tensor([1.0, 2.0, 3.0]),
    "mm": [{"pixels": torch.full((n, 2), float(n)), "grid": torch.tensor([[1, n, n]])} for n in (1, 2, 3)],
    "prompt": ["één", "", "三"],
    "extra": [{"any": ["thing", 1]}, (1, 2), None],
}


def check_samples(batch: Any) -> None:
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert batch["tokens"].is_nested
    assert torch.equal(batch["rewards"], torch.tensor([1.0, 2.0, 3.0]))
    assert [row.tolist() for row in batch["mm"]["pixels"].unbind()] == [
        [[1.0, 1.0]],
        [[2.0, 2.0], [2.0, 2.0]],
        [[3.0, 3.0], [3.0, 3.0], [3.0, 3.0]],
    ]
    assert batch["prompt"] == ["één", "", "三"]
    assert batch["extra"] == [{"any": ["thing", 1]}, (1, 2), None]


def test_columns_come_back_as_they_went_in(part: tq.Partition) -> None:
    ids = part.put(SAMPLES, keys=["a", None, "c"], groups=["g", 7, None], weight_version=(6, 7), tags={"done": True})
    batch = part.get(ids)
    check_samples(batch)
    assert batch.ids.tolist() == ids.tolist()
    assert batch.keys == ["a", None, "c"]
    assert batch.groups == ["g", 7, None]
    assert batch.tags == [{"done": True}] * 3
    assert batch.weight_versions.tolist() == [[6, 7]] * 3
    assert batch.fields == list(SAMPLES)


def test_samples_as_dicts_and_as_a_tensordict(part: tq.Partition) -> None:
    from tensordict import TensorDict

    rows = [{name: column[row] for name, column in SAMPLES.items()} for row in range(3)]
    batch = part.get(part.put(rows, weight_version=[1, (2, 3), None]))
    assert batch["prompt"] == SAMPLES["prompt"]
    assert batch.weight_versions.tolist() == [[1, 1], [2, 3], [-1, -1]]
    values = TensorDict({"x": torch.arange(6).reshape(3, 2), "deep": {"y": torch.ones(3, 1)}}, batch_size=[3])
    other = part.get(part.put(values), fields=["x", "deep"])
    assert torch.equal(other["x"], values["x"])
    assert torch.equal(other["deep"]["y"], torch.ones(3, 1))
    again = other.to_tensordict()
    assert torch.equal(again["deep", "y"], torch.ones(3, 1))
    assert again.batch_size == torch.Size([3])


def test_conversions(part: tq.Partition) -> None:
    batch = part.get(part.put(SAMPLES))
    assert batch.padded("tokens", value=-1).tolist() == [[0, 1, 2, -1], [0, -1, -1, -1], [0, 1, 2, 3]]
    assert [row.tolist() for row in batch.list("tokens")] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert len(batch) == 5
    assert "tokens" in batch
    assert dict(batch.items())["prompt"] == batch["prompt"]
    with pytest.raises(KeyError, match="no such"):
        batch["no such"]
    with pytest.raises(tq.InvalidArgument, match="was not claimed here"):
        batch.ack()


def test_rows_from_several_puts_in_any_order(part: tq.Partition) -> None:
    ids = np.concatenate([part.put({"x": torch.arange(start, start + 4)}) for start in (0, 10, 20)])
    order = np.random.default_rng(5).permutation(12)
    expected = np.concatenate([np.arange(start, start + 4) for start in (0, 10, 20)])[order]
    assert part.get(ids[order])["x"].tolist() == expected.tolist()
    assert part.get(torch.as_tensor(ids[order]))["x"].tolist() == expected.tolist()


def test_a_put_of_several_blocks(part: tq.Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    from tqclient.operations import put

    monkeypatch.setattr(put, "BLOCK_BYTES", 256 * 1024)
    values = torch.randn(3000, 256)
    ids = part.put({"x": values})
    assert torch.equal(part.get(ids)["x"], values)
    assert torch.equal(part.get(ids[[5, 2999, 700]])["x"], values[[5, 2999, 700]])


def test_another_stage_adds_a_column(part: tq.Partition) -> None:
    ids = part.put(SAMPLES)
    reader = part.consumer("train", fields=["tokens", "advantages"])
    with pytest.raises(tq.ClaimTimeout):
        reader.claim(1, timeout=0)
    part.put({"advantages": [torch.ones(4), torch.ones(3)]}, ids=ids[[2, 0]])
    with reader.claim(2, timeout=5) as batch:
        assert batch.ids.tolist() == [ids[0], ids[2]]
        assert [len(row) for row in batch.list("advantages")] == [3, 4]
        assert [len(row) for row in batch.list("tokens")] == [3, 4]
    with pytest.raises(tq.DuplicateKey, match="advantages"):
        part.put({"advantages": [torch.zeros(3)]}, ids=ids[:1])
    part.put({"advantages": [torch.zeros(2)]}, ids=ids[:1], upsert=True)
    assert part.get(ids[:1], fields=["advantages"])["advantages"][0].tolist() == [0, 0]
    with pytest.raises(tq.SampleNotFound):
        part.put({"advantages": [torch.zeros(2)]}, ids=[int(ids[-1]) + 1000])


def test_get_views(part: tq.Partition) -> None:
    ids = part.put({"x": torch.arange(1000)})
    with part.get(ids, copy=False) as batch:
        assert batch["x"].sum() == 499500
    claimed = part.consumer("c").claim(1000, copy=False)
    assert claimed["x"].sum() == 499500
    claimed.ack()


def test_metadata_is_exact(part: tq.Partition, other: tq.Client) -> None:
    part.metadata["num_microbatches"] = [4, (4,)]
    part.metadata.update({"tensor": torch.tensor([1.5], dtype=torch.bfloat16), 'dotted.name "q"': None})
    seen = other.partition(part.name).metadata
    assert seen["num_microbatches"] == [4, (4,)]
    assert seen["tensor"].dtype == torch.bfloat16
    assert set(seen) == {"num_microbatches", "tensor", 'dotted.name "q"'}
    del seen["tensor"]
    assert "tensor" not in part.metadata
    with pytest.raises(KeyError):
        part.metadata["tensor"]
    with pytest.raises(KeyError):
        del part.metadata["tensor"]


def test_claims_are_acked_released_and_redelivered(part: tq.Partition) -> None:
    part.put({"x": torch.arange(4)})
    actor = part.consumer("actor")
    with actor.claim(2, timeout=5) as batch:
        assert batch["x"].tolist() == [0, 1]
        assert counts(part, "actor") == {"leased": 2, "ready": 2}
    assert counts(part, "actor") == {"consumed": 2, "ready": 2}
    with pytest.raises(ValueError, match="training failed"), actor.claim(2, timeout=5):
        raise ValueError("training failed")
    again = actor.claim(2, timeout=5)
    assert again["x"].tolist() == [2, 3]
    assert again.attempts.tolist() == [2, 2]
    again.renew()
    again.release()
    again.release()
    with pytest.raises(tq.InvalidArgument, match="released"):
        again.ack()
    last = actor.claim(2, timeout=5)
    last.ack()
    last.ack()
    assert counts(part, "actor") == {"consumed": 4}
    assert counts(part, "actor") == {"consumed": 4}
    actor.reset()
    assert counts(part, "actor") == {"ready": 4}


def test_consumers_do_not_disturb_each_other(part: tq.Partition) -> None:
    part.put({"x": torch.arange(3)})
    for name in ("actor", "critic"):
        with part.consumer(name).claim(3, timeout=5) as batch:
            assert batch["x"].tolist() == [0, 1, 2]


def test_a_waiting_claim_is_woken(part: tq.Partition, other: tq.Client) -> None:
    actor = part.consumer("actor")
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(actor.claim(2, timeout=10)))
    waiting.start()
    wait_until(lambda: other.describe().waiting_claims == 1, what="a waiting claim")
    other.partition(part.name).put({"x": torch.arange(2)})
    waiting.join(60)
    assert got[0]["x"].tolist() == [0, 1]
    got[0].ack()


def test_a_claim_that_nobody_holds_any_more_comes_back(part: tq.Partition) -> None:
    part.put({"x": torch.arange(2)})
    batch = part.consumer("actor").claim(2, timeout=5)
    assert batch.rows == 2
    del batch
    wait_until(lambda: counts(part, "actor") == {"ready": 2}, what="the claim is given back")


def test_claims_of_a_client_that_closed_come_back(part: tq.Partition, shared_cluster: LocalCluster) -> None:
    part.put({"x": torch.arange(2)})
    with tq.connect(shared_cluster.address) as dying:
        held = dying.partition(part.name).consumer("actor").claim(2, timeout=5)
    with pytest.raises(tq.InvalidArgument, match="closed"):
        held.ack()
    assert counts(part, "actor") == {"ready": 2}


def test_a_claim_outlives_its_lease_while_the_client_lives(client: tq.Client) -> None:
    part = client.create_partition(f"part-{next(_numbers)}", lease=1.0)
    part.put({"x": torch.arange(2)})
    batch = part.consumer("actor").claim(2, timeout=5)
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert counts(part, "actor") == {"leased": 2}
        time.sleep(0.02)
    batch.ack()
    assert counts(part, "actor") == {"consumed": 2}


def test_streams_end_at_the_seal(part: tq.Partition) -> None:
    part.put({"x": torch.arange(5)})
    seen = []
    for batch in part.consumer("actor").batches(2):
        seen.append(batch["x"].tolist())
        if len(seen) == 2:
            part.seal()
    assert seen == [[0, 1], [2, 3], [4]]
    with pytest.raises(tq.Sealed):
        part.put({"x": torch.arange(1)})
    with pytest.raises(tq.Sealed):
        part.consumer("actor").claim(1)
    assert part.describe().sealed


def test_samples_that_fail_too_often_are_listed_as_dead(client: tq.Client) -> None:
    part = client.create_partition(f"part-{next(_numbers)}", max_attempts=2)
    (sample,) = part.put({"x": torch.arange(1)})
    actor = part.consumer("actor")
    for _ in range(2):
        actor.claim(1, timeout=5).release()
    assert actor.dead() == [sample]
    with pytest.raises(tq.ClaimTimeout):
        actor.claim(1, timeout=0)
    actor.requeue(actor.dead())
    assert actor.claim(1, timeout=5).attempts.tolist() == [1]


def test_a_full_partition_makes_a_put_wait(client: tq.Client, other: tq.Client) -> None:
    part = client.create_partition(f"part-{next(_numbers)}", capacity_samples=2)
    ids = part.put({"x": torch.arange(2)})
    start = time.monotonic()
    with pytest.raises(tq.BackpressureTimeout):
        part.put({"x": torch.arange(1)}, timeout=0.3)
    assert 0.2 <= time.monotonic() - start < 5  # without a timeout, 10 s
    with pytest.raises(tq.InvalidArgument):
        part.put({"x": torch.arange(3)})
    got: list[Any] = []
    waiting = threading.Thread(target=lambda: got.append(part.put({"x": torch.arange(1)}, timeout=10)))
    waiting.start()
    assert other.partition(part.name).clear(ids[:1]).tolist() == [ids[0]]
    waiting.join(60)
    assert len(got[0]) == 1
    assert part.describe().samples == 2


def test_a_full_arena(client: tq.Client) -> None:
    part = client.create_partition(f"part-{next(_numbers)}")
    row = torch.zeros(8 << 20, dtype=torch.uint8)
    puts = []
    with pytest.raises(tq.StorageFull, match=r"storage-0: .*free"):
        puts.extend(part.put({"x": [row]}) for _ in range(10))
    assert 4 <= len(puts) <= 8
    part.clear(np.concatenate(puts))
    part.put({"x": [row]})  # the bytes come back, if not at once then soon
    client.delete_partition(part.name)


def test_keys(part: tq.Partition) -> None:
    ids = part.put(SAMPLES, keys=["a", "b", "c"])
    check_samples(part.get(keys=["a", "b", "c"]))
    assert part.put(SAMPLES, keys=["a", "b", "c"]).tolist() == ids.tolist()
    changed = {**SAMPLES, "extra": [{"any": ["thing", 2]}, (1, 2), None]}
    with pytest.raises(tq.DuplicateKey) as caught:
        part.put(changed, keys=["a", "b", "c"])
    assert caught.value.rows == (0,)
    assert part.get(keys=["a"])["extra"] == [{"any": ["thing", 1]}]
    part.put(changed, keys=["a", "b", "c"], upsert=True)
    assert part.get(keys=["a"])["extra"] == [{"any": ["thing", 2]}]
    assert part.describe().samples == 3


def test_many_keys_that_exist(part: tq.Partition) -> None:
    keys = [f"k{row}" for row in range(600)]
    first = part.put({"x": torch.arange(600)}, keys=keys)
    assert part.put({"x": torch.arange(600)}, keys=keys).tolist() == first.tolist()
    more = part.put({"x": torch.arange(601)}, keys=[*keys, "new"])
    assert more[:600].tolist() == first.tolist()
    assert part.describe().samples == 601


def test_what_is_missing(client: tq.Client, part: tq.Partition) -> None:
    ids = part.put(SAMPLES, keys=["a", "b", "c"])
    with pytest.raises(tq.SampleNotFound) as caught:
        part.get([ids[0], ids[-1] + 1000])
    assert caught.value.ids == (ids[-1] + 1000,)
    with pytest.raises(tq.SampleNotFound, match="nobody"):
        part.get(keys=["a", "nobody"])
    with pytest.raises(tq.TQError, match="absent"):
        part.get(ids, fields=["absent"])
    with pytest.raises(tq.PartitionNotFound, match="no/such"):
        client.partition("no/such")
    part.clear(keys=["a"])
    with pytest.raises(tq.SampleNotFound):
        part.get(ids[:1])


def test_clear_by_each_selector(part: tq.Partition) -> None:
    ids = part.put(
        {"x": torch.arange(6)},
        keys=["a1", "a2", "b1", None, None, None],
        groups=[None, None, None, "g", 3, None],
        tags=[{}, {}, {}, {}, {}, {"old": True, "n": 1}],
    )
    assert part.clear(prefix="a").tolist() == ids[:2].tolist()
    assert part.clear(keys=["b1", "b1-gone"]).tolist() == [ids[2]]
    assert sorted(part.clear(groups=["g", 3]).tolist()) == ids[3:5].tolist()
    assert part.clear(tags={"old": True}).tolist() == [ids[5]]
    assert part.clear(ids).tolist() == []
    assert part.clear([]).tolist() == []
    refusals: list[tuple[dict[str, Any], str]] = [
        ({}, "exactly one of ids, keys, groups, tags and prefix, not none"),
        ({"ids": ids, "prefix": "a"}, "exactly one of .* not ids, prefix"),
        ({"tags": {}}, "name a tag"),
        ({"prefix": ""}, "name a prefix"),
    ]
    for arguments, message in refusals:
        with pytest.raises(tq.InvalidArgument, match=message):
            part.clear(**arguments)


def test_tags_and_versions(client: tq.Client, part: tq.Partition) -> None:
    ids = part.put({"x": torch.arange(2)}, tags=[{"a": 1}, {"a": 2, "b": 3}])
    part.set_tags(ids, {"a": None, "c": "new"})
    assert part.get(ids).tags == [{"c": "new"}, {"b": 3, "c": "new"}]
    stale = client.create_partition(f"part-{next(_numbers)}", consumers=["actor"], max_staleness=1)
    stale.put({"x": torch.arange(3)}, weight_version=[1, 2, 3])
    stale.set_version(3)
    assert stale.describe().version == 3
    assert counts(stale, "actor") == {"ready": 2, "dropped": 1}


def test_partitions_are_made_found_and_listed(client: tq.Client) -> None:
    name = f"listed/{next(_numbers)}"
    made = client.create_partition(name, consumers=["a"], capacity_bytes="1GiB", metadata={"k": (1,)})
    with pytest.raises(tq.PartitionExists):
        client.create_partition(name, consumers=["a"], capacity_bytes="1GiB")
    client.create_partition(name, consumers=["a"], capacity_bytes="1GiB", exist_ok=True)
    with pytest.raises(tq.PartitionExists):
        client.create_partition(name, capacity_bytes="2GiB", exist_ok=True)
    assert made.metadata["k"] == (1,)
    (info,) = client.partitions(name)
    assert (info.name, info.policy.capacity_bytes, info.policy.lease) == (name, 1 << 30, 10.0)
    with pytest.raises(tq.InvalidArgument, match="has: a"):
        made.consumer("b").claim(1, timeout=0)
    client.delete_partition(name)
    assert client.partitions(name) == []
    with pytest.raises(tq.PartitionNotFound):
        made.describe()


def test_a_reader_learns_the_schema_of_another_writer(part: tq.Partition, other: tq.Client) -> None:
    part.put({"x": torch.arange(2)})
    mine = other.partition(part.name)
    with pytest.raises(tq.SchemaMismatch, match="'x'"):
        mine.put({"x": torch.ones(2)})
    mine.put({"x": torch.arange(2)})


def test_many_threads_put_at_once(part: tq.Partition) -> None:
    ids: list[int] = []

    def work(thread: int) -> None:
        for turn in range(10):
            ids.extend(part.put({"x": torch.full((3,), thread * 100 + turn)}).tolist())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 240
    values = part.get(ids)["x"].reshape(-1, 3)
    assert torch.equal(values[:, 0], values[:, 2])
    expected = [thread * 100 + turn for thread in range(8) for turn in range(10)]
    assert sorted(values[:, 0].tolist()) == expected


@pytest.mark.parametrize(
    "arguments",
    [
        {"samples_per_insert": 0},
        {"capacity_versions": 0},
        {"samples_per_version": 8},
        {"replicas": 4},
        {"staleness": "wait"},
        {"capacity_bytes": "many"},
        {"capacity_bytes": 0},
        {"capacity_samples": 0},
        {"lease": 0},
        {"max_attempts": 0},
        {"max_staleness": -1},
        {"consumers": "actor"},
    ],
)
def test_policies_that_are_refused(client: tq.Client, arguments: dict[str, Any]) -> None:
    with pytest.raises(tq.InvalidArgument, match=next(iter(arguments))):
        client.create_partition("refused", **arguments)
    assert client.partitions("refused") == []


def test_describe_says_which_transport_and_why(client: tq.Client) -> None:
    (node,) = client.describe().nodes
    assert node.transport in TRANSPORTS
    assert node.reason
    assert node.attached
    assert node.capacity_bytes > 32 << 20


def test_a_required_transport_that_cannot_be_had(shared_cluster: LocalCluster) -> None:
    with pytest.raises(tq.TransportUnavailable, match="mooncake"):
        tq.connect(shared_cluster.address, transport="rdma")
    with pytest.raises(tq.InvalidArgument, match="carrier-pigeon"):
        tq.connect(shared_cluster.address, transport="carrier-pigeon")


def test_no_controller_at_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TQ_CONTROLLER", raising=False)
    with pytest.raises(tq.InvalidArgument, match="TQ_CONTROLLER"):
        tq.connect()
    start = time.monotonic()
    with pytest.raises(tq.Unavailable, match="controller"):
        tq.connect("127.0.0.1:1", timeout=0.5)
    assert time.monotonic() - start < 5  # without a timeout, 30 s


@pytest.mark.usefixtures("no_leaks")
def test_a_closed_client_leaves_nothing_behind(shared_cluster: LocalCluster) -> None:
    client = tq.connect(shared_cluster.address)
    part = client.create_partition("left", exist_ok=True)
    part.get(part.put({"x": torch.arange(100)}))
    client.close()
    client.close()
    with pytest.raises(tq.InvalidArgument, match="closed"):
        part.put({"x": torch.arange(1)})


def test_a_forked_child_is_told_to_connect_again(shared_cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with tq.connect(shared_cluster.address) as client:
        parent = os.getpid()
        with monkeypatch.context() as child:
            child.setattr(os, "getpid", lambda: parent + 1)
            with pytest.raises(tq.InvalidArgument, match="after a fork"):
                client.partitions()
        assert client.partitions("none") == []
