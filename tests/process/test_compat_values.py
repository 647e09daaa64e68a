"""Values of any form through the TransferQueue drop-in, over real daemons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

import tqclient.compat.transfer_queue as tq
from tests.process.transfer_queue_rig import address, client, lists, name, tensors

__all__ = ["address", "client", "name"]


def nested(first: int) -> Any:
    """Two rows: `positions` ragged in their second dimension, `m` a TensorDict, `s` texts."""
    values = torch.arange(8).reshape(2, 4) + first
    positions = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, 4]), jagged_dim=2)
    m = {"u": torch.full((2, 2), float(first)), "t": NonTensorStack("a", "b")}
    return TensorDict({"positions": positions, "m": m, "s": NonTensorStack("x", "y")}, batch_size=2)


@pytest.mark.parametrize("parser", [None, lambda batch: None, dict])
def test_a_batch_of_several_partitions_has_the_forms_of_one(
    client: tq.TransferQueueClient, name: str, parser: Any
) -> None:
    metas = [client.put(nested(n), partition_id=f"{name}/{n}", data_parser=parser) for n in (0, 100)]
    meta = tq.BatchMeta.concat(metas)
    meta.reorder([3, 0, 2, 1])
    read = client.get_data(meta)
    assert lists(read["positions"]) == [
        [[101, 102, 103], [105, 106, 107]],
        [[0], [4]],
        [[100], [104]],
        [[1, 2, 3], [5, 6, 7]],
    ]
    assert lists(read["m"]["u"]) == [[100.0] * 2, [0.0] * 2, [100.0] * 2, [0.0] * 2]
    assert (read["m"]["t"], read["s"]) == (["b", "a", "a", "b"], ["y", "x", "x", "y"])
    single = client.get_data(metas[0])
    assert lists(single["positions"]) == [[[0], [4]], [[1, 2, 3], [5, 6, 7]]]
    taken = client.get_meta(["positions", "m"], 2, f"{name}/0", task_name="t").field_schema
    assert taken["positions"] == {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False}
    assert taken["m"]["is_non_tensor"]


def test_a_parser_by_key(name: str) -> None:
    tq.kv_put("a", name, {"url": "one", "n": 1}, data_parser=lambda batch: {**batch, "url": [torch.ones(2)]})
    read = tq.kv_batch_get("a", name)
    assert (lists(read["url"]), read["n"]) == ([[1.0, 1.0]], [1])
    with pytest.raises(ValueError, match="data_parser"):
        tq.kv_put("b", name, {"url": "one"}, data_parser=lambda batch: batch.update(y=1))
    assert list(tq.kv_list(name)[name]) == ["a"]


def test_rows_of_a_lazy_stack_have_the_same_fields(name: str) -> None:
    rows = TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(2), "y": torch.ones(1)})
    with pytest.raises(ValueError, match=r"'y': rows \[0\]"):
        tq.kv_batch_put(["a", "b"], name, LazyStackedTensorDict(*rows))
    assert tq.kv_list(name) == {}


def test_samples_without_fields(client: tq.TransferQueueClient, name: str) -> None:
    metas = [
        tq.kv_put("a", name, {}, {"k": 1}),
        tq.kv_put("b", name, TensorDict({}, batch_size=[1])),
        tq.kv_batch_put(["c"], name, TensorDict({}, batch_size=[1]), [{"k": 2}]),
    ]
    assert [meta.fields for meta in metas] == [[]] * 3
    assert tq.kv_list(name)[name] == {"a": {"k": 1}, "b": {}, "c": {"k": 2}}
    put = client.put(TensorDict({}, batch_size=[2]), partition_id=name)
    assert (put.size, put.field_names, put.is_ready) == (2, [], True)
    added = client.put(TensorDict({"x": torch.arange(2)}, batch_size=[2]), put)
    assert client.get_data(added)["x"].tolist() == [0, 1]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        (TensorDict({}, batch_size=[2]), "2 rows .*for 1"),
        (TensorDict({"m": TensorDict({}, batch_size=[1]), "x": torch.zeros(1)}, batch_size=[1]), "'m'.*leave it out"),
        ({"x": torch.zeros(1), "y": ["a", "b"]}, "'x': 1, 'y': 2"),
    ],
)
def test_counts_that_do_not_fit(client: tq.TransferQueueClient, name: str, fields: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        tq.kv_batch_put(["a"], name, fields)
    with pytest.raises(ValueError, match=says):
        client.put(fields, tq.BatchMeta([1], [name]))
    assert tq.kv_list(name) == {}


def test_non_tensor_data_of_one_sample(name: str) -> None:
    tq.kv_put("a", name, {"x": NonTensorData(3), "y": NonTensorStack("p", "q")})
    read = tq.kv_batch_get("a", name)
    assert (read["x"], read["y"]) == ([3], [["p", "q"]])


def test_fields_that_are_selected(name: str) -> None:
    meta = tq.kv_batch_put(["a", "b"], name, tensors(2))
    assert tq.kv_batch_get(["a", "b"], name, ["r", "r"])["r"].tolist() == [0, 1]
    for read in (tq.kv_batch_get(["a", "b"], name, []), tq.kv_batch_get_by_meta(meta, [])):
        assert (list(read.keys()), read.batch_size) == ([], torch.Size([0]))
    with pytest.raises(tq.StorageKeyNotFoundError, match="'c'"):
        tq.kv_batch_get(["a", "c"], name, [])
