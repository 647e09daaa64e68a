"""Code written against TransferQueue, over real daemons."""

from __future__ import annotations

import asyncio
import multiprocessing
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tqclient
import tqclient.compat.transfer_queue as tq
from tests.harness.supervisor import wait_until
from tests.process.transfer_queue_rig import address, client, lists, name, tensors
from tqclient.compat.transfer_queue import config, lookup

__all__ = ["address", "client", "name"]

LEAVES_ONE_WAITING = """
import asyncio, sys, threading
import tqclient.compat.transfer_queue as tq
from tests.harness.supervisor import wait_until
client = tq.TransferQueueClient("leaves", sys.argv[1])
part = client.service.create_partition(sys.argv[2])
waiting = client.async_get_meta(["x"], 1, sys.argv[2], task_name="t")
threading.Thread(target=asyncio.run, args=[waiting], daemon=True).start()
wait_until(lambda: client.service.describe().waiting_claims, what="a claim that waits")
print("leaving", flush=True)
"""


# Keys.


def test_a_sample_by_key(name: str) -> None:
    fields = {"ids": torch.tensor([1, 2, 3]), "reward": torch.tensor(0.5), "text": "one", "extra": {"a": [1, (2, 3)]}}
    meta = tq.kv_put("s", name, fields, {"score": 0.95, "span": (6, 7), "note": None})
    assert (meta.keys, meta.partition_id, sorted(meta.fields or [])) == (
        ["s"],
        name,
        ["extra", "ids", "reward", "text"],
    )
    assert meta.tags == [{"score": 0.95, "span": (6, 7), "note": None}]
    read = tq.kv_batch_get("s", name)
    assert (lists(read["ids"]), read["reward"].tolist(), read["text"]) == ([[1, 2, 3]], [0.5], ["one"])
    assert read["extra"] == [{"a": [1, (2, 3)]}]
    assert list(tq.kv_batch_get("s", name, "reward").keys()) == ["reward"]


def test_samples_come_in_the_order_asked_for(name: str) -> None:
    tq.kv_batch_put(["a", "b", "c"], name, tensors(3))
    read = tq.kv_batch_get(["c", "a", "c"], name)
    assert (lists(read["x"]), read["r"].tolist()) == ([[6, 7, 8], [0, 1, 2], [6, 7, 8]], [2, 0, 2])


def test_a_container_depends_on_no_value(name: str) -> None:
    tq.kv_put("a", name, {"x": torch.arange(3)})
    tq.kv_batch_put(["b", "c"], name, TensorDict({"x": torch.ones(2, 3, dtype=torch.int64)}, batch_size=2))
    nested = torch.nested.nested_tensor([torch.arange(5)], layout=torch.jagged)
    tq.kv_batch_put(["d"], name, TensorDict({"x": nested}, batch_size=1))
    for keys in (["a"], ["b", "c"], ["a", "b"], ["d"], ["c", "d"]):
        assert tq.kv_batch_get(keys, name)["x"].layout == torch.jagged
    assert lists(tq.kv_batch_get(["a", "d", "c"], name)["x"]) == [[0, 1, 2], [0, 1, 2, 3, 4], [1, 1, 1]]


def test_padding_is_as_wide_as_the_longest_row(name: str) -> None:
    tq.kv_batch_put(["a", "b"], name, tensors(2))
    tq.kv_put("c", name, {"x": torch.arange(2)})
    for keys, shape in ((["a", "b"], (2, 3)), (["c", "a"], (2, 3)), (["c"], (1, 2))):
        assert tq.kv_batch_get(keys, name)["x"].to_padded_tensor(0).shape == shape
        assert tq.kv_batch_get(keys, name, "x").to_padded_tensor()["x"].shape == shape


def test_rows_that_are_ragged_in_their_second_dimension(name: str) -> None:
    values = torch.arange(32).reshape(4, 8)
    positions = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 3, 8]), jagged_dim=2)
    tq.kv_batch_put(["a", "b"], name, TensorDict({"position_ids": positions}, batch_size=2))
    read = tq.kv_batch_get(["b", "a"], name)["position_ids"]
    assert lists(read) == [values[:, 3:].tolist(), values[:, :3].tolist()]
    assert read.size(1) == 4


