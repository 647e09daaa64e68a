"""Batches as one tensor, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.client.fakes import FakeService
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.consumer import Batch
from tqclient.errors import CorruptBlock, InvalidArgument
from tqclient.info import PartitionRef
from tqclient.operations.put import put
from tqclient.operations.read import get

VALUES: dict[str, Any] = {
    "tokens": [torch.arange(3), torch.arange(5)],
    "weights": [torch.full((3,), 2), torch.full((5,), 2)],
    "mask": [torch.ones(2, 4, dtype=torch.bool), torch.zeros(0, 4, dtype=torch.bool)],
    "dense": torch.tensor([[1.5, 2.5], [3.5, 4.5]], dtype=torch.bfloat16),
    "array": np.arange(6).reshape(2, 3),
    "arrays": [np.arange(2), np.arange(3)],
    "text": ["ä", "b"],
    "blob": [b"1", b""],
    "record": [{"a": [1, (2, None)]}, 3],
    "struct": [{"pixels": torch.ones(2, 3), "name": "x"}, {"pixels": torch.zeros(1, 3), "name": "y"}],
}


def batch_of(service: FakeService, ref: PartitionRef, values: dict[str, Any] = VALUES) -> BatchData:
    arguments = RowArguments(keys=["k", None], groups=["g", 4], weight_version=[(1, 2), 3], tags=[{"t": 1}, {}])
    ids = service.run(put(service.state, ref, values, arguments, None))
    return BatchData(service.state, service.run(get(service.state, ref, ids, None, None, True, 5.0)))


def same(value: Any, other: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dtype == other.dtype and value.shape == other.shape and bool((value == other).all())
    if isinstance(value, np.ndarray):
        return value.dtype == other.dtype and np.array_equal(value, other)
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    return type(value) is type(other) and value == other


def test_a_batch_comes_out_of_its_buffer_as_it_went_in(service: FakeService, ref: PartitionRef) -> None:
    batch = batch_of(service, ref)
    extra = {"micro_batch_indices": [[0, (1,)]], "tensor": torch.arange(3)}
    buffer = batch.to_buffer(extra)
    assert (buffer.dtype, buffer.dim(), buffer.is_contiguous()) == (torch.uint8, 1, True)
    copy = Batch.from_buffer(buffer)
    assert copy.fields == batch.fields == list(VALUES)
    assert same(copy.extra, extra)
    for field in VALUES:
        assert type(copy[field]) is type(batch[field]), field
        rows, others = batch.list(field), copy.list(field)
        assert all(same(row, other) for row, other in zip(rows, others, strict=True)), field
    assert copy["tokens"].is_nested
    assert (copy["tokens"] * copy["weights"]).values().tolist() == [0, 2, 4, 0, 2, 4, 6, 8]
    assert same(copy["dense"], VALUES["dense"])
    for fact in ("ids", "keys", "groups", "tags", "weight_versions", "attempts"):
        assert np.array_equal(getattr(copy, fact), getattr(batch, fact)), fact


def test_a_column_that_is_a_list_stays_one(service: FakeService, ref: PartitionRef) -> None:
    from tqclient.codec import Records

    batch = batch_of(service, ref, {"images": Records([torch.ones(2), torch.ones(3)])})
    copy = Batch.from_buffer(batch.to_buffer())
    assert isinstance(copy["images"], list)
    assert copy.extra is None


def test_values_are_views_of_the_buffer_and_what_follows_it_is_ignored(service: FakeService, ref: PartitionRef) -> None:
    buffer = batch_of(service, ref, {"dense": torch.zeros(2, 8)}).to_buffer()
    copy = Batch.from_buffer(buffer)
    start = copy["dense"].data_ptr() - buffer.data_ptr()
    assert 0 < start < len(buffer)
    longer = torch.cat([buffer, torch.full((100,), 7, dtype=torch.uint8)])
    assert Batch.from_buffer(longer)["dense"].tolist() == [[0.0] * 8] * 2
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    assert Batch.from_buffer(shifted.numpy())["dense"].tolist() == [[0.0] * 8] * 2


def test_a_batch_from_a_buffer_is_not_claimed(service: FakeService, ref: PartitionRef) -> None:
    copy = Batch.from_buffer(batch_of(service, ref).to_buffer())
    for act in (copy.ack, copy.release, copy.renew):
        with pytest.raises(InvalidArgument, match="not claimed here"):
            act()
    with copy:
        pass


def test_what_is_no_buffer_is_refused(service: FakeService, ref: PartitionRef) -> None:
    buffer = batch_of(service, ref).to_buffer()
    for wrong in (b"bytes", torch.zeros(4), buffer[None]):
        with pytest.raises(InvalidArgument, match="uint8"):
            Batch.from_buffer(wrong)
    for cut in (10, 100, len(buffer) - 64):
        with pytest.raises(CorruptBlock):
            Batch.from_buffer(buffer[:cut])
    with pytest.raises(CorruptBlock, match="not a block"):
        Batch.from_buffer(torch.zeros(640, dtype=torch.uint8))
    buffer[len(buffer) - 64] ^= 1
    with pytest.raises(CorruptBlock):
        Batch.from_buffer(buffer)
