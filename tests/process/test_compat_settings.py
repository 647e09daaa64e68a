"""What `init` of the TransferQueue drop-in is given counts for one job, over real daemons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict

import tqclient.compat.transfer_queue as tq
from tests.process.transfer_queue_rig import address, name
from tqclient.compat.transfer_queue import config

__all__ = ["address", "name"]

GROUPS_OF_4 = ("GRPOGroupNSampler", {"n_samples_per_prompt": 4})
SEQUENTIAL: tuple[str, dict[str, Any]] = ("SequentialSampler", {})


def use(sampler: Any) -> None:
    tq.init({"controller": {"sampler": sampler}})


def seen(client: tq.TransferQueueClient) -> tuple[str, dict[str, int]]:
    return type(client.settings.sampler).__name__, client.settings.sampler.params


@pytest.fixture
def other(name: str) -> Iterator[tq.TransferQueueClient]:
    """What another process holds."""
    client = tq.TransferQueueClient("other")
    yield client
    client.close()


def test_a_configuration_without_a_sampler_changes_none(other: tq.TransferQueueClient) -> None:
    use(tq.GRPOGroupNSampler(4))
    other.settings.store({"backend": {"storage_backend": "SimpleStorage"}})
    assert seen(other) == seen(tq.get_client()) == GROUPS_OF_4
    tq.init({"controller": {"polling_mode": True}})
    later = tq.TransferQueueClient("later")
    assert (seen(later), later.settings.polling) == (GROUPS_OF_4, True)
    later.close()


def test_the_next_job_begins_anew(name: str) -> None:
    use(tq.GRPOGroupNSampler(4))
    tq.close()
    tq.init()
    client = tq.get_client()
    client.put(TensorDict({"x": torch.arange(3)}, batch_size=[3]), partition_id=name)
    assert client.get_meta(["x"], 3, name, task_name="t").size == 3
    assert seen(client) == SEQUENTIAL


def test_two_processes_that_disagree(other: tq.TransferQueueClient) -> None:
    use(tq.GRPOGroupNSampler(4))
    for conf in ({"sampler": "SequentialSampler"}, {"sampler": tq.GRPOGroupNSampler(2)}, {"polling_mode": True}):
        with pytest.raises(ValueError, match=r"gave this job sampler GRPOGroupNSampler\(n_samples_per_prompt=4\)"):
            other.settings.store({"controller": conf})
    assert seen(other) == GROUPS_OF_4
    use("RankAwareSampler")  # who is alone with its settings may change them: those that took over keep the former
    assert seen(tq.get_client()) == ("RankAwareSampler", {})


def test_settings_stay_while_one_of_those_that_gave_them_does(other: tq.TransferQueueClient) -> None:
    use(tq.GRPOGroupNSampler(4))
    other.settings.store({"controller": {"sampler": tq.GRPOGroupNSampler(4), "polling_mode": False}})
    tq.close()
    tq.init()
    assert seen(tq.get_client()) == GROUPS_OF_4
    other.close()
    tq.close()
    assert seen(tq.get_client()) == SEQUENTIAL
    assert config.SETTINGS not in {info.name for info in tq.get_client().service.partitions()}


def test_settings_of_a_process_that_ended_without_close(other: tq.TransferQueueClient) -> None:
    """Who gives none takes them over, and is told; who gives some begins anew."""
    other.settings.store({"controller": {"sampler": tq.GRPOGroupNSampler(4), "polling_mode": True}})
    other.service.close()
    client = tq.get_client()
    with pytest.warns(RuntimeWarning, match=r"GRPOGroupNSampler.*polling_mode=True: taken over"):
        assert seen(client) == GROUPS_OF_4
    use("RankAwareSampler")
    assert (seen(client), client.settings.polling) == (("RankAwareSampler", {}), False)
