"""Strings cut apart, by whichever way is fastest for them: always those that were joined."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqclient.wire.texts import cut_texts


def cut(parts: list[bytes]) -> list[str]:
    bounds = np.concatenate(([0], np.cumsum([len(part) for part in parts]))).astype(np.int64)
    return cut_texts(np.frombuffer(b"".join(parts), np.uint8), bounds)


@given(st.lists(st.text(max_size=70)))
def test_texts_of_any_lengths_come_back(texts: list[str]) -> None:
    assert cut([text.encode() for text in texts]) == texts


@given(st.integers(0, 20).flatmap(lambda size: st.lists(st.text("aä\0 €", min_size=size, max_size=size))))
def test_texts_as_long_as_each_other_come_back(texts: list[str]) -> None:
    assert cut([text.encode() for text in texts]) == texts


@pytest.mark.parametrize("texts", [["x" * 600] * 3, ["x" * 600, "y"], ["", "", ""], ["\0", "\0"], ["", "a\0"], []])
def test_long_empty_and_odd_ones_come_back(texts: list[str]) -> None:
    assert cut([text.encode() for text in texts]) == texts


@pytest.mark.parametrize("parts", [[b"\xc3", b"\xa9"], [b"a", b"\xff"], [b"\xc3", b"\xa9a"], [b"a" * 600, b"\xe2\x82"]])
def test_each_must_be_utf8_by_itself(parts: list[bytes]) -> None:
    with pytest.raises(UnicodeDecodeError):
        cut(parts)
