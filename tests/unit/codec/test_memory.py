"""Who owns which bytes, how they are aligned, how many there may be, and what threads may do."""

from __future__ import annotations

import gc
import sys
import threading
import tracemalloc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.unit.codec.blocks import Block, encode
from tests.unit.codec.values import identical
from tqclient.codec import ALIGN, Layout, Part, allocate, dumps, loads, measure, read_column, same_rows
from tqclient.codec.buffers import TEXT_PIECE_BYTES
from tqclient.codec.checksum import PARALLEL_UNIT_MIN, UNIT_MAX, UNIT_MIN, unit_bytes
from tqclient.codec.directory import RAGGED, NodePlan, build, directory_bytes
from tqclient.codec.header import HEADER_BYTES, Header, aligned
from tqclient.codec.kinds.base import stream_size
from tqclient.codec.parallel import SERIAL_BYTES_MAX
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.schema import Form

COLUMNS: dict[str, Any] = {
    "dense": torch.arange(12.0).reshape(6, 2),
    "ragged": [torch.arange(row, dtype=torch.int16) for row in range(6)],
    "array": np.arange(6, dtype=">i8"),
    "extra": [{"t": torch.ones(row, dtype=torch.float64)} if row else 0 for row in range(6)],
}


def address(value: torch.Tensor | NDArray[Any]) -> int:
    return value.data_ptr() if isinstance(value, torch.Tensor) else value.ctypes.data


def inside(value: torch.Tensor | NDArray[Any], block: Block) -> bool:
    start = block.bytes.ctypes.data
    return start <= address(value) < start + block.bytes.size


@pytest.mark.parametrize("rows", [None, [2, 3, 4]])
def test_views_share_the_blocks_memory_and_copies_do_not(rows: list[int] | None) -> None:
    block = encode(COLUMNS)
    for name in COLUMNS:
        view, copied = block.read(name, copy=False, rows=rows), block.read(name, copy=True, rows=rows)
        assert view.is_view
        assert not copied.is_view
        samples = [(view.list()[-1], True), (copied.list()[-1], False)]
        for sample, shared in samples:
            value = sample["t"] if isinstance(sample, dict) else sample
            assert inside(value, block) == shared
            assert address(value) % value.itemsize == 0
        assert identical(view.list(), copied.list())


@pytest.mark.parametrize("rows", [[0, 2], [1, 0], [3, 3]])
def test_scattered_rows_are_copied_even_when_views_are_asked_for(rows: list[int]) -> None:
    block = encode(COLUMNS)
    column = block.read("dense", copy=False, rows=rows)
    assert not column.is_view
    assert column.value.tolist() == COLUMNS["dense"][rows].tolist()


def test_every_stream_and_leaf_is_aligned() -> None:
    block = encode(
        {"a": np.zeros((3, 1), np.int8), "b": ["x", "y", "z"], "c": [[np.ones(1, np.int8), torch.ones(9)]] * 3}
    )
    for name in block.layout.fields:
        assert all(start % ALIGN == 0 for start in block.layout.ranges(name)[:, 0].tolist())
    for row in block.read("c").list():
        assert all(address(leaf) % ALIGN == 0 for leaf in row)


def test_a_view_keeps_its_buffer_and_a_copy_frees_it() -> None:
    class Owner:
        def __init__(self, size: int) -> None:
            self.memory = allocate(size)
            self.__array_interface__ = self.memory.__array_interface__

    plan = measure({"x": [torch.arange(4), torch.arange(2)]})
    owner = Owner(plan.size_bytes)
    gone = weakref.ref(owner)
    blocks = [np.asarray(owner)]
    part = Part(Layout.parse(plan.write(blocks[0])), np.arange(2), lambda offset, length: blocks[0][offset:][:length])
    view = read_column("x", [part], copy=False, allocate=allocate).list()[1]
    copied = read_column("x", [part], copy=True, allocate=allocate).value
    blocks.clear()
    del owner
    gc.collect()
    assert gone() is not None
    assert view.tolist() == [0, 1]
    del view
    gc.collect()
    assert gone() is None
    assert copied.values().tolist() == [0, 1, 2, 3, 0, 1]


