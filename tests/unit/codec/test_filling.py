"""What fills up the ends of padded rows is what was given."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import encode
from tqclient.codec import Shared
from tqclient.codec.dtypes import TORCH
from tqclient.codec.filling import filling
from tqclient.errors import InvalidArgument

NAN, INF = math.nan, math.inf
STRUCTURE = np.dtype([("a", "i4")])

FITTING: list[tuple[Any, Any, Any]] = [
    (torch.int64, -1, -1),
    (torch.int64, 7.0, 7),
    (torch.int64, True, 1),
    (torch.int64, torch.tensor(7), 7),
    (torch.int64, np.int8(7), 7),
    (torch.int64, np.array(7), 7),
    (torch.uint64, 2**64 - 1, 2**64 - 1),
    (torch.bool, 1, True),
    (torch.float32, 0.1, float(np.float32(0.1))),
    (torch.float32, -INF, -INF),
    (torch.float64, 2**70, 2.0**70),
    (torch.bfloat16, -1e9, -998244352.0),
    (torch.float8_e4m3fn, 448.0, 448.0),
    (torch.complex64, 1 + 2j, 1 + 2j),
    (np.int32, -1, -1),
    (np.uint64, 2**64 - 1, 2**64 - 1),
    (np.float16, 0.1, float(np.float16(0.1))),
    (np.longdouble, np.longdouble(1) / 3, np.longdouble(1) / 3),
    (">i2", 7, 7),
    ("U3", "pad", "pad"),
    ("U3", "", ""),
    ("S3", b"p", b"p"),
    ("M8[ns]", np.datetime64("2020-01-01"), np.datetime64("2020-01-01", "ns")),
    ("m8[s]", np.timedelta64(2, "m"), np.timedelta64(120, "s")),
    (STRUCTURE, np.zeros((), STRUCTURE), np.zeros((), STRUCTURE)),
]

UNFIT: list[tuple[Any, Any]] = [
    *((torch.int64, value) for value in (0.5, NAN, INF, 2**63, 10**400, "x", None, 1 + 2j, torch.tensor([7]), [7])),
    *((torch.uint8, value) for value in (-1, 256)),
    (torch.uint64, -1),
    *((torch.bool, value) for value in (2, -1, 0.5, NAN)),
    *((torch.float32, value) for value in (1e39, 2**24 + 1, 10**400, 1j, "0", np.datetime64(1, "ns"))),
    (torch.float16, 1e9),
    (torch.bfloat16, 3.4e38),
    *((torch.float8_e4m3fn, value) for value in (1e9, INF, 17)),
    *((torch.float8_e8m0fnu, value) for value in (0, 0.0, -1.0)),
    *((torch.complex64, value) for value in (complex(0, 1e39), complex(NAN, 1e39))),
    *((np.int32, value) for value in (0.5, NAN, 2**40, "5", None, b"", [1], np.timedelta64(1, "ns"))),
    *((np.uint8, value) for value in (-1, 256)),
    *((np.float32, value) for value in (1e39, 2**24 + 1, 1j)),
    *(("U3", value) for value in (0, "four", b"b", None)),
    *(("S3", value) for value in (0, b"four", "s")),
    *(("M8[ns]", value) for value in (0, "2020", np.timedelta64(1, "s"), np.datetime64("9999"))),
    *(("m8[s]", value) for value in (0, np.timedelta64(1500, "ms"))),
    *((STRUCTURE, value) for value in (0, (0,), np.zeros((), [("b", "i4")]))),
    ("V3", b"abc"),
]


def dtype_of(dtype: Any) -> Any:
    return dtype if isinstance(dtype, torch.dtype) else np.dtype(dtype)


@pytest.mark.parametrize(("dtype", "value", "expected"), FITTING)
def test_a_fill_that_the_dtype_has(dtype: Any, value: Any, expected: Any) -> None:
    found = filling(value, dtype_of(dtype))
    assert (found.dtype, found.ndim) == (dtype_of(dtype), 0)
    assert (found.item() if isinstance(found, torch.Tensor) else found[()]) == expected


@pytest.mark.parametrize("name", sorted(name for name, dtype in TORCH.items() if dtype.is_floating_point))
def test_not_a_number_is_one_of_every_float(name: str) -> None:
    if name == "float4_e2m1fn_x2":  # torch fills none of these
        with pytest.raises(InvalidArgument, match="float4_e2m1fn_x2 has no such value"):
            filling(NAN, TORCH[name])
    else:
        assert math.isnan(filling(NAN, TORCH[name]).item())
    assert np.isnat(filling(np.datetime64("NaT"), np.dtype("M8[ns]")))


@pytest.mark.parametrize(("dtype", "value"), UNFIT)
def test_a_fill_that_the_dtype_has_not(dtype: Any, value: Any) -> None:
    with pytest.raises(InvalidArgument, match="has no such value; give one that it has"):
        filling(value, dtype_of(dtype))


@pytest.mark.parametrize(
    ("rows", "value", "end"),
    [
        ([torch.tensor([1], dtype=torch.uint64), torch.empty(0, dtype=torch.uint64)], 2**64 - 1, 2**64 - 1),
        ([torch.ones(1).bfloat16(), torch.empty(0).bfloat16()], 0.1, 0.10009765625),
        ([np.array(["ab"]), np.empty(0, "U2")], "-", "-"),
        ([np.ones(1, ">i4"), np.empty(0, ">i4")], -7, -7),
    ],
)
def test_rows_end_with_it(rows: list[Any], value: Any, end: Any) -> None:
    for column in (rows, Shared(rows, [0, 1])):
        padded = encode({"x": column}).read("x").padded(value)
        assert padded.dtype == rows[0].dtype
        assert padded.tolist() == [rows[0].tolist(), [end]]
