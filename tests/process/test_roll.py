"""The transfer backend for ROLL, over real daemons."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

import tqclient as tq
from tqclient.integrations.roll import TransferBackend
from tqserver.local import LocalCluster

_numbers = itertools.count()


class RowRemoteBatch:
    """Takes what ROLL's class of that name takes, and keeps copies as it does."""

    def __init__(
        self, partition: str, device: torch.device | None, fields: list[str], row_ids: list[str], cache: Any
    ) -> None:
        self.partition = partition
        self.device = device
        self.fields = set(fields)
        self.row_ids = row_ids.copy()
        self.cache = cache.clone()


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB") as running:
        yield running


@pytest.fixture
def backend(shared_cluster: LocalCluster) -> Iterator[TransferBackend[RowRemoteBatch]]:
    made = TransferBackend(shared_cluster.address, remote_batch=RowRemoteBatch)
    yield made
    made.close()


@pytest.fixture
def name() -> str:
    return f"train_eval/{next(_numbers)}"


Backend = TransferBackend[RowRemoteBatch]


def ids(rows: int) -> list[str]:
    return [f"row-{row}" for row in range(rows)]


def objects(*values: Any) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def as_array(stack: Any) -> Any:
    """What ROLL makes of a field that is no tensor: see `RemoteBatch.__getitem__` there."""
    return objects(*list(stack))


