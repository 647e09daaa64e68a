"""What the processes around an arena file share: its first page, and the locks of those that write to it.

The node writes the page; clients only read it, and trust nothing that `ArenaHeader.from_bytes` has not checked. How the
pages up to `data_offset` are used is the node's own affair. All numbers are little-endian:

    0     magic           8 bytes
    8     version         uint32
    12    name_bytes      uint32
    16    arena           uint64
    24    file_bytes      uint64
    32    data_offset     uint64
    40    segment_bytes   uint64
    48    node            UTF-8, then zeros
    4080  checksum        uint64   xxh3-64 of everything in front of it
    4088  seen_sequence   uint64   the only number that changes
"""

from __future__ import annotations

import errno
import fcntl
import struct
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, UnsupportedVersion
from tqclient.limits import ARENA_LOCK_BASE, NAME_BYTES_MAX
from tqclient.wire.packing import U64

MAGIC: Final = b"TQARENA\x00"
VERSION: Final = 1
HEADER_BYTES: Final = 4096

_FIELDS: Final = struct.Struct("<8sIIQQQQ")  # magic, version, bytes of the name, arena, file, data offset, segment
_CHECKSUM: Final = struct.Struct("<Q")  # of everything in front of it, padded name included
_SEQUENCE_OFFSET: Final = HEADER_BYTES - 8  # behind the checksum, because it changes
_FLOCK: Final = struct.Struct("@hhqqi4x")  # struct flock: type, whence, start, length, pid
_ENGINE_BYTE: Final = ARENA_LOCK_BASE - 1  # in front of those of the sessions


@dataclass(frozen=True, slots=True)
class ArenaHeader:
    """The first page of an arena file.

    Attributes:
        arena: the file's identity, drawn at random when it was made.
        file_bytes: length of the file.
        data_offset: extents lie from here on.
        segment_bytes: the node's segment size.
        node: name of the node that owns it.
    """

    arena: int
    file_bytes: int
    data_offset: int
    segment_bytes: int
    node: str

    def to_bytes(self) -> bytes:
        """Returns the page up to the seen sequence, `HEADER_BYTES - 8` long.

        Raises:
            InvalidArgument: the name is too long.
        """
        name = self.node.encode()
        if len(name) > NAME_BYTES_MAX:
            raise InvalidArgument(f"node name of {len(name)} bytes, at most {NAME_BYTES_MAX}")
        fields = _FIELDS.pack(
            MAGIC, VERSION, len(name), self.arena, self.file_bytes, self.data_offset, self.segment_bytes
        )
        body = (fields + name).ljust(_SEQUENCE_OFFSET - _CHECKSUM.size, b"\x00")
        return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def from_bytes(cls, data: bytes) -> ArenaHeader:
        """Reads the first `HEADER_BYTES` of a file.

        Raises:
            InvalidArgument: this is no arena file, or its first page is damaged.
            UnsupportedVersion: it is one of another format.
        """
        if len(data) < HEADER_BYTES or data[: len(MAGIC)] != MAGIC:
            raise InvalidArgument("not an arena file: its first page is not that of one")
        _, version, name_bytes, arena, file_bytes, data_offset, segment_bytes = _FIELDS.unpack_from(data)
        if version != VERSION:
            raise UnsupportedVersion(f"arena file of format {version}; this version knows {VERSION}")
        body = data[: _SEQUENCE_OFFSET - _CHECKSUM.size]
        if _CHECKSUM.unpack_from(data, len(body))[0] != xxhash.xxh3_64_intdigest(body) or name_bytes > NAME_BYTES_MAX:
            raise InvalidArgument("arena file: its first page is damaged")
        if not HEADER_BYTES <= data_offset <= file_bytes:
            raise InvalidArgument(f"arena file: its data begins at {data_offset} of {file_bytes} bytes")
        node = data[_FIELDS.size : _FIELDS.size + name_bytes].decode(errors="replace")
        return cls(arena, file_bytes, data_offset, segment_bytes, node)


def seen_sequence(mapping: Any) -> NDArray[np.uint64]:
    """Views, in a mapped arena file, the highest journal sequence that a controller told the node; uint64 `[1]`.

    It is aligned: a store is one instruction, which no kill can tear.
    """
    return np.frombuffer(mapping, dtype=U64, count=1, offset=_SEQUENCE_OFFSET)


def _flock(kind: int, byte: int) -> bytes:
    return _FLOCK.pack(kind, 0, byte, 1, 0)


def lock_session(descriptor: int, session: int) -> bool:
    """Takes the lock that says: this open file may write for the session. False when another one holds it.

    The kernel drops it when the last descriptor and the last mapping of the open file are gone.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_WRLCK, ARENA_LOCK_BASE + session))
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return False
        raise
    return True


def unlock_session(descriptor: int, session: int) -> None:
    """Gives the lock back; does nothing when this open file does not hold it."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, ARENA_LOCK_BASE + session))


def session_locked(descriptor: int, session: int) -> bool:
    """Whether an open file other than this one holds the session's lock."""
    return _locked(descriptor, ARENA_LOCK_BASE + session)


def lock_engine(descriptor: int) -> None:
    """Takes the lock that says: a transfer engine may write to this file. Any number of engines may hold it."""
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_RDLCK, _ENGINE_BYTE))


def engine_locked(descriptor: int) -> bool:
    """Whether an open file other than this one holds the lock of an engine."""
    return _locked(descriptor, _ENGINE_BYTE)


def _locked(descriptor: int, byte: int) -> bool:
    found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _flock(fcntl.F_WRLCK, byte))
    kind: int = _FLOCK.unpack(found)[0]
    return kind != fcntl.F_UNLCK
