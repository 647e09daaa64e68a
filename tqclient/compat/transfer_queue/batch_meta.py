"""Which samples, and what is known of them: the metadata of the lower-level interface. No I/O happens in it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tqclient.compat.transfer_queue.columns import rows_of, schema_of, to_columns
from tqclient.compat.transfer_queue.merging import check_permutation, even_spans, merge_info

Schema = dict[str, dict[str, Any]]


class SampleView:
    """One row of a BatchMeta, read-only."""

    def __init__(self, batch: BatchMeta, row: int) -> None:
        """Made by `BatchMeta.samples`."""
        self._batch = batch
        self._row = row

    @property
    def global_index(self) -> int:
        """Id of the sample."""
        return self._batch.global_indexes[self._row]

    @property
    def partition_id(self) -> str:
        """Partition that it is in."""
        return self._batch.partition_ids[self._row]

    @property
    def production_status(self) -> int:
        """1 when all fields of the batch were there."""
        return int(self._batch.production_status[self._row])

    @property
    def custom_meta(self) -> Mapping[str, Any]:
        """Its tags."""
        return MappingProxyType(self._batch.custom_meta[self._row])

    @property
    def fields(self) -> Mapping[str, Mapping[str, Any]]:
        """What is known of each field: `dtype`, `shape` (of this row), `is_nested`, `is_non_tensor`."""
        known = {}
        for name, entry in self._batch.field_schema.items():
            own = {key: value for key, value in entry.items() if key != "per_sample_shapes"}
            own["shape"] = self._batch.get_shapes(name)[self._row]
            known[name] = MappingProxyType(own)
        return MappingProxyType(known)


class BatchMeta:
    """Samples of one or several partitions, by id. It can be pickled and passed to other processes.

    Attributes:
        global_indexes: ids of the samples.
        partition_ids: partition of each.
        field_schema: by field: `dtype`, `shape` of a row, `is_nested`, `is_non_tensor`, and for nested ones that were
            put from here `per_sample_shapes`.
        production_status: int8 [rows]: 1 where all fields are there.
        extra_info: batch-level values; they stay in the object.
        custom_meta: tags of each sample.
    """

    def __init__(
        self,
        global_indexes: Sequence[int],
        partition_ids: Sequence[str],
        field_schema: Mapping[str, Mapping[str, Any]] | None = None,
        production_status: ArrayLike | None = None,
        extra_info: Mapping[str, Any] | None = None,
        custom_meta: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Checks that everything has as many rows.

        Raises:
            ValueError: it has not; says what.
        """
        self.global_indexes = [int(each) for each in global_indexes]
        rows = len(self.global_indexes)
        self.partition_ids = list(partition_ids)
        self.field_schema: Schema = {name: dict(entry) for name, entry in (field_schema or {}).items()}
        status = np.zeros(rows, np.int8) if production_status is None else np.array(production_status, np.int8)
        self.production_status: NDArray[np.int8] = status
        self.extra_info = dict(extra_info or {})
        self.custom_meta = [dict(each) for each in custom_meta] if custom_meta else [{} for _ in range(rows)]
        counted: dict[str, Sequence[Any] | NDArray[Any]] = {
            "partition_ids": self.partition_ids,
            "production_status": status,
            "custom_meta": self.custom_meta,
        }
        for name, entry in self.field_schema.items():
            if entry.get("per_sample_shapes") is not None:
                counted[f"per_sample_shapes of field {name!r}"] = entry["per_sample_shapes"]
        for what, values in counted.items():
            if len(values) != rows:
                raise ValueError(f"{what}: {len(values)} of them for {rows} samples")

    @classmethod
    def empty(cls, extra_info: Mapping[str, Any] | None = None) -> BatchMeta:
        """Returns a batch without samples."""
        return cls([], [], extra_info=extra_info)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.global_indexes)

    @property
    def field_names(self) -> list[str]:
        """Names of the fields, sorted."""
        return sorted(self.field_schema)

    @property
    def samples(self) -> Sequence[SampleView]:
        """The samples one by one."""
        return [SampleView(self, row) for row in range(self.size)]

    @property
    def is_ready(self) -> bool:
        """Whether there are samples, and all of them have all fields."""
        return self.size > 0 and bool((self.production_status == 1).all())

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[BatchMeta]:
        return (self[row] for row in range(self.size))

    def __getitem__(self, item: int | slice) -> BatchMeta:
        rows = range(self.size)[item]  # raises IndexError, TypeError
        return self.select_samples(list(rows) if isinstance(rows, range) else [rows])

    def get_dtypes(self, field_name: str) -> list[Any]:
        """Returns the dtype of a field, once for each sample; KeyError when the batch lacks it."""
        return [self.field_schema[field_name].get("dtype")] * self.size

    def get_shapes(self, field_name: str) -> list[Any]:
        """Returns the shape of each sample's row; None where it is not known here. KeyError when the batch lacks it."""
        entry = self.field_schema[field_name]
        shapes = entry.get("per_sample_shapes")
        return [entry.get("shape")] * self.size if shapes is None else list(shapes)

    def get_extra_info(self, key: str, default: Any = None) -> Any:
        """Returns a batch-level value."""
        return self.extra_info.get(key, default)

    def set_extra_info(self, key: str, value: Any) -> None:
        """Sets a batch-level value."""
        self.extra_info[key] = value

    def get_all_extra_info(self) -> dict[str, Any]:
        """Returns a deep copy of the batch-level values."""
        return copy.deepcopy(self.extra_info)

    def update_extra_info(self, info_dict: Mapping[str, Any]) -> None:
        """Sets several batch-level values."""
        self.extra_info.update(info_dict)

    def remove_extra_info(self, key: str) -> Any:
        """Removes a batch-level value and returns it; None when there was none."""
        return self.extra_info.pop(key, None)

    def clear_extra_info(self) -> None:
        """Removes all batch-level values."""
        self.extra_info.clear()

    def has_extra_info(self, key: str) -> bool:
        """Whether there is a batch-level value of that name."""
        return key in self.extra_info

    def get_all_custom_meta(self) -> list[dict[str, Any]]:
        """Returns a deep copy of all samples' tags."""
        return copy.deepcopy(self.custom_meta)

    def update_custom_meta(self, custom_meta: Sequence[Mapping[str, Any]] | None) -> None:
        """Merges tags into those of the samples, one mapping for each; the next put or set_custom_meta stores them.

        Raises:
            ValueError: there are not as many as samples.
        """
        if custom_meta is None:
            return
        if len(custom_meta) != self.size:
            raise ValueError(f"custom_meta: {len(custom_meta)} of them for {self.size} samples")
        for own, new in zip(self.custom_meta, custom_meta, strict=True):
            own.update(new)

    def clear_custom_meta(self) -> None:
        """Forgets the tags, in this object alone."""
        self.custom_meta = [{} for _ in range(self.size)]

    def add_fields(self, tensor_dict: Any, set_all_ready: bool = True) -> BatchMeta:
        """Adds the fields of a TensorDict, in place.

        Raises:
            ValueError: it has not as many rows.
        """
        columns = to_columns(tensor_dict)
        rows = rows_of(columns, tensor_dict)
        if rows not in (None, self.size):
            raise ValueError(f"add_fields: {rows} rows for {self.size} samples")
        self.field_schema.update(schema_of(columns))
        if set_all_ready:
            self.production_status[:] = 1
        return self

    def select_samples(self, sample_indices: Sequence[int]) -> BatchMeta:
        """Returns a batch of some rows, by their positions.

        Raises:
            ValueError: a position is out of range.
        """
        rows = [int(row) for row in sample_indices]
        if any(not 0 <= row < self.size for row in rows):
            raise ValueError(f"rows {rows}: expected positions from 0 to {self.size - 1}")
        return BatchMeta(
            [self.global_indexes[row] for row in rows],
            [self.partition_ids[row] for row in rows],
            _select_shapes(self.field_schema, rows),
            self.production_status[rows],
            self.extra_info,
            copy.deepcopy([self.custom_meta[row] for row in rows]),
        )

    def select_fields(self, field_names: Sequence[str]) -> BatchMeta:
        """Returns a batch of some fields.

        Raises:
            ValueError: the batch lacks one.
        """
        unknown = [name for name in field_names if name not in self.field_schema]
        if unknown:
            raise ValueError(f"select_fields: {unknown} are not among the fields {self.field_names}")
        chosen = self.copy()
        chosen.field_schema = {name: chosen.field_schema[name] for name in field_names}
        return chosen

    def copy(self) -> BatchMeta:
        """Returns a deep copy."""
        return copy.deepcopy(self)

    def chunk(self, chunks: int) -> list[BatchMeta]:
        """Cuts the batch into consecutive parts; the first ones have one sample more when it doesn't divide.

        There are always as many parts as were asked for; with more parts than samples, the last ones are empty.
        """
        return [self[start:stop] for start, stop in even_spans(self.size, chunks)]

    def chunk_by_partition(self) -> list[BatchMeta]:
        """Cuts the batch into one part for each partition, in order of their first samples."""
        rows: dict[str, list[int]] = {}
        for row, partition in enumerate(self.partition_ids):
            rows.setdefault(partition, []).append(row)
        return [self.select_samples(own) for own in rows.values()]

    def union(self, other: BatchMeta) -> BatchMeta:
        """Returns a batch with the fields of both, which have the same samples in the same order.

        What both have is the other's. A sample is ready when it is in both. An empty batch changes nothing.

        Raises:
            ValueError: the samples differ.
        """
        if not self.size or not other.size:
            return (self if self.size else other).copy()
        if (self.global_indexes, self.partition_ids) != (other.global_indexes, other.partition_ids):
            raise ValueError("union: the two batches are not of the same samples in the same order")
        united = self.copy()
        united.field_schema.update(copy.deepcopy(other.field_schema))
        united.production_status = self.production_status & other.production_status
        united.extra_info.update(other.extra_info)
        united.update_custom_meta(copy.deepcopy(other.custom_meta))
        return united

    @classmethod
    def concat(cls, data: Sequence[BatchMeta], validate: bool = True) -> BatchMeta:
        """Returns the samples of several batches as one; empty ones are passed over.

        Args:
            data: the batches.
            validate: whether fields and dtypes must agree.

        Raises:
            ValueError: fields, dtypes, or batch-level values differ.
        """
        parts = [part for part in data if part.size]
        if not parts:
            return cls.empty()
        if validate:
            _check_alike(parts)
        return cls(
            [each for part in parts for each in part.global_indexes],
            [each for part in parts for each in part.partition_ids],
            {name: _concat_entry(name, parts) for name in parts[0].field_schema},
            np.concatenate([part.production_status for part in parts]),
            merge_info([part.extra_info for part in parts]),
            copy.deepcopy([each for part in parts for each in part.custom_meta]),
        )

    def reorder(self, indices: Sequence[int]) -> None:
        """Puts the samples into another order, in place.

        Raises:
            ValueError: the indices do not name each row once.
        """
        check_permutation(indices, self.size)
        other = self.select_samples(indices)
        self.__dict__.update(other.__dict__)

    def __repr__(self) -> str:
        return f"BatchMeta({self.size} samples, ready={self.is_ready}, fields={self.field_names})"


