"""Frames that are cut, or whose parts overlap or wrap: an error, soon, and in little memory; others are served."""

from __future__ import annotations

import statistics
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import tqclient as tq
from tests.unit.codec.blocks import Block, encode
from tqclient.codec import Layout, Part, Plan, allocate, read_column
from tqclient.limits import KIB
from tqclient.windows import Cut
from tqclient.wire.v1 import common_pb2
from tqserver.local import LocalCluster

MEDIAN_SECONDS = 0.010
ERROR_BYTES = 24 * KIB
"""What an error itself takes, with its message and traceback."""

# Layout of a directory: a prefix, then for each column a node, its name, dtype and shape, and its streams.
_PREFIX = struct.Struct("<4sIIIQQ")
_NODE = struct.Struct("<BBHIIIII")
_ROWS_AT = 16
_SIZE_AT = 24

VALUES: dict[str, Any] = {
    "dense": torch.arange(8 * 64).reshape(8, 64),
    "ragged": [torch.arange(size) for size in (0, 7, 300, 1, 64, 90, 0, 33)],
    "mm": [{"pixels": torch.full((row, 3), row), "grid": row} for row in range(8)],
    "prompt": ["", "a", "bc", "déf", "g" * 90, "h", "i", "j"],
    "extra": [{"row": row, "t": torch.ones(row)} for row in range(8)],
}


LARGE = encode({**VALUES, "large": torch.arange(8 << 14).reshape(8, -1)})
"""Large enough that buffers of a fixed size do not count."""


def resealed(directory: bytes | bytearray) -> bytes:
    """With the checksum that a hostile writer would give it."""
    body = bytes(directory[:-8])
    return body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))


def first_stream(directory: bytes) -> int:
    """Where the description of the first column's first stream begins."""
    _, _, _, _, name_bytes, dtype_bytes, dimensions, _ = _NODE.unpack_from(directory, _PREFIX.size)
    return int(_PREFIX.size + _NODE.size + name_bytes + dtype_bytes + 8 * dimensions)


def patched(directory: bytes, at: int, form: str, *numbers: int) -> bytes:
    changed = bytearray(directory)
    struct.pack_into(form, changed, at, *numbers)
    return resealed(changed)


