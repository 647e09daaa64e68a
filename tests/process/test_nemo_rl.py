"""NeMo-RL's data-plane client over real daemons."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

import tqclient as tq
from examples.nemo_rl_data_plane.meta import KVBatchMeta
from tests.harness.supervisor import wait_until
from tqclient.integrations.nemo_rl import DataPlane
from tqserver.local import LocalCluster

_numbers = itertools.count()


Plane = DataPlane[KVBatchMeta]


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[LocalCluster]:
    with LocalCluster(storage_nodes=1, arena="64MiB") as running:
        yield running


@pytest.fixture
def planes(shared_cluster: LocalCluster) -> Iterator[Callable[[], Plane]]:
    made: list[Plane] = []

    def make() -> Plane:
        made.append(DataPlane(shared_cluster.address, batch_meta=KVBatchMeta))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def plane(planes: Callable[[], Plane]) -> Plane:
    return planes()


@pytest.fixture
def name(plane: Plane) -> str:
    """A partition that is registered with two fields and two tasks."""
    made = f"train/{next(_numbers)}"
    plane.register_partition(made, ["x", "y"], num_samples=8, consumer_tasks=["train", "ref_lp"])
    return made


def ids(rows: int) -> list[str]:
    return [f"u{row}" for row in range(rows)]


def of(**columns: Any) -> TensorDict:
    rows = next(iter(columns.values()))
    return TensorDict(columns, batch_size=[rows.size(0)])


def jagged(rows: list[list[float]]) -> torch.Tensor:
    made: torch.Tensor = torch.nested.nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)
    return made


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    return thread, results


def waits(plane: Plane) -> None:
    wait_until(lambda: plane.client.describe().waiting_claims == 1, what="a claim waits")


# What the contract tests of NeMo-RL ask for: tests/unit/data_plane/test_interface_contract.py there.


def test_put_get_clear(plane: Plane, name: str) -> None:
    plane.put_samples(sample_ids=ids(4), partition_id=name, fields=of(x=torch.arange(4)))
    read = plane.get_samples(sample_ids=ids(4), partition_id=name, select_fields=["x"])
    assert torch.equal(read["x"], torch.arange(4))
    plane.clear_samples(sample_ids=None, partition_id=name)
    with pytest.raises(KeyError):
        plane.get_samples(sample_ids=ids(4), partition_id=name, select_fields=["x"])


def test_a_claim_advances_consumption(plane: Plane, name: str) -> None:
    plane.put_samples(sample_ids=["a", "b"], partition_id=name, fields=of(x=torch.tensor([10, 20])))
    meta = plane.claim_meta(partition_id=name, task_name="train", required_fields=["x"], batch_size=2)
    assert isinstance(meta, KVBatchMeta)
    assert meta == KVBatchMeta(name, "train", ["a", "b"], ["x"], None, {}, [{}, {}])
    assert plane.check_consumption_status(name, ["train"])


def test_get_data_reads_what_is_named(plane: Plane, name: str) -> None:
    meta = plane.put_samples(["a"], name, of(x=torch.tensor([1]), y=torch.tensor([2])))
    assert meta == KVBatchMeta(name, None, ["a"], ["x", "y"])
    assert set(plane.get_data(meta).keys()) == {"x", "y"}
    assert plane.get_data(meta, ["y"])["y"].tolist() == [2]
    bare = KVBatchMeta(partition_id=name, task_name=None, sample_ids=["a"], fields=None)
    with pytest.raises(ValueError, match="names no fields: give select_fields"):
        plane.get_data(bare)
    assert plane.get_data(bare, ["x"])["x"].tolist() == [1]


# Values.


def test_dense_fields_come_back_dense(plane: Plane, name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    values = {
        "input_ids": draw.integers(0, 9, (4, 5)),
        "sample_mask": draw.random(4).astype(np.float32),
        "pixel_values": draw.random((4, 3, 2, 2)),
        "token_mask": draw.random((4, 5)) < 0.5,
    }
    plane.put_samples(ids(4), name, of(**{key: torch.from_numpy(value) for key, value in values.items()}))
    read = plane.get_samples(["u2", "u0", "u2"], name, list(values))
    assert isinstance(read, TensorDict)
    assert (read.batch_size, set(read.keys())) == ((3,), set(values))
    for key, value in values.items():
        assert read[key].numpy().dtype == value.dtype
        assert read[key].tolist() == value[[2, 0, 2]].tolist()


def test_ragged_fields_come_back_ragged(plane: Plane, name: str, seed: int) -> None:
    draw = np.random.default_rng(seed)
    rows = [draw.random(length).astype(np.float32).tolist() for length in (3, 1, 4, 3)]
    plane.put_samples(ids(4), name, of(x=jagged(rows)))
    read = plane.get_samples(["u2", "u1"], name, ["x"])["x"]
    assert read.layout == torch.jagged
    assert [row.tolist() for row in read.unbind()] == [rows[2], rows[1]]
    padded = torch.nested.to_padded_tensor(read, padding=-1.0)
    assert padded.tolist() == [rows[2], [*rows[1], -1.0, -1.0, -1.0]]
    assert plane.get_samples(["u0", "u3"], name, ["x"])["x"].tolist() == [rows[0], rows[3]]


def test_a_field_may_be_as_wide_as_each_step_pads_it(plane: Plane, name: str) -> None:
    plane.put_samples(["a"], name, of(x=torch.ones(1, 2)))
    plane.put_samples(["b"], name, of(x=torch.zeros(1, 3)))
    rows = plane.get_samples(["b", "a"], name, ["x"])["x"].unbind()
    assert [row.tolist() for row in rows] == [[0.0, 0.0, 0.0], [1.0, 1.0]]


def test_other_values(plane: Plane, name: str) -> None:
    turns = np.empty(2, dtype=object)
    turns[:] = [[{"role": "user", "content": "hi"}], None]
    fields = TensorDict({"turns": turns, "text": NonTensorStack("a", "b")}, batch_size=[2])
    plane.put_samples(["a", "b"], name, fields)
    read = plane.get_samples(["b", "a"], name, ["turns", "text"])
    assert isinstance(read.get("turns"), NonTensorStack)
    assert read.get("turns").tolist() == [None, [{"role": "user", "content": "hi"}]]
    assert read.get("text").tolist() == ["b", "a"]


def test_no_ids_are_no_call(plane: Plane) -> None:
    assert plane.put_samples([], "nowhere", of(x=torch.ones(0))) == KVBatchMeta("nowhere", None, [], ["x"])
    assert plane.get_samples([], "nowhere", ["x"]).batch_size == (0,)
    plane.clear_samples([], "nowhere")
    with pytest.raises(KeyError, match="'nowhere' does not exist: register it, put to it first, or correct its name"):
        plane.get_samples(["a"], "nowhere", ["x"])


# Puts.


def test_a_later_stage_adds_and_replaces_fields(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    plane.put_samples(ids(3), name, of(x=torch.arange(3)))
    planes().put_samples(["u2", "u1"], name, of(x=torch.tensor([20, 10]), y=torch.tensor([2.0, 1.0])))
    assert plane.get_samples(ids(3), name, ["x"])["x"].tolist() == [0, 10, 20]
    assert plane.get_samples(["u1", "u2"], name, ["y"])["y"].tolist() == [1.0, 2.0]
    with pytest.raises(KeyError, match="'y' is not written for 1 of 3"):
        plane.get_samples(ids(3), name, ["y"])


def test_tags_are_merged_and_come_with_a_claim(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    first = [{"weight_version": 7, "input_lengths": 3}, {"weight_version": 8, "input_lengths": 5}]
    meta = plane.put_samples(["a", "b"], name, of(x=torch.arange(2)), tags=first)
    assert meta == KVBatchMeta(name, None, ["a", "b"], ["x"], None, {}, first)
    assert planes().put_samples(["b"], name, tags=[{"weight_version": 9, "span": (8, 9)}]).fields is None
    claimed = plane.claim_meta(name, "train", ["x"], 2)
    assert claimed.tags == [
        {"weight_version": 7, "input_lengths": 3},
        {"weight_version": 9, "input_lengths": 5, "span": (8, 9)},
    ]
    assert claimed.sequence_lengths == [3, 5]
    plane.put_samples(["c"], name, of(x=torch.arange(1)), tags=[{"std": 0.5}])
    assert plane.claim_meta(name, "ref_lp", ["x"], 3).sequence_lengths is None


def test_samples_may_come_before_their_fields(plane: Plane, name: str) -> None:
    assert plane.put_samples(["a", "b"], name) == KVBatchMeta(name, None, ["a", "b"], None)
    assert plane.put_samples(["c"], name, TensorDict({}, batch_size=[1]), [{"n": 1}]).fields == []
    plane.put_samples(["c", "a"], name, of(x=torch.arange(2)))
    claimed = plane.claim_meta(name, "train", ["x"], 2)
    assert (claimed.sample_ids, claimed.tags) == (["a", "c"], [{}, {"n": 1}])


@pytest.mark.parametrize("timeout", [None, "1", float("nan"), True])
def test_a_wait_that_is_no_number(plane: Plane, name: str, timeout: Any) -> None:
    plane.put_samples(["a"], name, of(x=torch.arange(1)))
    with pytest.raises(ValueError, match=r"timeout_s=.*expected seconds"):
        plane.claim_meta(name, "train", ["x"], 1, timeout_s=timeout)
    assert plane.claim_meta(name, "train", ["x"], 1, timeout_s=-1).sample_ids == ["a"]


REFUSED: list[tuple[list[Any], Any, Any, type[Exception], str]] = [
    (["a"], TensorDict({}, batch_size=[2]), [{}], ValueError, "2 rows for 1 keys"),
    (["a", "b"], of(x=torch.arange(3)), None, ValueError, "3 rows for 2 keys: give one key per row"),
    (["a", "b"], of(x=torch.arange(2)), [{}], ValueError, "1 tags for 2 keys"),
    (["a", "a"], of(x=torch.arange(2)), None, ValueError, r"\['a'\] come twice in one put"),
    (["a", 7], of(x=torch.arange(2)), None, ValueError, "the key of row 1 is 7"),
    (["a"], of(old=torch.ones(1)), [{"new": 1}], tq.SchemaMismatch, "'old'.*int64.*float32"),
    (["a"], of(old=torch.ones(1, 2, dtype=torch.int64)), None, tq.SchemaMismatch, "'old'"),
    (["a"], TensorDict({"o": NonTensorStack(object())}, batch_size=[1]), None, TypeError, r"o\[0\]: a object cannot"),
    (["a"], of(x=torch.arange(1)), [{"_writer/1": 1}], ValueError, "names of tags that begin with '_writer/'"),
    ([], of(x=torch.arange(1)), None, ValueError, "1 rows for 0 keys"),
]


@pytest.mark.parametrize(("sample_ids", "fields", "tags", "error", "message"), REFUSED)
def test_a_put_that_is_refused_writes_nothing(
    plane: Plane, name: str, sample_ids: list[Any], fields: Any, tags: Any, error: type, message: str
) -> None:
    plane.put_samples(["first"], name, of(old=torch.tensor([7])))
    with pytest.raises(error, match=message):
        plane.put_samples(sample_ids, name, fields, tags)
    info = plane.client.partition(name).describe()
    assert info.samples == 1
    assert plane.get_samples(["first"], name, ["old"])["old"].tolist() == [7]


def test_what_is_missing_is_named(plane: Plane, name: str) -> None:
    plane.put_samples(["a", "b"], name, of(x=torch.arange(2)))
    with pytest.raises(tq.SampleNotFound, match="2 of 3 keys have no sample: 'p', 'q'") as missing:
        plane.get_samples(["p", "a", "q"], name, ["x"])
    assert missing.value.rows == (0, 2)
    with pytest.raises(KeyError, match="has no field 'nope'"):
        plane.get_samples(["a"], name, ["x", "nope"])
    for fields in ([], "x", [1]):
        with pytest.raises(ValueError, match="expected a list of names, one at least"):
            plane.get_samples(["a"], name, fields)  # type: ignore[arg-type]


# Claims.


def test_each_task_is_given_each_sample_once(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    plane.put_samples(ids(24), name, of(x=torch.arange(24)))
    given: dict[str, list[str]] = {"train": [], "ref_lp": []}

    def consume(task: str) -> None:
        own = planes_made.pop()
        for _ in range(4):
            meta = own.claim_meta(name, task, ["x"], 3, timeout_s=30)
            assert own.get_data(meta)["x"].tolist() == [int(each[1:]) for each in meta.sample_ids]
            given[task].extend(meta.sample_ids)

    planes_made = [planes() for _ in range(4)]
    threads = [threading.Thread(target=consume, args=(task,)) for task in given for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {task: sorted(each) for task, each in given.items()} == {task: sorted(ids(24)) for task in given}
    assert plane.check_consumption_status(name, ["train", "ref_lp"])
    assert plane.get_samples(["u23"], name, ["x"])["x"].tolist() == [23]


def test_a_claim_waits_for_samples(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    thread, claimed = in_background(lambda: planes().claim_meta(name, "train", ["x"], 3, timeout_s=60))
    plane.put_samples(["a", "b"], name, of(x=torch.arange(2)))
    waits(plane)
    plane.put_samples(["c"], name, of(x=torch.arange(1)))
    thread.join()
    assert [meta.sample_ids for meta in claimed] == [["a", "b", "c"]]


def test_a_claim_waits_for_the_fields_of_another_stage(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    plane.put_samples(["a", "b", "c"], name, of(x=torch.arange(3)))
    thread, claimed = in_background(lambda: planes().claim_meta(name, "train", ["x", "y"], 2, timeout_s=60))
    waits(plane)
    plane.put_samples(["c", "b"], name, of(y=torch.tensor([3.0, 2.0])))
    thread.join()
    assert sorted(claimed[0].sample_ids) == ["b", "c"]
    assert sorted(plane.get_data(claimed[0])["y"].tolist()) == [2.0, 3.0]


def test_a_claim_that_comes_to_its_end_takes_nothing(plane: Plane, name: str) -> None:
    plane.put_samples(["a", "b"], name, of(x=torch.arange(2)))
    with pytest.raises(TimeoutError, match=rf"partition '{name}': .*2 samples are ready.*by blocking=False"):
        plane.claim_meta(name, "train", ["x"], 3, timeout_s=0.01)
    assert not plane.check_consumption_status(name, ["train"])
    assert plane.claim_meta(name, "train", ["x"], 2).sample_ids == ["a", "b"]


@pytest.mark.parametrize("ready", [0, 1, 5, 7, 10, 12])
def test_a_claim_that_does_not_wait_takes_what_is_ready(plane: Plane, name: str, ready: int) -> None:
    if ready:
        plane.put_samples(ids(ready), name, of(x=torch.arange(ready)))
    meta = plane.claim_meta(name, "train", ["x"], 10, blocking=False)
    assert meta.sample_ids == ids(ready)[:10]
    assert plane.check_consumption_status(name, ["train"]) == (0 < ready <= 10)


def test_a_sealed_partition_gives_its_rest_and_then_says_so(plane: Plane, name: str) -> None:
    plane.put_samples(ids(3), name, of(x=torch.arange(3)))
    plane.client.partition(name).seal()
    assert plane.claim_meta(name, "train", ["x"], 8).sample_ids == ids(3)
    assert plane.claim_meta(name, "ref_lp", ["x"], 8, blocking=False).sample_ids == ids(3)
    assert plane.claim_meta(name, "train", ["x"], 8, blocking=False).sample_ids == []
    with pytest.raises(tq.Sealed):
        plane.claim_meta(name, "train", ["x"], 8)


def test_groups_are_claimed_whole(plane: Plane, planes: Callable[[], Plane]) -> None:
    name = f"train/{next(_numbers)}"
    plane.register_partition(name, ["x", "y"], 4, ["train"], grpo_group_size=2)
    other = planes()
    plane.put_samples(["p_g0", "q_g0"], name, of(x=torch.arange(2)))
    other.put_samples(["q_g1", "r_g0"], name, of(x=torch.arange(2)))
    assert plane.claim_meta(name, "train", ["x"], 4, blocking=False).sample_ids == ["q_g0", "q_g1"]
    other.put_samples(["p_g0", "r_g0"], name, of(y=torch.arange(2)))  # another field of those: the groups stay
    other.put_samples(["r_g1", "p_g1"], name, of(x=torch.arange(2)))
    meta = plane.claim_meta(name, "train", ["x"], 4)
    assert [set(meta.sample_ids[:2]), set(meta.sample_ids[2:])] == [{"p_g0", "p_g1"}, {"r_g0", "r_g1"}]
    with pytest.raises(ValueError, match="no multiple of the group size, 2"):
        plane.claim_meta(name, "train", ["x"], 3, blocking=False)


def test_a_claim_that_nothing_could_ever_meet_is_refused(plane: Plane, name: str) -> None:
    with pytest.raises(ValueError, match=r"no tasks \['tran'\], but \['train', 'ref_lp'\]: name them in register_part"):
        plane.claim_meta(name, "tran", ["x"], 1)
    with pytest.raises(ValueError, match=r"fields \['z'\] were neither written nor declared"):
        plane.claim_meta(name, "train", ["x", "z"], 1)
    with pytest.raises(ValueError, match="required_fields"):
        plane.claim_meta(name, "train", [], 1)
    for blocking in (True, False):
        with pytest.raises(ValueError, match="batch_size"):
            plane.claim_meta(name, "train", ["x"], 0, blocking=blocking)
    with pytest.raises(KeyError, match="does not exist: register it"):
        plane.claim_meta("nowhere", "train", ["x"], 1)
    plane.put_samples(["a"], name, of(z=torch.arange(1)))
    assert plane.claim_meta(name, "train", ["z"], 1).sample_ids == ["a"]


def test_samples_without_a_key_are_left_for_others(plane: Plane, name: str) -> None:
    plane.client.partition(name).put({"x": torch.arange(2)})
    with pytest.raises(ValueError, match=r"samples \[\d+, \d+\] have no key: put them with keys="):
        plane.claim_meta(name, "train", ["x"], 2)
    with plane.client.partition(name).consumer("train", fields=["x"]).claim(2, timeout=10) as batch:
        assert batch["x"].tolist() == [0, 1]


def test_a_claim_that_does_not_wait_returns_what_it_took_before_an_error(plane: Plane, name: str) -> None:
    plane.put_samples(ids(4), name, of(x=torch.arange(4)))
    plane.client.partition(name).put({"x": torch.arange(1)})
    assert plane.claim_meta(name, "train", ["x"], 8, blocking=False).sample_ids == ids(4)
    with pytest.raises(ValueError, match="have no key"):
        plane.claim_meta(name, "train", ["x"], 1)


@pytest.mark.parametrize("length", ["long", None, 2.5, [1]])
def test_a_length_that_is_no_int_costs_no_samples(plane: Plane, name: str, length: Any) -> None:
    tags = [{"input_lengths": 3}, {"input_lengths": length}]
    plane.put_samples(ids(2), name, of(x=torch.arange(2)), tags=tags)
    meta = plane.claim_meta(name, "train", ["x"], 2)
    assert (meta.sample_ids, meta.sequence_lengths, meta.tags) == (ids(2), None, tags)


def test_a_claim_is_the_same_after_another_registration(plane: Plane, name: str) -> None:
    plane.put_samples(["a", "b"], name, of(x=torch.arange(2)))
    assert plane.claim_meta(name, "train", ["x"], 1).sample_ids == ["a"]
    plane.register_partition(name, ["x"], 4, ["train"], enums={"status": ["ok", "cut"]})
    assert plane.claim_meta(name, "train", ["x"], 1).sample_ids == ["b"]
    assert plane.client.partition(name).metadata["nemo_rl"] == {
        "fields": ["x"],
        "num_samples": 4,
        "consumer_tasks": ["train"],
        "grpo_group_size": None,
        "enums": {"status": ["ok", "cut"]},
    }


@pytest.mark.parametrize(
    ("fields", "samples", "tasks", "size"),
    [([], 1, ["t"], None), (["x"], 1, [], None), (["x"], 1, "t", None), (["x"], -1, ["t"], None), (["x"], 1, ["t"], 0)],
)
def test_a_registration_that_says_nothing_is_refused(
    plane: Plane, fields: list[str], samples: int, tasks: Any, size: int | None
) -> None:
    name = f"train/{next(_numbers)}"
    with pytest.raises(ValueError, match="expected"):
        plane.register_partition(name, fields, samples, tasks, size)
    with pytest.raises(tq.PartitionNotFound):
        plane.client.partition(name)


def test_a_partition_need_not_be_registered(plane: Plane) -> None:
    name = f"rollout_data/{next(_numbers)}"
    plane.put_samples(["a"], name, of(x=torch.arange(1)))
    assert plane.claim_meta(name, "anyone", ["x"], 1).sample_ids == ["a"]
    assert plane.check_consumption_status(name, ["anyone"])
    assert not plane.check_consumption_status(name, ["anyone", "nobody"])


# Progress.


def test_consumption_is_the_same_for_all_clients(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    other = planes()
    assert not other.check_consumption_status(name, ["train"])  # no sample yet
    plane.put_samples(["a", "b"], name, of(x=torch.arange(2)))
    steps = [(plane, "train", 1), (other, "train", 1), (plane, "ref_lp", 2)]
    expected = [(False, False, False), (True, False, False), (True, True, True)]
    for (own, task, size), done in zip(steps, expected, strict=True):
        own.claim_meta(name, task, ["x"], size)
        for each in (plane, other):
            asked = (["train"], ["ref_lp"], ["train", "ref_lp"])
            assert tuple(each.check_consumption_status(name, tasks) for tasks in asked) == done
    plane.put_samples(["c"], name, of(x=torch.arange(1)))
    assert not other.check_consumption_status(name, ["train"])


def test_progress_of_what_is_not_there_is_an_error(plane: Plane, name: str) -> None:
    with pytest.raises(KeyError, match="'nowhere' does not exist"):
        plane.check_consumption_status("nowhere", ["train"])
    with pytest.raises(ValueError, match=r"has no tasks \['tran'\]"):
        plane.check_consumption_status(name, ["train", "tran"])
    for tasks in ([], "train"):
        with pytest.raises(ValueError, match="task_names"):
            plane.check_consumption_status(name, tasks)  # type: ignore[arg-type]


# Clears.


def test_a_clear_by_ids_may_be_repeated(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    plane.put_samples(ids(3), name, of(x=torch.arange(3)))
    for _ in range(2):
        planes().clear_samples(["u0", "u2", "never"], name)
    assert plane.get_samples(["u1"], name, ["x"])["x"].tolist() == [1]
    with pytest.raises(tq.SampleNotFound, match="'u0', 'u2'"):
        plane.get_samples(ids(3), name, ["x"])
    assert plane.claim_meta(name, "train", ["x"], 3, blocking=False).sample_ids == ["u1"]
    plane.put_samples(["u1", "u0"], name, of(x=torch.tensor([11, 10])))
    assert plane.claim_meta(name, "train", ["x"], 3, blocking=False).sample_ids == ["u0"]  # new; `u1` was consumed
    plane.clear_samples(["a"], "nowhere")
    with pytest.raises(ValueError, match="sample_ids='u1': expected a list of names"):
        plane.clear_samples("u1", name)  # type: ignore[arg-type]


def test_a_clear_without_ids_removes_what_this_client_wrote(
    plane: Plane, planes: Callable[[], Plane], name: str
) -> None:
    other = planes()
    plane.put_samples(["a", "b"], name, of(x=torch.arange(2)))
    other.put_samples(["c", "d"], name, of(x=torch.arange(2)))
    plane.put_samples(["d"], name, of(y=torch.arange(1)))
    plane.clear_samples(None, name)
    assert other.get_samples(["c"], name, ["x"])["x"].tolist() == [0]
    assert other.claim_meta(name, "train", ["x"], 4, blocking=False).sample_ids == ["c"]
    for where in (name, "nowhere"):
        with pytest.warns(RuntimeWarning, match=rf"clear_samples\(None, '{where}'\) removed nothing.*give their ids"):
            plane.clear_samples(None, where)
    assert other.get_samples(["c"], name, ["x"])["x"].tolist() == [0]


# The end.


def test_samples_outlive_the_client_that_put_them(plane: Plane, planes: Callable[[], Plane], name: str) -> None:
    own = planes()
    own.put_samples(["a"], name, of(x=torch.arange(1)))
    own.close()
    own.close()
    with pytest.raises(tq.InvalidArgument, match="closed"):
        own.get_samples(["a"], name, ["x"])
    assert plane.get_samples(["a"], name, ["x"])["x"].tolist() == [0]


def test_the_address_may_come_from_the_environment(cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONTROLLER", cluster.address)
    own = DataPlane(batch_meta=KVBatchMeta)
    own.put_samples(["a"], "train", of(x=torch.arange(1)))
    own.close()
    with tq.connect(cluster.address) as client:
        assert client.partition("train").describe().samples == 1