def _select_shapes(schema: Schema, rows: Sequence[int]) -> Schema:
    chosen = copy.deepcopy(schema)
    for entry in chosen.values():
        shapes = entry.get("per_sample_shapes")
        if shapes is not None:
            entry["per_sample_shapes"] = [shapes[row] for row in rows]
    return chosen


def _check_alike(parts: Sequence[BatchMeta]) -> None:
    first = parts[0]
    for number, part in enumerate(parts):
        if part.field_names != first.field_names:
            raise ValueError(f"concat: batch {number} has the fields {part.field_names}, batch 0 {first.field_names}")
        for name in first.field_names:
            own, base = part.field_schema[name].get("dtype"), first.field_schema[name].get("dtype")
            if own != base:
                raise ValueError(f"concat: field {name!r} is {own} in batch {number}, and {base} in batch 0")


def _concat_entry(name: str, parts: Sequence[BatchMeta]) -> dict[str, Any]:
    entries = [part.field_schema.get(name, {}) for part in parts]
    merged = {key: value for key, value in entries[0].items() if key != "per_sample_shapes"}
    if any(entry.get("is_nested") for entry in entries):
        merged["is_nested"] = True
        merged["shape"] = None
    if any(entry.get("per_sample_shapes") for entry in entries):
        merged["per_sample_shapes"] = [
            shape
            for part in parts
            for shape in (part.get_shapes(name) if name in part.field_schema else [None] * part.size)
        ]
    return merged
