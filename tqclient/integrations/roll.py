"""A transfer backend for ROLL: the rows of its remote batches, by id.

    backend = TransferBackend(remote_batch=RowRemoteBatch)  # ROLL's, of roll.distributed.scheduler.remote_protocol
    batch = backend.put("train_eval", row_ids, {"input_ids": tensor, "prompt": array}, batch_size=len(row_ids))
    fields = backend.get("train_eval", row_ids, ["input_ids"])
    backend.delete("train_eval", row_ids, ["input_ids", "prompt"])

The interface is that of `roll/distributed/scheduler/transfer_backend.py`, ROLL 0.3.0 (commit 7f9d4d3, unchanged in
8eb27cc of 2026-08-19). Nothing of ROLL is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from tqclient.errors import InvalidArgument, UnsupportedValue
from tqclient.integrations.keyed import KeyedSamples, checked_names

B = TypeVar("B")


class TransferBackend(Generic[B]):
    """What ROLL's `put`, `get` and `delete` call. Its methods may be called from many threads at once."""

    def __init__(self, address: str | None = None, *, remote_batch: Callable[..., B]) -> None:
        """Connects.

        Args:
            address: `host:port` of the controller; None takes TQ_CONTROLLER, then this machine.
            remote_batch: ROLL's `RowRemoteBatch`, or what takes the same keywords: `partition`, `device`, `fields`,
                `row_ids` and `cache`.

        Raises:
            ImportError: tensordict is not installed.
            Unavailable: the controller did not answer in time.
        """
        self._remote_batch = remote_batch
        self._samples = KeyedSamples("roll", address)

    def put(
        self,
        partition: str,
        row_ids: list[str],
        fields: Mapping[str, torch.Tensor | NDArray[Any]],
        batch_size: int,
    ) -> B:
        """Puts rows, or fields of rows that exist; these replace what was there. All is visible at once, or nothing.

        Args:
            partition: where; made when there is none.
            row_ids: of the rows; all different.
            fields: tensors `[batch_size, *]`, jagged ones too, and arrays `[batch_size, *]`, whose rows are kept as
                Python or numpy values.
            batch_size: rows.

        Returns:
            The remote batch, with the values as its cache.

        Raises:
            InvalidArgument: no field, counts that differ, or an id twice: a ValueError. Nothing was written.
            UnsupportedValue: a field is neither tensor nor array, or has a value that cannot be carried exactly: a
                TypeError. Nothing was written.
            SchemaMismatch: a field has another dtype or trailing shape than before. Nothing was written.
        """
        cache = _tensordict(partition, fields, batch_size)
        if len(row_ids) != batch_size:
            raise InvalidArgument(f"partition {partition!r}: {len(row_ids)} row_ids, but batch_size={batch_size}")
        self._samples.put(partition, row_ids, cache)
        return self._remote_batch(
            partition=partition, device=cache.device, fields=list(fields), row_ids=list(row_ids), cache=cache
        )

    def get(self, partition: str, keys: list[str], fields: list[Any]) -> Any:
        """Reads rows, in the order asked for; an id may come twice.

        Args:
            partition: where.
            keys: ids of the rows.
            fields: to read.

        Returns:
            A TensorDict `[keys]`: a tensor field is one tensor where the rows have one shape, jagged otherwise; what
            was put as an array is a NonTensorStack.

        Raises:
            StorageKeyNotFoundError: a row does not exist, or lacks a field; names all of them. A KeyError.
            InvalidArgument: no row or no field was named.
        """
        return self._samples.get(partition, keys, fields)

    def delete(self, partition: str, keys: list[str], fields: Sequence[Any]) -> None:
        """Removes rows with all of their fields; those that are gone already are passed over.

        Args:
            partition: where; one that does not exist has no rows.
            keys: ids of the rows.
            fields: without effect, as in ROLL's own backend: rows go whole.

        Raises:
            InvalidArgument: `keys` is no list of strings: one string would name rows by its letters.
        """
        if keys:
            checked_names(partition, "keys", keys)
            self._samples.clear_in(partition, keys=list(keys))

    def close(self) -> None:
        """Ends the connection; rows stay. Repeatable."""
        self._samples.close()


def _tensordict(partition: str, fields: Mapping[str, Any], batch_size: int) -> Any:
    from tensordict import NonTensorStack, TensorDict

    if not fields:
        raise InvalidArgument(f"partition {partition!r}: fields is empty: give one field at least")
    checked: dict[str, Any] = {}
    for name, value in fields.items():
        where = f"partition {partition!r}, field {name!r}"
        if not isinstance(value, torch.Tensor | np.ndarray):
            raise UnsupportedValue(
                f"{where}: {type(value).__qualname__}: expected a torch.Tensor or a numpy.ndarray; "
                "make a list an array of dtype=object"
            )
        rows = (value.size(0) if isinstance(value, torch.Tensor) else len(value)) if value.ndim else None
        if rows != batch_size:
            found = "no dimension" if rows is None else f"{rows} rows"
            raise InvalidArgument(f"{where}: {found}, but batch_size={batch_size}: give one row per row id")
        array = isinstance(value, np.ndarray)
        checked[name] = NonTensorStack(*value) if array and batch_size else value
    return TensorDict(checked, batch_size=[batch_size])
