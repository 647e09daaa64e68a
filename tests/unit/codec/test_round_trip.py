from __future__ import annotations

import datetime as dt
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.codec import strategies
from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.values import identical, rows_of
from tqclient.codec import Records, allocate, dtypes, dumps, loads, measure, read_column
from tqclient.errors import CorruptBlock, InvalidArgument


@given(strategies.batches)
def test_what_goes_in_comes_out(batch: dict[str, Any]) -> None:
    block = encode(batch)
    assert block.layout.fields == tuple(batch)
    for name, column in batch.items():
        for copy in (True, False):
            read = block.read(name, copy=copy)
            assert identical(rows_of(column), read.list())
            assert read.form == block.layout.form(name)


@given(strategies.batches, st.data())
def test_any_rows_of_any_blocks_in_any_order_read_from_no_more_than_the_ranges(
    batch: dict[str, Any], data: st.DataObject
) -> None:
    plan = measure(batch)
    blocks = [Block(part) for part in plan.split(data.draw(st.integers(1, 2048)))]
    places = [(block, row) for block in blocks for row in range(block.layout.rows)]
    picked = data.draw(st.lists(st.sampled_from(range(len(places))), max_size=12)) if places else []
    for name, column in batch.items():
        rows = rows_of(column)
        parts = [places[place][0].sparse_part(name, [places[place][1]]) for place in picked]
        if parts:
            read = read_column(name, parts, copy=True, allocate=allocate)
            assert identical([rows[place] for place in picked], read.list())


@given(strategies.batches)
def test_the_payload_is_what_all_fields_need(batch: dict[str, Any]) -> None:
    layout = encode(batch).layout
    needed = [layout.ranges(name) for name in batch]
    starts = [int(start) for ranges in needed for start, _ in ranges]
    stops = [int(start + size) for ranges in needed for start, size in ranges]
    assert layout.payload.tolist() == ([[min(starts), max(stops) - min(starts)]] if starts else [])


@given(strategies.values)
def test_a_single_value_comes_back(value: Any) -> None:
    assert identical(value, loads(dumps(value)))


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Point(1, 2), (1, 2)),
        (torch.nn.Parameter(torch.ones(2)), torch.ones(2)),
        (np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6).reshape(2, 3)),
    ],
)
def test_documented_conversions(value: Any, expected: Any) -> None:
    assert identical(expected, loads(dumps(value)))


@pytest.mark.parametrize(
    "value",
    [
        -(2**63) - 1,
        2**64,
        True,
        1,
        1.0,
        -0.0,
        {1: "a", (2, 3): "b", None: "c", b"d": 4},
        {"__tensor__": [1], "\x85": {"ExtType": 1}},
        np.array(7, np.int16),
        np.zeros((0, 3), ">f4"),
        np.zeros(2, np.dtype([("a", "i1"), ("b", "<f8")], align=True)),
        np.str_("trailing nul\0"),
        np.bytes_(b"trailing nul\0"),
        np.str_(""),
        np.longdouble("1.1"),
        dt.datetime(2024, 10, 27, 2, 30, fold=1),
        dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(minutes=-90), "half")),
        dt.time(1, 2, 3, 4, tzinfo=dt.timezone.utc),
        [[], {}, (), set(), frozenset(), "", b""],
        torch.tensor(3, dtype=torch.uint64),
    ],
    ids=repr,
)
def test_corners(value: Any) -> None:
    assert identical(value, loads(dumps(value)))


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_types_that_torch_itself_warns_of() -> None:
    half = torch.zeros(3, 2, dtype=torch.int16).view(torch.complex32)
    flat = torch.nested.nested_tensor([torch.ones(2), torch.ones(0), torch.ones(5)])
    deep = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 5), torch.ones(0, 1)])
    block = encode({"half": half, "flat": flat, "deep": deep, "x": Records([flat, deep, half])})
    assert identical(half, block.read("half").value)
    assert identical(flat, block.read("flat").value)
    assert identical(deep, block.read("deep").value)
    assert identical([deep.unbind()[i] for i in (2, 0)], block.read("deep", rows=[2, 0]).list())
    assert identical([flat, deep, half], block.read("x").value)


def test_a_namedtuple_inside_of_a_set_of_rows_keeps_its_order() -> None:
    assert loads(dumps([Point(3, 4)])) == [(3, 4)]


@pytest.mark.parametrize(
    ("column", "form"),
    [
        (torch.zeros(2, 3), "torch dense float32[rows, 3]"),
        (torch.zeros(2, dtype=torch.bfloat16), "torch dense bfloat16[rows]"),
        (np.zeros((2, 3)), "numpy dense <f8[rows, 3]"),
        ([torch.zeros(2, 4), torch.zeros(2, 4)], "torch ragged float32[rows, *, 4]"),
        ([torch.zeros(()), torch.ones(())], "torch dense float32[rows]"),
        ([np.zeros(2), np.zeros(3)], "numpy ragged <f8[rows, *]"),
        ([torch.zeros(2), torch.zeros(2, 1)], "list"),
        ([torch.zeros(2), torch.zeros(2, dtype=torch.int8)], "list"),
        (["a", "b"], "list"),
        ([1, "a"], "list"),
        ([{"a": 1, "b": torch.zeros(1)}, {"b": torch.zeros(2), "a": 2}], "{a: list, b: torch ragged float32[rows, *]}"),
        ([{"a": 1}, {"b": 1}], "list"),
        ([{}, {}], "list"),
        ({"a": torch.zeros(2), "b": ["x", "y"]}, "{a: torch dense float32[rows], b: list}"),
        (Records([torch.zeros(2), torch.zeros(2)]), "list"),
    ],
    ids=str,
)
def test_the_form_follows_from_the_types(column: Any, form: str) -> None:
    plan = measure({"x": column})
    assert str(plan.forms["x"]) == form
    assert Block(plan).layout.form("x") == plan.forms["x"]


