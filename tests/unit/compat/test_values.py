"""Values, tags and samplers of the TransferQueue drop-in, without a service."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from tqclient.codec import Records
from tqclient.compat.transfer_queue import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
    tags,
)
from tqclient.compat.transfer_queue.batch_meta import BatchMeta
from tqclient.compat.transfer_queue.columns import joined, parse, rows_of, select_rows, to_columns, to_tensordict
from tqclient.compat.transfer_queue.config import Config, address_of, pick
from tqclient.compat.transfer_queue.samplers import balance, make
from tqclient.compat.transfer_queue.streaming import chunk_batch_fn
from tqclient.compat.transfer_queue.taking import Slot, slot_of
from tqclient.errors import InvalidArgument, UnsupportedValue


def rows(column: Any) -> list[Any]:
    return [row.tolist() for row in column.unbind()]


def test_dense_rows_become_jagged_over_the_same_memory() -> None:
    dense = torch.arange(6).reshape(3, 2)
    column = to_columns(TensorDict({"x": dense}, batch_size=3))["x"]
    assert column.is_nested
    assert rows(column) == [[0, 1], [2, 3], [4, 5]]
    assert column.values().data_ptr() == dense.data_ptr()


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (1, 1), (2, 3, 4), (2, 3, 0)])
def test_dense_rows_of_any_shape(shape: tuple[int, ...]) -> None:
    column = to_columns({"x": torch.zeros(shape)})["x"]
    assert [tuple(row.shape) for row in column.unbind()] == [shape[1:]] * shape[0]


def test_rows_without_a_dimension_stay_one_tensor() -> None:
    values = torch.tensor([1.0, 2.0])
    assert to_columns(TensorDict({"x": values}, batch_size=2))["x"] is not None
    assert torch.equal(to_columns({"x": values})["x"], values)
    assert torch.equal(to_columns({"x": [torch.tensor(1.0), torch.tensor(2.0)]})["x"], values)


def test_what_is_no_tensor_is_a_list() -> None:
    fields = TensorDict(
        {"a": NonTensorStack({"k": 1}, {"k": 2}), "b": NonTensorData("x", batch_size=[2])}, batch_size=2
    )
    columns = to_columns(fields)
    assert (columns["a"].values, columns["b"].values) == ([{"k": 1}, {"k": 2}], ["x", "x"])
    assert isinstance(columns["a"], Records)


def test_a_lazy_stack_of_rows_of_other_lengths() -> None:
    stack = LazyStackedTensorDict(
        TensorDict({"x": torch.arange(2), "r": torch.tensor(1.0)}),
        TensorDict({"x": torch.arange(3), "r": torch.tensor(2.0)}),
    )
    columns = to_columns(stack)
    assert [row.tolist() for row in columns["x"]] == [[0, 1], [0, 1, 2]]
    assert columns["r"].tolist() == [1.0, 2.0]


@pytest.mark.parametrize("first", [0, 1])
def test_a_lazy_stack_whose_rows_have_other_fields(first: int) -> None:
    stacked = [TensorDict({"x": torch.ones(2)}), TensorDict({"x": torch.ones(2), "y": torch.ones(1)})]
    with pytest.raises(InvalidArgument, match=rf"'y': rows \[{first}\] of the stack lack it"):
        to_columns(LazyStackedTensorDict(stacked[first], stacked[1 - first]))


def test_a_lazy_stack_of_nested_tensordicts() -> None:
    stack = LazyStackedTensorDict(*(TensorDict({"m": {"y": torch.ones(n), "s": "t"}}) for n in (1, 2)))
    columns = to_columns(stack)["m"]
    assert ([row.tolist() for row in columns["y"]], columns["s"].values) == ([[1.0], [1.0, 1.0]], ["t", "t"])


@pytest.mark.parametrize(
    "fields",
    [
        [{"x": 1}],
        "x",
        {"_row": torch.zeros(2)},
        {"m": {"_turned": torch.zeros(2), "other": torch.zeros(2)}, "_turned": torch.zeros(2)},
        {"x": torch.tensor(1)},
        {"x": 1},
        {"x": "ab"},
        TensorDict({"x": "ab"}),
        TensorDict({"m": TensorDict({}, batch_size=[2]), "x": torch.zeros(2)}, batch_size=[2]),
    ],
)
def test_fields_that_are_refused(fields: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"field|taken"):
        to_columns(fields)


@pytest.mark.parametrize(
    ("fields", "rows"),
    [
        ({}, None),
        (TensorDict({}, batch_size=[3]), 3),
        (TensorDict({"x": torch.zeros(2, 1)}, batch_size=[2]), 2),
        ({"m": {"t": ["a", "b"]}, "x": torch.zeros(2)}, 2),
    ],
)
def test_how_many_rows_there_are(fields: Any, rows: int | None) -> None:
    assert rows_of(to_columns(fields), fields) == rows


def test_columns_of_different_numbers_of_rows() -> None:
    with pytest.raises(InvalidArgument, match="'x': 2, 'y': 3"):
        rows_of(to_columns({"x": torch.zeros(2), "y": ["a", "b", "c"]}))


def test_rows_are_selected_from_every_kind_of_column() -> None:
    nested = torch.nested.nested_tensor([torch.arange(1), torch.arange(2), torch.arange(3)], layout=torch.jagged)
    columns = to_columns(
        {"j": nested, "s": torch.arange(3), "t": ["a", "b", "c"], "d": {"x": torch.arange(6).reshape(3, 2)}}
    )
    chosen = select_rows(columns, [2, 0])
    assert [row.tolist() for row in chosen["j"]] == [[0, 1, 2], [0]]
    assert (chosen["s"].tolist(), chosen["t"].values) == ([2, 0], ["c", "a"])
    assert [row.tolist() for row in chosen["d"]["x"]] == [[4, 5], [0, 1]]


def test_a_parser_changes_values_in_place() -> None:
    def load(batch: dict[str, Any]) -> None:
        assert batch["x"].shape == (2, 2)
        batch["url"][:] = [torch.full((n,), n) for n in (1, 3)]

    columns = parse(TensorDict({"url": NonTensorStack("a", "b"), "x": torch.zeros(2, 2)}, batch_size=2), load)
    assert [row.tolist() for row in columns["url"]] == [[1], [3, 3, 3]]
    assert rows(columns["x"]) == [[0, 0], [0, 0]]


def turned(*lengths: int) -> torch.Tensor:
    """A jagged tensor whose rows are [2, length], counted through."""
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    values = torch.arange(2 * sum(lengths)).reshape(2, -1)
    made: torch.Tensor = torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=2)
    return made


def test_a_parser_may_return_other_values() -> None:
    columns = parse({"x": torch.zeros(2, 2), "t": ["a", "b"]}, lambda batch: {**batch, "x": batch["x"] + 1})
    assert (rows(columns["x"]), columns["t"].values) == ([[1, 1], [1, 1]], ["a", "b"])


def test_a_parser_gets_the_rows_of_every_kind_of_field() -> None:
    seen: dict[str, Any] = {}
    fields = TensorDict(
        {"positions": turned(1, 3), "m": {"u": torch.ones(2, 3), "t": NonTensorStack("a", "b")}}, batch_size=2
    )

    def work(batch: dict[str, Any]) -> None:
        seen.update(batch, m=dict(batch["m"]))
        batch["positions"][0] = torch.full((2, 2), 7)
        batch["m"]["u"] = torch.zeros(2, 3)

    columns = parse(fields, work)
    assert seen["positions"][1].tolist() == [[1, 2, 3], [5, 6, 7]]
    assert (seen["m"]["u"].tolist(), seen["m"]["t"]) == ([[1.0] * 3] * 2, ["a", "b"])
    assert [row.tolist() for row in columns["positions"]["_turned"]] == [[[7, 7], [7, 7]], [[1, 5], [2, 6], [3, 7]]]
    assert (rows(columns["m"]["u"]), columns["m"]["t"].values) == ([[0.0] * 3] * 2, ["a", "b"])


def test_a_parser_gets_the_rows_of_a_lazy_stack() -> None:
    stack = LazyStackedTensorDict(TensorDict({"x": torch.ones(1)}), TensorDict({"x": torch.ones(2)}))
    columns = parse(stack, lambda batch: {"x": [row + 1 for row in batch["x"]]})
    assert [row.tolist() for row in columns["x"]] == [[2.0], [2.0, 2.0]]


@pytest.mark.parametrize(
    "parser",
    [
        lambda batch: batch.clear(),
        lambda batch: batch.update(y=[1, 2]),
        lambda batch: batch.update(y=1),
        lambda batch: batch.update(x=1),
        lambda batch: batch["t"].append(1),
        lambda batch: batch["m"].update(u=torch.zeros(3)),
        lambda batch: {"x": batch["x"]},
        list,
        lambda batch: 0,
    ],
)
def test_a_parser_that_breaks_its_contract(parser: Any) -> None:
    with pytest.raises(InvalidArgument, match="data_parser"):
        parse({"x": torch.zeros(2, 2), "t": ["a", "b"], "m": {"u": torch.zeros(2)}}, parser)


def test_parts_are_joined_in_the_order_of_their_rows() -> None:
    def read(*lengths: int) -> dict[str, Any]:
        m = {"u": torch.tensor(lengths), "t": [str(length) for length in lengths]}
        return {**to_columns({"positions": turned(*lengths)}), "m": m, "s": [torch.ones(n) for n in lengths]}

    whole = to_tensordict(joined([([2, 0], read(3, 1)), ([1], read(2))], 3), 3)
    assert [row.tolist() for row in whole["positions"].unbind()] == [
        [[3], [7]],
        [[0, 1], [2, 3]],
        [[0, 1, 2], [4, 5, 6]],
    ]
    assert (whole["m"]["u"].tolist(), whole["m"]["t"]) == ([1, 2, 3], ["1", "2", "3"])
    assert isinstance(whole.get("s"), NonTensorStack)
    dense = joined([([1], {"x": torch.zeros(1, 2)}), ([0], {"x": torch.ones(1, 2)})], 2)["x"]
    assert dense.tolist() == [[1.0, 1.0], [0.0, 0.0]]


def test_parts_of_different_forms() -> None:
    """As Python values they come together; one tensor cannot hold several dtypes."""
    parts = [([0], to_columns({"p": turned(2)})), ([1], {"p": [torch.ones(2, 1)]}), ([2], {"p": {"u": torch.ones(1)}})]
    values = joined(parts, 3)["p"]
    assert [values[0].tolist(), values[1].tolist(), values[2]] == [[[0, 1], [2, 3]], [[1.0], [1.0]], {"u": 1.0}]
    with pytest.raises(InvalidArgument, match=r"'x'.*chunk_by_partition"):
        joined([([0], {"x": torch.zeros(1)}), ([1], {"x": torch.zeros(1, dtype=torch.int64)})], 2)


def test_what_is_known_of_rows_that_are_ragged_in_their_second_dimension() -> None:
    meta = BatchMeta([1, 2], ["p", "p"]).add_fields(TensorDict({"x": turned(1, 3)}, batch_size=2))
    entry = {"dtype": torch.int64, "shape": None, "is_nested": True, "is_non_tensor": False}
    assert meta.field_schema["x"] == {**entry, "per_sample_shapes": [(2, 1), (2, 3)]}
    assert meta.add_fields(TensorDict({}, batch_size=2)).field_names == ["x"]
    with pytest.raises(ValueError, match="3 rows for 2 samples"):
        meta.add_fields(TensorDict({}, batch_size=3))


def test_reading_gives_a_tensordict_without_the_marker() -> None:
    read = to_tensordict(
        {"x": torch.arange(2), "t": ["a", {"k": 1}], "d": {"y": torch.ones(2, 1)}, "_row": torch.zeros(2)}, 2
    )
    assert set(read.keys()) == {"x", "t", "d"}
    assert (read["t"], read["d"]["y"].tolist(), read.batch_size) == (["a", {"k": 1}], [[1.0], [1.0]], torch.Size([2]))


@pytest.mark.parametrize(
    "array",
    [
        np.array(["a", "bb", "c"]),
        np.array([b"a", b"bb", b"c"]),
        np.array([1, 2, 3], "M8[ns]"),
        np.array([(1, 2.0), (3, 4.0), (5, 6.0)], [("a", "i4"), ("b", "f8")]),
        np.array([[1, 2], [3, 4], [5, 6]], np.longdouble),
    ],
    ids=lambda array: str(array.dtype)[:8],
)
def test_each_row_has_its_own_of_an_array_that_torch_has_no_dtype_for(array: Any) -> None:
    read = to_tensordict({"x": array, "d": {"x": array}}, 3)
    for fields in (read, read["d"]):
        rows = fields["x"]
        assert len(rows) == 3
        for row in range(3):
            assert (rows[row].dtype, rows[row].tolist()) == (array.dtype, array[row].tolist())
            assert fields[row]["x"].tolist() == array[row].tolist()


def test_an_array_of_numbers_is_read_as_a_tensor() -> None:
    read = to_tensordict({"x": np.array([[1, 2], [3, 4]], np.uint16)}, 2)["x"]
    assert (read.dtype, read.tolist()) == (torch.uint16, [[1, 2], [3, 4]])


TAGS = {
    "i": 1,
    "f": 0.5,
    "b": True,
    "s": "x",
    "y": b"x",
    "n": None,
    "t": (1, 2),
    "l": [1, {"a": 2}],
    "z": b"\x00tq\x00x",
}


def test_tags_come_back_as_they_were() -> None:
    stored = tags.encode(TAGS)
    assert {name: stored[name] for name in "ifbsy"} == {name: TAGS[name] for name in "ifbsy"}
    assert all(isinstance(value, bool | int | float | str | bytes) for value in stored.values())
    back = tags.decode(stored)
    assert back == TAGS
    assert [type(value) for value in back.values()] == [type(value) for value in TAGS.values()]
    assert tags.decode(tags.encode({"x": np.int64(3)})) == {"x": 3}


def test_tags_that_cannot_come_back() -> None:
    with pytest.raises(UnsupportedValue, match="'f'"):
        tags.encode({"f": print})
    with pytest.raises(InvalidArgument):
        tags.encode([("a", 1)])  # type: ignore[arg-type]


@given(
    st.integers(1, 5).flatmap(
        lambda parts: st.tuples(
            st.just(parts),
            st.integers(1, 8).flatmap(
                lambda each: st.lists(st.integers(1, 10_000), min_size=each * parts, max_size=each * parts)
            ),
        )
    )
)
def test_balanced_parts_have_every_item_once_and_as_many(case: tuple[int, list[int]]) -> None:
    parts, weights = case
    dealt = balance(weights, parts)
    assert sorted(item for part in dealt for item in part) == list(range(len(weights)))
    assert {len(part) for part in dealt} == {len(weights) // parts}
    sums = [sum(weights[item] for item in part) for part in dealt]
    assert max(sums) - min(sums) <= max(weights)


def test_balance_of_a_case_worked_out_by_hand() -> None:
    assert [sum([9, 7, 6, 5, 4, 1][item] for item in part) for part in balance([9, 7, 6, 5, 4, 1], 2)] == [16, 16]


@pytest.mark.parametrize(("items", "sizes"), [(5, [1, 2, 2]), (2, [0, 1, 1]), (0, [0, 0, 0])])
def test_what_cannot_be_divided_evenly(items: int, sizes: list[int]) -> None:
    dealt = balance([1] * items, 3)
    assert sorted(len(part) for part in dealt) == sizes
    assert sorted(item for part in dealt for item in part) == list(range(items))


def test_whole_groups_are_dealt_out() -> None:
    lengths = [1, 1, 5, 5, 3, 3, 3, 3]
    dealt = SeqlenBalancedSampler(2, dp_size=2).divide([{"total_lengths": length} for length in lengths])
    assert sorted(dealt) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert SequentialSampler().divide([{}, {}]) == [[0, 1]]


@pytest.mark.parametrize(
    ("given_as", "kind", "params"),
    [
        ("SequentialSampler", SequentialSampler, {}),
        (RankAwareSampler, RankAwareSampler, {}),
        (GRPOGroupNSampler(4), GRPOGroupNSampler, {"n_samples_per_prompt": 4}),
        (SeqlenBalancedSampler(4, 2), SeqlenBalancedSampler, {"n_samples_per_prompt": 4, "dp_size": 2}),
    ],
)
def test_a_sampler_is_made_again_by_name(given_as: Any, kind: type[BaseSampler], params: dict[str, int]) -> None:
    sampler = make(given_as)
    assert (type(sampler), sampler.params) == (kind, params)
    again = make(kind.__name__, params)
    assert (type(again), again.params) == (kind, params)


class OfAUser(BaseSampler):
    """A sampler of the original's shape."""


