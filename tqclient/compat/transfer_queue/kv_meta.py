"""Which keys, and what is known of them: the metadata of the key-value interface. No I/O happens in it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tqclient.compat.transfer_queue.merging import check_permutation, even_spans, merge_info


@dataclass
class KVBatchMeta:
    """Samples of one partition, by key.

    Attributes:
        keys: of the samples; all different.
        tags: of each.
        partition_id: where they are.
        fields: that all of them have; None when that is not known.
        extra_info: batch-level values; they stay in the object.
    """

    keys: list[str] = dataclasses.field(default_factory=list)
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] | None = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ValueError when counts differ or a name comes twice."""
        if len(self.keys) != len(self.tags):
            raise ValueError(f"{len(self.keys)} keys, but {len(self.tags)} tags")
        for what, names in (("keys", self.keys), ("fields", self.fields or [])):
            if len(set(names)) != len(names):
                raise ValueError(f"{what}: {sorted({name for name in names if names.count(name) > 1})} come twice")
        self.tags = copy.deepcopy(self.tags)
        self.extra_info = copy.deepcopy(self.extra_info)

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.keys)

    def __len__(self) -> int:
        return len(self.keys)

    def select_keys(self, keys_to_select: list[str]) -> KVBatchMeta:
        """Returns a batch of some keys, in the order asked for.

        Raises:
            ValueError: a key comes twice.
            RuntimeError: the batch lacks one.
        """
        rows = {key: row for row, key in enumerate(self.keys)}
        unknown = [key for key in keys_to_select if key not in rows]
        if unknown:
            raise RuntimeError(f"select_keys: {unknown} are not in this batch")
        return self._select([rows[key] for key in keys_to_select])

    def reorder(self, indexes: list[int]) -> None:
        """Puts the samples into another order, in place.

        Raises:
            ValueError: the indexes do not name each row once.
        """
        check_permutation(indexes, self.size)
        self.keys, self.tags = [self.keys[row] for row in indexes], [self.tags[row] for row in indexes]

    def chunk(self, chunks: int) -> list[KVBatchMeta]:
        """Cuts the batch into consecutive parts, as `BatchMeta.chunk` does."""
        return [self._select(range(start, stop)) for start, stop in even_spans(self.size, chunks)]

    @classmethod
    def concat(cls, data: list[KVBatchMeta]) -> KVBatchMeta:
        """Returns the samples of several batches as one; empty ones are passed over.

        Raises:
            ValueError: partitions, fields or batch-level values differ, or a key comes twice.
        """
        parts = [part for part in data if part.size]
        if not parts:
            return cls()
        first = parts[0]
        for number, part in enumerate(parts):
            if part.partition_id != first.partition_id:
                raise ValueError(
                    f"concat: batch {number} is of {part.partition_id!r}, batch 0 of {first.partition_id!r}"
                )
            if None not in (part.fields, first.fields) and set(part.fields or ()) != set(first.fields or ()):
                raise ValueError(f"concat: batch {number} has the fields {part.fields}, batch 0 {first.fields}")
        known = all(part.fields is not None for part in parts)
        return cls(
            [key for part in parts for key in part.keys],
            [tag for part in parts for tag in part.tags],
            first.partition_id,
            list(first.fields or ()) if known else None,
            merge_info([part.extra_info for part in parts]),
        )

    def _select(self, rows: Sequence[int]) -> KVBatchMeta:
        return KVBatchMeta(
            [self.keys[row] for row in rows],
            [self.tags[row] for row in rows],
            self.partition_id,
            self.fields,
            self.extra_info,
        )
