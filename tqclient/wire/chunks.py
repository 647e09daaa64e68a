"""`tq.v1.ReadChunk` without the copies that a protobuf message makes of its bytes; on the wire it is the same.

A chunk is one field of bytes: its tag, its length as a varint, its data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from tqclient.wire.v1.storage_pb2 import ReadChunk

READ_METHOD: Final = "/tq.v1.Storage/Read"
_TAG: Final = ReadChunk.DATA_FIELD_NUMBER << 3 | 2  # length-delimited


def encode_chunk(parts: Sequence[Any], size_bytes: int) -> bytes:
    """Returns the serialized chunk whose data are these parts, back to back.

    Args:
        parts: buffers, contiguous, of bytes.
        size_bytes: of all of them.
    """
    header = bytearray([_TAG])
    rest = size_bytes
    while rest >= 0x80:
        header.append(rest & 0x7F | 0x80)
        rest >>= 7
    header.append(rest)
    return b"".join((header, *parts))


def decode_chunk(message: bytes) -> memoryview:
    """Returns the data of a serialized chunk, a view of it wherever it says nothing else.

    Raises:
        DecodeError: it is no chunk.
    """
    if message[:1] == bytes([_TAG]):
        length = shift = 0
        for position, byte in enumerate(message[1:11], 2):
            length |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                if position + length == len(message):
                    return memoryview(message)[position:]
                break
    return memoryview(ReadChunk.FromString(message).data)