def test_fields_and_tags_are_added_and_replaced(name: str) -> None:
    tq.kv_batch_put(["a", "b"], name, tensors(2), [{"status": "running", "n": 1}, {"status": "running"}])
    meta = tq.kv_batch_put(["b", "c"], name, TensorDict({"v": torch.tensor([5.0, 6.0])}, batch_size=2), [{"n": 2}, {}])
    assert (meta.fields, meta.tags) == (["v"], [{"status": "running", "n": 2}, {}])
    assert tq.kv_batch_get(["b", "c"], name)["v"].tolist() == [5.0, 6.0]
    assert sorted(tq.kv_batch_get("b", name).keys()) == ["r", "v", "x"]
    assert sorted(tq.kv_batch_get(["a", "b"], name).keys()) == ["r", "x"]
    tq.kv_put("b", name, {"r": torch.tensor(9)}, {"status": "done"})
    assert tq.kv_batch_get("b", name, ["r", "v"])["r"].tolist() == [9]
    assert tq.kv_list(name) == {
        name: {"a": {"status": "running", "n": 1}, "b": {"status": "done", "n": 2}, "c": {}},
    }


def test_a_key_may_have_tags_before_it_has_fields(name: str) -> None:
    meta = tq.kv_put("a", name, tag={"status": "pending"})
    assert (meta.fields, meta.tags) == ([], [{"status": "pending"}])
    with pytest.raises(ValueError, match="no field"):
        tq.kv_batch_get("a", name)
    tq.kv_put("a", name, {"x": torch.arange(2)}, {"status": "done"})
    assert lists(tq.kv_batch_get("a", name)["x"]) == [[0, 1]]


def test_what_is_missing_is_an_error_that_names_it(name: str) -> None:
    for error in (ValueError, KeyError, tq.StorageKeyNotFoundError, tqclient.SampleNotFound):
        with pytest.raises(error, match="does not exist"):
            tq.kv_batch_get("a", name)
    tq.kv_batch_put(["a", "b"], name, tensors(2))
    with pytest.raises(tq.StorageKeyNotFoundError, match="2 of 3 keys have no sample: 'y', 'z'") as missing:
        tq.kv_batch_get(["y", "a", "z"], name)
    assert missing.value.rows == (0, 2)
    with pytest.raises(tq.StorageKeyNotFoundError, match="'nope'"):
        tq.kv_batch_get(["a"], name, ["x", "nope"])
    tq.kv_put("c", name, {"r": torch.tensor(1)})
    with pytest.raises(tq.StorageKeyNotFoundError, match="'x' is not written for 1 of 2"):
        tq.kv_batch_get(["a", "c"], name, ["x"])
    assert tq.kv_list("nowhere") == {}


def test_a_conflict_of_types_writes_nothing(name: str) -> None:
    tq.kv_put("a", name, {"x": torch.arange(3)}, {"status": "old"})
    with pytest.raises(tqclient.SchemaMismatch, match=r"'x'.*int64.*float32"):
        tq.kv_batch_put(["a", "b"], name, TensorDict({"x": torch.ones(2, 3)}, batch_size=2), [{"status": "new"}] * 2)
    assert tq.kv_list(name) == {name: {"a": {"status": "old"}}}
    assert lists(tq.kv_batch_get("a", name)["x"]) == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((["a", "a"], tensors(2)), "same as"),
        ((["a"], tensors(2)), "2 rows for 1 keys"),
        ((["a"], tensors(1), [{}, {}]), "2 of them for 1 keys"),
        ((["a"],), "fields, tags"),
        (([], tensors(1)), "at least one"),
        (([1], tensors(1)), "at least one"),
        ((["a"], {"_row": torch.zeros(1)}), "taken"),
    ],
)
def test_puts_that_are_refused_write_nothing(name: str, arguments: Any, says: str) -> None:
    keys, *rest = arguments
    with pytest.raises(ValueError, match=says):
        tq.kv_batch_put(keys, name, *rest)
    assert tq.kv_list(name).get(name, {}) == {}


