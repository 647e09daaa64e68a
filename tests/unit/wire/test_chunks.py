from __future__ import annotations

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from tqclient.wire.chunks import decode_chunk, encode_chunk
from tqclient.wire.v1.storage_pb2 import ReadChunk


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=5))
def test_it_is_what_protobuf_writes(parts: list[bytes]) -> None:
    whole = b"".join(parts)
    encoded = encode_chunk([np.frombuffer(part, np.uint8) for part in parts], len(whole))
    assert ReadChunk.FromString(encoded).data == whole
    assert bytes(decode_chunk(encoded)) == whole
    assert bytes(decode_chunk(ReadChunk(data=whole).SerializeToString())) == whole


@pytest.mark.parametrize("size", [1, 127, 128, 16_383, 16_384, 1 << 20])
def test_lengths_of_one_to_three_bytes(size: int) -> None:
    data = np.arange(size, dtype=np.uint8)
    encoded = encode_chunk([data], size)
    assert encoded == ReadChunk(data=data.tobytes()).SerializeToString()
    assert decode_chunk(encoded) == memoryview(data)


def test_data_are_not_copied() -> None:
    message = encode_chunk([b"abcd"], 4)
    view = decode_chunk(message)
    assert view.obj is message


def test_other_spellings_of_a_chunk_are_read_as_well() -> None:
    assert decode_chunk(b"") == b""  # protobuf leaves an empty field out
    assert decode_chunk(b"\x0a\x84\x00abcd") == b"abcd"  # a length that is longer than it need be
    assert decode_chunk(b"\x0a\x01a\x0a\x02bc") == b"bc"  # the last one counts
    assert decode_chunk(b"\x0a\x02ab\x10\x07") == b"ab"  # with a field that this version does not know


@pytest.mark.parametrize(
    "message", [b"\x0a", b"\x0a\x05abc", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x00"]
)
def test_what_is_no_chunk_is_refused(message: bytes) -> None:
    with pytest.raises(DecodeError):
        decode_chunk(message)