def test_read_only_memory_gives_tensors_without_a_warning() -> None:
    block = encode(COLUMNS)
    block.bytes.flags.writeable = False
    for name in COLUMNS:
        assert identical(block.read(name, copy=False).list(), block.read(name).list())


@pytest.mark.parametrize("row", ["word " * 500, b"word " * 500])
def test_texts_are_joined_in_pieces(row: Any) -> None:
    """A whole column at once is pages that the kernel clears for each put, which takes longer than the put."""
    rows = [row] * 2000
    kept = sys.getsizeof(rows) + 8 * len(rows)  # references to the rows, and their lengths
    plan = measure({"x": rows})
    target = allocate(plan.size_bytes)
    tracemalloc.start()
    try:
        plan = measure({"x": rows})
        measured = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        plan.write(target)
        written = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert max(measured, written) < kept + 5 * TEXT_PIECE_BYTES


def test_padding_is_zeroed_so_that_equal_batches_have_equal_bytes() -> None:
    columns = {"a": ["x"], "b": [[torch.ones(3), np.ones((2, 5), np.int8)[:, ::2]]], "c": torch.ones(1, 3).T.T}
    assert encode(columns).bytes.tobytes() == encode(columns).bytes.tobytes()
    plan = measure(columns)
    target = allocate(plan.size_bytes)
    target[:] = 0
    plan.write(target)
    assert target.tobytes() == encode(columns).bytes.tobytes()


def test_sets_have_one_encoding_whatever_their_order() -> None:
    forwards, backwards = set(), set()
    for value in range(0, 4096, 256):
        forwards.add(value)
    for value in range(3840, -1, -256):
        backwards.add(value)
    assert dumps(forwards) == dumps(backwards)


@pytest.mark.parametrize("size", [-1, 1])
def test_a_target_of_another_size_is_refused(size: int) -> None:
    plan = measure({"x": torch.zeros(2)})
    with pytest.raises(InvalidArgument, match="target"):
        plan.write(allocate(plan.size_bytes + size))


def test_a_misaligned_target_is_refused() -> None:
    plan = measure({"x": torch.zeros(2)})
    with pytest.raises(InvalidArgument, match="aligned"):
        plan.write(allocate(plan.size_bytes + 8)[8:])


@pytest.mark.parametrize(
    ("length", "rows", "unit"),
    [
        (0, 0, UNIT_MIN),
        (8 * 8192, 8192, UNIT_MIN),
        (4096 * 1000, 1000, 4096),
        (8191 * 10, 10, 4096),
        (8192 * 10, 10, 8192),
        (1_000_000 * 8, 8, 16_384),  # a range of a large row reads a unit more, on average
        (3_000_000 * 8, 8, 32_768),  # a 64th of the row is 46,875
        (64 * (40 * 131_072 - 1), 64, 65_536),
        (64 * 40 * 131_072, 64, 131_072),  # threads hash these side by side
        (346_000_000, 64, 131_072),
        (20_000_000 * 4, 4, UNIT_MAX),
        (64 * (524_288 - 1), 64, 32_768),
        (64 * 4_194_304, 64, 65_536),
    ],
)
def test_the_checksum_unit_follows_the_mean_row(length: int, rows: int, unit: int) -> None:
    assert unit_bytes(length, rows) == unit


@pytest.mark.parametrize("mean", [640 * 1024, 1_000_000, 4_194_304, 5_242_879, 5_242_880, 5_400_000, 50_000_000])
def test_a_quarter_of_a_large_row_is_verified_with_a_tenth_more(mean: int) -> None:
    assert unit_bytes(64 * mean, 64) <= mean // 4 // 10


