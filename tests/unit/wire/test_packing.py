"""Packed arrays and strings: what the bytes are, that they come back, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqclient.errors import InvalidArgument
from tqclient.wire import packing
from tqclient.wire.packing import I64, U8, U32, U64
from tqclient.wire.v1.common_pb2 import Packed

LAYOUT = [
    (I64, [1, -2], "0100000000000000feffffffffffffff"),
    (U64, [2**64 - 1], "ffffffffffffffff"),
    (U32, [1, 258], "0100000002010000"),
    (U8, [0, 255], "00ff"),
    (I64, [], ""),
]


@pytest.mark.parametrize(("dtype", "values", "expected"), LAYOUT, ids=str)
def test_an_array_is_little_endian_without_a_header(dtype: np.dtype, values: list[int], expected: str) -> None:
    packed = packing.pack_array(values, dtype)
    assert packed.hex() == expected
    assert packing.unpack_array(packed, dtype, what="x", rows=len(values)).tolist() == values


@pytest.mark.parametrize(
    ("dtype", "value"), [(U8, 256), (U32, -1), (U64, 2**64), (I64, 2**63)], ids=["u1", "u4", "u8", "i8"]
)
def test_a_value_out_of_range_is_refused(dtype: np.dtype, value: int) -> None:
    with pytest.raises(OverflowError):
        packing.pack_array([value], dtype)
    with pytest.raises(OverflowError):
        packing.pack_array(np.array([value]), dtype)


def test_columns_come_back_as_a_read_only_table() -> None:
    table = packing.unpack_array(packing.pack_array([[1, 2, 3], [4, 5, 6]], U64), U64, what="extents", columns=3)
    assert table.tolist() == [[1, 2, 3], [4, 5, 6]]
    assert not table.flags.writeable


def test_a_strided_array_packs_its_values() -> None:
    values = np.arange(6, dtype=np.int64).reshape(2, 3).T
    assert packing.unpack_array(packing.pack_array(values, I64), I64, what="x").tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize(
    ("data", "rows", "columns"),
    [(b"1234567", None, 1), (bytes(16), 1, 1), (bytes(8), 2, 1), (b"", 1, 1), (bytes(16), None, 3), (bytes(24), 2, 3)],
)
def test_a_length_that_does_not_fit_is_refused_by_name(data: bytes, rows: int | None, columns: int) -> None:
    with pytest.raises(InvalidArgument, match=f"version_min: {len(data)} bytes"):
        packing.unpack_array(data, I64, what="version_min", rows=rows, columns=columns)


def test_strings_lie_back_to_back_with_their_ends() -> None:
    packed = packing.pack_strings(["ab", "", "é"])
    assert packed.data == b"ab\xc3\xa9"
    assert np.frombuffer(packed.ends, "<u4").tolist() == [2, 2, 4]
    assert packing.unpack_strings(packed, what="keys", rows=3) == ["ab", "", "é"]


@given(st.lists(st.binary(max_size=40), max_size=20))
def test_blobs_come_back(blobs: list[bytes]) -> None:
    packed = Packed.FromString(packing.pack_blobs(blobs).SerializeToString())
    assert packing.unpack_blobs(packed, what="tags", rows=len(blobs)) == blobs


def _packed(data: bytes, ends: list[int]) -> Packed:
    return Packed(data=data, ends=np.array(ends, "<u4").tobytes())


@pytest.mark.parametrize(
    "packed",
    [
        _packed(b"abc", [2]),
        _packed(b"abc", [4]),
        _packed(b"abc", []),
        _packed(b"abc", [2, 1, 3]),
        _packed(b"abc", [4, 3]),
        Packed(data=b"", ends=b"123"),
    ],
    ids=["short", "long", "no-ends", "descending", "beyond-then-back", "ragged-ends"],
)
def test_ends_that_lie_are_refused(packed: Packed) -> None:
    with pytest.raises(InvalidArgument, match="keys"):
        packing.unpack_blobs(packed, what="keys")


def test_a_wrong_number_of_strings_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"keys\.ends"):
        packing.unpack_strings(packing.pack_strings(["a", "b"]), what="keys", rows=3)


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="keys: not UTF-8"):
        packing.unpack_strings(packing.pack_blobs([b"\xff"]), what="keys")


@given(st.binary(max_size=24), st.binary(max_size=24))
def test_arbitrary_bytes_either_unpack_whole_or_are_refused(data: bytes, ends: bytes) -> None:
    try:
        blobs = packing.unpack_blobs(Packed(data=data, ends=ends), what="keys")
    except InvalidArgument:
        return
    assert b"".join(blobs) == data
    assert len(blobs) * 4 == len(ends)


@given(st.lists(st.sampled_from([0, 1, 255, 256, 65_535, 65_536, (1 << 32) - 1])))
def test_narrow_integers_come_back_and_take_no_more_than_the_largest_needs(values: list[int]) -> None:
    packed, width = packing.pack_narrow(np.array(values, np.int64))
    assert packing.unpack_narrow(packed, width, what="x", rows=len(values)).tolist() == values
    assert width == next(bytes_ for bytes_ in (1, 2, 4) if max(values, default=0) < 1 << (8 * bytes_))
    assert len(packed) == width * len(values)
