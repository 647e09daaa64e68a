"""Stands in for NeMo-RL's `KVBatchMeta`, so that the example runs without it: the same fields, and the same check."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class KVBatchMeta:
    """Which samples a batch consists of; the values stay where they are.

    Attributes:
        partition_id: where they are.
        task_name: that claimed them.
        sample_ids: of each.
        fields: that they have.
        sequence_lengths: in tokens.
        extra_info: anything.
        tags: of each.
    """

    partition_id: str
    task_name: str | None
    sample_ids: list[str]
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if self.tags is not None and len(self.tags) != len(self.sample_ids):
            raise ValueError("tags must align with sample_ids")