def test_by_metadata(name: str) -> None:
    meta = tq.kv_batch_put(["a", "b", "c"], name, tensors(3), [{"n": n} for n in range(3)])
    chosen = meta.select_keys(["c", "a"])
    assert tq.kv_batch_get_by_meta(chosen)["r"].tolist() == [2, 0]
    assert list(tq.kv_batch_get_by_meta(chosen, "x").keys()) == ["x"]
    whole = tq.KVBatchMeta.concat(meta.chunk(2))
    assert tq.kv_batch_get_by_meta(whole, ["r"])["r"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="'v'"):
        tq.kv_batch_get_by_meta(meta, ["v"])
    with pytest.raises(ValueError, match="partition_id"):
        tq.kv_batch_get_by_meta(tq.KVBatchMeta(["a"], [{}]))
    tq.kv_clear("b", name)
    with pytest.raises(tq.StorageKeyNotFoundError, match="'b'"):
        tq.kv_batch_get_by_meta(meta)


def test_clearing_may_be_repeated(name: str) -> None:
    tq.kv_batch_put(["a", "b"], name, tensors(2))
    for _ in range(2):
        tq.kv_clear(["a", "never"], name)
    assert list(tq.kv_list()[name]) == ["b"]
    tq.kv_clear("a", "nowhere")


def test_a_parser_works_before_the_put(name: str) -> None:
    def load(batch: dict[str, Any]) -> None:
        batch["image"][:] = [torch.full((len(url),), len(url)) for url in batch["image"]]

    tq.kv_batch_put(["a", "b"], name, TensorDict({"image": NonTensorStack("u", "url")}, batch_size=2), data_parser=load)
    assert lists(tq.kv_batch_get(["a", "b"], name)["image"]) == [[1], [3, 3, 3]]


def test_the_async_twins(name: str) -> None:
    async def work() -> None:
        await tq.async_kv_put("a", name, {"x": torch.arange(2)}, {"n": 1})
        meta = await tq.async_kv_batch_put(["b"], name, {"x": torch.ones(1, 2, dtype=torch.int64)})
        assert lists((await tq.async_kv_batch_get(["a", "b"], name))["x"]) == [[0, 1], [1, 1]]
        assert lists((await tq.async_kv_batch_get_by_meta(meta))["x"]) == [[1, 1]]
        await tq.async_kv_clear("b", name)
        assert await tq.async_kv_list(name) == {name: {"a": {"n": 1}}}
        client = tq.get_client()
        # What waits must not keep what it waits for from being done.
        waiting = [asyncio.ensure_future(client.async_get_meta(["y"], 1, name, task_name=f"t{n}")) for n in range(40)]
        put = await client.async_put(TensorDict({"y": torch.zeros(1)}, batch_size=1), partition_id=name)
        assert {meta.global_indexes[0] for meta in await asyncio.gather(*waiting)} == set(put.global_indexes)

    asyncio.run(work())


# The client.


def test_put_take_and_add(client: tq.TransferQueueClient, name: str) -> None:
    put = client.put(tensors(4), partition_id=name)
    assert (put.size, put.is_ready, put.field_names, put.get_shapes("x")) == (4, True, ["r", "x"], [(3,)] * 4)
    taken = client.get_meta(["x"], 3, name, task_name="generate")
    assert (taken.global_indexes, taken.is_ready, taken.field_names) == (put.global_indexes[:3], True, ["x"])
    assert lists(client.get_data(taken)["x"]) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    taken.update_custom_meta([{"n": n} for n in range(3)])
    added = client.put(TensorDict({"y": torch.tensor([7, 8, 9])}, batch_size=3), taken)
    assert added.field_names == ["x", "y"]
    trained = client.get_meta(["x", "y"], 3, name, task_name="train")
    assert trained.global_indexes == taken.global_indexes
    assert trained.custom_meta == [{"n": 0}, {"n": 1}, {"n": 2}]
    trained.reorder([2, 0, 1])
    assert client.get_data(trained.select_fields(["y"]))["y"].tolist() == [9, 7, 8]
    other = client.get_meta(["x"], 1, name, task_name="generate")
    assert other.global_indexes == put.global_indexes[3:]


def test_tags_of_samples_without_keys(client: tq.TransferQueueClient, name: str) -> None:
    put = client.put(tensors(2), partition_id=name)
    put.update_custom_meta([{"n": 1}, {"span": (1, 2)}])
    client.set_custom_meta(put)
    everything = client.get_meta(["x"], partition_id=name, mode="force_fetch")
    assert everything.custom_meta == [{"n": 1}, {"span": (1, 2)}]
    assert everything.is_ready


