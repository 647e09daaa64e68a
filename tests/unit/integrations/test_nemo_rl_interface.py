"""The NeMo-RL adapter has the methods and parameters that NeMo-RL publishes."""

from __future__ import annotations

import abc
import inspect
import sys
from typing import Any

import pytest

from tqclient.integrations.nemo_rl import DataPlane
from tqclient.integrations.nemo_rl.claims import group_of

# `DataPlaneClient` of nemo_rl/data_plane/interfaces.py, github.com/NVIDIA-NeMo/RL: v0.7.0,
# 81aa43dda4765b0429cf31dab44441e4e4383911; the same in 7ea279abfbeb698b092856d0dab61e7cf39bc909 of 2026-08-22.
REQUIRED = inspect.Parameter.empty
PUBLISHED: dict[str, dict[str, Any]] = {
    "register_partition": {
        "partition_id": REQUIRED,
        "fields": REQUIRED,
        "num_samples": REQUIRED,
        "consumer_tasks": REQUIRED,
        "grpo_group_size": None,
        "enums": None,
    },
    "claim_meta": {
        "partition_id": REQUIRED,
        "task_name": REQUIRED,
        "required_fields": REQUIRED,
        "batch_size": REQUIRED,
        "dp_rank": None,
        "blocking": True,
        "timeout_s": 60.0,
    },
    "get_data": {"meta": REQUIRED, "select_fields": None},
    "check_consumption_status": {"partition_id": REQUIRED, "task_names": REQUIRED},
    "put_samples": {"sample_ids": REQUIRED, "partition_id": REQUIRED, "fields": None, "tags": None},
    "get_samples": {"sample_ids": REQUIRED, "partition_id": REQUIRED, "select_fields": REQUIRED},
    "clear_samples": {"sample_ids": REQUIRED, "partition_id": REQUIRED},
    "close": {},
}


@pytest.mark.parametrize("method", PUBLISHED)
def test_a_method_has_the_parameters_that_are_published(method: str) -> None:
    parameters = list(inspect.signature(getattr(DataPlane, method)).parameters.values())[1:]
    assert [(each.name, each.default) for each in parameters] == list(PUBLISHED[method].items())
    assert {each.kind for each in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_there_are_no_other_methods() -> None:
    methods = {name for name, value in vars(DataPlane).items() if inspect.isfunction(value) and name[0] != "_"}
    assert methods == set(PUBLISHED)


def test_it_can_be_a_virtual_subclass() -> None:
    published = abc.ABCMeta("DataPlaneClient", (abc.ABC,), {})
    assert not issubclass(DataPlane, published)
    published.register(DataPlane)
    assert issubclass(DataPlane, published)


def test_tensordict_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensordict", None)
    with pytest.raises(ImportError, match=r"nemo_rl takes and returns TensorDicts: pip install 'tq-dataplane\[tensor"):
        DataPlane("127.0.0.1:1", batch_meta=dict)


NAMES = [
    ("3f2a_g0", "3f2a"),
    ("3f2a_g11", "3f2a"),
    ("a_g1_g2", "a_g1"),
    ("3f2a", "3f2a"),
    ("3f2a_gx", "3f2a_gx"),
    ("3f2a_g", "3f2a_g"),
    ("_g1", "_g1"),
]


@pytest.mark.parametrize(("sample_id", "group"), NAMES)
def test_the_group_of_a_sample_is_its_prompt(sample_id: str, group: str) -> None:
    assert group_of(sample_id) == group
