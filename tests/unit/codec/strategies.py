"""Values that users put: everything the codec promises to carry. Shared with the tests of whole transports."""

from __future__ import annotations

import datetime as dt
import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from tqclient.codec import Records, Shared

TORCH_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64, torch.bool),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64),
]
NUMPY_DTYPES = [
    np.dtype(name)
    for name in (
        "?",
        "i1",
        "u2",
        "<i4",
        ">i4",
        "<i8",
        "<f2",
        ">f4",
        "<f8",
        "<c8",
        "<U3",
        ">U2",
        "S4",
        "M8[ns]",
        "m8[s]",
        "V3",
    )
] + [np.dtype([("a", "<i4"), ("b", ">f8", (2,)), ("c", "S2")])]

shapes = st.lists(st.integers(0, 3), max_size=5).map(tuple)


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """Any bits (NaN payloads among them), in any of the ways in which a tensor can lie in memory."""
    dtype = dtype or draw(st.sampled_from(TORCH_DTYPES))
    shape = draw(shapes) if shape is None else shape
    size = math.prod(shape) * dtype.itemsize
    raw = bytearray(np.random.default_rng(draw(st.integers(0, 2**32))).bytes(size))
    if not size:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    tensor = torch.frombuffer(raw, dtype=dtype).reshape(shape)
    return _disguised(draw, tensor)


def _disguised(draw: st.DrawFn, tensor: torch.Tensor) -> torch.Tensor:
    """Equal shape and dtype, other strides and flags."""
    way = draw(
        st.sampled_from(["plain", "transposed", "strided", "expanded", "conjugate", "negative", "requires grad"])
    )
    if way == "transposed" and tensor.dim() > 1:
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if way == "strided" and tensor.dim():
        wide = torch.stack([tensor, tensor], -1)
        return wide[..., 0]
    if way == "expanded" and tensor.dim():
        return tensor[:1].expand(tensor.shape)
    if way == "conjugate" and tensor.is_complex():
        return tensor.conj()
    if way == "negative" and tensor.is_complex():
        # torch negates a NaN in two ways, by its sign bit or by arithmetic, depending on how many there are to negate.
        parts = torch.view_as_real(tensor)
        parts[parts.isnan()] = -0.0
        return tensor.conj().imag if tensor.dtype == torch.complex32 else torch._neg_view(tensor)
    if way == "requires grad" and tensor.dtype in (torch.float32, torch.float64, torch.bfloat16):
        return tensor.requires_grad_()
    return tensor


@st.composite
def arrays(draw: st.DrawFn, dtype: np.dtype[Any] | None = None, shape: tuple[int, ...] | None = None) -> np.ndarray:
    """Arrays in C and Fortran order, contiguous or not."""
    dtype = dtype or draw(st.sampled_from(NUMPY_DTYPES))
    shape = draw(shapes) if shape is None else shape
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if dtype.kind == "U":
        array = (
            rng.integers(0, 0xD000, math.prod(shape) * dtype.itemsize // 4).astype(dtype.byteorder + "u4").view(dtype)
        )
    elif dtype.kind == "b":
        array = rng.integers(0, 2, math.prod(shape)).astype(bool)
    else:
        array = np.frombuffer(rng.bytes(math.prod(shape) * dtype.itemsize), dtype)
    array = array.reshape(shape)
    way = draw(st.sampled_from(["c", "fortran", "strided"]))
    if way == "fortran":
        return np.asfortranarray(array)
    return np.repeat(array, 2, axis=0)[::2] if way == "strided" and array.ndim else array


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
zones = st.one_of(
    st.none(),
    st.just(dt.timezone.utc),
    st.builds(dt.timezone, st.timedeltas(dt.timedelta(hours=-23), dt.timedelta(hours=23)), st.just("here")),
)
numpy_scalars = st.one_of(
    st.builds(np.float32, st.floats(width=32)),
    st.builds(np.int8, st.integers(-128, 127)),
    st.builds(np.uint64, st.integers(0, 2**64 - 1)),
    st.builds(np.bool_, st.booleans()),
    st.builds(np.complex64, st.complex_numbers(width=64)),
    st.builds(np.str_, texts),
    st.builds(np.bytes_, st.binary(max_size=5)),
    st.just(np.datetime64("2024-02-29T12:00:00", "ms")),
)
hashables = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), texts, st.binary(max_size=8)),
    *(st.floats(), st.complex_numbers(), numpy_scalars, st.timedeltas(), st.dates()),
    st.datetimes(timezones=zones) | st.times(),
)
keys = st.one_of(
    texts, st.integers(-5, 5), st.sampled_from(["__tensor__", "__ext__", "$type", "_tq", "\x00", ""]), st.booleans()
) | st.tuples(st.integers(0, 2), texts)
leaves = st.one_of(hashables, tensors(), arrays())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(keys, inner, max_size=3),
        st.sets(st.integers() | texts, max_size=3),
        st.frozensets(st.binary(max_size=3), max_size=3),
    ),
    max_leaves=8,
)


