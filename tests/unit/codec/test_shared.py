"""Values that rows share: stored once, read like any other column."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import encode
from tests.unit.codec.test_corruption import resealed
from tests.unit.codec.values import identical, rows_of
from tqclient.codec import Layout, Part, Records, Shared, allocate, header, measure, normalise, read_column, same_rows
from tqclient.codec.columns import encode_column
from tqclient.errors import CorruptBlock, InvalidArgument, UnsupportedVersion

IMAGES = [torch.full((rows, 3), float(rows)) for rows in (40, 20, 70)]
INDEX = [2, 0, 0, 1, 2]


def test_the_list_shares_memory_and_the_value_does_not() -> None:
    column = encode({"x": Shared(IMAGES, INDEX)}).read("x")
    rows = column.list()
    assert identical(rows_of(Shared(IMAGES, INDEX)), rows)
    rows[1][0, 0] = -1
    assert rows[2][0, 0] == -1
    value = column.value
    assert value.layout == torch.jagged
    value[1][0, 0] = 5
    assert value[2][0, 0] == -1


def test_rows_of_a_struct_share_tensors_and_not_dicts() -> None:
    column = encode({"s": Shared({"x": IMAGES, "name": ["a", "b", "c"]}, INDEX)}).read("s")
    first, second = column.list()[1:3]
    assert first is not second
    assert first["x"].data_ptr() == second["x"].data_ptr()
    first["mine"] = True
    assert set(second) == {"x", "name"}
    assert column.value["name"] == ["c", "a", "a", "b", "c"]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (torch.arange(6, dtype=torch.bfloat16).view(3, 2), torch.Tensor),
        (np.arange(6).reshape(3, 2), np.ndarray),
        ([np.arange(2), np.arange(0), np.arange(3)], list),
        (["a", "b", "c"], list),
        (Records([1, None, (2,)]), list),
    ],
    ids=["tensor", "array", "arrays", "texts", "records"],
)
def test_the_value_has_the_form_of_the_values(values: Any, kind: type) -> None:
    shared, plain = encode({"x": Shared(values, INDEX)}), encode({"x": values})
    column = shared.read("x")
    assert column.form == plain.read("x").form
    assert isinstance(column.value, kind)
    assert identical(rows_of(Shared(values, INDEX)), rows_of(column.value))
    assert same_rows(column, column).all()


def test_values_whose_rows_vary_in_every_dimension() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.zeros(4, 5), torch.ones(0, 1)])
    column = encode({"x": Shared(nested, INDEX)}).read("x")
    expected = [nested.unbind()[pick] for pick in INDEX]
    assert identical(expected, column.list())
    assert column.value.layout == torch.strided
    assert identical(expected, list(column.value.unbind()))


def test_a_shared_column_is_padded_like_another() -> None:
    short = [torch.tensor([1, 2]), torch.tensor([3])]
    padded = encode({"x": Shared(short, [1, 0, 1])}).read("x").padded(-1)
    assert padded.tolist() == [[3, -1], [1, 2], [3, -1]]


def test_each_value_takes_its_bytes_once_and_unused_ones_none() -> None:
    column = Shared([*IMAGES, torch.zeros(9999, 3)], INDEX * 100)
    plan = measure({"x": column})
    # 3 images: 40 + 20 + 70 rows of 12 bytes. 500 rows: an index byte each.
    assert 130 * 12 + 500 < plan.size_bytes < 130 * 12 + 500 + 512
    block = encode({"x": column})
    assert block.layout.node("x").children[0].form.kind == "ragged"
    assert block.layout.column_bytes("x") == 130 * 12
    assert block.layout.row_lengths("x").tolist() == [70, 40, 40, 20, 70] * 100


def test_blocks_that_a_put_is_cut_into_each_hold_what_their_rows_share() -> None:
    images = [torch.full((1000,), image) for image in range(4)]  # of 8,000 bytes
    column = Shared(images, np.repeat(np.arange(4), 16))
    plan = measure({"x": column})
    plans = plan.split(20_000)
    assert encode_column("x", column, 0, allow_pickle=False).row_bytes().tolist() == [8000, *[0] * 15] * 4
    assert [part.rows for part in plans] == [32, 32]
    assert all(part.size_bytes < 20_000 for part in plans)


def test_lengths_are_those_of_rows() -> None:
    columns = {"x": Shared(IMAGES, INDEX), "s": Shared({"y": {"z": IMAGES}}, INDEX), "t": {"y": Shared(IMAGES, INDEX)}}
    lengths = measure(columns).lengths()
    assert {path: each.tolist() for path, each in lengths.items()} == {
        "x": [70, 40, 40, 20, 70],
        "s.y.z": [70, 40, 40, 20, 70],
        "t.y": [70, 40, 40, 20, 70],
    }


def test_shared_and_plain_blocks_are_one_column() -> None:
    shared, plain = encode({"x": Shared(IMAGES, INDEX)}), encode({"x": IMAGES[:2]})
    parts = [shared.part([3]), plain.part([1, 0]), shared.part([0, 3])]
    column = read_column("x", parts, copy=True, allocate=allocate)
    assert [len(row) for row in column.list()] == [20, 20, 40, 70, 20]
    assert same_rows(
        column, read_column("x", [plain.part([1, 1, 0, 1, 1])], copy=True, allocate=allocate)
    ).tolist() == [*(True, True, True, False, True)]


def test_only_the_values_of_the_rows_are_fetched_each_once() -> None:
    images = [torch.zeros(8192, dtype=torch.uint8) for _ in range(4)]
    block = encode({"x": Shared(images, [0, 1, 1, 2, 3, 1])})
    asked: list[int] = []

    def fetch(offset: int, length: int) -> Any:
        asked.append(length)
        return block.fetch(offset, length)

    rows = np.array([1, 2, 5])
    read_column("x", [Part(block.layout, rows, fetch)], copy=True, allocate=allocate)
    assert sum(asked) == 8192
    assert block.layout.ranges("x", rows)[:, 1].tolist() == [8192]


def test_a_damaged_value_names_the_first_of_its_rows() -> None:
    block = encode({"x": Shared([torch.zeros(8192, dtype=torch.uint8) for _ in range(3)], [0, 2, 1, 2])})
    block.bytes[block.layout.node("x").inner.streams[0].offset + 2 * 8192] ^= 1
    with pytest.raises(CorruptBlock, match="'x'") as caught:
        block.read("x", rows=[3, 2, 1])
    assert list(caught.value.rows) == [0]


def test_a_reader_that_lacks_the_kind_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    block, plain = encode({"s": {"x": Shared(IMAGES, INDEX)}}), encode({"x": IMAGES})
    monkeypatch.setattr(header, "CRITICAL_KNOWN", 0)
    with pytest.raises(UnsupportedVersion, match="0x1"):
        Layout.parse(block.directory)
    with pytest.raises(UnsupportedVersion, match="0x1"):
        Layout.open(block.bytes)
    assert Layout.open(plain.bytes).fields == ("x",)  # others stay what they were


@pytest.mark.parametrize(
    ("offset", "form", "value"),
    [
        (8, "<I", 0),  # the flag
        (36, "<I", 2),  # children
        (57, "<q", 2),  # values: of which a row has the third
        (57, "<q", 0),
        (57, "<q", 6),  # more than there are rows
        (57, "<q", -1),
        (57 + 8 + 24, "<B", 3),  # the index of row 0
        (57 + 8 + 8, "<Q", 64),  # bytes of its own
    ],
)
def test_a_directory_that_lies_about_what_is_shared(offset: int, form: str, value: int) -> None:
    directory = bytearray(encode({"x": Shared(IMAGES, INDEX)}).directory)
    struct.pack_into(form, directory, offset, value)
    with pytest.raises(CorruptBlock):
        Layout.parse(resealed(bytes(directory)))


@pytest.mark.parametrize("values", [6, 2**40, 2**63 - 1])
def test_more_values_than_rows_even_if_they_take_no_bytes(values: int) -> None:
    directory = bytearray(encode({"x": Shared(torch.zeros(3, 0), INDEX)}).directory)
    struct.pack_into("<q", directory, 57, values)
    with pytest.raises(CorruptBlock, match="5 rows cannot share"):
        Layout.parse(resealed(bytes(directory)))


@pytest.mark.parametrize(
    ("values", "index", "message"),
    [
        ([1, 2], [0, 2], r"index\[1\]=2, but there are 2"),
        ([1, 2], [0, -1], r"index\[1\]=-1"),
        ([1, 2], np.array([0, 2**64 - 1], np.uint64), r"index\[1\]=18446744073709551615"),
        ([1, 2], [0.0], "int"),
        ([1, 2], [[0]], "int"),
        ([1, 2], [True], "int"),
        (Shared([1], [0]), [0], "shared already"),
    ],
)
def test_what_is_no_index(values: Any, index: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        measure(normalise({"x": Shared(values, index)}))


def test_other_columns_must_be_as_long_as_the_index() -> None:
    with pytest.raises(InvalidArgument, match="has 5"):
        measure({"x": Shared(IMAGES, INDEX), "y": torch.zeros(3)})
    assert measure({"x": Shared(IMAGES, torch.tensor(INDEX)), "y": torch.zeros(5)}).rows == 5
    assert measure({"x": Shared([], []), "y": torch.zeros(0)}).rows == 0
