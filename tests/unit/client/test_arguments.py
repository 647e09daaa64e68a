"""Arguments are taken as what they are, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

from tqclient.arguments import (
    flag,
    int_of,
    names_of,
    pack_groups,
    pack_lookup_groups,
    pack_tags,
    pack_versions,
    row_ids,
    text_of,
)
from tqclient.errors import InvalidArgument
from tqclient.operations.ranges import wanted_ranges
from tqclient.permit import handle_of
from tqclient.wire.packing import I64, unpack_array, unpack_blobs

NANOSECONDS = np.array([1, 2], "M8[ns]")


@pytest.mark.parametrize(
    "ids",
    [
        [3, 1],
        (3, 1),
        (number for number in (3, 1)),
        {3: None, 1: None}.keys(),
        np.array([3, 1], np.uint64),
        torch.tensor([3, 1], dtype=torch.int32),
        [np.int64(3), torch.tensor(1)],
    ],
)
def test_ids(ids: Any) -> None:
    found = row_ids(ids)
    assert (found.dtype, found.tolist()) == (np.int64, [3, 1])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (b"\x01", r"not b'\x01'"),
        (bytearray(b"\x01"), "ids: expected integers, one per row"),
        (memoryview(b"\x01"), "ids: expected integers, one per row"),
        ("12", "expected integers, one per row, not '12'"),
        ({1: "a"}, "ids: expected integers, one per row"),
        (5, "expected integers, one per row, not 5"),
        ([True, 2], "ids: expected integers, one per row"),
        ([np.True_, 2], "ids: expected integers, one per row"),
        (np.array([1, 2**64 - 1], np.uint64), "ids[1]=18446744073709551615: ids are below 2**63"),
        ([2**63], "ids[0]=9223372036854775808: ids are below 2**63"),
        ([2**64], "got object"),
        (NANOSECONDS, "got datetime64[ns]"),
        (torch.ones(2, requires_grad=True), "ids: expected integers, one per row"),
        (torch.empty(2, dtype=torch.int64, device="meta"), "ids: expected integers, one per row"),
        ([[1], [1, 2]], "ids: expected integers, one per row"),
    ],
)
def test_what_is_no_ids(ids: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        row_ids(ids)


def test_what_a_generator_of_ids_raises_is_its_own() -> None:
    with pytest.raises(ZeroDivisionError):
        row_ids(1 // number for number in (1, 0))


@pytest.mark.parametrize(
    "value", [NANOSECONDS[0], np.timedelta64(5, "ns"), np.timedelta64(5, "D"), np.void(b"x"), np.longdouble(1), 1j]
)
def test_tags_and_groups_are_no_times(value: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"tags\['a'\]=.*: expected bool, int, float, str or bytes"):
        pack_tags({"a": value}, 1)
    with pytest.raises(InvalidArgument, match=r"groups\[0\]=.*: expected str, int, bytes or None"):
        pack_groups([value])


@pytest.mark.parametrize(
    ("value", "plain"), [(np.int8(1), 1), (np.float16(0.5), 0.5), (np.True_, True), (np.str_("s"), "s")]
)
def test_a_tag_of_numpys_is_one_of_pythons(value: Any, plain: Any) -> None:
    (packed,) = unpack_blobs(pack_tags({"a": value}, 1), what="tags", rows=1)
    found = msgpack.unpackb(packed)["a"]
    assert (type(found), found) == (type(plain), plain)


@pytest.mark.parametrize(
    ("pack", "what"),
    [
        (lambda values: pack_groups(values, 2), "groups"),
        (lambda values: pack_versions(values, 2), "weight_version"),
        (lambda values: names_of(values, what="fields"), "fields"),
        (lambda values: wanted_ranges({"x": values}), "ranges"),
    ],
)
@pytest.mark.parametrize(
    "values",
    [NANOSECONDS, np.array([1, 2], "m8[s]"), np.zeros(2, "V1"), torch.empty(2, device="meta"), np.array(5), b"ab", {}],
)
def test_several_values_are_not_made_of_others(pack: Callable[[Any], Any], what: str, values: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^{what}"):
        pack(values)


def test_weight_versions() -> None:
    pair = np.array([[1, 2], [3, 3]])
    for given in (pair, pair.tolist(), torch.tensor(pair), list(pair), [(1, 2), np.int32(3)]):
        low, high = (unpack_array(each, I64, what="versions").tolist() for each in pack_versions(given, 2))
        assert (low, high) == ([1, 3], [2, 3])
    for wrong in (np.timedelta64(5, "s"), (1, np.timedelta64(5, "s")), (1, [2]), (1, 2, 3), [[[1], [2, 3]], 1]):
        with pytest.raises(InvalidArgument, match="weight_version"):
            pack_versions(wrong, 2)


def test_names() -> None:
    for names in (["a", "b"], ("a", "b"), iter("ab"), np.array(["a", "b"]), {"a": 1, "b": 2}.keys()):
        assert names_of(names, what="fields") == ["a", "b"]
    for wrong in ("ab", 5, None, {"a": 1}, np.array("a"), torch.tensor(1)):
        with pytest.raises(InvalidArgument, match=r"^fields=.*: give a list of names"):
            names_of(wrong, what="fields")
    with pytest.raises(InvalidArgument, match=r"^fields\[1\]=5: expected a str"):
        names_of(["a", 5], what="fields")


def test_a_group_to_look_up_is_one() -> None:
    assert pack_lookup_groups(group for group in ("g", 3)) == pack_groups(["g", 3])
    with pytest.raises(InvalidArgument, match=r"groups\[1\]=None: expected str, int or bytes"):
        pack_lookup_groups(["g", None])


def test_numbers_texts_and_flags() -> None:
    assert int_of(np.uint8(5), what="n", least=0, most=5) == 5
    for number in (True, np.timedelta64(5, "s"), 5.0, 6, -1, None, "5", torch.tensor(5)):
        with pytest.raises(InvalidArgument, match=r"^n=.*: expected an int from 0 to 5"):
            int_of(number, what="n", least=0, most=5)
    assert (text_of("", what="t"), text_of("é", what="t")) == ("", "é")
    for text in ("\ud800", 5, None, b"x"):
        with pytest.raises(InvalidArgument, match=r"^t=.*: expected a str of UTF-8"):
            text_of(text, what="t")
    assert (flag(np.True_, what="f"), flag(False, what="f")) == (True, False)
    for odd in (1, 0, None, "no", np.array([True])):
        with pytest.raises(InvalidArgument, match=r"^f=.*: expected True or False"):
            flag(odd, what="f")
    assert handle_of(None) is None
    with pytest.raises(InvalidArgument, match=r"^permit=5: expected what Partition\.permit returns"):
        handle_of(5)
