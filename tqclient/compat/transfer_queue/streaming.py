"""Batches of a task as a torch dataset: fetched ahead, cut into micro-batches, kept for another pass."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tqclient.arguments import names_of
from tqclient.compat.transfer_queue.batch_meta import BatchMeta
from tqclient.compat.transfer_queue.client import TransferQueueClient
from tqclient.errors import InvalidArgument, Sealed

Fetched = tuple[Any, BatchMeta]

FETCH_SECONDS: Final = 1.0
"""A fetch waits so long on the service, before the dataset looks whether the task has been given everything."""
PAUSE_SECONDS: Final = 0.05
"""Between two fetches of a user's own `fetch_batch_fn` that found nothing."""


class StreamingDataset(IterableDataset[Fetched]):
    """The batches of one rank of a task.

    Attributes:
        buffer: what was fetched so far, as (TensorDict, BatchMeta); `reset` begins it anew, without another fetch.
        batch_index: position in the buffer.
    """

    def __init__(
        self,
        config: Any,
        batch_size: int,
        micro_batch_size: int,
        data_fields: list[str],
        partition_id: str,
        task_name: str,
        dp_rank: int,
        should_check_consumption_status: bool = False,
        fetch_batch_fn: Callable[..., Fetched] | None = None,
        process_batch_fn: Callable[..., Iterable[Fetched]] | None = None,
    ) -> None:
        """Makes no call.

        Args:
            config: what `init` returned, or anything that it takes.
            batch_size: samples of a fetch.
            micro_batch_size: samples of what is yielded.
            data_fields: to read.
            partition_id: where.
            task_name: whose progress counts.
            dp_rank: ranks of one number get the same batches, with a sampler that goes by ranks.
            should_check_consumption_status: end once the task was given every sample, and this rank its last batch;
                False goes on for ever, or until the partition is sealed.
            fetch_batch_fn: instead of `default_fetch_batch_fn`.
            process_batch_fn: instead of `chunk_batch_fn`.

        Raises:
            ValueError: a number is too small, no field is named, or `data_fields` is one string.
        """
        super().__init__()
        if micro_batch_size < 1 or batch_size < 1 or dp_rank < 0 or not data_fields:
            raise InvalidArgument(
                f"batch_size={batch_size}, micro_batch_size={micro_batch_size}, dp_rank={dp_rank}, "
                f"data_fields={data_fields}: expected sizes of 1 or more, a rank of 0 or more, and one field or more"
            )
        self.config = config
        self.batch_size = batch_size
        self.micro_batch_size = micro_batch_size
        self.data_fields = names_of(data_fields, what="data_fields")
        self.partition_id = partition_id
        self.task_name = task_name
        self.dp_rank = dp_rank
        self.should_check_consumption_status = should_check_consumption_status
        self.fetch_batch_fn = fetch_batch_fn or default_fetch_batch_fn
        self.process_batch_fn = process_batch_fn or chunk_batch_fn
        self.sampling_config = {"dp_rank": dp_rank, "task_name": task_name}
        self.buffer: list[Fetched] = []
        self.batch_index = 0
        self._client: TransferQueueClient | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None}

    def __iter__(self) -> Iterator[Fetched]:
        """Yields (TensorDict, BatchMeta) for each micro-batch."""
        client = self._connected()
        while True:
            if self.batch_index < len(self.buffer):
                batch = self.buffer[self.batch_index]
                self.batch_index += 1
                yield from self.process_batch_fn(*batch, micro_batch_size=self.micro_batch_size)
                continue
            if self.should_check_consumption_status and self._is_over(client):
                return
            try:
                data, meta = self.fetch_batch_fn(
                    tq_client=client,
                    data_fields=self.data_fields,
                    batch_size=self.batch_size,
                    partition_id=self.partition_id,
                    task_name=self.task_name,
                    sampling_config=self.sampling_config,
                    batch_index=self._number(),
                )
            except Sealed:
                return
            if data is not None:
                self.buffer.append((data, meta))
            elif self.fetch_batch_fn is not default_fetch_batch_fn:
                time.sleep(PAUSE_SECONDS)

    def _is_over(self, client: TransferQueueClient) -> bool:
        """Whether the task was given everything, and what is left of it is for other ranks."""
        if not client.check_consumption_status(self.task_name, self.partition_id):
            return False
        config = {**self.sampling_config, "batch_index": self._number()}
        return not client.was_given(self.partition_id, self.task_name, config)

    def _number(self) -> int:
        """Returns the number of the next batch; the workers of a loader number theirs in turns."""
        worker = get_worker_info()
        return len(self.buffer) if worker is None else len(self.buffer) * worker.num_workers + worker.id

    def _connected(self) -> TransferQueueClient:
        if self._client is None or self._client.forked:
            self._client = TransferQueueClient(f"StreamingDataset_{os.getpid()}", self.config)
        return self._client

    def close(self) -> None:
        """Ends the dataset's own connection; iterating opens another. Repeatable."""
        client, self._client = self._client, None
        if client is not None and not client.forked:
            client.close()

    def reset(self) -> None:
        """Goes back to the first batch that was fetched."""
        self.batch_index = 0

    def step(self, partition_id: str) -> None:
        """Goes on with another partition, and forgets what was fetched."""
        self.buffer = []
        self.batch_index = 0
        self.partition_id = partition_id


