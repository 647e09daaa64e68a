"""TransferQueue's interface over this service: `import tqclient.compat.transfer_queue as tq`.

Code written against TransferQueue 0.1.11 runs with this import alone. `docs/bridges-transfer-queue.md` lists what
behaves otherwise, and why. It needs the package tensordict as soon as values are put or read.
"""

from __future__ import annotations

from tqclient.compat.transfer_queue.batch_meta import BatchMeta
from tqclient.compat.transfer_queue.client import TransferQueueClient
from tqclient.compat.transfer_queue.errors import StorageKeyNotFoundError
from tqclient.compat.transfer_queue.kv import (
    async_kv_batch_get,
    async_kv_batch_get_by_meta,
    async_kv_batch_put,
    async_kv_clear,
    async_kv_list,
    async_kv_put,
    close,
    get_client,
    get_metrics_endpoint,
    init,
    kv_batch_get,
    kv_batch_get_by_meta,
    kv_batch_put,
    kv_clear,
    kv_list,
    kv_put,
    load_checkpoint,
    save_checkpoint,
)
from tqclient.compat.transfer_queue.kv_meta import KVBatchMeta
from tqclient.compat.transfer_queue.samplers import (
    BaseSampler,
    GRPOGroupNSampler,
    RankAwareSampler,
    SeqlenBalancedSampler,
    SequentialSampler,
)
from tqclient.compat.transfer_queue.streaming import StreamingDataLoader, StreamingDataset

AsyncTransferQueueClient = TransferQueueClient

__all__ = [
    "AsyncTransferQueueClient",
    "BaseSampler",
    "BatchMeta",
    "GRPOGroupNSampler",
    "KVBatchMeta",
    "RankAwareSampler",
    "SeqlenBalancedSampler",
    "SequentialSampler",
    "StorageKeyNotFoundError",
    "StreamingDataLoader",
    "StreamingDataset",
    "TransferQueueClient",
    "async_kv_batch_get",
    "async_kv_batch_get_by_meta",
    "async_kv_batch_put",
    "async_kv_clear",
    "async_kv_list",
    "async_kv_put",
    "close",
    "get_client",
    "get_metrics_endpoint",
    "init",
    "kv_batch_get",
    "kv_batch_get_by_meta",
    "kv_batch_put",
    "kv_clear",
    "kv_list",
    "kv_put",
    "load_checkpoint",
    "save_checkpoint",
]
