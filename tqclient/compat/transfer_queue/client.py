"""The lower-level interface: samples by id, batches by task."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from tqclient import limits
from tqclient.arguments import names_of
from tqclient.compat.transfer_queue import lookup, tags
from tqclient.compat.transfer_queue.batch_meta import BatchMeta
from tqclient.compat.transfer_queue.columns import (
    describe,
    joined,
    marked,
    parse,
    rows_of,
    select_rows,
    to_columns,
    to_tensordict,
)
from tqclient.compat.transfer_queue.config import names
from tqclient.compat.transfer_queue.connection import twin
from tqclient.compat.transfer_queue.errors import StorageKeyNotFoundError, TooFewSamplesError
from tqclient.compat.transfer_queue.keys import Keys, meta_of
from tqclient.compat.transfer_queue.taking import Ledger, slot_of, take
from tqclient.consumer import Batch
from tqclient.errors import ClaimTimeout, InvalidArgument
from tqclient.partition import Partition

N = TypeVar("N", int, float)


class TransferQueueClient(Keys):
    """A connection to the service, in the shape of TransferQueue's client.

    Arguments mean what they mean there; `docs/bridges-transfer-queue.md` lists what differs.
    Its methods may be called from many threads at once.
    """

    def initialize_storage_manager(self, manager_type: str = "", config: Any = None) -> None:
        """Does nothing: the controller says where samples are stored."""

    def get_partition_list(self) -> list[str]:
        """Returns the names of all partitions."""
        return list(names(self.service))

    def clear_partition(self, partition_id: str) -> None:
        """Removes a partition with its samples and its tasks' progress; nothing happens when there is none."""

        def clear(_: Partition, ledger: Ledger) -> None:
            self.service.delete_partition(partition_id)
            ledger.drop()

        try:
            self.on(partition_id, clear)
        except StorageKeyNotFoundError:
            return
        with self._lock:
            self._parts.pop(partition_id, None)

    def get_meta(
        self,
        data_fields: list[str] | None = None,
        batch_size: int | None = None,
        partition_id: str = "",
        mode: str = "fetch",
        task_name: str | None = None,
        sampling_config: dict[str, Any] | None = None,
    ) -> BatchMeta:
        """Finds samples.

        Args:
            data_fields: that they have.
            batch_size: how many.
            partition_id: where; made when there is none, so that a reader may come before the first writer.
            mode: `fetch` takes ready samples for a task, which is not given them again; `force_fetch` returns all
                samples, ready or not, and takes none; `insert` makes samples without fields.
            task_name: whose progress counts; needed to fetch.
            sampling_config: `dp_rank` and `batch_index`, for samplers that go by ranks.

        Returns:
            Their metadata. With `polling_mode`, an empty one when there are too few.

        Raises:
            TooFewSamplesError: there were too few in time; nothing was taken, and it may be called again. Nor is
                anything taken for a call of the async form that was cancelled while it waited.
            StorageKeyNotFoundError: `force_fetch`, and there is no such partition.
            InvalidArgument: `data_fields` is no list of names: one string would name fields by its letters.
        """
        fields = names_of(data_fields or [], what="data_fields")
        if mode == "force_fetch":
            return self.on(partition_id, lambda part, _: self._everything(part, fields))
        if batch_size is None:
            raise InvalidArgument(f"mode={mode!r} needs batch_size")
        if mode == "insert":
            return self._insert({}, batch_size, partition_id, fields)
        if mode != "fetch":
            raise InvalidArgument(f"mode={mode!r}: expected fetch, force_fetch or insert")
        if task_name is None or not fields:
            raise InvalidArgument("mode='fetch' needs task_name and data_fields")
        chosen = sampling_config or {}
        if self.settings.polling:
            if batch_size == 0:
                return BatchMeta.empty()
            return self.fetch_within(fields, batch_size, partition_id, task_name, chosen, 0.0)
        return self._fetch(fields, batch_size, partition_id, task_name, chosen, _seconds_to_wait())

    def _fetch(
        self, fields: list[str], size: int, name: str, task: str, config: dict[str, Any], wait: float
    ) -> BatchMeta:
        sampler = self.settings.sampler
        slot = slot_of(sampler, config)

        def fetch(part: Partition, ledger: Ledger) -> BatchMeta:
            consumer = part.consumer(task, fields=fields, sampler=sampler.native())
            rows = take(consumer, part, ledger, sampler, slot, size, wait)
            return meta_of(part, rows, fields, np.ones(len(rows.ids), np.int8))

        try:
            return self.on(name, fetch, create=True)
        except ClaimTimeout as error:
            raise TooFewSamplesError(error.message) from None

    def fetch_within(
        self, fields: list[str], size: int, name: str, task: str, config: dict[str, Any], wait: float
    ) -> BatchMeta:
        """Fetches as `get_meta` does, with a wait of its own; an empty batch when there are too few."""
        try:
            return self._fetch(fields, size, name, task, config, wait)
        except TooFewSamplesError:
            return BatchMeta.empty()

    def was_given(self, name: str, task: str, config: dict[str, Any]) -> bool:
        """Whether the batch that a `sampling_config` names is one that a rank of that number was given before."""
        slot = slot_of(self.settings.sampler, config)
        if slot is None:
            return False
        try:
            return bool(self.on(name, lambda _, ledger: ledger.find(task, slot)))
        except StorageKeyNotFoundError:
            return False

    def _everything(self, part: Partition, fields: list[str]) -> BatchMeta:
        rows = lookup.listing(part)
        status = self._status(part, fields, rows.ids)
        known = [name for name in fields if part._ref.form(name) is not None]
        return meta_of(part, rows, known, status.all(axis=1).astype(np.int8) if fields else None)

    def put(
        self,
        data: Any,
        metadata: BatchMeta | None = None,
        partition_id: str | None = None,
        data_parser: Callable[[Any], Any] | None = None,
    ) -> BatchMeta:
        """Puts new samples, or fields of samples that exist; these replace what was there.

        Args:
            data: a TensorDict.
            metadata: samples that exist; their `custom_meta` is merged into the stored tags with it. All of those of
                one partition become visible at once.
            partition_id: where to put new ones; made when there is none.
            data_parser: changes the values first, here; see `kv_put`.

        Returns:
            The metadata, with the fields added.

        Raises:
            SchemaMismatch: a field does not fit what was put before; nothing was written.
            UnsupportedValue: a value cannot be carried exactly; nothing was written.
        """
        columns = to_columns(data) if data_parser is None else parse(data, data_parser)
        rows = rows_of(columns, data)
        if metadata is None:
            if partition_id is None:
                raise InvalidArgument("put: give metadata, of samples that exist, or partition_id, for new ones")
            if not rows:
                raise InvalidArgument("put: there is no row")
            return self._insert(columns, rows, partition_id, []).add_fields(columns)
        if rows != metadata.size or not rows:
            raise InvalidArgument(f"put: {rows} rows of data for {metadata.size} samples")
        for name, own, ids in _by_partition(metadata):
            chosen = columns if len(own) == rows else select_rows(columns, own)
            given = [tags.encode(metadata.custom_meta[row]) for row in own]
            self.found(name, partial(_put_at, ids=ids, columns=chosen, given=given))
        return metadata.add_fields(columns)

    def _insert(self, columns: Mapping[str, Any], rows: int, name: str, fields: list[str]) -> BatchMeta:
        size = self.settings.sampler.group_size
        complete = marked(columns, rows)

        def insert(part: Partition, _: Ledger) -> BatchMeta:
            if size == 1:
                ids = part.put(complete)
            else:
                ids = self.put_grouped(part, rows, size, lambda groups: part.put(complete, groups=groups))
            placeholders = {field: describe(None, None) | {"is_non_tensor": False} for field in fields}
            return BatchMeta(ids.tolist(), [name] * rows, placeholders)

        return self.on(name, insert, create=True)

    def get_data(self, metadata: BatchMeta) -> Any:
        """Reads the fields of a batch, in its order.

        Returns:
            A TensorDict. That of an empty batch, or of one without fields, is empty.

        Raises:
            StorageKeyNotFoundError: a sample was cleared, or lacks a field; names all of them.
            InvalidArgument: a field has different dtypes in the partitions of the batch.
        """
        fields = metadata.field_names
        if not metadata.size or not fields:
            return to_tensordict({}, 0)
        parts = [
            (own, dict(self.found(name, partial(_get, ids=ids, fields=fields)).items()))
            for name, own, ids in _by_partition(metadata)
        ]
        columns = parts[0][1] if len(parts) == 1 else joined(parts, metadata.size)
        return to_tensordict(columns, metadata.size)

    def clear_samples(self, metadata: BatchMeta) -> None:
        """Removes samples; those that are gone already are passed over."""
        for name, _, ids in _by_partition(metadata):
            self.clear_in(name, ids=ids)

    def set_custom_meta(self, metadata: BatchMeta) -> None:
        """Stores the tags of a batch, in place of those that its samples had.

        Tags of other names that another client sets while this runs may stay beside them.

        Raises:
            StorageKeyNotFoundError: a sample was cleared.
        """
        for name, own, ids in _by_partition(metadata):
            given = [tags.encode(metadata.custom_meta[row]) for row in own]
            self.found(name, partial(_replace_tags, ids=ids, given=given))

    def get_consumption_status(
        self, task_name: str, partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Says which samples a task was given.

        Returns:
            ids: int64 [samples], ascending.
            status: int8 [samples]: 1 where it was given. Both are None when there is no such partition.
        """
        try:
            rows, taken = self.on(partition_id, lambda part, ledger: (lookup.listing(part), ledger.taken(task_name)))
        except StorageKeyNotFoundError:
            return None, None
        ids = sorted(rows.ids)
        return torch.tensor(ids, dtype=torch.int64), torch.tensor([each in taken for each in ids], dtype=torch.int8)

    def check_consumption_status(self, task_name: str, partition_id: str) -> bool:
        """Whether a task was given every sample; False while there is none.

        Where TQ_PRE_ALLOC_SAMPLE_NUM is set, there have to be that many samples first.
        """
        try:
            info = self.on(partition_id, lambda part, _: part.describe())
        except StorageKeyNotFoundError:
            return False
        expected = max(1, _number("TQ_PRE_ALLOC_SAMPLE_NUM", int, 1))
        return info.samples >= expected and info.counts.get(task_name, {}).get("consumed") == info.samples

    def get_production_status(
        self, data_fields: list[str], partition_id: str
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Says which samples have which fields.

        Returns:
            ids: int64 [samples], ascending.
            status: int8 [samples, fields]: 1 where it is there. Both are None when the partition, or one of the fields,
                does not exist.

        Raises:
            InvalidArgument: `data_fields` is no list of names.
        """
        data_fields = names_of(data_fields, what="data_fields")

        def look(part: Partition, _: Ledger) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            known = part.describe().fields
            if not data_fields or any(field not in known for field in data_fields):
                return None, None
            ids = sorted(lookup.listing(part).ids)
            status = self._status(part, data_fields, ids)
            return torch.tensor(ids, dtype=torch.int64), torch.from_numpy(status.astype(np.int8))

        try:
            return self.on(partition_id, look)
        except StorageKeyNotFoundError:
            return None, None

    def check_production_status(self, data_fields: list[str], partition_id: str) -> bool:
        """Whether every sample has every one of the fields; False while there is none."""
        _, status = self.get_production_status(data_fields, partition_id)
        return status is not None and status.numel() > 0 and bool((status == 1).all())

    @staticmethod
    def _status(part: Partition, fields: Sequence[str], ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
        info = part.describe()
        status = np.zeros((len(ids), len(fields)), np.bool_)
        for column, field in enumerate(fields):
            known = info.fields.get(field)
            if known is not None and known.written:
                lacking = lookup.missing(part, field, ids)
                status[:, column] = [each not in lacking for each in ids]
        return status

    def reset_consumption(self, partition_id: str, task_name: str | None = None) -> bool:
        """Has a task, or all of them, be given every sample again.

        Returns:
            Whether there is such a partition.
        """

        def reset(part: Partition, ledger: Ledger) -> None:
            consumers = part.describe().counts
            for task in consumers if task_name is None else {task_name} & consumers.keys():
                ledger.forget(task)
                part.consumer(task).reset()

        try:
            self.on(partition_id, reset)
        except StorageKeyNotFoundError:
            return False
        return True

    async_get_meta = twin(get_meta)
    async_put = twin(put)
    async_get_data = twin(get_data)
    async_clear_partition = twin(clear_partition)
    async_clear_samples = twin(clear_samples)
    async_set_custom_meta = twin(set_custom_meta)
    async_get_partition_list = twin(get_partition_list)
    async_get_consumption_status = twin(get_consumption_status)
    async_check_consumption_status = twin(check_consumption_status)
    async_get_production_status = twin(get_production_status)
    async_check_production_status = twin(check_production_status)
    async_reset_consumption = twin(reset_consumption)


def _seconds_to_wait() -> float:
    wait = _number("TQ_CONTROLLER_GET_METADATA_TIMEOUT", float, limits.CALL_TIMEOUT)
    if math.isnan(wait):  # which no time is later than
        raise InvalidArgument("TQ_CONTROLLER_GET_METADATA_TIMEOUT=nan: expected seconds")
    return wait


def _number(variable: str, kind: Callable[[str], N], default: N) -> N:
    """Reads a number of the environment; one that is unset or empty is the default."""
    given = os.environ.get(variable)
    try:
        return kind(given) if given else default
    except ValueError:
        raise InvalidArgument(f"{variable}={given!r:.80}: expected a number") from None


def _by_partition(metadata: BatchMeta) -> list[tuple[str, list[int], list[int]]]:
    """Returns, for each partition, the batch's rows there and their ids."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(metadata.partition_ids):
        rows.setdefault(name, []).append(row)
    return [(name, own, [metadata.global_indexes[row] for row in own]) for name, own in rows.items()]


def _put_at(part: Partition, ids: list[int], columns: Mapping[str, Any], given: list[dict[str, Any]]) -> None:
    if columns:
        part.put(columns, ids=ids, tags=given if any(given) else None, upsert=True)
    else:
        part.set_tags(ids, given)


def _get(part: Partition, ids: list[int], fields: list[str]) -> Batch:
    return part.get(ids, fields=fields)


def _replace_tags(part: Partition, ids: list[int], given: list[dict[str, Any]]) -> None:
    stored = lookup.tags_of(part, ids)
    part.set_tags(ids, [dict.fromkeys(stored.get(id_, ())) | own for id_, own in zip(ids, given, strict=True)])
