"""The metadata of the TransferQueue drop-in: pure, so without a service."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorStack, TensorDict

from tqclient.compat.transfer_queue import BatchMeta, KVBatchMeta

INT = {"dtype": torch.int64, "shape": (2,), "is_nested": False, "is_non_tensor": False}
RAGGED = {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False}


def batch(ids: list[int], **changes: Any) -> BatchMeta:
    rows = len(ids)
    arguments: dict[str, Any] = {
        "global_indexes": ids,
        "partition_ids": ["train"] * rows,
        "field_schema": {"a": INT, "b": {**RAGGED, "per_sample_shapes": [(id_,) for id_ in ids]}},
        "production_status": [1] * rows,
        "custom_meta": [{"n": id_} for id_ in ids],
    }
    return BatchMeta(**{**arguments, **changes})


def test_what_a_batch_says() -> None:
    meta = batch([7, 8, 9], extra_info={"step": 3})
    assert (meta.size, len(meta), meta.field_names, meta.is_ready) == (3, 3, ["a", "b"], True)
    assert meta.get_shapes("b") == [(7,), (8,), (9,)]
    assert meta.get_shapes("a") == [(2,)] * 3
    assert meta.get_dtypes("a") == [torch.int64] * 3
    sample = meta.samples[1]
    assert (sample.global_index, sample.partition_id, sample.production_status) == (8, "train", 1)
    assert (dict(sample.custom_meta), sample.fields["b"]["shape"]) == ({"n": 8}, (8,))
    with pytest.raises(KeyError):
        meta.get_shapes("c")
    with pytest.raises(TypeError):
        sample.custom_meta["n"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    "changes",
    [
        {"partition_ids": ["train"]},
        {"production_status": [1]},
        {"custom_meta": [{}]},
        {"field_schema": {"b": {**RAGGED, "per_sample_shapes": [(1,)]}}},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_everything_has_as_many_rows(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="1 of them for 2 samples"):
        batch([1, 2], **changes)


def test_a_batch_without_samples_is_not_ready() -> None:
    assert not BatchMeta.empty().is_ready
    assert BatchMeta.empty({"x": 1}).extra_info == {"x": 1}


def test_select_by_position_slice_and_field() -> None:
    meta = batch([5, 6, 7, 8])
    chosen = meta.select_samples([3, 0])
    assert (chosen.global_indexes, chosen.get_shapes("b"), chosen.custom_meta) == (
        [8, 5],
        [(8,), (5,)],
        [{"n": 8}, {"n": 5}],
    )
    assert meta[-1].global_indexes == [8]
    assert meta[1:3].global_indexes == [6, 7]
    assert [each.global_indexes for each in meta] == [[5], [6], [7], [8]]
    assert meta.select_fields(["b"]).field_names == ["b"]
    assert meta.field_names == ["a", "b"]
    with pytest.raises(IndexError):
        meta[4]
    with pytest.raises(ValueError, match="from 0 to 3"):
        meta.select_samples([4])
    with pytest.raises(ValueError, match="'c'"):
        meta.select_fields(["a", "c"])


def test_a_selection_shares_no_tags_with_its_origin() -> None:
    meta = batch([1, 2])
    meta.select_samples([0]).custom_meta[0]["n"] = 100
    meta.copy().extra_info["x"] = 1
    assert (meta.custom_meta, meta.extra_info) == ([{"n": 1}, {"n": 2}], {})


@pytest.mark.parametrize(
    ("rows", "chunks", "sizes"),
    [(6, 3, [2, 2, 2]), (7, 3, [3, 2, 2]), (5, 4, [2, 1, 1, 1]), (2, 4, [1, 1, 0, 0]), (0, 2, [0, 0]), (3, 1, [3])],
)
def test_chunks_are_even_and_as_many_as_asked_for(rows: int, chunks: int, sizes: list[int]) -> None:
    meta = batch(list(range(rows)))
    parts = meta.chunk(chunks)
    assert [part.size for part in parts] == sizes
    assert [id_ for part in parts for id_ in part.global_indexes] == list(range(rows))
    keyed = KVBatchMeta([str(row) for row in range(rows)], [{} for _ in range(rows)])
    assert [part.size for part in keyed.chunk(chunks)] == sizes


def test_no_chunk_is_no_division() -> None:
    with pytest.raises(ValueError, match="chunks=0"):
        batch([1]).chunk(0)


def test_chunk_by_partition() -> None:
    meta = batch([1, 2, 3, 4], partition_ids=["b", "a", "b", "a"])
    assert [(part.partition_ids[0], part.global_indexes) for part in meta.chunk_by_partition()] == [
        ("b", [1, 3]),
        ("a", [2, 4]),
    ]


def test_concat_undoes_chunk() -> None:
    meta = batch([1, 2, 3, 4, 5], extra_info={"step": 3, "t": torch.ones(2), "a": np.arange(2)})
    whole = BatchMeta.concat([*meta.chunk(3), BatchMeta.empty()])
    assert whole.global_indexes == meta.global_indexes
    assert whole.get_shapes("b") == meta.get_shapes("b")
    assert whole.custom_meta == meta.custom_meta
    assert whole.extra_info.keys() == meta.extra_info.keys()
    assert whole.is_ready
    assert BatchMeta.concat([]).size == 0


def test_concat_makes_a_field_nested_when_one_part_has_it_so() -> None:
    dense = batch([1], field_schema={"b": INT})
    nested = batch([2], field_schema={"b": {**RAGGED, "per_sample_shapes": [(5,)]}})
    whole = BatchMeta.concat([dense, nested])
    assert (whole.field_schema["b"]["is_nested"], whole.get_shapes("b")) == (True, [(2,), (5,)])


@pytest.mark.parametrize(
    ("other", "says"),
    [
        ({"field_schema": {"a": INT}}, "fields"),
        ({"field_schema": {"a": {**INT, "dtype": torch.float32}, "b": RAGGED}}, "dtype|float32"),
        ({"extra_info": {"step": 4}}, "step"),
        ({"extra_info": {"step": 3.0}}, "step"),
    ],
)
def test_concat_refuses_what_does_not_fit(other: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BatchMeta.concat([batch([1], extra_info={"step": 3}), batch([2], **other)])


def test_union_takes_the_others_fields_and_is_ready_where_both_are() -> None:
    one = batch([1, 2], field_schema={"a": INT}, production_status=[1, 1], extra_info={"x": 1, "y": 1})
    other = batch(
        [1, 2],
        field_schema={"a": RAGGED, "c": INT},
        production_status=[1, 0],
        extra_info={"y": 2},
        custom_meta=[{"n": 5}, {"m": 6}],
    )
    united = one.union(other)
    assert united.field_names == ["a", "c"]
    assert united.field_schema["a"]["is_nested"]
    assert united.production_status.tolist() == [1, 0]
    assert united.extra_info == {"x": 1, "y": 2}
    assert united.custom_meta == [{"n": 5}, {"n": 2, "m": 6}]
    assert one.field_names == ["a"]
    assert one.union(BatchMeta.empty()).field_names == ["a"]
    assert BatchMeta.empty().union(one).field_names == ["a"]


@pytest.mark.parametrize("other", [batch([2, 1]), batch([1, 2, 3]), batch([1, 2], partition_ids=["val", "val"])])
def test_union_is_of_the_same_samples(other: BatchMeta) -> None:
    with pytest.raises(ValueError, match="same samples"):
        batch([1, 2]).union(other)


def test_reorder_in_place() -> None:
    meta = batch([1, 2, 3], production_status=[0, 1, 1])
    meta.reorder([2, 0, 1])
    assert meta.global_indexes == [3, 1, 2]
    assert meta.production_status.tolist() == [1, 0, 1]
    assert meta.get_shapes("b") == [(3,), (1,), (2,)]
    assert meta.custom_meta == [{"n": 3}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("indexes", [[0, 1], [0, 0, 1], [0, 1, 3], [-1, 0, 1]])
def test_reorder_names_each_row_once(indexes: list[int]) -> None:
    with pytest.raises(ValueError, match="once"):
        batch([1, 2, 3]).reorder(indexes)
    keyed = KVBatchMeta(["a", "b", "c"], [{}, {}, {}])
    with pytest.raises(ValueError, match="once"):
        keyed.reorder(indexes)


def test_add_fields_describes_what_was_put() -> None:
    meta = BatchMeta([1, 2], ["p", "p"])
    nested = torch.nested.nested_tensor([torch.zeros(3), torch.zeros(5)], layout=torch.jagged)
    fields = {"dense": torch.zeros(2, 4), "scalar": torch.zeros(2), "ragged": nested, "text": NonTensorStack("x", "y")}
    assert meta.add_fields(TensorDict(fields, batch_size=2)) is meta
    assert meta.is_ready
    assert meta.get_shapes("dense") == [(4,), (4,)]
    assert meta.get_shapes("scalar") == [(), ()]
    assert meta.get_shapes("ragged") == [(3,), (5,)]
    assert meta.field_schema["text"]["is_non_tensor"]
    with pytest.raises(ValueError, match="3 rows for 2"):
        meta.add_fields(TensorDict({"x": torch.zeros(3)}, batch_size=3))


def test_extra_info_and_tags() -> None:
    meta = batch([1, 2])
    meta.set_extra_info("a", [1])
    meta.update_extra_info({"b": 2})
    meta.get_all_extra_info()["a"].append(2)
    assert (meta.get_extra_info("a"), meta.get_extra_info("z", 9), meta.has_extra_info("b")) == ([1], 9, True)
    assert (meta.remove_extra_info("b"), meta.remove_extra_info("b")) == (2, None)
    meta.clear_extra_info()
    assert meta.extra_info == {}
    meta.update_custom_meta([{"m": 1}, {"n": 3}])
    meta.get_all_custom_meta()[0]["m"] = 5
    assert meta.custom_meta == [{"n": 1, "m": 1}, {"n": 3}]
    with pytest.raises(ValueError, match="1 of them"):
        meta.update_custom_meta([{}])
    meta.clear_custom_meta()
    assert meta.custom_meta == [{}, {}]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda meta: pickle.loads(pickle.dumps(meta))])
def test_metadata_travels(duplicate: Any) -> None:
    meta = duplicate(batch([1, 2]))
    meta.production_status[0] = 0
    assert (meta.global_indexes, meta.get_shapes("b"), meta.is_ready) == ([1, 2], [(1,), (2,)], False)
    keyed = duplicate(KVBatchMeta(["a"], [{"x": (1, 2)}], "p", ["f"], {"y": 1}))
    assert keyed == KVBatchMeta(["a"], [{"x": (1, 2)}], "p", ["f"], {"y": 1})


def test_keys_select_reorder_and_concat() -> None:
    meta = KVBatchMeta(["a", "b", "c"], [{"n": 1}, {"n": 2}, {"n": 3}], "p", ["f", "g"], {"step": 1})
    chosen = meta.select_keys(["c", "a"])
    assert (chosen.keys, chosen.tags, chosen.partition_id, chosen.fields) == (
        ["c", "a"],
        [{"n": 3}, {"n": 1}],
        "p",
        ["f", "g"],
    )
    meta.reorder([1, 2, 0])
    assert (meta.keys, meta.tags) == (["b", "c", "a"], [{"n": 2}, {"n": 3}, {"n": 1}])
    assert KVBatchMeta.concat(meta.chunk(2)) == meta
    assert KVBatchMeta.concat([]) == KVBatchMeta()


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda: KVBatchMeta(["a"], []), ValueError, "1 keys, but 0 tags"),
        (lambda: KVBatchMeta(["a", "a"], [{}, {}]), ValueError, "'a'.*twice"),
        (lambda: KVBatchMeta(["a"], [{}], fields=["f", "f"]), ValueError, "'f'.*twice"),
        (lambda: KVBatchMeta(["a"], [{}]).select_keys(["z"]), RuntimeError, "'z'"),
        (lambda: KVBatchMeta(["a"], [{}]).select_keys(["a", "a"]), ValueError, "twice"),
        (lambda: KVBatchMeta.concat([KVBatchMeta(["a"], [{}], "p"), KVBatchMeta(["b"], [{}], "q")]), ValueError, "'q'"),
        (
            lambda: KVBatchMeta.concat(
                [KVBatchMeta(["a"], [{}], fields=["f"]), KVBatchMeta(["b"], [{}], fields=["g"])]
            ),
            ValueError,
            "fields",
        ),
        (lambda: KVBatchMeta.concat([KVBatchMeta(["a"], [{}]), KVBatchMeta(["a"], [{}])]), ValueError, "twice"),
        (
            lambda: KVBatchMeta.concat(
                [KVBatchMeta(["a"], [{}], extra_info={"x": 1}), KVBatchMeta(["b"], [{}], extra_info={"x": 2})]
            ),
            ValueError,
            "'x'",
        ),
    ],
)
def test_keys_that_do_not_fit(call: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        call()