@pytest.mark.parametrize("sampler", ["NoSampler", OfAUser, OfAUser(), 3, None])
def test_a_sampler_of_a_users_own_is_refused_with_what_to_do(sampler: Any) -> None:
    with pytest.raises(ValueError, match=r"tq\.samplers"):
        make(sampler)


@pytest.mark.parametrize("call", [lambda: GRPOGroupNSampler(0), lambda: SeqlenBalancedSampler(1, dp_size=-1)])
def test_sizes_of_samplers(call: Any) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        call()


@pytest.mark.parametrize(
    ("sampler", "config", "slot"),
    [
        (SequentialSampler(), {"dp_rank": 1, "batch_index": 2}, None),
        (GRPOGroupNSampler(2), {}, None),
        (GRPOGroupNSampler(2), {"dp_rank": 1, "batch_index": 2}, Slot(1, 2)),
        (RankAwareSampler(), {"dp_rank": 5, "batch_index": 0}, Slot(5, 0)),
        (SeqlenBalancedSampler(1, 2), {"dp_rank": 1, "batch_index": 0}, Slot(1, 0)),
    ],
)
def test_which_batch_a_rank_asks_for(sampler: BaseSampler, config: dict[str, Any], slot: Slot | None) -> None:
    assert slot_of(sampler, config) == slot