def test_what_was_filled_in_in_place_is_the_block_that_a_copy_makes() -> None:
    noise = torch.Generator().manual_seed(3)
    columns = {
        "huge": [
            torch.randint(255, (size,), dtype=torch.uint8, generator=noise) for size in (7 << 20, 5 << 20, 3 << 20)
        ],
        "large": torch.rand(3, 700_001, generator=noise),
        "small": torch.arange(3),
    }
    plan = measure(columns)
    copied, filled = allocate(plan.size_bytes), allocate(plan.size_bytes)
    directory = plan.write(copied)
    in_place = plan.over(filled)
    for name, column in columns.items():
        for target, row in zip(in_place.tensors()[name], column, strict=True):
            target.copy_(row)
    assert in_place.write(filled) == directory
    assert np.array_equal(filled, copied)
    assert Layout.parse(directory).node("huge").streams[0].unit == PARALLEL_UNIT_MIN


def test_split_by_bytes() -> None:
    columns = {
        "x": [torch.zeros(size, dtype=torch.uint8) for size in (100, 5000, 300, 20_000, 50, 60)],
        "y": list(range(6)),
    }
    plan = measure(columns)
    assert plan.split(plan.size_bytes) == [plan]
    plans = plan.split(8192)
    assert sum(part.rows for part in plans) == 6
    assert all(part.size_bytes <= 8192 or part.rows == 1 for part in plans)
    assert any(part.size_bytes > 8192 for part in plans)
    assert all(part.forms == plan.forms for part in plans)
    read = [row for part in plans for row in Block(part).read("y").list()]
    assert read == list(range(6))


def test_split_of_a_large_batch_fills_its_blocks() -> None:
    plans = measure({"x": torch.zeros(1000, 256), "s": ["text"] * 1000}).split(64 * 1024)
    assert max(part.size_bytes for part in plans) <= 64 * 1024
    assert len(plans) <= 18


