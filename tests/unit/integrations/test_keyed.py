"""Columns of TensorDicts, and TensorDicts whose uniform fields are dense."""

from __future__ import annotations

import torch
from tensordict import NonTensorStack, TensorDict

from tqclient.integrations.keyed import uniform_as_dense


def jagged(*rows: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor(list(rows), layout=torch.jagged)
    return made


def test_rows_of_one_shape_become_one_tensor_over_the_same_memory() -> None:
    rows = jagged(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))
    dense = uniform_as_dense(TensorDict({"x": rows}, batch_size=[2]))["x"]
    assert not dense.is_nested
    assert dense.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert dense.data_ptr() == rows.values().data_ptr()


def test_rows_with_further_dimensions_keep_them() -> None:
    values = torch.arange(24).reshape(2, 3, 2, 2)
    dense = uniform_as_dense(TensorDict({"x": jagged(*values.unbind())}, batch_size=[2]))["x"]
    assert torch.equal(dense, values)


def test_rows_of_several_lengths_stay_jagged() -> None:
    fields = uniform_as_dense(TensorDict({"x": jagged(torch.arange(2), torch.arange(3))}, batch_size=[2]))
    assert [row.tolist() for row in fields["x"].unbind()] == [[0, 1], [0, 1, 2]]


def test_rows_that_are_ragged_in_their_second_dimension() -> None:
    values = torch.arange(12).reshape(2, 6)
    for offsets, expected in (([0, 3, 6], [values[:, :3].tolist(), values[:, 3:].tolist()]), ([0, 2, 6], None)):
        rows = torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets), jagged_dim=2)
        made = uniform_as_dense(TensorDict({"x": rows}, batch_size=[2]))["x"]
        assert made.is_nested if expected is None else made.tolist() == expected


def test_empty_rows_scalars_children_and_other_values() -> None:
    child = TensorDict({"y": jagged(torch.ones(2), torch.zeros(2))}, batch_size=[2])
    fields = TensorDict(
        {
            "empty": jagged(torch.ones(0), torch.ones(0)),
            "scalar": torch.tensor([1, 2]),
            "text": NonTensorStack("a", "b"),
            "child": child,
        },
        batch_size=[2],
    )
    made = uniform_as_dense(fields)
    assert made["empty"].shape == (2, 0)
    assert made["scalar"].tolist() == [1, 2]
    assert list(made["text"]) == ["a", "b"]
    assert made["child", "y"].tolist() == [[1.0, 1.0], [0.0, 0.0]]