@pytest.mark.parametrize(
    ("sampler", "config"),
    [
        (RankAwareSampler(), {}),
        (RankAwareSampler(), {"dp_rank": 0}),
        (RankAwareSampler(), {"dp_rank": -1, "batch_index": 0}),
        (GRPOGroupNSampler(2), {"dp_rank": 0}),
        (SeqlenBalancedSampler(1, 2), {"dp_rank": 2, "batch_index": 0}),
    ],
)
def test_ranks_that_are_refused(sampler: BaseSampler, config: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=r"dp_rank|batch_index"):
        slot_of(sampler, config)


def test_configurations_of_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TQ_CONTROLLER", "from-environment:1")
    conf = Config(controller=Config(address="given:2"))
    assert address_of(conf) == address_of({"controller": {"address": "given:2"}}) == "given:2"
    assert (address_of(None), address_of({"controller": None})) == ("from-environment:1", "from-environment:1")
    monkeypatch.delenv("TQ_CONTROLLER")
    assert address_of(None) == "127.0.0.1:7700"
    assert conf.controller.address == pickle.loads(pickle.dumps(conf)).controller.address == "given:2"
    assert pick(conf, "backend", "storage_backend") is None
    with pytest.raises(AttributeError):
        _ = conf.backend


def test_micro_batches() -> None:
    nested = torch.nested.nested_tensor([torch.arange(n) for n in range(1, 6)], layout=torch.jagged)
    td = TensorDict({"x": torch.arange(5), "j": nested, "t": NonTensorStack(*"abcde")}, batch_size=5)
    parts = chunk_batch_fn(td, BatchMeta(range(5), ["p"] * 5), 2)
    assert [meta.global_indexes for _, meta in parts] == [[0, 1], [2, 3], [4]]
    assert [part["x"].tolist() for part, _ in parts] == [[0, 1], [2, 3], [4]]
    assert [[row.tolist() for row in part["j"].unbind()] for part, _ in parts] == [
        [[0], [0, 1]],
        [[0, 1, 2], [0, 1, 2, 3]],
        [[0, 1, 2, 3, 4]],
    ]
    assert [part["t"] for part, _ in parts] == [["a", "b"], ["c", "d"], ["e"]]