def _ragged(rows: int, make: Any, dtypes: list[Any]) -> st.SearchStrategy[list[Any]]:
    return st.tuples(st.sampled_from(dtypes), st.lists(st.integers(0, 3), max_size=2)).flatmap(
        lambda form: st.lists(
            st.integers(0, 4).flatmap(lambda length: make(form[0], (length, *form[1]))), min_size=rows, max_size=rows
        )
    )


def jagged(rows: int) -> st.SearchStrategy[torch.Tensor]:
    """Jagged NestedTensors, with empty rows."""
    return st.lists(st.integers(0, 4), min_size=rows, max_size=rows).flatmap(
        lambda lengths: tensors(torch.float32, (sum(lengths), 2)).map(
            lambda values: torch.nested.nested_tensor_from_jagged(
                values.detach(), torch.tensor([sum(lengths[:row]) for row in range(rows + 1)])
            )
        )
    )


def columns(rows: int, depth: int = 2) -> st.SearchStrategy[Any]:
    """Columns of every kind, in every way in which one can be given."""

    def listed(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
        return st.lists(inner, min_size=rows, max_size=rows)

    choices = [
        shapes.flatmap(lambda shape: tensors(shape=(rows, *shape[:3]))),
        shapes.flatmap(lambda shape: arrays(shape=(rows, *shape[:3]))),
        _ragged(rows, tensors, TORCH_DTYPES),
        _ragged(rows, arrays, NUMPY_DTYPES),
        st.sampled_from(TORCH_DTYPES).flatmap(lambda dtype: listed(tensors(dtype, ()))),
        st.sampled_from(NUMPY_DTYPES).flatmap(lambda dtype: listed(arrays(dtype, ()))),
        listed(texts),
        listed(st.binary(max_size=8)),
        listed(values),
        listed(tensors()).map(Records),
    ]
    if rows:
        choices.append(jagged(rows))
    if depth:
        names = st.lists(texts.filter(bool), min_size=1, max_size=3, unique=True)
        structs = names.flatmap(lambda keys: st.fixed_dictionaries({key: columns(rows, depth - 1) for key in keys}))
        choices.append(structs)
        choices.append(shared(rows, depth))
    return st.one_of(choices)


@st.composite
def shared(draw: st.DrawFn, rows: int, depth: int) -> Shared:
    """Rows that share values, some of which no row may have."""
    count = draw(st.integers(1 if rows else 0, 3))
    index = draw(st.lists(st.integers(0, max(0, count - 1)), min_size=rows, max_size=rows))
    return Shared(draw(columns(count, depth - 1).filter(lambda column: not isinstance(column, Shared))), index)


batches = st.integers(0, 5).flatmap(
    lambda rows: st.dictionaries(texts.filter(bool), columns(rows), min_size=1, max_size=3)
)
