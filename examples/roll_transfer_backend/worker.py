"""A worker, which is given rows by their ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tqclient.integrations.roll import TransferBackend


@dataclass
class RowRemoteBatch:
    """Stands in for ROLL's class of that name: which rows a batch has, and what of them is here already."""

    partition: str
    device: torch.device | None
    fields: list[str]
    row_ids: list[str]
    cache: Any


def work(address: str, batch: RowRemoteBatch) -> RowRemoteBatch:
    """A worker: reads the tokens of its rows, and writes a field of its own beside them."""
    backend = TransferBackend(address, remote_batch=RowRemoteBatch)
    tokens = backend.get(batch.partition, batch.row_ids, ["input_ids"])["input_ids"]
    log_probs = -tokens.float().log1p()
    written = backend.put(batch.partition, batch.row_ids, {"log_probs": log_probs}, batch_size=len(batch.row_ids))
    backend.close()
    written.cache = None  # what goes back to the driver names rows, and carries none
    return written
