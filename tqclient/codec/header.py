"""The first 64 bytes of a block: what it is, how long it is, and where its directory lies.

The header's size, magic and checksum keep their places in every version, so that a reader tells a newer block from a
damaged one. The directory follows the header; payload streams follow the directory, each on a 64-byte boundary.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arrays import Size
from tqclient.errors import CorruptBlock, UnsupportedVersion

ALIGN: Final = 64
"""Bytes; every stream, and every tensor leaf of a record, begins on a multiple of it."""
HEADER_BYTES: Final = 64
FORMAT: Final = 1
CRITICAL_SHARED: Final = 1
"""Bit of `critical`: some column stores values that rows share. See docs/decisions/0008-shared-values.md."""
CRITICAL_KNOWN: Final = CRITICAL_SHARED
"""Bits of `critical` that this reader understands; an unknown one means that the block cannot be read correctly."""

_MAGIC: Final = b"\x89TQB\r\n\x1a\n"  # a text-mode transfer or a cut high bit breaks it visibly
_FIELDS: Final = struct.Struct("<8sIIQQQQQ")  # magic, format, critical, size, directory offset and length, 2 reserved
_CHECKSUM: Final = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header."""

    size_bytes: int
    directory_bytes: int
    critical: int = 0

    @property
    def directory(self) -> slice:
        """Where the directory lies within the block."""
        return slice(HEADER_BYTES, HEADER_BYTES + self.directory_bytes)

    def to_bytes(self) -> bytes:
        """The 64 bytes."""
        body = _FIELDS.pack(_MAGIC, FORMAT, self.critical, self.size_bytes, HEADER_BYTES, self.directory_bytes, 0, 0)
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def size_of(cls, data: NDArray[np.uint8]) -> int:
        """Returns how long the block is that `data` begins with.

        Raises:
            CorruptBlock: it begins with no block.
            UnsupportedVersion: with one of a newer format.
        """
        size, _, _, _ = cls._fields(data)
        return size

    @classmethod
    def parse(cls, block: NDArray[np.uint8]) -> Header:
        """Reads the header of a whole block.

        Raises:
            CorruptBlock: it is cut, damaged, or no block.
            UnsupportedVersion: a newer format, or a feature that this reader lacks.
        """
        size, offset, length, critical = cls._fields(block)
        if size != block.size or size > limits.BLOCK_BYTES_MAX:
            raise CorruptBlock(f"the block says that it has {size} bytes, but {block.size} are here")
        if offset != HEADER_BYTES or length > size - HEADER_BYTES:
            raise CorruptBlock(f"the directory [{offset}, +{length}] does not fit a block of {size} bytes")
        return cls(size, length, critical)

    @staticmethod
    def _fields(block: NDArray[np.uint8]) -> tuple[int, int, int, int]:
        if block.size < HEADER_BYTES:
            raise CorruptBlock(f"a block of {block.size} bytes is shorter than its header of {HEADER_BYTES}")
        data = block[:HEADER_BYTES].tobytes()
        magic, version, critical, size, offset, length, _, _ = _FIELDS.unpack_from(data)
        if magic != _MAGIC:
            raise CorruptBlock(f"not a block: it begins with {magic!r}")
        if _CHECKSUM.unpack_from(data, _FIELDS.size)[0] != xxhash.xxh3_64_intdigest(data[: _FIELDS.size]):
            raise CorruptBlock("the block's header fails its checksum")
        check_version("block", version, critical)
        return size, offset, length, critical


def check_version(what: str, version: int, critical: int) -> None:
    """Tells a newer format from a damaged one; the checksum was good.

    Raises:
        CorruptBlock: no such version was ever written.
        UnsupportedVersion: it is newer than this reader.
    """
    if version == 0:
        raise CorruptBlock(f"the {what} has format 0, which does not exist")
    if version > FORMAT:
        raise UnsupportedVersion(f"the {what} has format {version}; this client reads up to {FORMAT}: update it")
    if unknown := critical & ~CRITICAL_KNOWN:
        raise UnsupportedVersion(f"the {what} uses features {unknown:#x} that this client lacks: update it")


def aligned(size: Size) -> Size:
    """`size`, or each of them, rounded up to the next 64-byte boundary."""
    return (size + ALIGN - 1) & -ALIGN