def test_containers_of_what_is_read() -> None:
    rows = [torch.arange(3), torch.arange(0), torch.arange(2)]
    block = encode({"ragged": rows, "np": [row.numpy() for row in rows], "mm": [{"a": row, "b": "t"} for row in rows]})
    value = block.read("ragged").value
    assert value.layout == torch.jagged
    assert identical(rows, list(value.unbind()))
    assert value.values().tolist() == [0, 1, 2, 0, 1]
    assert isinstance(block.read("np").value, list)
    struct = block.read("mm").value
    assert struct["a"].layout == torch.jagged
    assert struct["b"] == ["t", "t", "t"]
    assert block.layout.row_lengths("ragged").tolist() == [3, 0, 2]
    assert block.layout.row_lengths("mm.a").tolist() == [3, 0, 2]
    assert block.layout.column_bytes("ragged") == 40


def test_padded() -> None:
    block = encode(
        {"t": [torch.tensor([[1, 2]]), torch.zeros(0, 2, dtype=torch.int64)], "d": torch.zeros(2), "s": ["a", "b"]}
    )
    assert block.read("t").padded(-1).tolist() == [[[1, 2]], [[-1, -1]]]
    for name in ("d", "s"):
        with pytest.raises(InvalidArgument, match="ragged"):
            block.read(name).padded()
    assert np.array_equal(encode({"n": [np.arange(2), np.arange(1)]}).read("n").padded(9), [[0, 1], [0, 9]])


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("name", sorted(dtypes.TORCH.keys() - {"float4_e2m1fn_x2"}))  # torch fills none of these
def test_rows_of_every_dtype_are_padded(name: str) -> None:
    dtype = dtypes.TORCH[name]
    rows = [torch.ones(length, 2).to(dtype) for length in (2, 0, 3)]
    padded = encode({"x": rows}).read("x").padded(1)
    assert (padded.dtype, padded.shape) == (dtype, (3, 3, 2))
    raw = padded.view(torch.uint8).reshape(3, 3, -1)
    one = torch.ones(1, 2).to(dtype).view(torch.uint8).reshape(-1)
    assert all(torch.equal(item, one) for row in raw for item in row)
    if name == "float8_e8m0fnu":  # it has no zero
        return
    zeros = encode({"x": rows}).read("x").padded(0).view(torch.uint8).reshape(3, 3, -1)
    assert [[bool(item.any()) for item in row] for row in zeros] == [[True, True, False], [False] * 3, [True] * 3]


def test_a_jagged_tensor_knows_its_longest_row() -> None:
    found = encode({"x": [torch.arange(2.0), torch.arange(4.0), torch.arange(3.0)]}).read("x").value
    expected = torch.tensor([[0.0, 1.0, -1.0, -1.0], [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, -1.0]])
    assert torch.equal(found.to_padded_tensor(-1.0), expected)


def test_rows_of_one_tensor_join_a_ragged_column() -> None:
    ragged = encode({"x": [torch.tensor([1, 2, 3]), torch.tensor([4])]})
    dense = encode({"x": torch.tensor([[5, 6], [7, 8]])})
    parts = [dense.part([1]), ragged.part([1, 0]), dense.part([0])]
    column = read_column("x", parts, copy=True, allocate=allocate)
    assert identical([torch.tensor(row) for row in ([7, 8], [4], [1, 2, 3], [5, 6])], column.list())
    assert column.value.layout == torch.jagged
    alone = read_column("x", [dense.part()], copy=False, allocate=allocate, form=ragged.layout.form("x"))
    assert alone.value.layout == torch.jagged
    assert alone.is_view


def test_list_columns_of_different_kinds_read_together() -> None:
    blocks = [encode({"x": column}) for column in (["a", "b"], [b"c"], [1, (2,)])]
    parts = [blocks[0].part([1]), blocks[2].part([1]), blocks[1].part(), blocks[0].part([0]), blocks[2].part([0])]
    assert read_column("x", parts, copy=True, allocate=allocate).value == ["b", (2,), b"c", "a", 1]


def test_blocks_of_forms_that_never_joined_are_corrupt() -> None:
    blocks = [encode({"x": column}) for column in (torch.zeros(2), ["a", "b"])]
    with pytest.raises(CorruptBlock, match="'x'"):
        read_column("x", [block.part() for block in blocks], copy=True, allocate=allocate)


@pytest.mark.parametrize("value", [b"not a block", b"", dumps(1)[:-1]])
def test_loads_refuses_what_dumps_did_not_write(value: bytes) -> None:
    with pytest.raises(CorruptBlock):
        loads(value)