def test_tags_of_a_batch_replace_those_of_its_samples(client: tq.TransferQueueClient, name: str) -> None:
    tq.kv_batch_put(["a", "b"], name, tensors(2), [{"status": "running", "error": None}, {"status": "running"}])
    native = client.service.partition(name)
    native.put({"x": [torch.arange(1)]}, keys=["c"], tags={"status": "running", "n": 1})
    a, c = (client.kv_retrieve_meta("a", name), tq.BatchMeta([native.get(keys=["c"], fields=["x"]).ids[0]], [name]))
    for meta in (a, c):
        meta.clear_custom_meta()
        meta.update_custom_meta([{"status": "done"}])
        client.set_custom_meta(meta)
    done = {"status": "done"}
    assert tq.kv_list(name)[name] == {"a": done, "b": {"status": "running"}, "c": done}
    client.put(TensorDict({"y": torch.zeros(1)}, batch_size=1), client.kv_retrieve_meta("b", name))
    a.update_custom_meta([{"n": 2}])
    client.put(TensorDict({}, batch_size=1), a)
    assert tq.kv_list(name)[name] == {"a": {"status": "done", "n": 2}, "b": {"status": "running"}, "c": done}
    client.clear_samples(a)
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.set_custom_meta(a)


def test_a_batch_of_several_partitions(client: tq.TransferQueueClient, name: str) -> None:
    one, other = client.put(tensors(2), partition_id=name), client.put(tensors(1), partition_id=f"{name}/b")
    both = tq.BatchMeta.concat([one, other])
    both.reorder([2, 1, 0])
    read = client.get_data(both)
    assert (read["r"].tolist(), lists(read["x"])) == ([0, 1, 0], [[0, 1, 2], [3, 4, 5], [0, 1, 2]])
    client.put(TensorDict({"v": torch.tensor([10, 11, 12])}, batch_size=3), both)
    assert client.get_data(both.select_fields(["v"]))["v"].tolist() == [10, 11, 12]
    client.clear_samples(both)
    client.clear_samples(both)
    with pytest.raises(tq.StorageKeyNotFoundError):
        client.get_data(both)


def test_an_early_get_meta_waits_for_the_first_put(client: tq.TransferQueueClient, name: str) -> None:
    taken: list[tq.BatchMeta] = []
    reader = threading.Thread(target=lambda: taken.append(client.get_meta(["x"], 2, name, task_name="t")))
    reader.start()
    client.put(tensors(1), partition_id=name)
    put = client.put(tensors(1), partition_id=name)
    reader.join(60)
    assert taken[0].global_indexes[1:] == put.global_indexes


