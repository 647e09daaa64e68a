"""Tensors and arrays over raw bytes, and raw bytes out of tensors and arrays, without copies in between."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import parallel
from tqclient.codec.checksum import PARALLEL_UNIT_MIN, PIECE_BYTES, Checksums
from tqclient.codec.header import ALIGN

CAT_ITEMS_MAX: Final = 32_767
"""From 32,768 elements on, torch.cat leaves its one tight loop for a tensor iterator per input."""
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


def bytes_of(value: torch.Tensor | NDArray[Any]) -> NDArray[np.uint8]:
    """The bytes of a tensor or array in row-major order; a view where it is contiguous."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8) if value.nbytes else np.empty(0, np.uint8)
    return _flat(value.detach().resolve_conj().resolve_neg().cpu().contiguous())


def _flat(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor. numpy takes one element alone for contiguous whatever its strides are."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        array = tensor.numpy()
    except TypeError:  # numpy lacks the dtype
        array = tensor.view(_AS_LARGE[tensor.itemsize]).numpy()
    return array.reshape(-1).view(np.uint8)


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
    runs = batches(bounds, _run_bytes(values[0]))
    places = _places(values[0], target, [(bounds[low], bounds[high]) for low, high in runs])
    tasks: list[Callable[[], None]] = []
    for first, last in _tasks(runs, bounds):
        low, high = runs[first][0], runs[last - 1][1]
        if high - low == 1:
            tasks.extend(copies(values[low], checksums, bounds[low]))
        elif bounds[high] > bounds[low]:
            tasks.append(partial(_write_runs, values, runs[first:last], places[first:last], bounds, checksums))
    later.add(tasks, target.size)


def _run_bytes(first: Any) -> int:
    """How much of neighbouring values is joined in one call."""
    return min(PIECE_BYTES, CAT_ITEMS_MAX * first.element_size()) if isinstance(first, torch.Tensor) else PIECE_BYTES


def batches(bounds: Sequence[int], limit: int) -> list[tuple[int, int]]:
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


def _tasks(runs: Sequence[tuple[int, int]], bounds: Sequence[int]) -> list[tuple[int, int]]:
    """Brings neighbouring runs together that one thread hashes while they are in its cache; lone rows stay alone.

    Returns:
        (first, last + 1) of the runs.
    """
    tasks: list[tuple[int, int]] = []
    start, room = 0, PIECE_BYTES
    for index, (low, high) in enumerate(runs):
        room -= bounds[high] - bounds[low]
        alone = high - low == 1
        if index > start and (alone or room < 0):
            tasks.append((start, index))
            start, room = index, PIECE_BYTES - bounds[high] + bounds[low]
        if alone:
            tasks.append((index, index + 1))
            start, room = index + 1, PIECE_BYTES
    if start < len(runs):
        tasks.append((start, len(runs)))
    return tasks


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


def _places(first: Any, target: NDArray[np.uint8], spans: Sequence[tuple[int, int]]) -> list[Any]:
    """Tensors or arrays over spans of the target, for values like `first` to be joined in; empty if they cannot be."""
    shape = first.shape[1:]
    if isinstance(first, np.ndarray):
        if first.dtype.names is not None:
            return []  # field by field, the padding between fields would stay as it was
        whole: Any = as_array(target, first.dtype, (-1, *shape))
    elif first.is_cpu:
        whole = as_tensor(target, first.dtype, (-1, *shape))
    else:
        return []
    item = whole.itemsize * math.prod(shape)
    return [whole[start // item : stop // item] for start, stop in spans]


def _write_runs(
    values: Sequence[Any],
    runs: Sequence[tuple[int, int]],
    places: Sequence[Any],
    bounds: Sequence[int],
    checksums: Checksums,
) -> None:
    """Writes neighbouring small values, each run of them in one call."""
    low, high = runs[0][0], runs[-1][1]
    if places and _join(values, runs, places):
        checksums.hash(bounds[low], bounds[high])
        return
    for row in range(low, high):
        for copy in copies(values[row], checksums, bounds[row]):
            copy()


def _join(values: Sequence[Any], runs: Sequence[tuple[int, int]], places: Sequence[Any]) -> bool:
    first: Any = values[runs[0][0]]
    if isinstance(first, np.ndarray):
        join: Any = np.concatenate if first.ndim else np.stack
    else:
        join = torch.cat if first.ndim else torch.stack
    try:
        with torch.no_grad():
            for (low, high), place in zip(runs, places, strict=True):
                join(values[low:high], out=place)
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
