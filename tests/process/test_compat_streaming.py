"""Samplers and datasets of the TransferQueue drop-in, over real daemons."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

import tqclient
import tqclient.compat.transfer_queue as tq
from tests.process.transfer_queue_rig import address, client, lists, name, tensors

__all__ = ["address", "client", "name"]


def use(sampler: Any) -> None:
    tq.init({"controller": {"sampler": sampler}})


def taken(client: tq.TransferQueueClient, name: str, rank: int, index: int, size: int) -> list[int]:
    config = {"dp_rank": rank, "batch_index": index, "task_name": "t", "partition_id": name}
    return client.get_meta(["x"], size, name, task_name="t", sampling_config=config).global_indexes


def test_ranks_of_one_number_get_one_batch(client: tq.TransferQueueClient, name: str) -> None:
    use(tq.RankAwareSampler)
    ids = client.put(tensors(6), partition_id=name).global_indexes
    other = tq.TransferQueueClient("another process")
    try:
        assert other.settings.sampler.ranked
        first = [taken(each, name, rank, 0, 2) for rank in (0, 1) for each in (client, other)]
        assert first == [ids[:2], ids[:2], ids[2:4], ids[2:4]]
        assert taken(other, name, 0, 1, 2) == taken(client, name, 0, 1, 2) == ids[4:]
        assert taken(client, name, 0, 0, 2) == ids[:2]
    finally:
        other.close()


def test_ranks_that_ask_at_once(client: tq.TransferQueueClient, name: str) -> None:
    """Each rank has four members; every sample is taken by one rank, and a batch that nobody is left for by none."""
    use("RankAwareSampler")
    batches: dict[tuple[int, int], list[list[int]]] = {}
    lock = threading.Lock()

    def member(rank: int) -> None:
        for index in range(4):
            ids = taken(client, name, rank, index, 2)
            with lock:
                batches.setdefault((rank, index), []).append(ids)

    threads = [threading.Thread(target=member, args=(rank,)) for rank in (0, 1) for _ in range(4)]
    for thread in threads:
        thread.start()
    ids = [id_ for _ in range(8) for id_ in client.put(tensors(2), partition_id=name).global_indexes]
    for thread in threads:
        thread.join(30)
    assert all(len(got) == 4 and got == [got[0]] * 4 for got in batches.values())
    assert sorted(id_ for got in batches.values() for id_ in got[0]) == ids
    assert client.check_consumption_status("t", name)


def test_groups_are_what_one_client_puts_in_turn(client: tq.TransferQueueClient, name: str) -> None:
    use(tq.GRPOGroupNSampler(n_samples_per_prompt=2))
    other = tq.TransferQueueClient("another rollout worker")
    try:
        a = client.put(tensors(3), partition_id=name).global_indexes
        b = other.put(tensors(2), partition_id=name).global_indexes
        a += client.put(tensors(1), partition_id=name).global_indexes
        assert client.get_meta(["x"], 4, name, task_name="t").global_indexes == [*a[:2], *a[2:4]]
        assert client.get_meta(["x"], 2, name, task_name="t").global_indexes == b
        with pytest.raises(ValueError, match="n_samples_per_prompt=2"):
            client.get_meta(["x"], 3, name, task_name="t")
    finally:
        other.close()


def test_groups_of_keys(client: tq.TransferQueueClient, name: str) -> None:
    use(tq.GRPOGroupNSampler(n_samples_per_prompt=2))
    tq.kv_put("a", name, {"x": torch.arange(1)})
    tq.kv_batch_put(["a", "b", "c"], name, tensors(3))
    assert client.kv_retrieve_keys(client.get_meta(["x"], 2, name, task_name="t").global_indexes, name) == ["a", "b"]
    tq.kv_put("d", name, {"x": torch.arange(1)})
    assert client.kv_retrieve_keys(client.get_meta(["x"], 2, name, task_name="t").global_indexes, name) == ["c", "d"]


def test_lengths_are_balanced_over_ranks_by_whole_groups(client: tq.TransferQueueClient, name: str) -> None:
    use(tq.SeqlenBalancedSampler(n_samples_per_prompt=2, dp_size=2))
    put = client.put(tensors(8), partition_id=name)
    put.update_custom_meta([{"total_lengths": length} for length in (90, 10, 20, 20, 50, 50, 10, 30)])
    client.set_custom_meta(put)
    shares = [taken(client, name, rank, 0, 4) for rank in (0, 1)]
    rows = sorted([[put.global_indexes.index(id_) for id_ in share] for share in shares])
    # Groups of 100, 40, 100 and 40: one of each to either rank.
    assert rows in ([[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 1, 6, 7], [2, 3, 4, 5]])
    assert client.check_consumption_status("t", name)
    assert taken(client, name, 1, 0, 4) == shares[1]


def test_lengths_are_numbers_of_any_kind_and_others_cost_no_samples(client: tq.TransferQueueClient, name: str) -> None:
    use(tq.SeqlenBalancedSampler(dp_size=2))
    put = client.put(tensors(4), partition_id=name)
    put.update_custom_meta([{"total_lengths": length} for length in (np.int64(9), torch.tensor(7), 2.0, "long")])
    client.set_custom_meta(put)
    with pytest.raises(ValueError, match="'total_lengths'='long': expected a number"):
        taken(client, name, 0, 0, 2)
    put.update_custom_meta([{"total_lengths": length} for length in (np.int64(9), torch.tensor(7), 2.0, 4)])
    client.set_custom_meta(put)
    shares = [[put.global_indexes.index(id_) for id_ in taken(client, name, rank, 0, 2)] for rank in (0, 1)]
    assert sorted(shares) == [[0, 2], [1, 3]]


def test_the_last_batch_of_a_sealed_partition_may_leave_nothing_for_a_rank(
    client: tq.TransferQueueClient, name: str
) -> None:
    use(tq.SeqlenBalancedSampler(dp_size=2))
    ids = client.put(tensors(1), partition_id=name).global_indexes
    client.service.partition(name).seal()
    got: list[list[int]] = []
    for rank in (0, 1, 0, 1):
        try:
            got.append(taken(client, name, rank, 0, 2))
        except tqclient.Sealed:
            got.append([])
    assert got[:2] == got[2:]
    assert sorted(got[:2]) == [[], ids]
    with pytest.raises(tqclient.Sealed):
        taken(client, name, 0, 1, 2)


def test_a_sampler_of_a_users_own_is_refused(name: str) -> None:
    class Mine(tq.BaseSampler):
        """Not one of the four."""

    with pytest.raises(ValueError, match=r"tq\.samplers"):
        use(Mine())


def test_samples_that_the_native_client_put(client: tq.TransferQueueClient, name: str) -> None:
    use("RankAwareSampler")
    native = client.service.create_partition(name)
    ids = native.put({"x": [torch.arange(2), torch.arange(3)], "v": torch.zeros(2)}, keys=["a", "b"]).tolist()
    for _ in range(2):
        assert taken(client, name, 0, 0, 2) == ids
    assert lists(tq.kv_batch_get(["b", "a"], name, "x")["x"]) == [[0, 1, 2], [0, 1]]
    assert native.describe().counts["t"]["consumed"] == 2


# Datasets.


def dataset(name: str, **changes: Any) -> tq.StreamingDataset:
    arguments = {"batch_size": 4, "micro_batch_size": 2, "data_fields": ["x"], "partition_id": name, "task_name": "t"}
    finite = {"dp_rank": 0, "should_check_consumption_status": True}
    return tq.StreamingDataset(tq.init(), **{**arguments, **finite, **changes})


def test_a_finite_dataset_in_micro_batches(client: tq.TransferQueueClient, name: str) -> None:
    use("RankAwareSampler")
    ids = client.put(tensors(8), partition_id=name).global_indexes
    loader = tq.StreamingDataLoader(dataset(name))
    seen = [(meta.global_indexes, lists(data["x"])) for data, meta in loader]
    assert [got for got, _ in seen] == [ids[0:2], ids[2:4], ids[4:6], ids[6:8]]
    assert seen[1][1] == [[6, 7, 8], [9, 10, 11]]
    loader.reset()
    assert [meta.global_indexes for _, meta in loader] == [got for got, _ in seen]
    assert len(loader.get_buffer()) == 2
    # Another rank of the same number sees the same, later and by a connection of its own.
    again = dataset(name)
    again.should_check_consumption_status = False
    assert [meta.global_indexes for _, meta in itertools.islice(again, 4)] == [got for got, _ in seen]
    more = client.put(tensors(4), partition_id=f"{name}/next").global_indexes
    loader.step(f"{name}/next")
    assert [id_ for _, meta in loader for id_ in meta.global_indexes] == more
    again.close()
    loader.dataset.close()


def test_ranks_of_one_number_that_are_not_equally_fast(client: tq.TransferQueueClient, name: str) -> None:
    """The one that is behind gets the last batch, though the task was given everything when it asks for it."""
    use("RankAwareSampler")
    ids = client.put(tensors(4), partition_id=name).global_indexes
    members = [dataset(name, batch_size=2, micro_batch_size=1) for _ in range(2)]
    iterators = [iter(each) for each in members]
    seen = [[next(each)[1].global_indexes[0] for _ in range(2)] for each in iterators]
    for own, each in zip(seen, iterators, strict=True):
        own.extend(meta.global_indexes[0] for _, meta in each)
    assert seen == [ids, ids]
    for each in members:
        each.close()
    other = dataset(name, dp_rank=1)
    assert list(other) == []
    other.close()


def test_an_endless_dataset_ends_when_its_partition_is_sealed(client: tq.TransferQueueClient, name: str) -> None:
    data = dataset(name, should_check_consumption_status=False)
    ids: list[int] = []
    reader = threading.Thread(target=lambda: ids.extend(id_ for _, meta in data for id_ in meta.global_indexes))
    reader.start()
    put = client.put(tensors(4), partition_id=name).global_indexes
    put += client.put(tensors(2), partition_id=name).global_indexes
    client.service.partition(name).seal()
    reader.join(20)
    assert ids == put
    data.close()


def test_functions_of_a_users_own(client: tq.TransferQueueClient, name: str) -> None:
    client.put(tensors(4), partition_id=name)
    calls: list[int] = []

    def fetch(tq_client: Any, batch_index: int, data_fields: list[str], **rest: Any) -> Any:
        calls.append(batch_index)
        if len(calls) == 1:
            return None, tq.BatchMeta.empty()
        meta = tq_client.get_meta(data_fields, rest["batch_size"], rest["partition_id"], task_name=rest["task_name"])
        return tq_client.get_data(meta), meta

    def process(data: Any, meta: tq.BatchMeta, micro_batch_size: int) -> Any:
        yield data, meta.size * micro_batch_size

    data = dataset(name, fetch_batch_fn=fetch, process_batch_fn=process)
    assert [size for _, size in data] == [8]
    assert calls == [0, 0]
    data.close()


def test_workers_of_a_loader_share_the_batches(client: tq.TransferQueueClient, name: str) -> None:
    use("RankAwareSampler")
    ids = client.put(tensors(8), partition_id=name).global_indexes
    loader = tq.StreamingDataLoader(dataset(name, batch_size=2), num_workers=2, prefetch_factor=1)
    seen = {meta.global_indexes[0]: (meta.size, lists(data["x"])[0][0]) for data, meta in loader}
    assert seen == {ids[row]: (2, 3 * row) for row in (0, 2, 4, 6)}


@pytest.mark.parametrize(
    "changes", [{"batch_size": 0}, {"micro_batch_size": 0}, {"dp_rank": -1}, {"data_fields": []}, {"data_fields": "x"}]
)
def test_datasets_that_make_no_sense(name: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"expected|give a list of names"):
        dataset(name, **changes)