def test_a_get_meta_that_waits_in_vain_harms_nobody(
    client: tq.TransferQueueClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", "0.05")
    for error in (TimeoutError, RuntimeError):
        with pytest.raises(error, match="2 were asked for"):
            client.get_meta(["x"], 2, name, task_name="t")
    client.put(tensors(2), partition_id=name)
    assert client.get_meta(["x"], 2, name, task_name="t").size == 2


def test_a_get_meta_that_is_cancelled_takes_nothing(client: tq.TransferQueueClient, name: str) -> None:
    client.put(tensors(1), partition_id=name)

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(client.async_get_meta(["x"], 2, name, task_name="t"), 0.2)

    asyncio.run(give_up())
    client.put(tensors(1), partition_id=name)
    wait_until(lambda: not client.service.describe().waiting_claims, what="the claim's end")
    _, consumed = client.get_consumption_status("t", name)
    assert consumed is not None
    assert consumed.tolist() == [0, 0]
    assert client.get_meta(["x"], 2, name, task_name="t").size == 2


def test_polling_returns_an_empty_batch(client: tq.TransferQueueClient, name: str) -> None:
    tq.init({"controller": {"polling_mode": True}})
    assert [client.get_meta(["x"], size, name, task_name="t").size for size in (1, 0)] == [0, 0]
    assert client.get_data(tq.BatchMeta.empty()).batch_size == torch.Size([0])


def test_progress(client: tq.TransferQueueClient, name: str) -> None:
    assert client.get_consumption_status("t", name) == (None, None)
    assert client.get_production_status(["x"], name) == (None, None)
    assert not client.check_consumption_status("t", name)
    assert not client.check_production_status(["x"], name)
    assert not client.reset_consumption(name)
    put = client.put(tensors(3), partition_id=name)
    client.put(TensorDict({"y": torch.zeros(1)}, batch_size=1), put[1])
    ids, produced = client.get_production_status(["x", "y"], name)
    assert ids is not None
    assert produced is not None
    assert (ids.tolist(), produced.tolist()) == (put.global_indexes, [[1, 0], [1, 1], [1, 0]])
    assert (client.check_production_status(["x"], name), client.check_production_status(["x", "y"], name)) == (
        True,
        False,
    )
    assert client.get_production_status(["x", "z"], name) == (None, None)

    client.get_meta(["x"], 2, name, task_name="t")
    ids, consumed = client.get_consumption_status("t", name)
    assert ids is not None
    assert consumed is not None
    assert (ids.tolist(), consumed.tolist()) == (put.global_indexes, [1, 1, 0])
    assert not client.check_consumption_status("t", name)
    client.get_meta(["x"], 1, name, task_name="t")
    assert client.check_consumption_status("t", name)
    assert not client.check_consumption_status("other", name)

    client.get_meta(["x"], 3, name, task_name="other")
    assert client.reset_consumption(name, "t")
    assert (client.check_consumption_status("t", name), client.check_consumption_status("other", name)) == (False, True)
    assert client.get_meta(["x"], 3, name, task_name="t").global_indexes == put.global_indexes
    assert client.reset_consumption(name)
    _, consumed = client.get_consumption_status("other", name)
    assert consumed is not None
    assert consumed.tolist() == [0, 0, 0]


def test_samples_that_are_expected_count_as_not_consumed(
    client: tq.TransferQueueClient, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", "2")
    for expected in (False, True):
        client.put(tensors(1), partition_id=name)
        client.get_meta(["x"], 1, name, task_name="t")
        assert client.check_consumption_status("t", name) is expected


def test_a_partition_that_is_cleared_and_made_again(client: tq.TransferQueueClient, name: str) -> None:
    first = client.put(tensors(2), partition_id=name)
    client.get_meta(["x"], 2, name, task_name="t")
    other = tq.TransferQueueClient("other")
    try:
        assert name in other.get_partition_list()
        other.clear_partition(name)
        other.clear_partition(name)
        assert name not in client.get_partition_list()
        assert config.SETTINGS not in client.get_partition_list()
        with pytest.raises(tq.StorageKeyNotFoundError):
            client.get_data(first)
        again = client.put(TensorDict({"x": torch.ones(1, 2)}, batch_size=1), partition_id=name)
        assert not set(again.global_indexes) & set(first.global_indexes)
        assert other.get_meta(["x"], 1, name, task_name="t").global_indexes == again.global_indexes
    finally:
        other.close()


def test_keys_and_ids(client: tq.TransferQueueClient, name: str) -> None:
    made = client.kv_retrieve_meta(["a", "b"], name, create=True)
    assert (made.size, made.field_names, made.is_ready) == (2, [], False)
    put = client.put(tensors(2), made)
    assert client.kv_retrieve_keys(put.global_indexes[::-1], name) == ["b", "a"]
    assert client.kv_retrieve_meta("b", name).field_names == ["r", "x"]
    assert lists(tq.kv_batch_get("b", name)["x"]) == [[3, 4, 5]]
    with pytest.raises(tq.StorageKeyNotFoundError, match="'c'"):
        client.kv_retrieve_meta(["a", "c"], name)
    keyless = client.put(tensors(1), partition_id=name)
    assert client.kv_retrieve_keys([*keyless.global_indexes, made.global_indexes[0]], name) == [None, "a"]
    with pytest.raises(tq.StorageKeyNotFoundError, match="do not exist"):
        client.kv_retrieve_keys([made.global_indexes[0], 1 << 40], name)
    inserted = client.get_meta(["x"], 2, name, mode="insert")
    assert (inserted.size, inserted.is_ready, inserted.field_names) == (2, False, ["x"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"mode": "fetch", "task_name": "t"},
        {"batch_size": 1},
        {"batch_size": 1, "mode": "no such mode", "task_name": "t"},
        {"batch_size": 1, "data_fields": [], "task_name": "t"},
        {"batch_size": 1, "data_fields": "ab", "task_name": "t"},
        {"data_fields": "ab", "mode": "force_fetch"},
        {"batch_size": 1, "data_fields": "ab", "mode": "insert"},
    ],
)
def test_requests_that_make_no_sense(client: tq.TransferQueueClient, name: str, arguments: dict[str, Any]) -> None:
    client.put(tensors(1), partition_id=name)
    with pytest.raises(ValueError, match=r"mode|batch_size|data_fields='ab': give a list of names"):
        client.get_meta(**{"data_fields": ["x"], "partition_id": name, **arguments})
    with pytest.raises(ValueError, match="data_fields='ab': give a list of names"):
        client.check_production_status("ab", name)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["abc", "nan"])
