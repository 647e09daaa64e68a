"""What a rollout of a Megatron-shaped trainer consists of, and how it becomes samples. No I/O."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient import limits
from tqclient.arguments import items_of
from tqclient.codec import Records, Shared
from tqclient.errors import InvalidArgument

SCHEDULE_FIELDS: Final = ("partition", "global_batch_sizes", "num_microbatches", "micro_batch_indices")
"""One value per DP rank, of any nesting; that rank gets it back exactly as it went in."""
SCHEDULE: Final = "rollout_schedule"
"""The column that holds them: one value per shard, which its samples share."""
SHARD_TAG: Final = "shard"
KEY_PREFIX: Final = "row/"
"""A sample's key is this and its number in the batch that was published."""

SEQUENCES: Final[Mapping[str, torch.dtype]] = {
    "tokens": torch.int64,
    "loss_masks": torch.int32,
    "rollout_log_probs": torch.float32,
    "routed_experts": torch.int32,
}
"""Fields with a tensor per sample, and what lists of numbers become; tensors and arrays keep their dtype."""
VALUES: Final = ("rewards", "raw_reward", "total_lengths", "response_lengths", "truncated", "sample_indices")
"""Fields with a number per sample, or whatever else a reward model says: they come back as they went in."""
RECORDS: Final = ("prompt", "label", "metadata", "multimodal_train_inputs")
"""Fields whose samples need have nothing in common: texts, conversations, dicts of tensors, None."""
FIELDS: Final = (*SEQUENCES, *VALUES, *RECORDS)


@dataclass(frozen=True, slots=True)
class Samples:
    """A rollout as `Partition.put` takes it.

    Attributes:
        columns: by field, shard after shard, with the schedule.
        keys: of each row.
        tags: of each row: its shard.
        weight_version: of all rows, or of each.
    """

    columns: dict[str, Any]
    keys: list[str]
    tags: list[dict[str, int]]
    weight_version: Any


def convert(batch: Mapping[str, Any], dp_size: int, extra: Sequence[str] = (), weight_version: Any = None) -> Samples:
    """Makes samples of a rollout batch.

    Args:
        batch: field → one value per sample: a list, a tensor or an array; a field that is absent or None stays absent.
            Of the schedule fields: one value per DP rank. Without `partition`, DP rank r gets every `dp_size`-th sample
            from r on.
        dp_size: DP ranks that will fetch it.
        extra: further fields that it may have; a list of tensors or arrays stays one.
        weight_version: for all samples, an int or a tuple (min, max); or a list, array or tensor with one for each.

    Raises:
        InvalidArgument: an unknown field, counts that differ, or a partition that does not give each sample to one
            DP rank and each DP rank a sample.
    """
    given = {name: value for name, value in batch.items() if value is not None}
    unknown = sorted(given.keys() - {*FIELDS, *SCHEDULE_FIELDS, *extra})
    if unknown:
        raise InvalidArgument(
            f"rollout: unknown fields {', '.join(unknown)}; known are {', '.join(FIELDS)}; name others in extra_fields"
        )
    fields = [name for name in given if name not in SCHEDULE_FIELDS]
    rows = _row_count(given, fields)
    schedules = _schedules(given, dp_size, rows)
    shards = _shards([schedule["partition"] for schedule in schedules], rows)
    order = [row for shard in shards for row in shard]
    owners = [number for number, shard in enumerate(shards) for _ in shard]
    columns = {name: _column(name, given[name], order) for name in fields}
    facts = {"fields": fields, "dp_size": dp_size}
    columns[SCHEDULE] = Shared(Records([{**facts, "schedule": each} for each in schedules]), owners)
    versions = _versions(weight_version, rows, order)
    return Samples(columns, [f"{KEY_PREFIX}{row}" for row in order], [{SHARD_TAG: owner} for owner in owners], versions)


