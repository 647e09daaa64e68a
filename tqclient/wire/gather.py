"""The gather protocol: many ranges of an arena for one round trip over a plain TCP connection.

All numbers are little-endian. A connection carries one request after another; there is no greeting.

Request: HEADER, then `ranges` x (uint64 offset in the arena file, uint64 length).
    HEADER is 8 bytes of magic `tqgather`, uint64 secret (MooncakeEndpoint.gather_secret), uint64 ranges (1 to
    RANGES_MAX).
Answer: uint32 status; behind OK the bytes of the ranges, back to back in the order asked for, and nothing else.
    A request that is refused with another status is followed by the end of the connection.

The end of the connection is the whole answer to a header with another magic or secret, or with too many ranges, and to
a peer that takes longer than GATHER_SECONDS until its next request is there, or with the answer. Generations are not
checked: as after a one-sided read, the reader verifies checksums.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqclient.limits import MIB
from tqclient.wire.packing import U64, pack_array, unpack_array

MAGIC: Final = b"tqgather"
_HEADER: Final = struct.Struct("<8sQQ")
HEADER_BYTES: Final = _HEADER.size
RANGE_BYTES: Final = 16
STATUS: Final = struct.Struct("<I")
OK: Final = 0
OUT_OF_BOUNDS: Final = 1
"""A range does not lie in the arena's data, or they are more than ANSWER_BYTES_MAX together."""
RANGES_MAX: Final = 1 << 16
"""Of one request: 1 MiB of them."""
ANSWER_BYTES_MAX: Final = 64 * MIB
"""Of all ranges of one request."""
BUFFERS_MAX: Final = 1024
"""Of one system call: the kernel's IOV_MAX."""
GATHER_SECONDS: Final = 10.0
"""How long a server waits for a request, and then for its answer to be taken."""


def pack_request(secret: int, ranges: NDArray[np.uint64]) -> bytes:
    """Packs one request.

    Args:
        secret: of the engine.
        ranges: `[n, 2]`: offset, length.
    """
    return _HEADER.pack(MAGIC, secret, len(ranges)) + pack_array(ranges, U64)


def unpack_header(data: bytes | bytearray, secret: int) -> int:
    """Returns how many ranges follow a request's header.

    Raises:
        InvalidArgument: it is none of this engine's.
    """
    magic, told, ranges = _HEADER.unpack(data)
    if magic != MAGIC or told != secret or not 1 <= ranges <= RANGES_MAX:
        raise InvalidArgument("not the header of a gather from this engine")
    return int(ranges)


def unpack_ranges(data: bytes | bytearray, start: int, stop: int) -> list[tuple[int, int]]:
    """Unpacks the ranges of a request as (start, stop) runs of the arena file.

    Args:
        data: RANGE_BYTES for each.
        start: of the bytes that they must lie in.
        stop: their end.

    Raises:
        InvalidArgument: one is out of bounds, or they are too long together.
    """
    ranges: NDArray[Any] = unpack_array(bytes(data), U64, what="ranges", columns=2)
    offsets, lengths = ranges[:, 0], ranges[:, 1]
    low, high = np.uint64(start), np.uint64(stop)
    # Compared so that no sum can wrap.
    outside = (offsets < low) | (offsets > high) | (lengths > high - np.minimum(offsets, high))
    outside |= lengths > np.uint64(ANSWER_BYTES_MAX)
    if outside.any() or int(lengths.sum()) > ANSWER_BYTES_MAX:
        raise InvalidArgument("ranges out of bounds")
    return list(zip(offsets.tolist(), (offsets + lengths).tolist(), strict=True))


def advance(buffers: list[memoryview], index: int, count: int) -> int:
    """Takes `count` bytes off the buffers from `index` on; returns the index of the first that is not used up."""
    while index < len(buffers) and count >= len(buffers[index]):
        count -= len(buffers[index])
        index += 1
    if count:
        buffers[index] = buffers[index][count:]
    return index


def bound(connection: socket.socket, deadline: float | None, event: int) -> None:
    """Bounds the next call on a blocking socket: it fails with BlockingIOError, or ends early, at the deadline.

    The kernel keeps the time. With Python's time-out, a call would end whenever the socket's buffer is full or empty,
    and each further one pass all the buffers again. A signal ends a call early that has moved something. One that has
    not Python repeats, with all of its time anew: so it begins only once there is something to be moved.

    Args:
        connection: the socket.
        deadline: in monotonic seconds; None: none.
        event: what the call waits for: POLLIN or POLLOUT.

    Raises:
        TimeoutError: it has passed.
    """
    left = 0.0  # for ever
    if deadline is not None:
        ready = select.poll()
        ready.register(connection, event)
        ready.poll(max(0.0, deadline - time.monotonic()) * 1000)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
    value = struct.pack("@ll", int(left), int(left % 1 * 1e6) or int(deadline is not None))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, value)


def batches(runs: NDArray[np.uint64]) -> list[NDArray[np.uint64]]:
    """Cuts (start, stop) runs into the ranges of as few requests as the bounds allow, in their order; each `[n, 2]`."""
    whole = np.stack((runs[:, 0], runs[:, 1] - runs[:, 0]), axis=1)
    if 1 <= len(whole) <= RANGES_MAX and int(whole[:, 1].sum()) <= ANSWER_BYTES_MAX:
        return [whole]
    requests: list[list[tuple[int, int]]] = [[]]
    room = ANSWER_BYTES_MAX
    for run_start, stop in runs.tolist():
        start = run_start
        while start < stop:
            if room == 0 or len(requests[-1]) == RANGES_MAX:
                requests.append([])
                room = ANSWER_BYTES_MAX
            length = min(stop - start, room)
            requests[-1].append((start, length))
            start += length
            room -= length
    return [np.array(request, np.uint64).reshape(-1, 2) for request in requests if request]