def test_the_arithmetic_beyond_four_gibibytes() -> None:
    """An expanded tensor is measured, never written."""
    rows, items = 1024, 1 << 20
    plan = measure(
        {"x": torch.zeros(1, 1).expand(rows, items), "y": [torch.zeros(1).expand(1 << 31), torch.zeros(2)] * 512}
    )
    dense, ragged = rows * items * 4, 512 * ((1 << 33) + 8)
    checksums = 8 * (dense // 65_536 + ragged // UNIT_MAX)  # a dense row has 4 MiB
    assert dense + ragged + checksums < plan.size_bytes < dense + ragged + checksums + 64 * 1024
    parts = plan.split(1 << 34)
    assert all(part.size_bytes <= 1 << 34 for part in parts)
    assert sum(part.rows for part in parts) == rows


def test_rows_beyond_four_gibibytes_are_read_from_a_sparse_file(tmp_path: Path) -> None:
    counts = np.array([1 << 29, 3, 1 << 29, 5], np.int64)  # float64: 8 GiB and a few rows' worth
    form = Form("ragged", "torch", "float64")
    size = stream_size(int(counts.sum()) * 8, 4, counts)
    node = NodePlan("x", RAGGED, form, 0, [size], [])
    start = aligned(HEADER_BYTES + directory_bytes([node]))
    total = aligned(start + size.length)
    hashes = np.zeros(-(-size.length // size.unit), "<u8")
    directory = build([node], 4, total, [start], [hashes])
    path = tmp_path / "block"
    with path.open("wb") as file:
        file.truncate(total)
    block = np.memmap(path, np.uint8, "r+")
    header = Header(total, len(directory)).to_bytes()
    block[: HEADER_BYTES + len(directory)] = np.frombuffer(header + directory, np.uint8)
    last = start + 8 * ((1 << 30) + 3)
    block[last : last + 40] = np.arange(5.0).view(np.uint8)
    layout = Layout.open(block)
    assert layout.row_lengths("x").tolist() == counts.tolist()
    part = Part(layout, np.array([3, 1]), lambda offset, length: block[offset : offset + length])
    column = read_column("x", [part], copy=True, allocate=allocate, verify=False)
    assert [row.tolist() for row in column.list()] == [[0.0, 1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0]]
    with pytest.raises(CorruptBlock, match="row 3"):
        read_column("x", [replace(part, rows=np.array([3]))], copy=True, allocate=allocate)
    first, length = layout.ranges("x", np.array([3]))[-1].tolist()
    assert first <= last < last + 40 <= first + length < first + 2 * UNIT_MAX


def test_large_columns_are_copied_on_several_threads_and_come_out_whole() -> None:
    size = SERIAL_BYTES_MAX // 8 + 4321
    whole = torch.arange(size)
    rows = list(torch.arange(size).split(1000))
    strided = torch.stack([whole, whole], 1)[:, 0]
    block = encode(
        {"whole": whole[None], "strided": [strided], "rows": [torch.cat(rows)], "array": whole.numpy()[None]}
    )
    for name in block.layout.fields:
        column = block.read(name)
        assert torch.equal(torch.as_tensor(column.list()[0]), whole)
    small = encode({"rows": rows}).read("rows")
    assert torch.equal(torch.cat(small.list()), whole)


def test_one_plan_may_be_written_and_read_by_many_threads() -> None:
    plan = measure({"x": torch.arange(50_000).reshape(50, 1000), "y": [{"k": (i,)} for i in range(50)]})
    expected = Block(plan).bytes.tobytes()
    results: list[Any] = []

    def work() -> None:
        for _ in range(5):
            block = Block(plan)
            results.append(block.bytes.tobytes() == expected and block.read("y").list()[49] == {"k": (49,)})

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 40


NAN, OTHER_NAN = (torch.tensor([bits]).view(torch.float64) for bits in (0x7FF8000000000000, 0x7FF8000000000001))


@pytest.mark.parametrize(
    ("column", "other", "same"),
    [
        (torch.tensor([1, 2, 3]), torch.tensor([1, 9, 3]), [True, False, True]),
        (torch.zeros(2, 0), torch.zeros(2, 0), [True, True]),
        (torch.tensor([1.0]), torch.tensor([1.0], dtype=torch.float64), [False]),
        (torch.tensor([0.0, 0.0]), torch.tensor([0.0, -0.0]), [True, False]),
        (torch.cat([NAN, NAN]), torch.cat([NAN, OTHER_NAN]), [True, False]),
        ([torch.ones(2), torch.ones(3)], [torch.ones(2), torch.ones(2)], [True, False]),
        (torch.ones(2, 3), [torch.ones(3), torch.ones(2)], [True, False]),
        ([torch.ones(3), torch.ones(2)], torch.ones(2, 3), [True, False]),
        (["a", "b"], ["a", "c"], [True, False]),
        (["a", "b"], [b"a", "b"], [False, True]),
        ([1, True, 1.0, (1,)], [1, 1, 1, [1]], [True, False, False, False]),
        ([{"a": torch.ones(1)}, 1], [{"a": torch.ones(1)}, 2], [True, False]),
        ([[torch.zeros(1)], [NAN]], [[-torch.zeros(1)], [OTHER_NAN]], [False, False]),
        ([{"a": 1, "b": "x"}, {"a": 1, "b": "x"}], {"a": [1, 2], "b": ["x", "x"]}, [True, False]),
        (torch.zeros(1), ["a"], [False]),
        (["a"], torch.zeros(1), [False]),
    ],
)
def test_same_rows(column: Any, other: Any, same: list[bool]) -> None:
    assert same_rows(encode({"x": column}).read("x"), encode({"x": other}).read("x")).tolist() == same


def test_same_rows_needs_as_many_rows() -> None:
    with pytest.raises(InvalidArgument, match="2 and 1"):
        same_rows(encode({"x": [1, 2]}).read("x"), encode({"x": [1]}).read("x"))


def test_loaded_values_own_their_memory() -> None:
    data = bytearray(dumps({"t": torch.ones(4)}))
    value = loads(bytes(data))
    value["t"].add_(1)
    assert value["t"].tolist() == [2.0] * 4


@pytest.mark.parametrize("rows", [[-1], [3], [2**40]])
def test_rows_out_of_bounds(rows: list[int]) -> None:
    block = encode({"x": [1, 2, 3]})
    with pytest.raises(InvalidArgument, match="block that has 3"):
        block.layout.ranges("x", np.array(rows))
    with pytest.raises(InvalidArgument, match="block that has 3"):
        block.read("x", rows=rows)


def test_ranges_are_merged_ascending_and_unit_aligned() -> None:
    block = encode({"x": torch.zeros(1000, 512)})  # 2 KiB rows, units of 4 KiB
    start = int(block.layout.ranges("x")[0, 0])
    rows = np.array([900, 0, 1, 3, 3])
    assert (block.layout.ranges("x", rows) - [start, 0]).tolist() == [[0, 8192], [900 * 2048, 4096]]
    assert block.layout.ranges("x", np.zeros(0, np.int64)).shape == (0, 2)


def test_unknown_fields_are_named() -> None:
    block = encode({"x": [1], "m": [{"a.b": 1, "a": torch.ones(2)}]})
    assert block.layout.column_bytes("m.a") == 8
    assert block.layout.form("m.a.b").kind == "list"
    for name in ("y", "m.c", "x.y", "m."):
        with pytest.raises(InvalidArgument, match="has no field"):
            block.layout.form(name)
    with pytest.raises(InvalidArgument, match="no length"):
        block.layout.row_lengths("x")


@pytest.mark.parametrize(
    "rows",
    [
        [*range(1, 250)],
        [*range(3, 90), *range(100, 190), *range(7, 299)],
        [*range(250, 300), *range(50)],
        [0, 299, 150, 150, *range(60, 160), 1],
        [*range(299, -1, -3)],
    ],
    ids=["one long run", "overlapping runs", "end then start", "short and long", "backwards"],
)
def test_long_and_short_runs_meet_at_unit_boundaries(rows: list[int]) -> None:
    """Rows of 3,001 bytes: every run begins and ends within a checksum unit."""
    values = np.random.default_rng(0).integers(0, 255, (300, 3001), np.uint8)
    block = encode({"dense": values, "ragged": [row[: 3001 - index] for index, row in enumerate(values)]})
    parts = [block.sparse_part("dense", rows)]
    assert np.array_equal(read_column("dense", parts, copy=True, allocate=allocate).value, values[rows])
    read = read_column("ragged", [block.sparse_part("ragged", rows)], copy=True, allocate=allocate)
    assert all(np.array_equal(row, values[index, : 3001 - index]) for row, index in zip(read.list(), rows, strict=True))


def test_many_one_row_parts_that_alternate_between_blocks() -> None:
    blocks = [encode({"x": torch.arange(100) + 100 * block}) for block in range(3)]
    parts = [blocks[index % 3].part([index // 3]) for index in range(300)]
    column = read_column("x", parts, copy=False, allocate=allocate)
    assert column.value.tolist() == [index // 3 + 100 * (index % 3) for index in range(300)]
    assert not column.is_view


def test_no_rows_at_all() -> None:
    block = encode(COLUMNS | {"mm": {"a": [torch.ones(2)] * 6, "s": ["x"] * 6}})
    for name in block.layout.fields:
        for copy in (True, False):
            column = block.read(name, rows=[], copy=copy)
            assert column.rows == 0
            assert column.list() == []
    assert block.read("ragged", rows=[]).value.size(0) == 0
    assert block.read("ragged", rows=[]).padded().shape == (0, 0)
    with pytest.raises(InvalidArgument, match="no parts"):
        read_column("dense", [], copy=True, allocate=allocate)
