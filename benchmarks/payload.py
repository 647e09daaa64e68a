"""The bytes that `tq-bench transport` moves: a batch of large values, a block of small rows, and one small row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from tqclient.limits import KIB, MIB

Batch: TypeAlias = Literal["large", "scattered", "small"]
Bytes: TypeAlias = NDArray[np.uint8]
Rows: TypeAlias = NDArray[np.int64]
ROW_BYTES: Final = 4 * KIB


@dataclass(frozen=True, slots=True)
class Shape:
    """How much is moved.

    Attributes:
        values: of the large batch.
        value_bytes: of each; a multiple of `ROW_BYTES`.
        block_rows: of `ROW_BYTES`, among which the scattered rows lie.
        scattered_rows: that one get brings.
    """

    values: int = 64
    value_bytes: int = 4 * MIB
    block_rows: int = 20_480
    scattered_rows: int = 1_000

    def size_bytes(self, batch: Batch) -> int:
        """Returns the bytes that one put or get of a batch moves."""
        return {
            "large": self.values * self.value_bytes,
            "scattered": self.scattered_rows * ROW_BYTES,
            "small": ROW_BYTES,
        }[batch]

    @property
    def block_offset(self) -> int:
        """Bytes in front of the block of rows in a buffer that holds everything; the large batch is at 0."""
        return self.values * self.value_bytes

    @property
    def small_offset(self) -> int:
        """Bytes in front of the small row in such a buffer."""
        return self.block_offset + self.block_rows * ROW_BYTES

    @property
    def buffer_bytes(self) -> int:
        """Length of such a buffer."""
        return self.small_offset + ROW_BYTES


class Payload:
    """Seeded bytes, all in one buffer.

    Attributes:
        buffer: uint8 `[shape.buffer_bytes]`.
        large: view, uint8 `[values, value_bytes]`.
        block: view, uint8 `[block_rows, ROW_BYTES]`.
        small: view, uint8 `[1, ROW_BYTES]`.
    """

    def __init__(self, shape: Shape, seed: int) -> None:
        self._stamp = 0
        self.buffer: Bytes = np.random.default_rng(seed).integers(0, 256, shape.buffer_bytes, dtype=np.uint8)
        self.large = self.buffer[: shape.block_offset].reshape(shape.values, shape.value_bytes)
        self.block = self.buffer[shape.block_offset : shape.small_offset].reshape(-1, ROW_BYTES)
        self.small = self.buffer[shape.small_offset :].reshape(1, ROW_BYTES)

    def values(self, batch: Batch) -> Bytes:
        """Returns what a put of a batch puts, uint8 `[n, size]`."""
        return {"large": self.large, "scattered": self.block, "small": self.small}[batch]

    def renew(self, batch: Batch) -> None:
        """Changes each `ROW_BYTES` of a batch, so that bytes of an earlier put cannot pass for those of the next."""
        self._stamp += 1
        stamps = self.values(batch).reshape(-1, ROW_BYTES)[:, :8]
        stamps[:] = np.frombuffer(self._stamp.to_bytes(8, "little"), np.uint8)

    def digest(self, batch: Batch, rows: Rows | None = None) -> int:
        """Returns the digest of what a get of a batch has to bring.

        Args:
            batch: what was put.
            rows: int64 `[n]`: of it, in the order of the get; None: all.
        """
        values = self.values(batch)
        return digest(values if rows is None else values[rows])


def digest(values: NDArray[Any]) -> int:
    """Returns the xxh3-64 of an array's bytes."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def blank(target: Bytes) -> None:
    """Changes each `ROW_BYTES` of a receive buffer, so that what an earlier get brought cannot pass for the next."""
    target[::ROW_BYTES] ^= 0xFF


def check(got: NDArray[Any], expected: int, what: str) -> None:
    """Compares received bytes with the digest of those that were put.

    Raises:
        RuntimeError: they differ.
    """
    if digest(got) != expected:
        raise RuntimeError(f"{what}: what was read differs from what was put")
