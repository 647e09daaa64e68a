"""What becomes of a batch on its way to the training loop."""

from __future__ import annotations

import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.codec.blocks import encode
from tqclient.codec import Shared
from tqclient.errors import InternalError, InvalidArgument, SampleNotFound
from tqclient.rows import RowSet
from tqclient.torch.batch import LoadedBatch
from tqclient.torch.devices import Mover
from tqclient.torch.workers import portable

VALUES = {
    "reward": torch.tensor([1.0, 2.0, 3.0]),
    "tokens": [torch.arange(n) for n in (3, 1, 4)],
    "image": [{"pixels": torch.full((n, 2), float(n)), "name": f"image {n}"} for n in (1, 2, 3)],
    "shared": {"by": Shared([torch.arange(2), torch.arange(1)], [1, 0, 1])},
    "prompt": Shared([torch.ones(2), torch.zeros(3)], [0, 1, 1]),
    "array": [np.arange(n) for n in (2, 0, 1)],
    "text": ["a", "b", "c"],
    "extra": [{"any": torch.ones(2)}, (1, 2), None],
}
Pair = namedtuple("Pair", "left right")


@pytest.fixture
def batch() -> LoadedBatch:
    block = encode(VALUES)
    rows = RowSet(
        ids=np.array([4, 5, 6]),
        keys=["k", None, None],
        groups=[7, None, "g"],
        tags=[{}, {"done": True}, {}],
        weight_versions=np.full((3, 2), -1),
        attempts=np.ones(3, np.int64),
        runs={},
        blocks={},
    )
    return LoadedBatch(rows, {name: block.read(name) for name in VALUES}, 9)


def check(batch: Any) -> None:
    assert batch["reward"].tolist() == [1.0, 2.0, 3.0]
    assert batch["tokens"].layout == torch.jagged
    assert [row.tolist() for row in batch["tokens"].unbind()] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert batch.padded("tokens", -1).tolist() == [[0, 1, 2, -1], [0, -1, -1, -1], [0, 1, 2, 3]]
    assert [row.tolist() for row in batch.list("tokens")] == [[0, 1, 2], [0], [0, 1, 2, 3]]
    assert batch["image"]["name"] == ["image 1", "image 2", "image 3"]
    assert batch.list("image")[1]["pixels"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    assert [row["by"].tolist() for row in batch.list("shared")] == [[0], [0, 1], [0]]
    assert batch["shared"]["by"].layout == torch.jagged
    assert batch.padded("prompt").tolist() == [[1, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert batch.padded("array").tolist() == [[0, 1], [0, 0], [0, 0]]
    assert batch["text"] == ["a", "b", "c"]
    assert batch["extra"][0]["any"].tolist() == [1.0, 1.0]
    assert batch["extra"][1:] == [(1, 2), None]
    assert (batch.ids.tolist(), batch.keys, batch.groups) == ([4, 5, 6], ["k", None, None], [7, None, "g"])
    assert (batch.tags[1], batch.step, batch.rows) == ({"done": True}, 9, 3)


def test_a_batch_has_all_that_any_batch_has(batch: LoadedBatch) -> None:
    batch.verify()
    batch.verify(["tokens", "text"])
    for act in (lambda: batch.verify(["nonesuch"]), lambda: batch.to_buffer(fields=["nonesuch"])):
        with pytest.raises(KeyError, match="'nonesuch' is not in this batch"):
            act()
    copy = LoadedBatch.from_buffer(batch.to_buffer({"extra": 1}))
    assert (copy.extra, copy.step, copy.ids.tolist()) == ({"extra": 1}, None, [4, 5, 6])
    copy.verify()
    with pytest.raises(InvalidArgument, match="only a batch that a StreamingLoader yielded"):
        copy.ack()
    copy.close()


def test_a_batch_reads_the_same_in_another_process(batch: LoadedBatch) -> None:
    check(batch)
    check(pickle.loads(pickle.dumps(batch)))


def test_a_batch_reads_the_same_on_a_device(batch: LoadedBatch) -> None:
    moved, ready = Mover("cpu", None).move(batch)
    assert ready is None
    check(moved)
    assert "carried" not in repr(moved)


def test_tensors_are_moved_out_of_whatever_holds_them() -> None:
    jagged = torch.nested.nested_tensor_from_jagged(torch.arange(4.0), torch.tensor([0, 1, 1, 4]))
    value = {"pair": Pair(torch.ones(2), [jagged, "text"]), "none": None, "array": np.arange(2)}
    moved, _ = Mover(torch.device("cpu"), None).move(value)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].left.tolist() == [1.0, 1.0]
    assert [row.tolist() for row in moved["pair"].right[0].unbind()] == [[0.0], [], [1.0, 2.0, 3.0]]
    assert moved["pair"].right[1] == "text"
    assert moved["none"] is None
    assert moved["array"] is value["array"]


def test_without_a_device_nothing_is_touched(batch: LoadedBatch) -> None:
    mover = Mover(None, None)
    assert mover.move(batch) == (batch, None)
    assert mover.device is None


@pytest.mark.parametrize("device", ["cuda:99", "nonesuch", "meta", 3.5, "xla", "hpu", "privateuseone"])
def test_an_absent_device_is_an_error(device: Any) -> None:
    with pytest.raises(InvalidArgument, match="device="):
        Mover(device, None)


def test_pinned_memory_needs_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidArgument, match="pin_memory=True needs CUDA"):
        Mover(None, True)


class Stubborn(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__("cannot be made from this alone")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (SampleNotFound("gone", ids=[3]), SampleNotFound),
        (ValueError("off"), ValueError),
        (Stubborn(1, 2), InternalError),
    ],
)
def test_an_error_crosses_to_another_process(error: Exception, kind: type[Exception]) -> None:
    crossed = pickle.loads(pickle.dumps(portable(error)))
    assert type(crossed) is kind
    assert str(error) in str(crossed)
    assert getattr(crossed, "ids", None) == getattr(error, "ids", getattr(crossed, "ids", None))
