"""Ranges as a user gives them: what is refused, when, and with which words; and what a client counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.client.fakes import FakeService
from tqclient.arguments import RowArguments
from tqclient.batch import BatchData
from tqclient.codec import Shared
from tqclient.counters import Traffic
from tqclient.errors import ClaimTimeout, CorruptBlock, InvalidArgument, LeaseExpired, PartitionNotFound, Sealed
from tqclient.info import PartitionRef
from tqclient.operations.claims import ConsumerRef, claim
from tqclient.operations.put import put
from tqclient.operations.read import Delivery, get
from tqclient.operations.sessions import release_lost_claims
from tqclient.samplers import Fifo

ROWS = {
    "x": [torch.arange(5), torch.arange(3)],
    "mm": {"pixels": [torch.ones(4, 2), torch.zeros(2, 2)], "size": torch.tensor([4, 2])},
    "dense": torch.arange(8).view(2, 4),
    "name": ["a", "b"],
}


@pytest.fixture
def filled(service: FakeService, ref: PartitionRef) -> FakeService:
    service.run(put(service.state, ref, ROWS, RowArguments(), None))
    del service.calls[:]
    return service


def do_get(service: FakeService, ref: PartitionRef, ranges: Any, fields: list[str] | None = None) -> Delivery:
    return service.run(get(service.state, ref, [1, 2], None, fields, True, 5.0, ranges))


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ((1, 3), [[1, 2], [1, 2]]),
        ((2, None), [[2, 3, 4], [2]]),
        ((3, 3), [[], []]),
        ([(0, 5), (3, None)], [[0, 1, 2, 3, 4], []]),
        ([[1, 2], [0, 1]], [[1], [0]]),
        (np.array([[4, 5], [0, 3]]), [[4], [0, 1, 2]]),
        (torch.tensor([[4, 5], [0, 3]]), [[4], [0, 1, 2]]),
        (lambda lengths: np.stack([lengths - 1, lengths], axis=1), [[4], [2]]),
        (lambda lengths: [(0, length // 2) for length in lengths.tolist()], [[0, 1], [0]]),
    ],
)
def test_pairs_in_every_way_of_giving_them(filled: FakeService, ref: PartitionRef, pairs: Any, expected: Any) -> None:
    delivery = do_get(filled, ref, {"x": pairs})
    assert [row.tolist() for row in delivery.columns["x"].list()] == expected
    assert delivery.columns["name"].list() == ["a", "b"]


def test_several_fields_and_a_child_of_a_struct(filled: FakeService, ref: PartitionRef) -> None:
    columns = do_get(filled, ref, {"mm.pixels": (1, 2), "dense": (2, 4), "x": (0, 1)}).columns
    assert [row["pixels"].tolist() for row in columns["mm"].list()] == [[[1.0, 1.0]], [[0.0, 0.0]]]
    assert columns["mm"].value["size"].tolist() == [4, 2]
    assert columns["dense"].value.tolist() == [[2, 3], [6, 7]]
    assert [row.tolist() for row in columns["x"].list()] == [[0], [0]]


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ([("x", 1)], "expected a dict from field"),
        ({1: (0, 1)}, "expected a dict from field"),
        ({"x": 3}, r"ranges\['x'\]=3: expected \(start, stop\)"),
        ({"x": "ab"}, "expected"),
        ({"x": (0, 1, 2)}, "0 of row 0 is no pair"),
        ({"x": [(0, 1), (2,)]}, "of row 1 is no pair"),
        ({"x": (0.0, 1)}, "no integers"),
        ({"x": (True, 1)}, "no integers"),
        ({"x": np.array([[0.5, 1.0]] * 2)}, "no integers"),
        ({"x": (-2, None)}, r"\(-2, None\) of row 0: expected 0 <= start <= stop"),
        ({"x": (2, 1)}, "expected 0 <= start <= stop"),
        ({"name": (0, 1)}, "rows of list have no leading dimension"),
        ({"mm": (0, 1)}, r"rows of \{pixels.* have no leading dimension"),
        ({"mm.size": (0, 1)}, "no leading dimension"),
        ({"mm.colour": (0, 1)}, "there is no 'colour' in {pixels"),
        ({"x.y": (0, 1)}, "there is no 'y' in torch ragged"),
    ],
)
def test_what_is_refused_before_anything_is_asked(
    filled: FakeService, ref: PartitionRef, ranges: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        do_get(filled, ref, ranges)
    consumer = ConsumerRef(ref, "trainer", (), Fifo())
    with pytest.raises(InvalidArgument, match=message):
        filled.run(claim(filled.state, consumer, 1, True, 5.0, ranges=ranges))
    assert filled.calls == []


def test_a_field_that_is_not_read(filled: FakeService, ref: PartitionRef) -> None:
    with pytest.raises(InvalidArgument, match="that is not read; what is: 'name'"):
        do_get(filled, ref, {"x": (0, 1)}, ["name"])
    assert filled.calls == []
    with pytest.raises(InvalidArgument, match="that is not read; what is: 'x', 'mm', 'dense', 'name'"):
        do_get(filled, ref, {"later": (0, 1)})


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"x": (0, 4)}, r"ranges\['x'\]: \[0, 4\) reaches beyond row 1, sample 2, whose length is 3"),
        ({"x": [(5, None), (4, None)]}, r"\[4, 4\) reaches beyond row 1, sample 2, whose length is 3"),
        ({"x": [(0, 1)]}, "1 of them for 2 rows"),
        ({"x": lambda lengths: lengths}, "is no pair"),
    ],
)
def test_a_range_that_does_not_fit_gives_a_claim_back(
    filled: FakeService, ref: PartitionRef, ranges: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        do_get(filled, ref, ranges)
    consumer = ConsumerRef(ref, "trainer", ("x",), Fifo())
    with pytest.raises(InvalidArgument, match=message):
        filled.run(claim(filled.state, consumer, 2, True, 5.0, ranges=ranges))
    assert filled.leased == {1, 2}
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()


@pytest.mark.parametrize("error", [Sealed, ClaimTimeout, LeaseExpired, CorruptBlock, PartitionNotFound, StopIteration])
def test_what_a_function_raises_is_no_answer_to_the_read(
    filled: FakeService, ref: PartitionRef, error: type[Exception]
) -> None:
    def fail(lengths: Any) -> Any:
        asked.append(len(lengths))
        raise error("its own")

    asked: list[int] = []
    consumer = ConsumerRef(ref, "trainer", ("x",), Fifo())
    with pytest.raises(RuntimeError, match=rf"^ranges\['x'\] raised {error.__name__}: its own$") as raised:
        do_get(filled, ref, {"x": fail})
    assert isinstance(raised.value.__cause__, error)
    with pytest.raises(RuntimeError, match=error.__name__):
        filled.run(claim(filled.state, consumer, 2, True, 5.0, ranges={"x": fail}))
    assert asked == [2, 2]
    filled.run(release_lost_claims(filled.state))
    assert filled.leased == set()


def test_a_client_that_has_not_heard_of_the_fields_learns_of_them_first(filled: FakeService, ref: PartitionRef) -> None:
    stranger = PartitionRef(1, "train", {})
    with pytest.raises(InvalidArgument, match="no leading dimension"):
        do_get(filled, stranger, {"name": (0, 1)})
    assert filled.calls != []


def test_what_is_moved_is_counted_by_path(service: FakeService, ref: PartitionRef) -> None:
    state = service.state
    service.run(put(state, ref, {"x": torch.zeros(2, 65_536, dtype=torch.uint8)}, RowArguments(), None))
    written = state.counters.traffic()["shm"].written_bytes
    assert written > 2 * 65_536
    service.run(get(state, ref, [2], None, None, True, 5.0))
    assert state.counters.traffic() == {"shm": Traffic(1, 65_536, 1, written)}
    service.run(get(state, ref, [2], None, None, True, 5.0, {"x": (0, 10)}))  # lies in one unit of 32 KiB
    assert state.counters.traffic() == {"shm": Traffic(2, 65_536 + 32_768, 1, written)}


def test_a_batch_puts_shared_values_together_only_when_they_are_asked_for(
    service: FakeService, ref: PartitionRef
) -> None:
    values = {"x": Shared([torch.arange(3), torch.arange(2)], [0, 0, 1]), "y": torch.arange(3)}
    service.run(put(service.state, ref, values, RowArguments(), None))
    batch = BatchData(service.state, service.run(get(service.state, ref, [1, 2, 3], None, None, True, 5.0)))
    listed = batch.list("x")
    assert listed[0].data_ptr() == listed[1].data_ptr()
    assert "_plain" not in vars(batch._columns["x"])
    assert batch["x"] is batch["x"]
    assert [row.tolist() for row in batch["x"].unbind()] == [[0, 1, 2], [0, 1, 2], [0, 1]]
    assert dict(batch.items())["x"] is batch["x"]
    assert [len(value) for value in batch.values()] == [3, 3]
