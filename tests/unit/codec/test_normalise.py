from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from tests.unit.codec.blocks import encode
from tests.unit.codec.values import identical
from tqclient.codec import Records, normalise


def test_columns_are_the_callers_own() -> None:
    tokens = [torch.ones(2)]
    columns = normalise({"tokens": tokens, "array": np.zeros(1)})
    assert list(columns) == ["tokens", "array"]
    assert columns["tokens"] is tokens


def test_samples_are_transposed() -> None:
    samples = [{"a": 1, "b": "x"}, {"b": "y", "a": 2}]
    assert normalise(samples) == {"a": [1, 2], "b": ["x", "y"]}


def test_a_tensordict_with_nested_and_non_tensor_data() -> None:
    data = TensorDict(
        {
            "a": torch.arange(6).reshape(3, 2),
            "inner": {"b": torch.zeros(3), "text": NonTensorStack("p", "q", "r")},
            "text": NonTensorStack("x", "y", "z"),
            "same": NonTensorData({"k": 1}, batch_size=[3]),
        },
        batch_size=[3],
    )
    block = encode(data)
    assert torch.equal(block.read("a").value, data["a"])
    assert block.read("text").value == ["x", "y", "z"]
    assert block.read("same").value == {"k": [1, 1, 1]}
    assert block.read("inner").list()[2]["text"] == "r"
    assert block.read("inner").value["b"].tolist() == [0, 0, 0]


def test_a_tensordict_holding_a_jagged_tensor() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(5), torch.tensor([0, 2, 2, 5]))
    block = encode(TensorDict({"t": jagged}, batch_size=[3]))
    assert identical(jagged, block.read("t").value)


def test_a_lazy_stack_of_unequal_samples() -> None:
    samples = [TensorDict({"a": torch.ones(size), "t": NonTensorData("abc"[size])}) for size in range(3)]
    block = encode(LazyStackedTensorDict(*samples))
    assert [row.numel() for row in block.read("a").list()] == [0, 1, 2]
    assert block.read("t").value == ["a", "b", "c"]
    assert identical(block.read("a").value, encode(samples).read("a").value)


def test_records_say_what_they_are() -> None:
    assert repr(Records([1, 2])) == "Records(2 rows)"
    assert len(Records(())) == 0


def test_tensordict_is_not_imported_for_users_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)  # an import would fail now
    block = encode([{"a": torch.ones(1), "b": "x", "c": {"d": 1}}])
    assert block.read("b").value == ["x"]
