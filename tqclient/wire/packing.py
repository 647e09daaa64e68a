"""Packed little-endian arrays and strings: how bulk metadata crosses the wire."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument
from tqclient.wire.texts import cut_texts
from tqclient.wire.v1.common_pb2 import Packed

I64 = np.dtype("<i8")
U64 = np.dtype("<u8")
U32 = np.dtype("<u4")
U16 = np.dtype("<u2")
U8 = np.dtype("u1")


def pack_array(values: Any, dtype: np.dtype[Any]) -> bytes:
    """Packs integers into little-endian bytes.

    Args:
        values: ints, any shape; a value that `dtype` cannot hold raises OverflowError.
        dtype: one of this module's dtypes.
    """
    if not isinstance(values, np.ndarray):
        return np.ascontiguousarray(values, dtype=dtype).tobytes()  # raises by itself when one does not fit
    if values.dtype == dtype:
        return values.tobytes()
    packed = values.astype(dtype)
    if not np.can_cast(values.dtype, dtype) and not np.array_equal(packed, values):  # it wrapped around
        raise OverflowError(f"values of {values.dtype} beyond {dtype}")
    return packed.tobytes()


def unpack_array(
    data: bytes, dtype: np.dtype[Any], *, what: str, rows: int | None = None, columns: int = 1
) -> NDArray[Any]:
    """Views packed bytes as an array.

    Args:
        data: what `pack_array` made.
        dtype: one of this module's dtypes.
        what: the name of the wire field, for the error.
        rows: how many there must be; None takes any number.
        columns: numbers per row.

    Returns:
        A read-only view, `[rows]`, or `[rows, columns]` when there are several columns.

    Raises:
        InvalidArgument: the length does not fit.
    """
    width = dtype.itemsize * columns
    if len(data) % width or (rows is not None and len(data) != rows * width):
        expected = f"{rows} × {width}" if rows is not None else f"a multiple of {width}"
        raise InvalidArgument(f"{what}: {len(data)} bytes, expected {expected}")
    array = np.frombuffer(data, dtype=dtype)
    return array if columns == 1 else array.reshape(-1, columns)


def pack_narrow(values: NDArray[Any]) -> tuple[bytes, int]:
    """Packs integers from 0 to 2**32 - 1 in as few bytes each as the largest one needs; returns that number, too."""
    most = int(values.max(initial=0))
    dtype = U8 if most < 1 << 8 else U16 if most < 1 << 16 else U32
    return pack_array(values, dtype), dtype.itemsize


def unpack_narrow(data: bytes, width: int, *, what: str, rows: int) -> NDArray[np.uint32]:
    """Unpacks what `pack_narrow` made; a width of 0 is 4.

    Raises:
        InvalidArgument: there is no such width, or the length does not fit.
    """
    dtypes: dict[int, np.dtype[Any]] = {0: U32, 1: U8, 2: U16, 4: U32}
    dtype = dtypes.get(width)
    if dtype is None:
        raise InvalidArgument(f"{what}: integers of {width} bytes; expected 1, 2 or 4")
    return unpack_array(data, dtype, what=what, rows=rows).astype(U32, copy=False)


def pack_blobs(blobs: Iterable[bytes]) -> Packed:
    """Packs byte strings; fewer than 4 GiB in all."""
    parts = list(blobs)
    ends = np.cumsum(np.fromiter(map(len, parts), dtype=np.uint64, count=len(parts)), dtype=np.uint64)
    if len(ends) and int(ends[-1]) >= 1 << 32:
        raise InvalidArgument(f"{int(ends[-1])} bytes of packed strings, at most {(1 << 32) - 1}")
    return Packed(data=b"".join(parts), ends=ends.astype(U32).tobytes())


def unpack_blobs(packed: Packed, *, what: str, rows: int | None = None) -> list[bytes]:
    """Unpacks what `pack_blobs` made.

    Raises:
        InvalidArgument: the number, order or extent of the strings does not fit.
    """
    data, bounds = packed.data, _bounds(packed, what, rows)
    return [data[start:end] for start, end in itertools.pairwise(bounds.tolist())]


def _bounds(packed: Packed, what: str, rows: int | None) -> NDArray[np.int64]:
    ends = unpack_array(packed.ends, U32, what=f"{what}.ends", rows=rows)
    if (int(ends[-1]) if len(ends) else 0) != len(packed.data):
        raise InvalidArgument(f"{what}: {len(packed.data)} bytes of data, but the last string ends elsewhere")
    if len(ends) > 1 and bool(np.any(ends[1:] < ends[:-1])):
        raise InvalidArgument(f"{what}.ends: not ascending")
    return np.concatenate((np.zeros(1, np.int64), ends))


def pack_strings(strings: Sequence[str]) -> Packed:
    """Packs strings as UTF-8."""
    return pack_blobs(string.encode() for string in strings)


def unpack_strings(packed: Packed, *, what: str, rows: int | None = None) -> list[str]:
    """Unpacks UTF-8 strings.

    Raises:
        InvalidArgument: as `unpack_blobs`, or a string is not UTF-8.
    """
    bounds = _bounds(packed, what, rows)
    try:
        return cut_texts(np.frombuffer(packed.data, np.uint8), bounds)
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{what}: not UTF-8 ({error.reason})") from None
