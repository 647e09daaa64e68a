"""Values at the edge of what is carried: the deepest, the emptiest, and those that look like others."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import encode
from tests.unit.codec.values import identical
from tqclient.codec import NESTING_MAX, dtypes, dumps, loads, measure
from tqclient.errors import UnsupportedValue

LEAVES = [2**70, np.float32(1.5), dt.date(2026, 1, 2), torch.arange(3), np.arange(3), "text", 1j]


def nested(layout: torch.layout, *lengths: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(length, dtype=dtype) for length in lengths], layout=layout)


@pytest.mark.parametrize("around", [lambda value: (value,), lambda value: [value], lambda value: {"k": value}])
def test_the_deepest_container_may_hold_any_value(around: Any) -> None:
    for leaf in (*LEAVES, nested(torch.jagged, 2, 1), nested(torch.strided, 2, 1)):
        value = leaf
        for _ in range(NESTING_MAX):
            value = around(value)
        assert identical(loads(dumps(value)), value)
        with pytest.raises(UnsupportedValue, match=f"nest deeper than {NESTING_MAX}"):
            dumps(around(value))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8])
def test_a_nested_tensor_without_rows_keeps_what_its_rows_would_be(dtype: torch.dtype) -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.ones(0, 3, 2, dtype=dtype), torch.tensor([0]))
    back = loads(dumps({"x": jagged}))["x"]
    assert (back.layout, back.dtype, back.size(0), back.values().shape) == (torch.jagged, dtype, 0, (0, 3, 2))
    strided = torch.nested.nested_tensor([], dtype=dtype, layout=torch.strided)
    back = loads(dumps([strided]))[0]
    assert (back.layout, back.is_nested, back.dtype, back.size(0)) == (torch.strided, True, dtype, 0)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_list_of_nested_tensors_is_a_list(layout: torch.layout) -> None:
    values = [nested(layout, 2, 1), nested(layout, 3)]
    assert identical(encode({"x": values}).read("x").list(), values)
    samples = [{"x": {"deep": value}} for value in values]
    assert identical(encode({"s": samples}).read("s").list(), samples)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, np.dtype((np.record, [("a", "<i4")]))),
        np.zeros(2, np.dtype("i4", metadata={"unit": "m"})),
        np.zeros(2, np.dtype([("a", np.dtype("i4", metadata={"unit": "m"}))])),
    ],
    ids=["record", "metadata", "metadata of a field"],
)
def test_a_dtype_that_would_lose_something_is_refused(array: np.ndarray[Any, Any]) -> None:
    np.zeros(2, [("a", "<i4")])  # equal to the first one, as numpy sees it
    dumps(np.zeros(2, [("a", "<i4")]))
    for column in (array, [array, array], [{"k": array}, {"k": array, "l": 1}]):
        with pytest.raises(UnsupportedValue, match=r"x.*would lose its (record type|metadata)"):
            measure({"x": column})


@pytest.mark.parametrize(
    "name",
    [
        '{"base":' * 5000 + '"<i4"' + ',"shape":[1]}' * 5000,
        json.dumps(
            {"names": ["a"], "formats": ["<i4"], "offsets": [2**70], "titles": [None], "itemsize": 4, "aligned": False}
        ),
        json.dumps({"base": "<i4", "shape": [2**62, 2**62]}),
        "{" * 5000,
    ],
    ids=["deep", "far", "large", "open"],
)
def test_a_hostile_dtype_is_none(name: str) -> None:
    with pytest.raises(dtypes.UnknownDtype) as caught:
        dtypes.numpy_dtype(name)
    assert len(str(caught.value)) < 1000
