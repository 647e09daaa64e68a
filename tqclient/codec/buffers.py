"""Tensors and arrays over raw bytes, and raw bytes out of tensors and arrays, without copies in between."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.arrays import bounds
from tqclient.codec import parallel
from tqclient.codec.checksum import PARALLEL_UNIT_MIN, PIECE_BYTES, Checksums
from tqclient.codec.header import ALIGN
from tqclient.limits import KIB, MIB

JOIN_BYTES: Final = MIB
"""Neighbouring rows are joined in runs of so many bytes: with shorter ones, threads wait longer for one another's turns
at the interpreter's lock than they copy."""
CAT_ITEMS_MAX: Final = 32_767
"""From 32,768 elements on, torch.cat leaves its one tight loop over all inputs, and many threads copy a single one."""
TEXT_PIECE_BYTES: Final = 64 * KIB
"""Texts are joined in pieces that malloc has at hand: larger ones are pages that the kernel clears for each put."""
_AS_LARGE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes: what numpy knows of elements whose dtype it lacks."""


def allocate(size: int) -> NDArray[np.uint8]:
    """A new buffer, uint8 [size], 64-byte aligned."""
    raw = np.empty(size + ALIGN, np.uint8)
    skip = -raw.ctypes.data % ALIGN
    return raw[skip : skip + size]


class _Alias:
    """Lends an array's memory to torch, which has no read-only tensors and warns of read-only arrays."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self.owner = array
        self.__array_interface__ = {
            "shape": array.shape,
            "typestr": "|u1",
            "data": (array.ctypes.data, False),
            "version": 3,
        }


