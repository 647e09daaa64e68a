"""Samples by key, as TensorDicts: what the adapters for key-value interfaces stand on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from tqclient.compat.transfer_queue.columns import marked, rows_of, to_columns, to_tensordict
from tqclient.compat.transfer_queue.connection import Connection
from tqclient.compat.transfer_queue.errors import StorageKeyNotFoundError
from tqclient.consumer import Batch
from tqclient.errors import InvalidArgument, PartitionNotFound
from tqclient.partition import Partition

T = TypeVar("T")


class KeyedSamples(Connection):
    """A connection whose samples have a key each. Its methods may be called from many threads at once."""

    def __init__(self, name: str, address: str | None = None) -> None:
        """Connects.

        Args:
            name: of the adapter.
            address: `host:port` of the controller; None takes TQ_CONTROLLER, then this machine.

        Raises:
            ImportError: tensordict is not installed.
            Unavailable: the controller did not answer in time.
        """
        try:
            __import__("tensordict")
        except ImportError:
            raise ImportError(f"{name} takes and returns TensorDicts: pip install 'tq-dataplane[tensordict]'") from None
        super().__init__(name, address)

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        fields: Any = None,
        *,
        groups: Sequence[str] | None = None,
        tags: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[str]:
        """Puts samples, or fields and tags of samples that exist: all of it becomes visible at once, or nothing does.

        Args:
            partition: where; made when there is none.
            keys: one per row.
            fields: a TensorDict of as many rows; None, or one without fields: of tags alone.
            groups: of the samples, one per row.
            tags: merged into the samples' tags, one mapping per row.

        Returns:
            The names of the fields.

        Raises:
            InvalidArgument: a key comes twice, or counts differ; nothing was written.
            SchemaMismatch: a field does not fit what was put before; nothing was written.
            UnsupportedValue: a value cannot be carried exactly; nothing was written.
        """
        where = f"partition {partition!r}"
        columns = {} if fields is None else to_columns(fields)
        for number, key in enumerate(keys):
            if not isinstance(key, str) or not key:
                raise InvalidArgument(f"{where}: the key of row {number} is {key!r}: expected a str that is not empty")
        if len(set(keys)) != len(keys):
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise InvalidArgument(f"{where}: {twice} come twice in one put: give each row a key of its own")
        rows = rows_of(columns, fields)
        if rows not in (None, len(keys)):
            raise InvalidArgument(f"{where}: {rows} rows for {len(keys)} keys: give one key per row")
        if tags is not None and len(tags) != len(keys):
            raise InvalidArgument(f"{where}: {len(tags)} tags for {len(keys)} keys: give one dict per row, or None")
        if not keys:
            return list(columns)
        complete = marked(columns, len(keys))
        self.on(
            partition,
            lambda part, _: part.put(
                complete,
                keys=keys,
                groups=groups,
                tags=None if tags is None else [dict(each) for each in tags],
                upsert=True,
            ),
            create=True,
        )
        return list(columns)

    def get(self, partition: str, keys: Sequence[str], fields: Sequence[str]) -> Any:
        """Reads samples by key, in the order asked for; a key may come twice.

        Returns:
            A TensorDict `[keys]`: a field of tensors is one tensor where the rows read have one shape, and jagged
            otherwise; any other field is a NonTensorStack.

        Raises:
            StorageKeyNotFoundError: a key has no sample, a sample lacks a field, or there is no such partition: a
                KeyError that names all of them.
            InvalidArgument: no key, or no field, was named.
        """
        checked_names(partition, "fields", fields)
        checked_names(partition, "keys", keys)

        def read(part: Partition) -> Batch:
            return part.get(keys=keys, fields=fields)

        batch = self.existing(partition, read)
        return uniform_as_dense(to_tensordict(dict(batch.items()), len(keys)))

    def existing(self, partition: str, action: Callable[[Partition], T]) -> T:
        """Calls back with a partition; once more with the new one where it was deleted and made again.

        Raises:
            StorageKeyNotFoundError: there is none of that name; says what makes one. A KeyError.
        """
        try:
            return self.found(partition, action)
        except StorageKeyNotFoundError as error:
            if not isinstance(error.__cause__, PartitionNotFound):
                raise
            raise StorageKeyNotFoundError(
                f"partition {partition!r} does not exist: register it, put to it first, or correct its name"
            ) from None


def checked_names(partition: str, what: str, names: Any) -> None:
    """Raises InvalidArgument unless names are a list (or tuple) of strings, one at least; a string is no list."""
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidArgument(f"partition {partition!r}: {what}={names!r:.200}: expected a list of names, one at least")


def uniform_as_dense(fields: Any) -> Any:
    """Has a TensorDict hold each jagged field whose rows have one shape as one tensor, over the same memory."""
    from tensordict import TensorDictBase, is_non_tensor

    for name in list(fields.keys()):
        value = fields.get(name)
        if is_non_tensor(value):
            continue
        if isinstance(value, TensorDictBase):
            uniform_as_dense(value)
        elif value.is_nested:
            fields.set(name, _dense(value))
    return fields


def _dense(value: torch.Tensor) -> torch.Tensor:
    turned = getattr(value, "_ragged_idx", 1) == 2  # rows of [size, length]
    jagged = value.transpose(1, 2) if turned else value
    lengths = jagged.offsets().diff()  # type: ignore[attr-defined]
    if len(lengths) == 0 or bool((lengths != lengths[0]).any()):
        return value
    rows = jagged.values()
    dense: torch.Tensor = rows.reshape(len(lengths), int(lengths[0]), *rows.shape[1:])
    return dense.transpose(1, 2) if turned else dense
