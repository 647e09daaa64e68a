"""Large copies of many columns are gathered, and made at once."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import Block, encode
from tqclient.codec import Shared, allocate, read_column
from tqclient.codec.parallel import Later, run
from tqclient.errors import CorruptBlock

ROWS, WIDTH = 8, 20_000
LONG = torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)
RAGGED = [torch.arange(WIDTH + row) for row in range(ROWS)]
VALUES: dict[str, Any] = {
    "dense": LONG,
    "ragged": RAGGED,
    "struct": [{"a": LONG[row], "b": RAGGED[row]} for row in range(ROWS)],
    "shared": Shared([LONG[0], LONG[1]], [row % 2 for row in range(ROWS)]),
    "records": [{"any": LONG[row]} if row % 2 else None for row in range(ROWS)],
    "text": ["x" * WIDTH for _ in range(ROWS)],
}


@pytest.fixture(scope="module")
def block() -> Block:
    return encode(VALUES)


@pytest.mark.parametrize("field", VALUES)
@pytest.mark.parametrize("rows", [None, [0, 1, 2], [7, 3, 3, 0]])
def test_a_column_whose_copies_were_made_later_is_the_same(block: Block, field: str, rows: list[int] | None) -> None:
    later = Later()
    column = block.read(field, rows=rows, later=later)
    later.run()
    assert column.same_rows(block.read(field, rows=rows).plain()).all()


@pytest.mark.parametrize(("field", "size_bytes"), [("dense", LONG.nbytes), ("text", 0), ("records", 0), ("shared", 0)])
def test_what_is_looked_at_at_once_is_copied_at_once(block: Block, field: str, size_bytes: int) -> None:
    later = Later()
    block.read(field, later=later)
    assert later.size_bytes == size_bytes
    assert bool(later.tasks) == bool(size_bytes)


def test_nothing_is_moved_before(block: Block) -> None:
    later = Later()
    targets = []

    def allocating(size: int) -> Any:
        targets.append(allocate(size))
        targets[-1][:] = 0xEE
        return targets[-1]

    for field in ("dense", "ragged"):
        read_column(field, [block.part()], copy=True, allocate=allocating, later=later)
    assert [target.size for target in targets] == [LONG.nbytes, sum(row.nbytes for row in RAGGED)]
    assert all((target == 0xEE).all() for target in targets)
    later.run()
    assert np.array_equal(targets[0], LONG.numpy().reshape(-1).view(np.uint8))
    assert np.array_equal(targets[1], torch.cat(RAGGED).numpy().view(np.uint8))


@pytest.mark.parametrize(("field", "path"), [("dense", "dense"), ("struct", "struct.a")])
def test_damage_is_told_by_the_copy(field: str, path: str) -> None:
    block = encode({field: VALUES[field]})
    (stream,) = (block.layout.node(field).children or [block.layout.node(field)])[0].streams
    block.bytes[stream.offset + 6 * LONG[0].nbytes - 8] ^= 1  # no unit that begins in an earlier row
    later = Later()
    block.read(field, later=later)
    with pytest.raises(CorruptBlock, match=f"field '{path}', row 5 of its block: bytes from .* fail") as raised:
        later.run()
    assert list(raised.value.rows) == [5]


def test_shared_values_say_themselves_which_row_was_damaged() -> None:
    block = encode({"shared": VALUES["shared"]})
    (stream,) = block.layout.node("shared").children[0].streams
    block.bytes[stream.offset + 2 * LONG[0].nbytes - 8] ^= 1
    with pytest.raises(CorruptBlock) as raised:
        block.read("shared", later=Later())
    assert list(raised.value.rows) == [1]


def test_memory_goes_with_its_column(block: Block) -> None:
    """Not with the next collection of garbage: until then, the next batch would need memory that is not there yet."""
    gone: list[int] = []

    def allocating(size: int) -> Any:
        target = allocate(size)
        weakref.finalize(target, gone.append, size)
        return target

    gc.disable()
    try:
        later = Later()
        fields = ("dense", "ragged", "struct")
        columns = [read_column(field, [block.part()], copy=True, allocate=allocating, later=later) for field in fields]
        later.run()
        assert gone == []
        del later, columns
        assert len(gone) == 4
    finally:
        gc.enable()


def test_tasks_add_up() -> None:
    later, done = Later(), []
    later.add([lambda: done.append(1), lambda: done.append(2)], 10)
    later.add([lambda: done.append(3)], 5)
    assert (done, later.size_bytes) == ([], 15)
    later.run()
    run([], 0)
    assert sorted(done) == [1, 2, 3]