class Costs:
    """The processor time of each attempt, and that none of them took more memory than twice its input."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def refuse(self, attempt: Callable[[], Any], input_bytes: int) -> None:
        """Makes an attempt, which must end in CorruptBlock."""
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        start = time.thread_time()  # what others do beside it is not its cost
        with pytest.raises(tq.CorruptBlock):
            attempt()
        self.seconds.append(time.thread_time() - start)
        peak = tracemalloc.get_traced_memory()[1] - before
        assert peak <= 2 * input_bytes + ERROR_BYTES, f"{peak} bytes for an input of {input_bytes}"


@contextmanager
def costs() -> Iterator[Costs]:
    """Measures attempts; on leaving, they must have been fast."""
    measured = Costs()
    tracemalloc.start()
    try:
        yield measured
    finally:
        tracemalloc.stop()
    assert statistics.median(measured.seconds) <= MEDIAN_SECONDS


def test_a_frame_cut_at_every_length_is_refused() -> None:
    frame = encode(VALUES).bytes
    with costs() as measured:
        for length in range(frame.size):
            measured.refuse(lambda: Layout.open(frame[:length]), length)  # noqa: B023


def test_a_directory_cut_at_every_length_is_refused_whatever_its_checksum() -> None:
    directory = encode(VALUES).directory
    with costs() as measured:
        for length in range(len(directory)):
            measured.refuse(lambda: Layout.parse(directory[:length]), length)  # noqa: B023
            sealed = resealed(directory[:length] + bytes(8)) if length < len(directory) - 8 else directory[:length]
            measured.refuse(lambda: Layout.parse(sealed), len(sealed))  # noqa: B023


def test_a_large_frame_that_is_cut_takes_little_time_and_memory(seed: int) -> None:
    rows = 1 << 19
    block = encode({"counts": [b"ab"] * rows, "dense": np.zeros((rows, 2), np.int64)})
    rng = np.random.default_rng(seed)
    with costs() as measured:
        for length in rng.integers(64, block.bytes.size, 100).tolist():
            measured.refuse(lambda: Layout.open(block.bytes[:length]), length)  # noqa: B023
        for length in rng.integers(64, len(block.directory) - 16, 100).tolist():
            sealed = resealed(block.directory[:length] + bytes(8))
            measured.refuse(lambda: Layout.parse(sealed), length)  # noqa: B023


WRAPS = [(2**64 - 64, 128), (2**64 - 64, 64), (0, 2**64 - 1), (2**63, 2**63), (64, 2**64 - 64), (2**64 - 1, 2**64 - 1)]


@pytest.mark.parametrize(("offset", "length"), WRAPS)
def test_streams_that_wrap_are_refused(offset: int, length: int) -> None:
    directory = encode(VALUES).directory
    hostile = patched(directory, first_stream(directory), "<QQ", offset, length)
    with costs() as measured:
        measured.refuse(lambda: Layout.parse(hostile), len(hostile))


@given(st.data())
def test_streams_that_overlap_or_leave_their_place_are_refused(data: st.DataObject) -> None:
    """The streams of a block follow each other; a directory that places one elsewhere cannot be right."""
    directory = encode({"a": torch.arange(64), "b": torch.arange(64, 128)}).directory
    first, length = struct.unpack_from("<QQ", directory, first_stream(directory))
    right = data.draw(st.sampled_from([first, first + length]))
    anywhere = st.integers(0, 2**64 - 1) | st.integers(first - 128, first + 3 * length)
    wrong = data.draw(anywhere.filter(lambda offset: offset != right))
    hostile = patched(directory, directory.index(struct.pack("<QQ", right, length)), "<Q", wrong)
    with costs() as measured:
        measured.refuse(lambda: Layout.parse(hostile), len(hostile))


@given(st.data())
def test_a_hostile_number_anywhere_is_refused_or_harmless(data: st.DataObject) -> None:
    block = LARGE
    number = data.draw(st.sampled_from([2**64 - 1, 2**64 - 64, 2**63, 2**44, 2**32, 2**20, 1]))
    position = data.draw(st.integers(0, len(block.directory) - 16))
    hostile = patched(block.directory, position, "<Q", number)
    tracemalloc.start()
    try:
        refused = _refused(block, hostile)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not refused or peak <= 2 * block.bytes.size


def _refused(block: Block, directory: bytes) -> bool:
    """Reads all of a block by a directory; whether that was refused. Fetches beyond the block are a failure."""
    try:
        layout = Layout.parse(directory)
        if layout.size_bytes != block.bytes.size:
            return True
        for field in layout.fields:
            part = Part(layout, np.arange(layout.rows), block.fetch)
            read_column(field, [part], copy=True, allocate=allocate)
    except (tq.CorruptBlock, tq.UnsupportedVersion):
        return True
    return False


def read_behind(first: Block, second: Block, directory: bytes, rows: list[int]) -> tuple[int, ...]:
    """Reads field x of a good block and then of a hostile one; returns the rows of the batch that the error names."""
    parts = [first.part(), Part(Layout.parse(directory), np.array(rows), second.fetch)]
    with pytest.raises(tq.CorruptBlock) as caught:
        read_column("x", parts, copy=True, allocate=allocate)
    return tuple(caught.value.rows)


def test_a_text_that_is_none_names_its_row() -> None:
    texts, octets = encode({"x": ["a", "b", "c"]}), encode({"x": [b"d", b"\xff"]})
    kind_of_texts = texts.directory[_PREFIX.size]
    claims_texts = patched(octets.directory, _PREFIX.size, "<B", kind_of_texts)
    assert read_behind(texts, octets, claims_texts, [0, 1]) == (4,)
    assert read_behind(texts, octets, claims_texts, [1, 0]) == (3,)


def test_a_shape_that_does_not_fit_names_its_row() -> None:
    values = {"x": torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 2)])}
    honest, hostile = encode(values), encode(values)
    shapes = hostile.layout.node("x").streams[1]
    stored = hostile.bytes[shapes.offset : shapes.offset + shapes.length]
    stored.view(np.int64)[3] = 4  # the second row's second size
    directory = bytearray(hostile.directory)
    struct.pack_into("<Q", directory, len(directory) - 16, xxhash.xxh3_64_intdigest(stored))
    assert read_behind(honest, hostile, resealed(directory), [0, 1]) == (3,)
    assert read_behind(honest, hostile, resealed(directory), [1]) == (2,)


@dataclass(frozen=True)
class Hostile:
    """What a writer commits instead of what it wrote."""

    directory: Callable[[bytes], bytes] = lambda directory: directory
    extent: Callable[[common_pb2.Extent], None] = lambda _: None


def _other(values: Any) -> Callable[[bytes], bytes]:
    directory = encode(values).directory
    return lambda _: directory


COMMITS = {
    "no directory": Hostile(lambda _: b""),
    "a cut one": Hostile(lambda directory: directory[:-1]),
    "a cut one with a checksum": Hostile(lambda d: resealed(d[:60] + bytes(8))),
    "a stream that wraps": Hostile(lambda d: patched(d, first_stream(d), "<QQ", 2**64 - 64, 128)),
    "a stream that overlaps the header": Hostile(lambda d: patched(d, first_stream(d), "<Q", 0)),
    "too many rows": Hostile(lambda d: patched(d, _ROWS_AT, "<Q", 2**63)),
    "a longer block": Hostile(lambda d: patched(d, _SIZE_AT, "<Q", 2**44)),
    "the directory of a larger block": Hostile(_other({"x": torch.arange(4096 * 64).reshape(4, -1)})),
    "the directory of a smaller block": Hostile(_other({"x": torch.arange(4 * 8).reshape(4, 8)})),
    "the directory of fewer rows": Hostile(_other({"x": torch.arange(2 * 2048).reshape(2, 2048)})),
    "the directory of another field": Hostile(_other({"y": torch.arange(4 * 1024).reshape(4, 1024)})),
    "the directory of another dtype": Hostile(_other({"x": torch.zeros(4, 1024, dtype=torch.float64)})),
    "the directory of other values": Hostile(_other({"x": torch.arange(4 * 1024).reshape(4, 1024) + 1})),
    "an extent behind the arena": Hostile(extent=lambda extent: setattr(extent, "offset", 1 << 50)),
    "an extent across the arena's end": Hostile(extent=lambda extent: setattr(extent, "offset", (16 << 20) - 256)),
    "an extent longer than the window": Hostile(extent=lambda extent: setattr(extent, "length", 1 << 40)),
}


@contextmanager
def committing(hostile: Hostile) -> Iterator[None]:
    """Whoever puts within this context writes what it should, and commits something else."""
    write, extent = Plan.write, Cut.extent

    def write_and_lie(plan: Plan, target: NDArray[np.uint8]) -> bytes:
        return hostile.directory(write(plan, target))

    def extent_that_lies(cut: Cut) -> common_pb2.Extent:
        honest = extent(cut)
        hostile.extent(honest)
        return honest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Plan, "write", write_and_lie)
        patch.setattr(Cut, "extent", extent_that_lies)
        yield


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="16MiB") as running:
        yield running


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("what", COMMITS)
def test_what_a_hostile_writer_commits_is_corrupt_and_hurts_nobody_else(
    what: str, transport: str, cluster: LocalCluster
) -> None:
    name = f"{what} over {transport}"
    with tq.connect(cluster.address, timeout=10) as client, tq.connect(cluster.address, transport=transport) as other:
        part = client.create_partition(name)
        honest = part.put({"x": torch.arange(4 * 1024).reshape(4, 1024)}).tolist()
        with committing(COMMITS[what]):
            hostile = part.put({"x": torch.arange(4 * 1024).reshape(4, 1024)}).tolist()
        reader = other.partition(name)
        for copy in (True, False):
            for ids in (hostile, hostile[3:], [*honest, *hostile]):
                with pytest.raises(tq.CorruptBlock) as caught, reader.get(ids, copy=copy) as batch:
                    batch.verify()  # views of this host's memory; all else was refused before
                message = str(caught.value)
                first = (*honest, *hostile).index(hostile[0]) if len(ids) == 8 else 0
                sample = hostile[3] if ids == hostile[3:] else hostile[0]
                assert message.startswith(f"partition {name!r}, field 'x', row {first}, sample {sample}: "), message
        consumer = reader.consumer("actor")
        with consumer.claim(4, timeout=5) as batch:
            assert torch.equal(batch["x"], torch.arange(4 * 1024).reshape(4, 1024))
        with pytest.raises(tq.CorruptBlock):
            consumer.claim(4, timeout=5)
        assert torch.equal(reader.get(honest)["x"], torch.arange(4 * 1024).reshape(4, 1024))
        client.delete_partition(name)


@pytest.mark.parametrize(
    ("offset", "length"),
    [(2**64 - 256, 256), (2**64 - 256, 2**64 - 1), (256, 2**64 - 1), (2**63, 2**63), (0, 0), (1, 64)],
)
def test_an_extent_that_wraps_is_refused_at_the_commit(offset: int, length: int, cluster: LocalCluster) -> None:
    with tq.connect(cluster.address, timeout=10) as client:
        part = client.create_partition("wrapping", exist_ok=True)
        before = part.describe().samples

        def wrap(extent: common_pb2.Extent) -> None:
            extent.offset, extent.length = offset, length

        with committing(Hostile(extent=wrap)), pytest.raises(tq.InvalidArgument, match="extent"):
            part.put({"x": torch.arange(64)})
        assert part.describe().samples == before