@pytest.mark.parametrize(("td", "size", "error"), [({}, 1, TypeError), (None, 0, ValueError), (None, 3, ValueError)])
def test_micro_batches_that_are_refused(td: Any, size: int, error: type[Exception]) -> None:
    td = TensorDict({"x": torch.arange(2)}, batch_size=2) if td is None else td
    with pytest.raises(error):
        chunk_batch_fn(td, BatchMeta([1, 2], ["p", "p"]), size)


def test_an_array_of_python_values_is_one_value_per_row() -> None:
    turns = np.empty(2, dtype=object)
    turns[:] = [["a", {"b": 1}], None]
    fields = TensorDict({"turns": turns, "text": np.array(["x", "yy"])}, batch_size=[2])
    assert [to_columns(fields)[name].values for name in ("turns", "text")] == [[["a", {"b": 1}], None], ["x", "yy"]]


def test_a_value_that_is_no_column_is_that_of_every_row() -> None:
    vector = np.array([1, 2])
    fields = TensorDict({"v": NonTensorData(vector, batch_size=[2]), "s": NonTensorData("ab", batch_size=[2])}, [2])
    columns = to_columns(fields)
    assert [each.tolist() for each in columns["v"].values] == [[1, 2], [1, 2]]
    assert columns["s"].values == ["ab", "ab"]