def test_numbers_of_the_environment_that_are_none(
    client: tq.TransferQueueClient, name: str, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("TQ_CONTROLLER_GET_METADATA_TIMEOUT", given)
    with pytest.raises(ValueError, match=f"TQ_CONTROLLER_GET_METADATA_TIMEOUT='?{given}'?: expected"):
        client.get_meta(["x"], 1, name, task_name="t")
    monkeypatch.setenv("TQ_PRE_ALLOC_SAMPLE_NUM", given)
    client.put(tensors(1), partition_id=name)
    with pytest.raises(ValueError, match=f"TQ_PRE_ALLOC_SAMPLE_NUM='{given}': expected a number"):
        client.check_consumption_status("t", name)


# Processes.


def _another_process(address: str, name: str, meta: tq.BatchMeta, result: Any) -> None:
    tq.init({"controller": {"address": address}})
    data = tq.get_client().get_data(meta)
    tq.kv_put("from the other", name, {"sum": data["r"].sum()}, {"pid": True})
    tq.close()
    result.put(lists(data["x"]))


def test_metadata_goes_to_another_process(client: tq.TransferQueueClient, name: str) -> None:
    meta = client.put(tensors(3), partition_id=name)
    context = multiprocessing.get_context("spawn")
    result = context.SimpleQueue()
    process = context.Process(target=_another_process, args=(client.address, name, meta, result))
    process.start()
    try:
        assert result.get() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    finally:
        process.join(30)
        process.close()
    result.close()
    assert tq.kv_batch_get("from the other", name)["sum"].tolist() == [3]


def test_closing_ends_calls_that_wait(client: tq.TransferQueueClient, name: str) -> None:
    async def work() -> None:
        waiting = asyncio.ensure_future(client.async_get_meta(["x"], 1, name, task_name="t"))
        await asyncio.sleep(0)
        await asyncio.to_thread(wait_until, lambda: client.service.describe().waiting_claims, what="a claim that waits")
        await asyncio.to_thread(tq.close)
        with pytest.raises((tqclient.TQError, RuntimeError)):
            await waiting

    start = time.monotonic()
    asyncio.run(work())
    assert time.monotonic() - start < 10  # its own wait is 30 s


def test_the_end_of_the_interpreter_does_not_wait_for_calls_that_wait(address: str, name: str) -> None:
    command = [sys.executable, "-c", LEAVES_ONE_WAITING, address, name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "leaving\n"
        start = time.monotonic()
        assert process.wait(60) == 0
    assert time.monotonic() - start < 15  # its own wait is 30 s


def test_samples_outlive_the_connection(name: str) -> None:
    tq.kv_put("a", name, {"x": torch.arange(2)})
    tq.close()
    tq.close()
    assert lists(tq.kv_batch_get("a", name)["x"]) == [[0, 1]]
    assert tq.get_metrics_endpoint() is None
    with pytest.raises(ValueError, match="journal"):
        tq.save_checkpoint("/nowhere")
    with pytest.raises(ValueError, match="journal"):
        tq.load_checkpoint("/nowhere")


def test_listing_many_samples(client: tq.TransferQueueClient, name: str) -> None:
    keys = [f"{n}_0_{i}" for n in range(3000) for i in range(8)]
    for start in range(0, len(keys), 8000):
        part = keys[start : start + 8000]
        tq.kv_batch_put(part, name, tags=[{"n": key} for key in part])
    assert tq.kv_list(name)[name] == {key: {"n": key} for key in keys}
    assert client.on(name, lambda part, _: lookup.listing(part)).keys == keys
