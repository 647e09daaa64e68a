from __future__ import annotations

import datetime as dt
import enum
import zoneinfo
from collections import OrderedDict, defaultdict
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import Block, encode
from tqclient.codec import NESTING_MAX, Records, dumps, loads, measure, normalise
from tqclient.errors import InvalidArgument, UnsupportedValue


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


class Text(str):
    __slots__ = ()


class Custom:
    def __init__(self, value: int) -> None:
        self.value = value


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def jagged(values: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 1, len(values)]))


@pytest.mark.parametrize(
    ("column", "path"),
    [
        ([1, {"callback": print}], "extra[1].callback: "),
        ([{"callback": 1}, {"callback": print}], "extra[1].callback: "),
        ({"callback": [1, print]}, "extra.callback[1]: "),
        ([1, {"a": [0, {"b c": Custom(1)}]}], "extra[1].a[1]['b c']: "),
        ([1, {"a": ({1: Custom(1)},)}], "extra[1].a[0][1]: "),
        ([Colour.RED, 1], "extra[0]: an enum member"),
        ([Level.LOW, 1], "extra[0]: an enum member"),
        ([Text("a"), "b"], "extra[0]: "),
        ([1, OrderedDict(a=1)], "extra[1]: "),
        ([1, defaultdict(list)], "extra[1]: "),
        ([1, bytearray(b"x")], "extra[1]: a bytearray"),
        ([1, memoryview(b"x")], "extra[1]: a memoryview"),
        ([1, msgpack.ExtType(5, b"")], "extra[1]: "),
        ([1, msgpack.Timestamp(5)], "extra[1]: "),
        ([1, Decimal(1)], "extra[1]: "),
        ([1, torch.Size([2])], "extra[1]: "),
        ([1, torch.float32], "extra[1]: "),
        ([1, {Custom(1): 1}], "extra[1] (key "),
        ([1, dt.datetime(2024, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))], "extra[1]: a time zone"),
        (["a", "\ud800"], "extra[1]: a text has a lone surrogate"),
        (["a" * 1000, "a" * 1000 + "\ud800"], "extra[1]: a text has a lone surrogate"),
        ([1, {"x": "\ud800"}], "extra[1].x: a text has a lone surrogate"),
        ([{"\ud800": 1}, {"\ud800": 2}], "extra[0]: the key"),
        ([1, np.array([None])], "extra[1]: an array of dtype object"),
        ([1, np.ma.array([1])], "extra[1]: a numpy.ma"),
        (np.array(["a", None]), "extra: an array of dtype object"),
        (torch.eye(2).to_sparse(), "extra: a tensor of layout torch.sparse_coo"),
        ([torch.eye(2), torch.eye(2).to_sparse()], "extra[1]: a tensor of layout torch.sparse_coo"),
        (torch.zeros(2, device="meta"), "extra: a meta tensor"),
        ([torch.zeros(2, device="meta")] * 2, "extra[0]: a meta tensor"),
        (torch.zeros(2, dtype=torch.uint8).view(torch.bits8), "extra: a tensor of dtype torch.bits8"),
        (jagged(torch.zeros(3)).to("meta"), "extra: a meta tensor"),
        ([1, jagged(torch.zeros(3)).to("meta")], "extra[1]: a meta tensor"),
        ([{"m": jagged(torch.zeros(3)).to("meta")}] * 2, "extra[0].m: a meta tensor"),
        (jagged(torch.zeros(3, dtype=torch.uint8).view(torch.bits8)), "extra: a tensor of dtype torch.bits8"),
        ([1, jagged(torch.zeros(3, dtype=torch.uint8).view(torch.bits8))], "extra[1]: a tensor of dtype torch.bits8"),
        ([1, nested(NESTING_MAX + 1)], "extra[1]" + "[0]" * NESTING_MAX + ": containers nest deeper than"),
        ([1, cycle()], "extra[1]" + "[0]" * NESTING_MAX + ": containers nest deeper than"),
        (Records([1, Custom(1)]), "extra[1]: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_round_trip_is_refused_with_its_path(column: Any, path: str) -> None:
    with pytest.raises(UnsupportedValue) as caught:
        measure({"ok": [1, 2], "extra": column})
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize("wrap", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}])
def test_nesting_up_to_the_limit(wrap: Any) -> None:
    value: Any = 1
    for _ in range(NESTING_MAX):
        value = wrap(value)
    assert loads(dumps(value)) == value
    assert encode({"x": [value, value]}).read("x").list() == [value, value]
    with pytest.raises(UnsupportedValue, match="nest deeper"):
        dumps(wrap(value))
    with pytest.raises(UnsupportedValue, match="nest deeper"):
        measure({"x": [wrap(value)]})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": [1, 2], "b": torch.zeros(3)}, "field 'b' has 3 rows, but field 'a' has 2"),
        ({"m": {"a": [1, 2], "b": [1]}}, "field 'm.b' has 1 rows, but field 'm.a' has 2"),
        ({}, "no fields"),
        ({"a": torch.tensor(1)}, "field 'a': a 0-dim tensor"),
        ({"a": np.array(1)}, "field 'a': a 0-dim array"),
        ({"a": "text"}, "field 'a': a column is"),
        ({"a": {}}, "field 'a': a dict of columns without columns"),
    ],
)
def test_columns_that_make_no_batch(columns: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        measure(columns)
    assert message in str(caught.value)


def test_rows_that_were_expected() -> None:
    with pytest.raises(InvalidArgument, match="field 'a' has 2 rows, but 3"):
        measure({"a": [1, 2]}, rows=3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([{"a": 1}, {"b": 1}], "sample 1 has other keys than sample 0: it lacks 'a' and adds 'b'"),
        ([{"a": 1}, 2], "sample 1 is a int"),
        ([], "empty list"),
        ({1: [1]}, "a field name must be"),
        ({"": [1]}, "a field name must be"),
        ({"x" * 513: [1]}, "513 bytes"),
        ({"\ud800": [1]}, "surrogate"),
        ("text", "not str"),
        (torch.zeros(2), "not Tensor"),
    ],
)
def test_batches_that_are_none(values: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        normalise(values)
    assert message in str(caught.value)


def test_pickling_needs_both_sides() -> None:
    value = {"z": complex(1, 2), "c": Custom(7), "kept": (1, torch.ones(2))}
    data = dumps(value, allow_pickle=True)
    with pytest.raises(UnsupportedValue, match="allow_pickle"):
        loads(data)
    read = loads(data, allow_pickle=True)
    assert read["c"].value == 7
    assert read["kept"][0] == 1
    with pytest.raises(UnsupportedValue, match=r"value\.f: pickling"):
        dumps({"f": lambda: 0}, allow_pickle=True)
    for taken in (bytearray(b"x"), memoryview(b"x"), msgpack.ExtType(1, b"\x90"), msgpack.Timestamp(1)):
        with pytest.raises(UnsupportedValue, match=r"value\[0\]: "):
            dumps([taken], allow_pickle=True)
    plan = measure({"x": [Custom(1), Custom(2)], "y": [1, 2]}, allow_pickle=True)
    block = Block(plan)
    assert block.read("y").list() == [1, 2]
    with pytest.raises(UnsupportedValue, match="'x' holds pickled"):
        block.read("x")
    assert [item.value for item in block.read("x", allow_pickle=True).list()] == [1, 2]