def as_tensor(data: NDArray[np.uint8], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """A tensor over `data`, which it keeps alive."""
    if not data.size:
        return torch.empty(tuple(shape), dtype=dtype)
    if not data.flags.writeable:
        data = np.asarray(_Alias(data))
    return torch.from_numpy(data).view(dtype).view(tuple(shape))


def as_array(data: NDArray[np.uint8], dtype: np.dtype[Any], shape: Sequence[int]) -> NDArray[Any]:
    """An array over `data`, which it keeps alive."""
    if not data.size:
        return np.zeros(tuple(shape), dtype)
    return data.view(dtype).reshape(tuple(shape))


def tensor_over(array: NDArray[Any]) -> torch.Tensor | None:
    """A tensor over an array's memory; None: torch has no such dtype, or not in this byte order."""
    try:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    except (TypeError, ValueError):
        return None
    return as_tensor(bytes_of(array), dtype, array.shape)


def rows_of(array: NDArray[Any]) -> list[NDArray[Any]]:
    """One array per row, a view; of shape [] where the rows are scalars."""
    if array.ndim > 1:
        return list(array)
    return [array[row : row + 1].reshape(()) for row in range(len(array))]


def bytes_of(value: torch.Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a tensor or array in row-major order; a view where it is contiguous."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.nbytes else np.empty(0, np.uint8)
    return _flat(value.detach().resolve_conj().resolve_neg().cpu().contiguous())


def elements_of(tensor: torch.Tensor) -> NDArray[Any]:
    """An array over the elements of a tensor of the host; as integers of their size where numpy lacks the dtype."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        return tensor.numpy()
    except TypeError:  # numpy lacks the dtype
        return tensor.view(_AS_LARGE[tensor.itemsize]).numpy()


def _flat(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor. numpy takes one element alone for contiguous whatever its strides are."""
    return elements_of(tensor).reshape(-1).view(np.uint8)


def write_one(value: torch.Tensor | NDArray[Any], checksums: Checksums, later: parallel.Later) -> None:
    """Copies the tensor, or array, that is all of a stream; `later`, as with `write_all`."""
    later.add(_tasks_of_one(value, checksums), checksums.stream.size)


def write_all(values: Sequence[Any], sizes: NDArray[np.int64], checksums: Checksums, later: parallel.Later) -> None:
    """Copies tensors, or arrays, of one dtype back to back into a stream.

    Args:
        values: any strides; equal in all but their leading dimension, or 0-dim.
        sizes: int64, the bytes of each.
        checksums: of the stream, which has as many bytes as they together.
        later: where the copies go; they are made when that is run.
    """
    target = checksums.stream
    if not target.size:
        return
    bounds = [0, *np.cumsum(sizes).tolist()]
    whole = _whole(values[0], target)
    tasks: list[Callable[[], None]] = []
    for low, high in _runs(bounds, CAT_ITEMS_MAX * values[0].itemsize):
        if high - low == 1:
            tasks.extend(copies(values[low], checksums, bounds[low]))
        elif bounds[high] > bounds[low]:
            tasks.append(partial(_write_run, values[low:high], whole, bounds[low : high + 1], checksums))
    later.add(tasks, target.size)


def batches(bounds: Sequence[int] | NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Cuts rows into (first, last + 1) of neighbours that together fit a limit; a larger one stands alone.

    Args:
        bounds: [rows + 1]: row i takes bounds[i]:bounds[i + 1].
        limit: in the same measure.
    """
    found = []
    low, count = 0, len(bounds) - 1
    while low < count:
        high = max(bisect_right(bounds, bounds[low] + limit, low + 1) - 1, low + 1)
        found.append((low, high))
        low = high
    return found


def _runs(bounds: Sequence[int], row_bytes_max: int) -> list[tuple[int, int]]:
    """Cuts rows into (first, last + 1) of neighbours that are joined; one that is too large for that stands alone.

    Args:
        bounds: bytes [rows + 1]: row i takes bounds[i]:bounds[i + 1].
        row_bytes_max: of a row that may be joined.
    """
    rows = len(bounds) - 1
    large = np.flatnonzero(np.diff(bounds) > row_bytes_max).tolist()
    found = []
    for before, row in itertools.pairwise([-1, *large, rows]):
        first = before + 1
        found += [(first + low, first + high) for low, high in batches(bounds[first : row + 1], JOIN_BYTES)]
        if row < rows:
            found.append((row, row + 1))
    return found


def _tasks_of_one(value: Any, checksums: Checksums) -> list[Callable[[], None]]:
    """What writes the value that is all of a stream; one that lies there already is only hashed.

    In units for which threads would take turns, that is left to `Checksums.finish`.
    """
    size = checksums.stream.size
    plain = _plain_bytes(value) if size else None
    if plain is None:
        return copies(value, checksums, 0)
    if plain.ctypes.data != checksums.stream.ctypes.data:
        return _plain_copies(plain, checksums, 0)
    if checksums.unit < PARALLEL_UNIT_MIN:
        return []
    step = parallel.TASK_BYTES
    return [partial(checksums.hash, start, min(start + step, size)) for start in range(0, size, step)]


def _whole(first: Any, target: NDArray[np.uint8]) -> Any:
    """The target as one tensor or array, for values like `first` to be joined in; None if they cannot be."""
    if isinstance(first, np.ndarray):
        if first.dtype.names is not None:
            return None  # field by field, the padding between fields would stay as it was
        return as_array(target, first.dtype, (-1, *first.shape[1:]))
    return as_tensor(target, first.dtype, (-1, *first.shape[1:])) if first.is_cpu else None


def _write_run(values: Sequence[Any], whole: Any, bounds: Sequence[int], checksums: Checksums) -> None:
    """Writes neighbouring small values, in one call if they can be joined; `bounds` are theirs within the stream."""
    if whole is None or not _join(values, whole, bounds[0], bounds[-1]):
        for value, at in zip(values, bounds[:-1], strict=True):
            for copy in copies(value, checksums, at):
                copy()
        return
    checksums.hash(bounds[0], bounds[-1])


def _join(values: Sequence[Any], whole: Any, start: int, stop: int) -> bool:
    if isinstance(values[0], np.ndarray):
        join: Any = np.concatenate if values[0].ndim else np.stack
    else:
        join = torch.cat if values[0].ndim else torch.stack
    item = whole.itemsize * math.prod(whole.shape[1:])
    try:
        with torch.no_grad():
            join(values, out=whole[start // item : stop // item])
    except RuntimeError:  # a tensor is on a device
        return False
    return True


def copies(value: torch.Tensor | NDArray[Any], checksums: Checksums, at: int) -> list[Callable[[], None]]:
    """The independent tasks that together copy a value to `at` in the stream and hash it."""
    if not value.nbytes:
        return []
    plain = _plain_bytes(value)
    if plain is not None:
        return _plain_copies(plain, checksums, at)
    if value.ndim == 0:
        return [partial(_copy_rows, value[None], checksums, at)]
    row_bytes = value.nbytes // len(value)
    step = max(1, parallel.TASK_BYTES // row_bytes)
    return [
        partial(_copy_rows, value[row : row + step], checksums, at + row * row_bytes)
        for row in range(0, len(value), step)
    ]


def _plain_copies(plain: NDArray[np.uint8], checksums: Checksums, at: int) -> list[Callable[[], None]]:
    tasks = range(0, plain.size, parallel.TASK_BYTES)
    return [partial(_copy_bytes, plain[start : start + parallel.TASK_BYTES], checksums, at + start) for start in tasks]


def _plain_bytes(value: torch.Tensor | NDArray[Any]) -> NDArray[np.uint8] | None:
    """The bytes of a value where they lie as they shall be written."""
    if isinstance(value, np.ndarray):
        return value.reshape(-1).view(np.uint8) if value.flags.c_contiguous else None
    if not value.is_cpu or not value.is_contiguous() or value.is_conj() or value.is_neg():
        return None
    return _flat(value)


def _copy_bytes(source: NDArray[np.uint8], checksums: Checksums, at: int) -> None:
    target = checksums.stream
    for position in range(0, source.size, PIECE_BYTES):
        piece = source[position : position + PIECE_BYTES]
        start = at + position
        np.copyto(target[start : start + piece.size], piece)
        # From the last unit's start on, so that a unit that ends in this piece is hashed by it.
        checksums.hash(max(at, start - checksums.unit + 1), start + piece.size)


def _copy_rows(value: torch.Tensor | NDArray[Any], checksums: Checksums, at: int) -> None:
    """Rows whose strides, device or conjugation need the library's own copy."""
    row_bytes = value.nbytes // len(value)
    step = max(1, PIECE_BYTES // row_bytes)
    for row in range(0, len(value), step):
        part = value[row : row + step]
        start, stop = at + row * row_bytes, at + (row + len(part)) * row_bytes
        target = checksums.stream[start:stop]
        if isinstance(part, np.ndarray):
            raw = np.dtype(f"V{part.dtype.itemsize}")  # moves bytes, whatever they mean
            np.copyto(target.view(raw).reshape(part.shape), part.view(raw))
        else:
            with torch.no_grad():
                as_tensor(target, part.dtype, part.shape).copy_(part)
        checksums.hash(max(at, start - checksums.unit + 1), stop)


def write_bytes(source: bytes, checksums: Checksums) -> None:
    """Copies a whole stream of plain bytes."""
    _copy_bytes(np.frombuffer(source, np.uint8), checksums, 0)


def pieces(sizes: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Cuts texts into (first, last + 1) of those that are joined at once.

    Args:
        sizes: int64, of each.
    """
    return batches(bounds(sizes), TEXT_PIECE_BYTES)


def write_joined(values: Sequence[str] | Sequence[bytes], sizes: NDArray[np.int64], checksums: Checksums) -> None:
    """Copies bytes, or texts of ASCII alone, back to back into a stream.

    Args:
        values: of one type.
        sizes: int64, the bytes of each.
        checksums: of the stream, which has as many bytes as they together.
    """
    target, unit = checksums.stream, checksums.unit
    stop = 0
    for low, high in pieces(sizes):
        joined = _joined(values[low:high])
        start, stop = stop, stop + len(joined)
        target[start:stop] = np.frombuffer(joined, np.uint8)
        checksums.hash(start - start % unit, stop)


def _joined(values: Any) -> bytes:
    if isinstance(values[0], str):
        return "".join(values).encode("ascii")
    return values[0] if len(values) == 1 else b"".join(values)
