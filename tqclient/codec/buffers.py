"""Tensors and arrays over raw bytes, and raw bytes out of tensors and arrays, without copies in between."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.codec import parallel
from tqclient.codec.checksum import PARALLEL_UNIT_MIN, PIECE_BYTES, Checksums
from tqclient.codec.header import ALIGN

_CAT_ITEMS_MAX: Final = 32_767
"""From 32,768 elements on, torch.cat leaves its one tight loop for a tensor iterator per input."""


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
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return _flat(plain) if plain.numel() else np.empty(0, np.uint8)


def _flat(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor; one element alone is contiguous whatever its strides, so `view` won't do."""
    items: Any = tensor.as_strided((tensor.numel(),), (1,))
    return np.asarray(items.view(torch.uint8).numpy())


def write_all(values: Sequence[Any], sizes: NDArray[np.int64], target: NDArray[np.uint8], unit: int) -> Any:
    """Copies tensors, or arrays, of one dtype back to back into a stream.

    Args:
        values: any strides; equal in all but their leading dimension, or 0-dim.
        sizes: int64, the bytes of each.
        target: uint8 [sum of sizes].
        unit: bytes per checksum.

    Returns:
        uint64, one checksum per unit.
    """
    checksums = Checksums(target, unit)
    if len(values) == 1:
        _write_one(values[0], checksums)
        return checksums.finish()
    bounds = np.zeros(len(values) + 1, np.int64)
    np.cumsum(sizes, out=bounds[1:])
    tasks: list[Callable[[], None]] = []
    for low, high in _batches(bounds, _batch_bytes(values)):
        start, stop = int(bounds[low]), int(bounds[high])
        if start == stop:
            continue
        if high - low > 1:
            tasks.append(partial(_write_batch, values[low:high], checksums, start, stop))
        else:
            tasks.extend(copies(values[low], checksums, start))
    parallel.run(tasks, target.size)
    return checksums.finish()


def _write_one(value: Any, checksums: Checksums) -> None:
    """Writes the value that is all of a stream; one that lies there already is only hashed."""
    size = checksums.stream.size
    plain = _plain_bytes(value) if size else None
    if plain is None:
        tasks = copies(value, checksums, 0)
    elif plain.ctypes.data != checksums.stream.ctypes.data:
        tasks = _plain_copies(plain, checksums, 0)
    else:
        step = parallel.TASK_BYTES if checksums.unit >= PARALLEL_UNIT_MIN else size
        tasks = [partial(checksums.hash, start, min(start + step, size)) for start in range(0, size, step)]
    parallel.run(tasks, size)


def _batch_bytes(values: Sequence[Any]) -> int:
    if values and isinstance(values[0], torch.Tensor):
        return min(PIECE_BYTES, _CAT_ITEMS_MAX * values[0].element_size())
    return PIECE_BYTES


def _batches(bounds: NDArray[np.int64], batch_bytes: int) -> list[tuple[int, int]]:
    """Neighbours that together fit `batch_bytes`; a larger one stands alone."""
    batches = []
    low, count = 0, len(bounds) - 1
    while low < count:
        high = int(np.searchsorted(bounds, bounds[low] + batch_bytes, side="right")) - 1
        high = min(max(high, low + 1), count)
        batches.append((low, high))
        low = high
    return batches


def _write_batch(values: Sequence[Any], checksums: Checksums, start: int, stop: int) -> None:
    """Joins small values in one call."""
    target, first = checksums.stream[start:stop], values[0]
    joined = _join_arrays(values, target) if isinstance(first, np.ndarray) else _join_tensors(values, target)
    if joined:
        checksums.hash(start, stop)
        return
    for value in values:
        for copy in copies(value, checksums, start):
            copy()
        start += value.nbytes


def _join_tensors(tensors: Sequence[torch.Tensor], target: NDArray[np.uint8]) -> bool:
    first = tensors[0]
    if not all(tensor.is_cpu for tensor in tensors):
        return False
    with torch.no_grad():
        if first.dim():
            torch.cat(tuple(tensors), out=as_tensor(target, first.dtype, (-1, *first.shape[1:])))
        else:
            torch.stack(tuple(tensors), out=as_tensor(target, first.dtype, (-1,)))
    return True


def _join_arrays(arrays: Sequence[NDArray[Any]], target: NDArray[np.uint8]) -> bool:
    first = arrays[0]
    if first.dtype.names is not None:
        return False  # field by field, the padding between fields would stay as it was
    join = np.concatenate if first.ndim else np.stack
    join(arrays, out=as_array(target, first.dtype, (-1, *first.shape[1:])))
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
    return _flat(value.detach())


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


def write_bytes(source: bytes, target: NDArray[np.uint8], unit: int) -> NDArray[np.uint64]:
    """Copies a whole stream of plain bytes and returns its checksums."""
    checksums = Checksums(target, unit)
    _copy_bytes(np.frombuffer(source, np.uint8), checksums, 0)
    return checksums.finish()
