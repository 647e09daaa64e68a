"""Bringing the bytes of blocks: many small ones of one node for one round trip."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tqclient.counters import Counters
from tqclient.errors import InvalidArgument, SampleNotFound, TQError, Unavailable
from tqclient.info import PartitionRef
from tqclient.limits import MIB
from tqclient.operations import damage
from tqclient.operations.effects import Deadline
from tqclient.operations.replicas import ExtentGone, Path, ReplicaFailed
from tqclient.rows import RowSet
from tqclient.transport.base import Fetched, Read

ALONE_BYTES_MIN: Final = MIB
"""A block of which so much is wanted is read by itself: its path may have a better way."""
TOGETHER_BYTES_MAX: Final = 16 * MIB
"""Of the blocks that are read by one call."""
TOGETHER_RANGES_MAX: Final = 16_384
"""Far below what a node takes in one request."""


class Batch:
    """Blocks of one node that are read by one call.

    Attributes:
        path: to the node.
        reads: by block id.
        size_bytes: of all of them.
        ranges: how many they have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.reads: dict[int, Read] = {}
        self.size_bytes = 0
        self.ranges = 0

    def takes(self, size_bytes: int, ranges: int) -> bool:
        """Says whether another block fits."""
        return self.size_bytes + size_bytes <= TOGETHER_BYTES_MAX and self.ranges + ranges <= TOGETHER_RANGES_MAX

    def add(self, block_id: int, read: Read, size_bytes: int) -> None:
        """Takes in a block."""
        self.reads[block_id] = read
        self.size_bytes += size_bytes
        self.ranges += len(read.ranges)


def batches(wanted: Mapping[int, NDArray[np.uint64]], paths: Mapping[int, Path]) -> Iterable[Batch]:
    """Cuts what is wanted, byte ranges by block id, into what is read by one call each."""
    filling: dict[tuple[int, bool], Batch] = {}
    for block_id, ranges in wanted.items():
        path, size_bytes = paths[block_id], sum(ranges[:, 1].tolist())
        key = id(path.transport), path.spare
        alone = size_bytes >= ALONE_BYTES_MIN
        batch = Batch(path) if alone else filling.setdefault(key, Batch(path))
        if not alone and not batch.takes(size_bytes, len(ranges)):
            yield batch
            batch = filling[key] = Batch(path)
        batch.add(block_id, Read(path.extent, ranges), size_bytes)
        if alone:
            yield batch
    yield from filling.values()


def bring(
    ref: PartitionRef,
    rows: RowSet,
    wanted: Mapping[int, NDArray[np.uint64]],
    paths: Mapping[int, Path],
    deadline: Deadline,
    counters: Counters,
) -> dict[int, Fetched]:
    """Reads byte ranges of blocks by the paths that were chosen.

    Args:
        ref: partition, for messages.
        rows: that the blocks hold, for messages.
        wanted: by block id, uint64 [n, 2]: offset within the block, length.
        paths: by block id.
        deadline: of the call.
        counters: of the client.

    Raises:
        ReplicaFailed: blocks could not be read; nothing stays open.
    """
    fetched: dict[int, Fetched] = {}
    with _closed_on_error(fetched):
        for batch in batches(wanted, paths):
            seconds = batch.path.seconds(deadline, batch.size_bytes)
            try:
                found = batch.path.transport.read_many(list(batch.reads.values()), timeout=seconds)
            except Unavailable as refusal:
                raise ReplicaFailed(batch.reads, refusal) from None
            except (SampleNotFound, InvalidArgument) as refusal:
                if len(batch.reads) == 1:
                    (block_id,) = batch.reads
                    raise ReplicaFailed([block_id], _refused(ref, rows, block_id, refusal)) from None
                fetched.update(_read_each(ref, rows, batch, deadline))
            else:
                fetched.update(zip(batch.reads, found, strict=True))
            counters.read(batch.path.transport.name, batch.size_bytes, len(batch.reads))
    return fetched


@contextmanager
def _closed_on_error(fetched: dict[int, Fetched]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        for each in fetched.values():
            each.close()
        raise


def _read_each(ref: PartitionRef, rows: RowSet, batch: Batch, deadline: Deadline) -> dict[int, Fetched]:
    """Finds out which of the blocks failed them all. Those that are gone, as with an arena, are all named at once."""
    fetched: dict[int, Fetched] = {}
    gone: dict[int, TQError] = {}
    with _closed_on_error(fetched):
        for block_id, read in batch.reads.items():
            try:
                seconds = batch.path.seconds(deadline, batch.size_bytes)
                fetched[block_id] = batch.path.transport.read(read.extent, read.ranges, timeout=seconds)
            except SampleNotFound as refusal:
                gone[block_id] = _refused(ref, rows, block_id, refusal)
            except InvalidArgument as refusal:
                raise ReplicaFailed([block_id], _refused(ref, rows, block_id, refusal)) from None
            except Unavailable as refusal:
                raise ReplicaFailed(batch.reads, refusal) from None
        if gone:
            raise ReplicaFailed(gone, next(iter(gone.values())))
    return fetched


def _refused(ref: PartitionRef, rows: RowSet, block_id: int, refusal: TQError) -> TQError:
    if isinstance(refusal, SampleNotFound):
        return ExtentGone(f"partition {ref.name!r}: {refusal.message}")
    return damage.unreadable(ref, rows, block_id, refusal)  # the extent leaves the arena, or the directory the extent
