"""How a rollout becomes samples, without a service."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import tqclient as tq
from tqclient.codec import Records, Shared
from tqclient.integrations.rollout_fields import SCHEDULE, context_rows, convert

BATCH: dict[str, Any] = {
    "tokens": [[1, 2, 3], [4], [5, 6]],
    "rewards": [0.5, {"model": 1.0}, None],
    "truncated": torch.tensor([0, 1, 0]),
    "prompt": ["a", [{"role": "user", "content": "b"}], "c"],
}


def test_rows_come_shard_after_shard_with_their_number_and_their_shard() -> None:
    samples = convert({**BATCH, "partition": [[2, 0], [1]]}, 2, weight_version=[7, 8, (8, 9)])
    assert [row.tolist() for row in samples.columns["tokens"]] == [[5, 6], [1, 2, 3], [4]]
    assert samples.columns["rewards"] == [None, 0.5, {"model": 1.0}]
    assert samples.columns["truncated"].tolist() == [0, 0, 1]
    assert samples.columns["prompt"].values == ["c", "a", [{"role": "user", "content": "b"}]]
    assert samples.keys == ["row/2", "row/0", "row/1"]
    assert samples.tags == [{"shard": 0}, {"shard": 0}, {"shard": 1}]
    assert samples.weight_version == [(8, 9), 7, 8]


@pytest.mark.parametrize("make", [list, np.array, torch.tensor, lambda given: (dict.fromkeys(given, 0)).keys()])
def test_weight_versions_follow_their_samples_whatever_holds_them(make: Callable[[list[int]], Any]) -> None:
    samples = convert({**BATCH, "partition": [[2, 0], [1]]}, 2, weight_version=make([7, 8, 9]))
    assert samples.weight_version == [9, 7, 8]
    spans = convert({**BATCH, "partition": [[2, 0], [1]]}, 2, weight_version=np.array([[7, 8], [8, 8], [9, 9]]))
    assert spans.weight_version == [[9, 9], [7, 8], [8, 8]]


@pytest.mark.parametrize("given", [[7, 8], [7, 8, 9, 10], np.array(7), "789"])
def test_weight_versions_that_are_not_one_per_sample_are_refused(given: Any) -> None:
    with pytest.raises(tq.InvalidArgument, match="one for all, or one for each of the 3 samples"):
        convert(BATCH, 2, weight_version=given)


def test_a_schedule_is_held_once_per_shard() -> None:
    schedule = {
        "partition": [[2, 0], (1,)],
        "global_batch_sizes": [[3], [3]],
        "num_microbatches": [[2], 1],
        "micro_batch_indices": [[[0], [1]], [[0]]],
    }
    column = convert({**BATCH, **schedule}, 2).columns[SCHEDULE]
    assert isinstance(column, Shared)
    assert isinstance(column.values, Records)
    assert column.index.tolist() == [0, 0, 1]
    fields = ["tokens", "rewards", "truncated", "prompt"]
    first = {"partition": [2, 0], "global_batch_sizes": [3], "num_microbatches": [2]}
    second = {"partition": (1,), "global_batch_sizes": [3], "num_microbatches": 1}
    assert column.values.values == [
        {"fields": fields, "dp_size": 2, "schedule": {**first, "micro_batch_indices": [[0], [1]]}},
        {"fields": fields, "dp_size": 2, "schedule": {**second, "micro_batch_indices": [[0]]}},
    ]


def test_samples_are_dealt_out_in_turn_where_the_batch_does_not_say() -> None:
    samples = convert({"tokens": [[row] for row in range(5)]}, 2)
    assert [int(row[0]) for row in samples.columns["tokens"]] == [0, 2, 4, 1, 3]
    assert [each["schedule"] for each in samples.columns[SCHEDULE].values.values] == [
        {"partition": [0, 2, 4]},
        {"partition": [1, 3]},
    ]


def test_lists_of_numbers_become_tensors_and_tensors_keep_their_dtype() -> None:
    experts = np.zeros((2, 47, 4), np.int16)
    experts.flags.writeable = False
    batch = {
        "tokens": [[1, 2]],
        "loss_masks": [[0, 1]],
        "rollout_log_probs": [[-0.5, -1]],
        "routed_experts": [experts],
        "advantages": [torch.zeros(2, dtype=torch.bfloat16)],
        "label": None,
    }
    columns = convert(batch, 1, extra=["advantages"]).columns
    dtypes = {name: column[0].dtype for name, column in columns.items() if name != SCHEDULE}
    assert dtypes == {
        "tokens": torch.int64,
        "loss_masks": torch.int32,
        "rollout_log_probs": torch.float32,
        "routed_experts": torch.int16,
        "advantages": torch.bfloat16,
    }


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 1, "has no samples"),
    ({"tokens": []}, 1, "has no samples"),
    ({"tokens": [[1]], "tokenz": [[1]]}, 1, "unknown fields tokenz; .* name others in extra_fields"),
    ({"tokens": [[1], [2]], "rewards": [0.0]}, 1, "'rewards' has 1 samples, but 'tokens' has 2"),
    ({"tokens": [[1]]}, 0, "dp_size=0"),
    ({"tokens": [[1]]}, 2, r"partition\[1\] is empty"),
    ({"tokens": [[1], [2]], "partition": [[0, 1]]}, 2, "partition must be a list with one value for each of the 2"),
    ({"tokens": [[1], [2]], "partition": [[0], [0]]}, 2, r"not so with \[1\]"),
    ({"tokens": [[1], [2]], "partition": [[0, 1], [1]]}, 2, r"not so with \[1\]"),
    ({"tokens": [[1], [2]], "partition": [[0], [2]]}, 2, r"not so with \[1, 2\]"),
    ({"tokens": [[1], [2]], "partition": [0, 1]}, 2, r"partition\[0\]=0: expected the numbers of its DP rank's"),
    ({"tokens": [[1], [2]], "partition": [[0.7], [1]]}, 2, r"partition\[0\]=\[0.7\]: expected the numbers"),
    ({"tokens": [[1], [2]], "rewards": 1.0}, 2, "'rewards'=1.0: expected one value for each sample"),
    ({"tokens": [[1], [2]], "rewards": torch.tensor(1.0)}, 2, "'rewards'=.*: expected one value for each sample"),
    ({"tokens": [[1]], "num_microbatches": 4}, 1, "num_microbatches must be a list"),
    ({"tokens": [["a"]]}, 1, "'tokens' needs a sequence of numbers"),
    ({"tokens": [1]}, 1, "'tokens' needs sequences"),
    ({"tokens": [torch.zeros(1), torch.zeros(1, dtype=torch.int64)]}, 1, r"torch.float32 \[\*, \], torch.int64"),
]


@pytest.mark.parametrize(("batch", "dp_size", "reason"), REFUSED, ids=[reason for _, _, reason in REFUSED])
def test_what_cannot_be_trained_on_is_refused(batch: dict[str, Any], dp_size: int, reason: str) -> None:
    with pytest.raises(tq.InvalidArgument, match=reason):
        convert(batch, dp_size)


def test_context_ranks_cut_each_sequence_into_runs_without_gap_or_overlap() -> None:
    lengths = np.array([0, 1, 7, 8])
    cuts = [context_rows(rank, 4)(lengths).tolist() for rank in range(4)]
    assert cuts[0] == [[0, 0], [0, 1], [0, 2], [0, 2]]
    assert cuts[1] == [[0, 0], [1, 1], [2, 4], [2, 4]]
    assert cuts[2] == [[0, 0], [1, 1], [4, 6], [4, 6]]
    assert cuts[3] == [[0, 0], [1, 1], [6, 7], [6, 8]]
    with pytest.raises(tq.InvalidArgument, match="cp_rank=4"):
        context_rows(4, 4)
