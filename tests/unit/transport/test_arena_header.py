from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tqclient.errors import InvalidArgument, UnsupportedVersion
from tqclient.wire.arena import (
    HEADER_BYTES,
    ArenaHeader,
    lock_session,
    seen_sequence,
    session_locked,
    unlock_session,
)

U64 = st.integers(0, 2**64 - 1)
HEADER = ArenaHeader(arena=2**63 + 1, file_bytes=1 << 40, data_offset=1 << 20, segment_bytes=64 << 20, node="nöde-0")


def test_layout_is_the_documented_one() -> None:
    data = HEADER.to_bytes()
    assert data[:8] == b"TQARENA\0"
    assert struct.unpack_from("<II", data, 8) == (1, 7)  # version; "nöde-0" has 7 bytes
    assert struct.unpack_from("<QQQQ", data, 16) == (2**63 + 1, 1 << 40, 1 << 20, 64 << 20)
    assert data[48:55].decode() == "nöde-0"
    assert data[55:4080] == bytes(4025)
    assert len(data) == 4088


@given(
    arena=U64, file_bytes=st.integers(HEADER_BYTES, 2**64 - 1), segment=U64, node=st.text(max_size=128), data=st.data()
)
def test_round_trip(arena: int, file_bytes: int, segment: int, node: str, data: st.DataObject) -> None:
    header = ArenaHeader(arena, file_bytes, data.draw(st.integers(HEADER_BYTES, file_bytes)), segment, node)
    assert ArenaHeader.from_bytes(header.to_bytes().ljust(HEADER_BYTES, b"\0")) == header


@given(position=st.integers(0, 4087), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(position: int, bit: int) -> None:
    data = bytearray(HEADER.to_bytes())
    data[position] ^= 1 << bit
    with pytest.raises((InvalidArgument, UnsupportedVersion)):
        ArenaHeader.from_bytes(bytes(data) + bytes(8))


@pytest.mark.parametrize("data", [b"", b"TQARENA\0", HEADER.to_bytes(), bytes(HEADER_BYTES)])
def test_what_is_no_arena_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="not an arena"):
        ArenaHeader.from_bytes(data)


@pytest.mark.parametrize("data_offset", [HEADER_BYTES - 1, (1 << 40) + 1])
def test_data_must_begin_within_the_file(data_offset: int) -> None:
    header = ArenaHeader(1, 1 << 40, data_offset, 1, "n")
    with pytest.raises(InvalidArgument, match="begins at"):
        ArenaHeader.from_bytes(header.to_bytes() + bytes(8))


def test_a_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 512"):
        ArenaHeader(1, 8192, 4096, 1, "x" * 513).to_bytes()


def test_the_sequence_is_outside_of_the_checksum() -> None:
    page = bytearray(HEADER.to_bytes().ljust(HEADER_BYTES, b"\0"))
    assert seen_sequence(page).tolist() == [0]
    seen_sequence(page)[0] = 2**64 - 1
    assert page[4088:4096] == b"\xff" * 8
    assert ArenaHeader.from_bytes(bytes(page)) == HEADER


def test_a_lock_belongs_to_the_open_file_description(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    path.write_bytes(b"")
    first, second = os.open(path, os.O_RDWR), os.open(path, os.O_RDWR)
    duplicate = os.dup(first)
    try:
        assert lock_session(first, 7)
        assert lock_session(first, 7)  # again, by its holder
        assert not lock_session(second, 7)
        assert lock_session(second, 8)
        assert (session_locked(second, 7), session_locked(second, 8)) == (True, False)
        os.close(first)
        assert session_locked(second, 7)  # the duplicate keeps the description
        unlock_session(duplicate, 7)
        assert not session_locked(second, 7)
    finally:
        os.close(duplicate)
        os.close(second)