def context_rows(cp_rank: int, cp_size: int) -> Callable[[NDArray[np.int64]], NDArray[np.int64]]:
    """Says which rows of each sequence are read by one context-parallel rank.

        bridge.fetch(rollout_id, dp_rank, ranges={"routed_experts": context_rows(cp_rank, cp_size)})

    Sequences are cut into `cp_size` runs that differ by one item at most; the lower ranks have the longer ones.
    """
    if not 0 <= cp_rank < cp_size:
        raise InvalidArgument(f"cp_rank={cp_rank} lies outside cp_size={cp_size}")

    def cut(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        size, longer = np.divmod(lengths, cp_size)
        start = cp_rank * size + np.minimum(cp_rank, longer)
        return np.stack([start, start + size + (cp_rank < longer)], axis=1)

    return cut


def _row_count(given: Mapping[str, Any], fields: Sequence[str]) -> int:
    counts = {name: _count(name, given[name]) for name in fields}
    if not counts or min(counts.values()) == 0:
        raise InvalidArgument("rollout: it has no samples")
    first = next(iter(counts))
    for name, count in counts.items():
        if count != counts[first]:
            raise InvalidArgument(f"rollout: field {name!r} has {count} samples, but {first!r} has {counts[first]}")
    return counts[first]


def _count(name: str, values: Any) -> int:
    try:
        return len(values)
    except TypeError:  # one value, or a tensor without dimensions
        raise InvalidArgument(f"rollout: field {name!r}={values!r:.80}: expected one value for each sample") from None


def _versions(given: Any, rows: int, order: Sequence[int]) -> Any:
    """Returns the weight versions of samples in the order of the shards; one for all of them stays as it is."""
    if given is None or isinstance(given, int | tuple | np.integer):
        return given
    listed = items_of(given)
    if listed is None or len(listed) != rows:
        raise InvalidArgument(
            f"rollout: weight_version={given!r:.80}: expected one for all, or one for each of the {rows} samples"
        )
    return _picked(listed, order)


def _schedules(given: Mapping[str, Any], dp_size: int, rows: int) -> list[dict[str, Any]]:
    """Returns the schedule of each DP rank."""
    if isinstance(dp_size, bool) or not isinstance(dp_size, int) or dp_size < 1:
        raise InvalidArgument(f"dp_size={dp_size!r}: expected an int, 1 or more")
    columns = {name: given[name] for name in SCHEDULE_FIELDS if name in given}
    columns.setdefault("partition", [list(range(rank, rows, dp_size)) for rank in range(dp_size)])
    for name, values in columns.items():
        if not isinstance(values, list | tuple) or len(values) != dp_size:
            raise InvalidArgument(f"rollout: {name} must be a list with one value for each of the {dp_size} DP ranks")
    return [{name: columns[name][rank] for name in columns} for rank in range(dp_size)]


def _shards(partitions: Sequence[Any], rows: int) -> list[list[int]]:
    """Returns the rows of each shard; together they are all rows, each once."""
    shards = [_numbers(number, shard) for number, shard in enumerate(partitions)]
    for number, shard in enumerate(shards):
        if not shard:
            raise InvalidArgument(f"rollout: partition[{number}] is empty: its DP rank would have nothing to train on")
        if len(shard) > limits.ROWS_PER_CLAIM_MAX:
            raise InvalidArgument(
                f"rollout: partition[{number}] has {len(shard)} samples, at most {limits.ROWS_PER_CLAIM_MAX}"
            )
    dealt = sorted(row for shard in shards for row in shard)
    if dealt != list(range(rows)):
        amiss = sorted(set(range(rows)).symmetric_difference(dealt)) or [
            row for row, after in itertools.pairwise(dealt) if row == after
        ]
        raise InvalidArgument(
            f"rollout: partition must give each of the {rows} samples to one DP rank; not so with {amiss[:8]}"
        )
    return shards


def _numbers(number: int, shard: Any) -> list[int]:
    try:
        return [operator.index(row) for row in shard]
    except TypeError:
        raise InvalidArgument(
            f"rollout: partition[{number}]={shard!r:.80}: expected the numbers of its DP rank's samples"
        ) from None


def _column(name: str, values: Any, order: Sequence[int]) -> Any:
    """Returns a column with its rows in the order of the shards."""
    if name in SEQUENCES:
        return _sequences(name, values, order)
    if isinstance(values, torch.Tensor | np.ndarray):
        if isinstance(values, torch.Tensor) and values.is_nested:
            return _picked(values.unbind(), order)
        return values[np.asarray(order)]
    picked = _picked(values, order)
    return Records(picked) if name in RECORDS else picked


def _picked(values: Sequence[Any], order: Sequence[int]) -> list[Any]:
    return [values[row] for row in order]


def _sequences(name: str, values: Any, order: Sequence[int]) -> list[torch.Tensor]:
    """Returns a tensor for each sample, so that the column is jagged."""
    rows = _picked(values.unbind() if isinstance(values, torch.Tensor) else values, order)
    try:
        tensors = [_tensor(row, SEQUENCES[name]) for row in rows]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"rollout: field {name!r} needs a sequence of numbers for each sample: {error}") from None
    shapes = {(str(tensor.dtype), tuple(tensor.shape[1:])) for tensor in tensors}
    if len(shapes) > 1 or tensors[0].dim() == 0:
        found = ", ".join(sorted(f"{dtype} [*, {', '.join(map(str, shape))}]" for dtype, shape in shapes))
        raise InvalidArgument(f"rollout: field {name!r} needs sequences that differ in length alone, not {found}")
    return tensors


def _tensor(row: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(row, torch.Tensor):
        return row
    if isinstance(row, np.ndarray):
        return torch.from_numpy(row if row.flags.writeable else row.copy())
    return torch.tensor(row, dtype=dtype)
