"""The key-value interface: one client for each process, and functions over it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, NoReturn

import torch

from tqclient.compat.transfer_queue.client import TransferQueueClient
from tqclient.compat.transfer_queue.columns import parse, rows_of, to_columns
from tqclient.compat.transfer_queue.config import Config, address_of
from tqclient.compat.transfer_queue.keys import checked_keys
from tqclient.compat.transfer_queue.kv_meta import KVBatchMeta
from tqclient.errors import InvalidArgument

Parser = Callable[[Any], Any]

_lock: Final = threading.Lock()
_clients: Final[list[TransferQueueClient]] = []


def init(conf: Any = None) -> Config:
    """Connects this process to the service, which runs already (`tq up`, or the daemons of a cluster).

    Args:
        conf: a nested dict or DictConfig; None takes over what another process gave. `controller.address` says where
            the controller is (else TQ_CONTROLLER does, else it is 127.0.0.1:7700); `controller.sampler` is one of the
            four samplers, its class or its name; `controller.polling_mode` has get_meta return at once. These two count
            for the job: for all processes that call `init` without them, until those that gave them have called
            `close`. What is said of storage backends has no meaning here.

    Returns:
        What a StreamingDataset needs, in this process or another.

    Raises:
        Unavailable: the service did not answer.
        InvalidArgument: the sampler is none of the four, or another process, which is connected, gave another one or
            another polling mode.
    """
    client = _connected(address_of(conf))
    if conf is not None:
        client.settings.store(conf)
    return Config(controller=Config(address=client.address))


def _connected(address: str | None = None) -> TransferQueueClient:
    with _lock:
        while _clients and (_clients[-1].forked or address not in (None, _clients[-1].address)):
            stale = _clients.pop()
            if not stale.forked:
                stale.close()
        if not _clients:
            _clients.append(TransferQueueClient("default", address))
        return _clients[-1]


def get_client() -> TransferQueueClient:
    """Returns the client of this process; connects as `init()` does where that was not called."""
    return _connected()


def close() -> None:
    """Ends this process's connection, and what it gave to `init` for the job. Repeatable.

    Samples stay where they are; `clear_partition` removes them.
    """
    with _lock:
        while _clients:
            client = _clients.pop()
            if not client.forked:
                client.close()


def get_metrics_endpoint() -> str | None:
    """Returns None: the daemons serve their own figures."""
    return None


def save_checkpoint(checkpoint_dir: str | Path, **options: Any) -> NoReturn:
    """Refuses: there is no checkpoint of this kind.

    Raises:
        InvalidArgument: always; says what there is instead.
    """
    raise InvalidArgument(
        "checkpoints of the queue are not taken from a client: the controller's journal and the storage nodes' arenas "
        "survive the processes that use them"
    )


def load_checkpoint(checkpoint_dir: str | Path) -> NoReturn:
    """Refuses, as `save_checkpoint` does.

    Raises:
        InvalidArgument: always.
    """
    save_checkpoint(checkpoint_dir)


def kv_put(
    key: str,
    partition_id: str,
    fields: Any = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Puts one sample, or fields and tags of one that exists.

    Args:
        key: of the sample.
        partition_id: where; made when there is none.
        fields: a dict of values without a row dimension, or a TensorDict of one row. What was there is replaced.
        tag: merged into the sample's tags.
        data_parser: changes the values first, here: it gets a dict of all fields, in which a field that is one tensor
            is that tensor, a nested TensorDict a dict of the same kind, and any other a list of its rows, and returns
            it with other values. One that returns None is taken to have changed them in place.

    Returns:
        The key with all of its tags and fields.

    Raises:
        SchemaMismatch: a field does not fit what was put before; nothing was written, tags neither.
        ValueError: neither fields nor tag were given, or a value of the dict is a nested tensor.
    """
    if isinstance(fields, dict):
        fields = {name: _one_row(name, value) for name, value in fields.items()}
    return kv_batch_put([key], partition_id, fields, None if tag is None else [tag], data_parser)


