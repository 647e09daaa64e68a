"""Where many rows are looked at, joined or decoded in one go: what leaves that way comes out the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import encode
from tests.unit.codec.values import bits, identical, rows_of
from tqclient.codec import NESTING_MAX, Records, alike, buffers, measure, normalise
from tqclient.codec.alike import SMALL_ROW_BYTES
from tqclient.codec.buffers import CAT_ITEMS_MAX, TEXT_PIECE_BYTES, batches
from tqclient.codec.checksum import PIECE_BYTES
from tqclient.errors import CorruptBlock, UnsupportedValue

A = torch.arange(6)
REAL = torch.arange(6.0)
COMPLEX = torch.tensor([1 + 2j, 3 - 4j, 5j])


class Subclass(torch.Tensor):
    pass


def check(column: Any, kind: str) -> None:
    """The column is of a kind, whole and in parts, and each row comes back bit by bit."""
    block = encode({"x": column})
    assert block.layout.form("x").kind == kind
    rows = [row.detach() if isinstance(row, torch.Tensor) else row for row in rows_of(column)]
    backwards = list(range(len(rows)))[::-1]
    for copy in (True, False):
        assert identical(block.read("x", copy=copy).list(), rows)
        assert identical(block.read("x", copy=copy, rows=backwards).list(), rows[::-1])
        assert identical(block.read("x", copy=copy, rows=backwards[1:2]).list(), rows[::-1][1:2])


@pytest.mark.parametrize("wide", [1, SMALL_ROW_BYTES], ids=["small", "large"])
@pytest.mark.parametrize(
    "rows",
    [
        [A[:2], A[3:3], A[1:4]],
        [A[:0], A[:0]],
        [A[::2], A[:1].expand(4), A],
        [A.reshape(2, 3), A[:3].reshape(1, 3), A.reshape(2, 3)[:0]],
        [A.reshape(3, 2).T, A[:3].reshape(1, 3)],
        [REAL.clone().requires_grad_(), REAL[:2], torch.nn.Parameter(REAL[:3])],
        [COMPLEX.conj(), COMPLEX, COMPLEX[:1].conj()],
        [COMPLEX.conj().imag, torch._neg_view(REAL)[:4], REAL],
        [A.bool(), A.bool()[:3]],
        [REAL.to(torch.float8_e4m3fn), REAL[:2].to(torch.float8_e4m3fn)],
        [REAL.bfloat16(), REAL[:2].bfloat16()],
        [A],
        [torch.ones(2, 0), torch.ones(3, 0)],
    ],
)
def test_tensors_that_are_alike(rows: list[torch.Tensor], wide: int) -> None:
    if wide > 1:
        rows = [torch.cat([row] * wide) if not row.is_neg() and not row.is_conj() else row for row in rows]
    check(rows, "ragged")
    check(tuple(rows), "ragged")


@pytest.mark.parametrize("wide", [1, SMALL_ROW_BYTES], ids=["small", "large"])
@pytest.mark.parametrize(
    "odd",
    [A.float(), A.int(), A[None], A[:0].reshape(0, 5), A[0], A.reshape(2, 3)],
    ids=["dtype", "width", "dimension", "empty", "scalar", "matrix"],
)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_one_row_that_differs_makes_it_a_list(odd: torch.Tensor, at: int, wide: int) -> None:
    rows = [A[:2].repeat(wide), A.repeat(wide), A[:3]]
    check([*rows[:at], odd, *rows[at:]], "list")


@pytest.mark.parametrize("odd", [A[:0], torch.ones(2, 2, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64)])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_one_matrix_that_differs_makes_it_a_list(odd: torch.Tensor, at: int) -> None:
    rows = [A.reshape(2, 3), A.reshape(2, 3)[:1]]
    check([*rows[:at], odd, *rows[at:]], "list")


def test_zero_dimensional_rows_are_dense() -> None:
    check(list(A), "dense")
    check([REAL[0].clone().requires_grad_(), REAL[1]], "dense")
    check([np.array(1.5), np.array(2.5)], "dense")


@pytest.mark.parametrize("width", [1, 3])
def test_more_small_rows_than_are_joined_at_once(width: int) -> None:
    generator = np.random.default_rng(0)
    counts = generator.integers(0, 4, CAT_ITEMS_MAX).tolist()
    values = torch.from_numpy(generator.integers(0, 1 << 62, (sum(counts), width)))
    rows = list((values if width > 1 else values[:, 0]).split(counts))
    assert alike.join_small(rows) is not None
    assert encode({"x": rows}).bytes.tobytes() == encode({"x": [row.clone() for row in rows]}).bytes.tobytes()
    assert identical(encode({"x": rows}).read("x").list(), rows)


def test_small_rows_are_copied_when_they_are_measured_and_others_are_not() -> None:
    assert alike.join_small([A] * 2) is not None
    assert alike.join_small([A.repeat(SMALL_ROW_BYTES)] * 2) is None
    assert alike.join_small([A]) is None


@pytest.mark.parametrize("wide", [1, SMALL_ROW_BYTES], ids=["small", "large"])
@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (A.to_sparse(), "layout torch.sparse_coo"),
        (A.to("meta"), "meta tensor"),
        (A.float().as_subclass(Subclass), "Subclass"),
    ],
)
@pytest.mark.parametrize("at", [0, 2])
def test_a_refused_row_is_named(odd: torch.Tensor, reason: str, at: int, wide: int) -> None:
    rows = [A.repeat(wide), A[:2], A[:1]]
    with pytest.raises(UnsupportedValue, match=rf"^x\[{at}\]: .*{reason}"):
        measure({"x": [*rows[:at], odd, *rows[at:]]})
    with pytest.raises(UnsupportedValue, match=rf"^x\[{at}\].y: .*{reason}"):
        measure({"x": [{"y": row} for row in (*rows[:at], odd, *rows[at:])]})


@pytest.mark.filterwarnings("ignore")  # that quantised tensors are on their way out
def test_rows_of_one_refused_kind() -> None:
    with pytest.raises(UnsupportedValue, match=r"^x\[0\]: a tensor of layout torch.sparse_coo"):
        measure({"x": [A.to_sparse()] * 2})
    with pytest.raises(UnsupportedValue, match=r"^x\[0\]: a meta tensor"):
        measure({"x": [A.to("meta")] * 2})
    quantised = torch.quantize_per_tensor(REAL, 0.1, 0, torch.qint8)
    with pytest.raises(UnsupportedValue, match=r"^x\[0\]: a tensor of dtype torch.qint8"):
        measure({"x": [quantised] * 2})


def test_nested_tensors_among_rows_make_it_a_list() -> None:
    nested = torch.nested.nested_tensor([A[:2], A[:1]], layout=torch.strided)
    for rows in ([A, nested], [nested, A], [nested, nested]):
        assert encode({"x": rows}).layout.form("x").kind == "list"


@pytest.mark.parametrize("other", ["i4", ">i8", "f8"])
def test_an_array_that_differs_makes_it_a_list(other: str) -> None:
    check([np.arange(3), np.arange(2), np.arange(2).astype(other)], "list")
    check([np.arange(3), np.arange(2)[None]], "list")
    check([np.arange(3), np.arange(2).astype(np.dtype("i8").newbyteorder("="))], "ragged")


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.int64])
def test_rows_of_all_sizes_lie_back_to_back(dtype: torch.dtype) -> None:
    sizes = [5, CAT_ITEMS_MAX, 7, 0, CAT_ITEMS_MAX + 1, *[3000] * 300, PIECE_BYTES + 3, 1, *[20_000] * 20, 0]
    rows = [torch.from_numpy(np.random.default_rng(size).integers(0, 2, size)).to(dtype) for size in sizes]
    column = encode({"x": rows}).read("x")
    assert bits(column.values()) == b"".join(map(bits, rows))  # type: ignore[attr-defined]
    arrays = encode({"x": [row.numpy() for row in rows]}).read("x")
    assert arrays.values().tobytes() == b"".join(map(bits, rows))  # type: ignore[attr-defined]


@pytest.mark.parametrize("last", ["z", "é", "\N{SNOWMAN}" * 30_000])
def test_texts_of_all_sizes_lie_back_to_back(last: str) -> None:
    lengths = [0, 3, TEXT_PIECE_BYTES - 3, 1, TEXT_PIECE_BYTES + 1, 0, *[700] * 300, 3 * TEXT_PIECE_BYTES, 5, 0]
    texts = [*(chr(97 + row % 26) * length for row, length in enumerate(lengths)), last]
    assert encode({"x": texts}).read("x").list() == texts
    encoded = [text.encode() for text in texts]
    assert encode({"x": encoded}).read("x").list() == encoded
    assert encode({"x": texts}).read("x", rows=[4, 11, len(lengths)]).list() == [texts[4], texts[11], last]


def test_what_torch_does_not_join_is_copied_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [A.repeat(SMALL_ROW_BYTES), A, A[:3]]
    plan = measure(normalise({"x": rows}))

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Expected all tensors to be on the same device")

    monkeypatch.setattr(torch, "cat", refuse)
    target = buffers.allocate(plan.size_bytes)
    plan.write(target)
    monkeypatch.undo()
    assert target.tobytes() == encode({"x": rows}).bytes.tobytes()


def test_batches_cover_all_rows_and_keep_to_the_limit() -> None:
    bounds = [0, 3, 3, 4, 20, 20, 21, 29]
    assert batches(bounds, 4) == [(0, 3), (3, 4), (4, 6), (6, 7)]
    assert batches([0], 4) == []
    assert batches([0, 0, 0], 4) == [(0, 2)]


@pytest.mark.parametrize(
    "rows",
    [
        [[1, 2], [], ["a", None, 2.5, b"x", True, 1j]],
        [1, 2**200, -(2**70), None],
        [[1], (1, [2]), {3}, {"k": [4]}],
        [[1], [[2, [3]]], [{"k": b"x"}]],
        [[1], [A, np.arange(3)], A, []],
        [A, 1, [2]],
    ],
)
def test_records_with_and_without_tensors(rows: list[Any]) -> None:
    check(Records(rows), "list")


@pytest.mark.parametrize("rows", [["a", "\ud800", 1], [["a"], ["b", "\ud800"]], [[1], [{"k": "\ud800"}]]])
def test_a_lone_surrogate_in_a_record_is_named(rows: list[Any]) -> None:
    with pytest.raises(UnsupportedValue, match=r"^x\[1\].*lone surrogate"):
        measure({"x": Records(rows)})


def test_lists_of_scalars_nest_no_deeper_than_other_values() -> None:
    value: Any = [1, 2]
    for _ in range(NESTING_MAX - 1):
        value = {"k": value}
    check([value, value], "struct")
    with pytest.raises(UnsupportedValue, match=r"^x\[0\].*nest deeper"):
        measure({"x": [{"k": value}] * 2})


@pytest.mark.parametrize(
    "rows", [["a", "", "bc"], ["", ""], ["a", "ä", "", "€𝄞", "z"], ["ä"], [b"a", b"", b"\xff\x00"], ["\x00", "\x7f"]]
)
def test_texts_and_bytes(rows: list[Any]) -> None:
    check(rows, "list")


def test_a_damaged_record_is_named_whether_or_not_others_are_sound() -> None:
    block = encode({"x": Records([[1], [2, 3], [4]])})
    stream = block.layout.node("x").streams[0]
    block.bytes[stream.offset + 2] = 0xC1  # never used in msgpack: the second row's first byte
    with pytest.raises(CorruptBlock, match="row 1 of its block"):
        block.read("x", verify=False)
    block.bytes[stream.offset + 2] = 0x91  # a list of one: the row ends too early
    with pytest.raises(CorruptBlock, match="row 1 of its block: a value does not end"):
        block.read("x", verify=False)
