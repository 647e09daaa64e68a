"""The names that code written against TransferQueue 0.1.11 uses, and how it calls them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import tqclient.compat.transfer_queue as tq

KEYS = {
    "kv_put": "key partition_id fields tag data_parser",
    "kv_batch_put": "keys partition_id fields tags data_parser",
    "kv_batch_get": "keys partition_id select_fields",
    "kv_batch_get_by_meta": "meta select_fields",
    "kv_list": "partition_id",
    "kv_clear": "keys partition_id",
}
CLIENT = {
    "get_meta": "data_fields batch_size partition_id mode task_name sampling_config",
    "set_custom_meta": "metadata",
    "put": "data metadata partition_id data_parser",
    "get_data": "metadata",
    "clear_partition": "partition_id",
    "clear_samples": "metadata",
    "get_consumption_status": "task_name partition_id",
    "get_production_status": "data_fields partition_id",
    "check_consumption_status": "task_name partition_id",
    "check_production_status": "data_fields partition_id",
    "reset_consumption": "partition_id task_name",
    "get_partition_list": "",
    "kv_retrieve_meta": "keys partition_id create",
    "kv_retrieve_keys": "global_indexes partition_id",
    "kv_list": "partition_id",
}
OTHERS: dict[Callable[..., Any], str] = {
    tq.init: "conf",
    tq.close: "",
    tq.get_client: "",
    tq.get_metrics_endpoint: "",
    tq.KVBatchMeta: "keys tags partition_id fields extra_info",
    tq.BatchMeta: "global_indexes partition_ids field_schema production_status extra_info custom_meta",
    tq.GRPOGroupNSampler: "n_samples_per_prompt",
    tq.SeqlenBalancedSampler: "n_samples_per_prompt dp_size",
    tq.StreamingDataset: "config batch_size micro_batch_size data_fields partition_id task_name dp_rank "
    "should_check_consumption_status fetch_batch_fn process_batch_fn",
    tq.StreamingDataLoader: "dataset num_workers collate_fn pin_memory worker_init_fn multiprocessing_context "
    "prefetch_factor persistent_workers pin_memory_device",
}


def parameters(call: Callable[..., Any]) -> list[str]:
    return [name for name in inspect.signature(call).parameters if name != "self"]


@pytest.mark.parametrize("name", KEYS)
def test_functions_and_their_twins(name: str) -> None:
    assert parameters(getattr(tq, name)) == KEYS[name].split()
    twin = getattr(tq, f"async_{name}")
    assert inspect.iscoroutinefunction(twin)
    assert parameters(twin) == KEYS[name].split()


@pytest.mark.parametrize("name", CLIENT)
def test_methods_and_their_twins(name: str) -> None:
    assert parameters(getattr(tq.TransferQueueClient, name)) == CLIENT[name].split()
    assert inspect.iscoroutinefunction(getattr(tq.AsyncTransferQueueClient, f"async_{name}"))


@pytest.mark.parametrize("call", OTHERS, ids=lambda call: call.__name__)
def test_the_others(call: Callable[..., Any]) -> None:
    assert parameters(call) == OTHERS[call].split()


def test_everything_that_is_exported_is_there() -> None:
    assert [name for name in tq.__all__ if not hasattr(tq, name)] == []


def test_importing_it_does_not_import_tensordict() -> None:
    program = "import sys, tqclient.compat.transfer_queue; sys.exit('tensordict' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