def test_a_remote_batch_says_what_was_put(backend: Backend, name: str) -> None:
    tokens = torch.arange(6).reshape(3, 2)
    prompts = objects("a", "b", "c")
    batch = backend.put(name, ids(3), {"tokens": tokens, "prompt": prompts}, 3)
    assert (batch.partition, batch.device, batch.fields) == (name, None, {"tokens", "prompt"})
    assert batch.row_ids == ["row-0", "row-1", "row-2"]
    assert batch.cache["tokens"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert list(batch.cache["prompt"]) == ["a", "b", "c"]
    assert batch.cache.batch_size == (3,)


def test_dense_fields_come_back_dense(backend: Backend, name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = {
        "tokens": draw.integers(0, 9, (4, 7)),
        "rewards": draw.random(4),
        "pixels": draw.random((4, 3, 2, 2)).astype(np.float32),
        "mask": draw.random((4, 7)) < 0.5,
    }
    backend.put(name, ids(4), {field: torch.from_numpy(value) for field, value in values.items()}, 4)
    read = backend.get(name, ["row-3", "row-0"], list(values))
    assert isinstance(read, TensorDict)
    assert read.batch_size == (2,)
    assert set(read.keys()) == set(values)
    for field, value in values.items():
        assert read[field].numpy().dtype == value.dtype
        assert read[field].tolist() == value[[3, 0]].tolist()


def test_arrays_come_back_as_the_values_of_their_rows(backend: Backend, name: str) -> None:
    fields: dict[str, Any] = {
        "text": np.array(["one", "two"]),
        "score": np.array([0.5, 1.5], np.float32),
        "turns": objects([{"role": "user", "content": "hi"}], None),
        "images": objects({"pixels": torch.arange(3), "grid": (1, 2)}, {"pixels": torch.arange(2), "grid": (3, 4)}),
        "matrix": np.arange(6).reshape(2, 3),
    }
    backend.put(name, ids(2), fields, 2)
    read = backend.get(name, ids(2), list(fields))
    assert as_array(read["text"]).tolist() == ["one", "two"]
    assert as_array(read["score"]).tolist() == [0.5, 1.5]
    assert [type(each) for each in read["score"]] == [np.float32, np.float32]
    assert as_array(read["turns"]).tolist() == [[{"role": "user", "content": "hi"}], None]
    assert [each["pixels"].tolist() for each in read["images"]] == [[0, 1, 2], [0, 1]]
    assert [each["grid"] for each in read["images"]] == [(1, 2), (3, 4)]
    assert [each.tolist() for each in read["matrix"]] == [[0, 1, 2], [3, 4, 5]]


def test_rows_of_several_widths(backend: Backend, name: str) -> None:
    backend.put(name, ["a", "b"], {"x": torch.ones(2, 3)}, 2)
    backend.put(name, ["c"], {"x": torch.zeros(1, 5)}, 1)
    rows = torch.nested.nested_tensor([torch.arange(2.0), torch.arange(1.0)], layout=torch.jagged)
    backend.put(name, ["d", "e"], {"x": rows}, 2)
    assert backend.get(name, ["b", "a"], ["x"])["x"].tolist() == [[1.0] * 3] * 2
    assert backend.get(name, ["c"], ["x"])["x"].tolist() == [[0.0] * 5]
    ragged = backend.get(name, ["c", "e", "d", "a"], ["x"])["x"]
    assert [row.tolist() for row in ragged.unbind()] == [[0.0] * 5, [0.0], [0.0, 1.0], [1.0] * 3]


def test_a_later_stage_adds_and_replaces_fields(backend: Backend, name: str) -> None:
    backend.put(name, ids(3), {"x": torch.arange(3), "y": torch.arange(3)}, 3)
    batch = backend.put(name, ["row-2", "row-1"], {"y": torch.tensor([20, 10]), "z": torch.tensor([2.0, 1.0])}, 2)
    assert batch.fields == {"y", "z"}
    assert backend.get(name, ids(3), ["x", "y"])["y"].tolist() == [0, 10, 20]
    assert backend.get(name, ["row-1", "row-2"], ["z", "x"])["z"].tolist() == [1.0, 2.0]
    with pytest.raises(KeyError, match="'z' is not written for 1 of 3"):
        backend.get(name, ids(3), ["z"])


def test_a_repeated_row_is_read_as_often(backend: Backend, name: str) -> None:
    backend.put(name, ids(2), {"x": torch.tensor([5, 6])}, 2)
    assert backend.get(name, ["row-1", "row-1", "row-0"], ["x"])["x"].tolist() == [6, 6, 5]


def test_what_is_missing_is_named(backend: Backend, name: str) -> None:
    with pytest.raises(KeyError, match=f"partition '{name}' does not exist: register it, put to it first, or correct"):
        backend.get(name, ["row-0"], ["x"])
    backend.put(name, ids(2), {"x": torch.arange(2)}, 2)
    with pytest.raises(tq.SampleNotFound, match="2 of 3 keys have no sample: 'p', 'q'") as missing:
        backend.get(name, ["p", "row-0", "q"], ["x"])
    assert missing.value.rows == (0, 2)
    with pytest.raises(KeyError, match="has no field 'nope'; its fields: x"):
        backend.get(name, ["row-0"], ["x", "nope"])
    for keys, fields in (([], ["x"]), (["row-0"], []), ("row-0", ["x"]), (["row-0"], "x")):
        with pytest.raises(ValueError, match="expected a list of names, one at least"):
            backend.get(name, keys, fields)  # type: ignore[arg-type]


REFUSED: list[tuple[list[str], dict[str, Any], int, type[Exception], str]] = [
    (["a", "b"], {}, 2, ValueError, "fields is empty"),
    (["a", "b"], {"x": torch.arange(3)}, 2, ValueError, "field 'x': 3 rows, but batch_size=2"),
    (["a", "b"], {"x": torch.arange(2), "y": np.arange(3)}, 2, ValueError, "field 'y': 3 rows"),
    (["a", "b"], {"x": torch.tensor(1)}, 2, ValueError, "field 'x': no dimension"),
    (["a"], {"x": torch.arange(2)}, 2, ValueError, "1 row_ids, but batch_size=2"),
    (["a", "a"], {"x": torch.arange(2)}, 2, ValueError, r"\['a'\] come twice in one put"),
    (["a", ""], {"x": torch.arange(2)}, 2, ValueError, "the key of row 1 is ''"),
    (["a", "b"], {"x": [1, 2]}, 2, TypeError, "field 'x': list: expected a torch.Tensor or a numpy.ndarray"),
    (["a", "b"], {"x": objects(1, object())}, 2, TypeError, "x"),
    (["a", "b"], {"old": torch.ones(2)}, 2, tq.SchemaMismatch, "'old'.*int64.*float32"),
]


@pytest.mark.parametrize(("row_ids", "fields", "rows", "error", "message"), REFUSED)
def test_a_put_that_is_refused_writes_nothing(
    backend: Backend, name: str, row_ids: list[str], fields: dict[str, Any], rows: int, error: type, message: str
) -> None:
    backend.put(name, ["first"], {"old": torch.tensor([7])}, 1)
    with pytest.raises(error, match=message):
        backend.put(name, row_ids, fields, rows)
    for key in set(row_ids) - {""}:
        with pytest.raises(tq.SampleNotFound):
            backend.get(name, [key], ["old"])
    assert backend.get(name, ["first"], ["old"])["old"].tolist() == [7]


def test_no_rows_are_no_call(backend: Backend, name: str) -> None:
    batch = backend.put(name, [], {"x": torch.ones(0, 3), "o": objects()}, 0)
    assert (batch.row_ids, batch.fields) == ([], {"x", "o"})
    backend.delete(name, [], ["x"])
    with pytest.raises(KeyError, match="does not exist"):
        backend.get(name, ["a"], ["x"])


def test_a_delete_removes_rows_whole_and_may_be_repeated(backend: Backend, name: str) -> None:
    backend.delete(name, ["row-0"], ["x"])  # no such partition
    backend.put(name, ids(3), {"x": torch.arange(3), "y": torch.arange(3)}, 3)
    for _ in range(2):
        backend.delete(name, ["row-0", "row-2", "never"], ["x"])
    assert backend.get(name, ["row-1"], ["x", "y"])["y"].tolist() == [1]
    for field in ("x", "y"):
        with pytest.raises(tq.SampleNotFound, match="'row-0', 'row-2'"):
            backend.get(name, ids(3), [field])
    backend.put(name, ["row-0"], {"x": torch.tensor([9])}, 1)
    assert backend.get(name, ["row-0", "row-1"], ["x"])["x"].tolist() == [9, 1]


def test_one_string_is_no_list_of_ids(backend: Backend, name: str) -> None:
    backend.put(name, ["a", "b"], {"x": torch.arange(2)}, 2)
    with pytest.raises(ValueError, match="keys='ab': expected a list of names"):
        backend.delete(name, "ab", ["x"])  # type: ignore[arg-type]
    assert backend.get(name, ["a", "b"], ["x"])["x"].tolist() == [0, 1]


def test_partitions_do_not_mix(backend: Backend, name: str) -> None:
    other = f"{name}/other"
    backend.put(name, ["a"], {"x": torch.tensor([1])}, 1)
    backend.put(other, ["a"], {"x": torch.tensor([2.5])}, 1)
    backend.delete(name, ["a"], ["x"])
    assert backend.get(other, ["a"], ["x"])["x"].tolist() == [2.5]


def test_workers_put_and_read_at_once(shared_cluster: LocalCluster, name: str) -> None:
    writers, rows = 4, 5
    read: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        own = TransferBackend(shared_cluster.address, remote_batch=RowRemoteBatch)
        keys = [f"{number}-{row}" for row in range(rows)]
        own.put(name, keys, {"x": torch.arange(rows * 2).reshape(rows, 2) + 100 * number}, rows)
        read[number] = own.get(name, keys, ["x"])["x"].tolist()
        own.close()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read == {
        number: [[100 * number + 2 * row, 100 * number + 2 * row + 1] for row in range(rows)]
        for number in range(writers)
    }


def test_rows_outlive_the_backend_that_put_them(shared_cluster: LocalCluster, backend: Backend, name: str) -> None:
    own = TransferBackend(shared_cluster.address, remote_batch=RowRemoteBatch)
    own.put(name, ["a"], {"x": torch.tensor([3])}, 1)
    own.close()
    own.close()
    with pytest.raises(tq.InvalidArgument, match="closed"):
        own.get(name, ["a"], ["x"])
    assert backend.get(name, ["a"], ["x"])["x"].tolist() == [3]


def test_the_address_may_come_from_the_environment(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONTROLLER", cluster.address)
    own = TransferBackend(remote_batch=RowRemoteBatch)
    own.put("train_eval", ["a"], {"x": torch.tensor([3])}, 1)
    own.close()
    with tq.connect(cluster.address) as client:
        assert client.partition("train_eval").describe().samples == 1
