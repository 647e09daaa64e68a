"""What a filter of tags says of maps, and how few of them it unpacks for it."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqserver.controller.core import tags
from tqserver.controller.core.tags import TagFilter

_PLAIN = st.sampled_from(
    [0, 1, -1, 200, 2**40, True, False, 0.0, -0.0, 1.0, math.nan, "", "t", "é", "x" * 40, b"", b"t"]
)
_VALUES = st.recursive(
    _PLAIN, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("tu"), inner), max_leaves=4
)
_NAMES = st.sampled_from(["t", "u", "aborted", "é", "tt", b"t", "long" * 10])
_MAPS = st.dictionaries(_NAMES, _VALUES, max_size=4)


def _passes(own: dict[Any, Any], where: dict[Any, Any], unaborted: bool) -> bool:
    """Plainly: 1, 1.0 and True are different values, 0.0 and -0.0 are not."""
    has = all(tag in own and type(own[tag]) is type(value) and own[tag] == value for tag, value in where.items())
    return has and not (unaborted and own.get("aborted") is True)


@given(maps=st.lists(_MAPS, max_size=12), where=_MAPS, copies=st.integers(1, 3), unaborted=st.booleans())
def test_a_filter_passes_what_has_all_of_its_tags(
    maps: list[dict[Any, Any]], where: dict[Any, Any], copies: int, unaborted: bool
) -> None:
    maps = [each | dict(list(where.items())[:turn]) for turn, each in enumerate(maps * copies)]
    encoded = [tags.merge(b"", msgpack.packb(each)) for each in maps]
    decoded = [msgpack.unpackb(each) if each else {} for each in encoded]
    passes = TagFilter(msgpack.packb(where), unaborted)
    expected = [_passes(each, msgpack.unpackb(msgpack.packb(where)), unaborted) for each in decoded]
    assert passes.of(encoded).tolist() == expected
    assert [passes(each) for each in encoded] == expected


@pytest.mark.parametrize(
    "where", [{"uid": 77}, {"uid": "77"}, {"uid": 77, "split": "val"}, {"split": ["val"], "no": 1}]
)
def test_a_filter_unpacks_few_of_many_different_maps(where: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    maps = [{"uid": row, "split": "val" if row % 2 else "train"} for row in range(1_000)]
    unpacked, counts = tags.unpacked, list[int]()

    def counted(values: list[bytes]) -> list[dict[Any, Any]]:
        counts.append(len(values))
        return unpacked(values)

    monkeypatch.setattr(tags, "unpacked", counted)
    passes = TagFilter(msgpack.packb(where), False)
    encoded = [msgpack.packb(each) for each in maps]
    monkeypatch.setattr("tqserver.controller.core.tags.msgpack.unpackb", None)  # none by itself, either
    assert passes.of(encoded).tolist() == [_passes(each, where, False) for each in maps]
    assert sum(counts) < 10