def _one_row(name: str, value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return [value]
    if value.is_nested:
        raise InvalidArgument(f"field {name!r} is nested: put several samples by kv_batch_put")
    return value.unsqueeze(0)


def kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Any = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """Puts several samples at once: all of them become visible, or none.

    Args:
        keys: of the samples; all different.
        partition_id: where; made when there is none.
        fields: a TensorDict of as many rows; None changes tags alone, and makes samples without fields.
        tags: one dict for each key, merged into the sample's tags.
        data_parser: changes the values first, here; see `kv_put`.

    Returns:
        The keys with all of their tags, and the fields that all of them have.

    Raises:
        SchemaMismatch: a field does not fit what was put before; nothing was written, tags neither.
        ValueError: neither fields nor tags were given, there are not as many as keys, or a key comes twice; nothing was
            written.
    """
    wanted = checked_keys(keys)
    if fields is None and tags is None:
        raise InvalidArgument("give fields, tags, or both")
    columns = {} if fields is None else to_columns(fields) if data_parser is None else parse(fields, data_parser)
    rows = rows_of(columns, fields)
    if rows not in (None, len(wanted)):
        raise InvalidArgument(f"fields: {rows} rows for {len(wanted)} keys")
    if tags is not None and len(tags) != len(wanted):
        raise InvalidArgument(f"tags: {len(tags)} of them for {len(wanted)} keys")
    client = get_client()
    client.upsert(wanted, partition_id, columns, tags)
    meta = client.kv_retrieve_meta(wanted, partition_id)
    return KVBatchMeta(wanted, meta.custom_meta, partition_id, meta.field_names)


def kv_batch_get(keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None) -> Any:
    """Reads samples by key, in the order asked for.

    Args:
        keys: one or several.
        partition_id: where.
        select_fields: one or several; None reads the fields that all of the samples have, an empty list none.

    Returns:
        A TensorDict.

    Raises:
        StorageKeyNotFoundError: keys have no sample, or samples lack a field: a ValueError and a KeyError that names
            all of them.
    """
    fields = [select_fields] if isinstance(select_fields, str) else select_fields
    return get_client().read(checked_keys(keys), partition_id, fields)


def kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> Any:
    """Reads the samples of a batch.

    Args:
        meta: as a put returned it.
        select_fields: some of its fields; None reads all of them.

    Raises:
        ValueError: the batch has no partition, or lacks a field that is selected.
        StorageKeyNotFoundError: a sample was cleared, or lacks a field.
    """
    if meta.partition_id is None:
        raise InvalidArgument("the batch says no partition_id")
    fields = [select_fields] if isinstance(select_fields, str) else select_fields
    unknown = [field for field in fields or () if field not in (meta.fields or ())]
    if unknown:
        raise InvalidArgument(f"select_fields: {unknown} are not among the batch's fields {meta.fields}")
    return kv_batch_get(meta.keys, meta.partition_id, meta.fields if fields is None else fields)


def kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """Lists keys and their tags: `{partition: {key: tags}}`, of one partition or of all."""
    return get_client().kv_list(partition_id)


def kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """Removes samples by key; those that are gone already are passed over."""
    get_client().clear_in(partition_id, keys=checked_keys(keys))


async def async_kv_put(
    key: str,
    partition_id: str,
    fields: Any = None,
    tag: dict[str, Any] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """See `kv_put`. The values must not change until it is done."""
    return await get_client().in_thread(lambda: kv_put(key, partition_id, fields, tag, data_parser))


async def async_kv_batch_put(
    keys: list[str],
    partition_id: str,
    fields: Any = None,
    tags: list[dict[str, Any]] | None = None,
    data_parser: Parser | None = None,
) -> KVBatchMeta:
    """See `kv_batch_put`. The values must not change until it is done."""
    return await get_client().in_thread(lambda: kv_batch_put(keys, partition_id, fields, tags, data_parser))


async def async_kv_batch_get(
    keys: list[str] | str, partition_id: str, select_fields: list[str] | str | None = None
) -> Any:
    """See `kv_batch_get`."""
    return await get_client().in_thread(lambda: kv_batch_get(keys, partition_id, select_fields))


async def async_kv_batch_get_by_meta(meta: KVBatchMeta, select_fields: list[str] | str | None = None) -> Any:
    """See `kv_batch_get_by_meta`."""
    return await get_client().in_thread(lambda: kv_batch_get_by_meta(meta, select_fields))


async def async_kv_list(partition_id: str | None = None) -> dict[str, dict[str, Any]]:
    """See `kv_list`."""
    return await get_client().in_thread(lambda: kv_list(partition_id))


async def async_kv_clear(keys: list[str] | str, partition_id: str) -> None:
    """See `kv_clear`."""
    await get_client().in_thread(lambda: kv_clear(keys, partition_id))