def default_fetch_batch_fn(
    tq_client: TransferQueueClient,
    data_fields: list[str],
    batch_size: int,
    partition_id: str,
    task_name: str,
    sampling_config: dict[str, Any],
    batch_index: int,
) -> Fetched:
    """Fetches one batch; (None, an empty batch) when there are too few samples for a while."""
    config = {**sampling_config, "batch_index": batch_index, "partition_id": partition_id}
    meta = tq_client.fetch_within(data_fields, batch_size, partition_id, task_name, config, FETCH_SECONDS)
    return (tq_client.get_data(meta) if meta.size else None), meta


def chunk_batch_fn(td: Any, batch_meta: BatchMeta, micro_batch_size: int = 1) -> list[Fetched]:
    """Cuts a batch into micro-batches, the last of which may be smaller.

    Raises:
        TypeError: it is no TensorDict.
        ValueError: the size is no int of 1 or more, or more than there are samples.
    """
    from tensordict import TensorDictBase

    if not isinstance(td, TensorDictBase):
        raise TypeError(f"expected a TensorDict, not {type(td).__qualname__}")
    if not td.batch_size:
        raise InvalidArgument("the TensorDict has no batch dimension")
    rows = td.batch_size[0]
    if isinstance(micro_batch_size, bool) or not isinstance(micro_batch_size, int) or micro_batch_size < 1:
        raise InvalidArgument(f"micro_batch_size={micro_batch_size!r}: expected an int of 1 or more")
    if micro_batch_size > rows:
        raise InvalidArgument(f"micro_batch_size={micro_batch_size}, but there are {rows} samples")
    return [
        (_cut(td, start, stop), batch_meta[start:stop])
        for start in range(0, rows, micro_batch_size)
        for stop in [min(start + micro_batch_size, rows)]
    ]


def _cut(value: Any, start: int, stop: int) -> Any:
    from tensordict import TensorDict, TensorDictBase, is_non_tensor

    if isinstance(value, torch.Tensor) and value.is_nested:
        return torch.nested.as_nested_tensor(list(value.unbind())[start:stop], layout=value.layout)
    if isinstance(value, TensorDictBase) and not is_non_tensor(value):
        parts = {name: _cut(value.get(name), start, stop) for name in value.keys()}  # noqa: SIM118
        return TensorDict(parts, batch_size=[stop - start])
    return value[start:stop]


class StreamingDataLoader(DataLoader[Fetched]):
    """A DataLoader over a StreamingDataset, which makes the batches."""

    dataset: StreamingDataset

    def __init__(
        self,
        dataset: StreamingDataset,
        num_workers: int = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
    ) -> None:
        """Passes everything to the DataLoader. Workers are spawned unless a context says otherwise."""
        if num_workers and multiprocessing_context is None:
            multiprocessing_context = "spawn"  # a fork would share the connections of its parent
        options = {"pin_memory_device": pin_memory_device} if pin_memory_device else {}
        super().__init__(
            dataset,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=collate_fn or _as_it_is,
            pin_memory=pin_memory,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            **options,  # type: ignore[arg-type]
        )

    def reset(self) -> None:
        """See `StreamingDataset.reset`."""
        self.dataset.reset()

    def step(self, partition_id: str) -> None:
        """See `StreamingDataset.step`."""
        self.dataset.step(partition_id)

    def get_buffer(self) -> list[Fetched]:
        """Returns what was fetched so far; with workers, they have it, and it is empty here."""
        return self.dataset.buffer


def _as_it_is(batch: Any) -> Any:
    return batch
